"""Which steps of a worker are read, what is read of them, and that vLLM is as it was afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ullage_vllm import worker
from ullage_vllm.sampling import Probe

from tests.plugins import vllm_worker
from tests.plugins.vllm_worker import (
    HEADS,
    KV_HEADS,
    Attention,
    CUDAGraphMode,
    Runner,
    entropy,
    model,
)

BOTH = pytest.mark.parametrize("second", [False, True], ids=["first runner", "second runner"])


class Worker:
    def __init__(self, runner: Runner) -> None:
        self.model_runner = runner


def probed(runner: Runner, every: int = 1) -> Probe:
    return Probe(Worker(runner), every)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_ranks", lambda: {"tp_rank": 0, "pp_rank": 0})


def last_entropies(runner: Runner, name: str, row: int, query: torch.Tensor) -> list[float]:
    """Of every head of the layer `name` at the last position of the request that is row `row`."""
    ids = sorted(runner.sequences)
    layer, sequence = runner.layers[name], runner.sequences[ids[row]]
    keys, _ = layer.held(torch.tensor(sequence.table), sequence.computed)
    low = max(0, sequence.computed - layer.sliding_window) if layer.sliding_window else 0
    return [
        entropy(query[row, head], keys[low:, head // (HEADS // KV_HEADS)], 0.3)
        for head in range(HEADS)
    ]


@BOTH
def test_a_decode_step_is_read_row_by_row_as_written_out(second: bool) -> None:
    runner = Runner(model(None, 5), second)
    probe = probed(runner)
    runner.step({"a": 9, "b": 14}, a=9, b=14)
    rows: list[list[list[float]]] = []
    for row in (0, 1):
        runner.queries.clear()
        runner.step(a=1, b=1)
        rows.append(
            [
                last_entropies(runner, name, row, query)
                for name, query in zip(runner.layers, runner.queries, strict=True)
            ]
        )
    assert (probe.counts.steps, probe.counts.sampled, probe.counts.missed) == (2, 2, 0)
    assert (probe.counts.rows, probe.refused) == (2, [])
    for number, told in enumerate(probe.memory.report(0)):
        assert told["layer"] == number
        for head in range(HEADS):
            mean = (rows[0][number][head] + rows[1][number][head]) / 2
            assert told["heads"][head]["entropy_nats"]["mean"] == pytest.approx(mean, abs=1e-5)
            assert told["heads"][head]["rows"] == 2


@BOTH
def test_a_full_graph_gives_way_in_a_sampled_step_and_in_no_other(second: bool) -> None:
    """A graph replays without calling Python: nothing could be read of it."""
    runner = Runner(model(None), second)
    probe = probed(runner, every=3)
    runner.step({"a": 6}, a=6)
    for _ in range(6):
        runner.step(a=1)
    full = [mode is CUDAGraphMode.FULL for mode in runner.modes]
    assert full == [False, True, True, False, True, True, False]
    assert (probe.counts.sampled, probe.counts.without_graph, probe.counts.missed) == (2, 2, 0)


def test_a_step_whose_layers_are_not_called_is_counted_as_missed() -> None:
    """However it came about: here a dispatcher that keeps its full graph."""
    runner = Runner(model(None))
    always = (CUDAGraphMode.FULL, 8)
    runner.cudagraph_dispatcher.dispatch = lambda *_, **__: always  # type: ignore[method-assign]
    probe = probed(runner)
    runner.step({"a": 1}, a=1)
    assert (probe.counts.sampled, probe.counts.missed) == (0, 1)
    assert "1 layers were not called" in probe.last_miss


def test_a_batch_that_ranks_split_keeps_the_graph_that_they_agreed_on() -> None:
    runner = Runner(model(None), second=True)
    split = vllm_worker.BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 1, num_ubatches=2)
    runner.cudagraph_manager.dispatch = lambda num_reqs, num_tokens, *_: split  # type: ignore
    probe = probed(runner)
    runner.step({"a": 1}, a=1)
    assert (runner.modes, probe.counts.missed) == ([CUDAGraphMode.FULL], 1)


@BOTH
@pytest.mark.parametrize("fails", [False, True])
def test_after_a_step_everything_of_vllms_is_its_own_again(second: bool, fails: bool) -> None:
    runner = Runner(model(None, 5), second)
    probe = probed(runner)
    runner.step({"a": 6}, a=6)
    runner.fail = fails
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            runner.step(a=1)
    else:
        assert runner.step(a=1) == "done"
    others = (
        getattr(runner, "cudagraph_dispatcher", None),
        runner.cudagraph_manager if second else None,
    )
    for owner in (*(layer.impl for layer in runner.layers.values()), *others):
        assert owner is None or not {"forward", "dispatch"} & set(vars(owner))
    assert "prepare_inputs" not in vars(runner)
    assert "execute_model" in vars(runner)
    probe.every = 0
    probe.follow()
    assert "execute_model" not in vars(runner)


@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (3, 1), (8, 2), (20, 3), (60, 4)])
def test_requests_take_turns_and_a_larger_step_gives_more_rows(requests: int, rows: int) -> None:
    probe = probed(Runner(model(None)))
    counts = {f"r{number:02}": 1 for number in range(requests)}
    scheduled = SimpleNamespace(num_scheduled_tokens=counts, scheduled_spec_decode_tokens={})
    seen: list[str] = []
    for _ in range(requests):
        wants = probe._wants(scheduled)
        assert len(wants) == rows
        seen += [want.request_id for want in wants]
    assert {seen.count(one) for one in counts} == {rows}


def test_prompts_are_no_decode_steps() -> None:
    runner = Runner(model(None))
    probe = probed(runner)
    runner.step({"a": 9}, a=5)
    runner.step(a=4)
    assert (probe.counts.steps, probe.counts.sampled) == (0, 0)


def test_a_layer_that_computes_something_else_than_is_read_is_refused_by_name() -> None:
    runner = Runner(model(None, None))
    runner.layers["model.layers.1.self_attn.attn"].impl.really_scaled_by = 0.1
    probe = probed(runner)
    runner.step({"a": 12}, a=12)
    runner.step(a=1)
    (refused,) = probe.refused
    assert refused.startswith("model.layers.1.self_attn.attn: vLLM's output is ")
    assert [one["layer"] for one in probe.memory.report(0)] == [0]
    runner.step(a=1)
    assert (probe.counts.sampled, probe.counts.missed, len(probe.refused)) == (2, 0, 1)


@BOTH
def test_ranks_run_the_same_graphs_whatever_each_of_them_can_read(second: bool) -> None:
    """Ranks of one tensor meet in every layer: one must not replay a graph while others do not."""
    ranks = [Runner(model(None), second) for _ in range(2)]
    ranks[1].layers["model.layers.0.self_attn.attn"].impl.really_scaled_by = 0.1
    probes = [probed(runner, every=2) for runner in ranks]
    for runner in ranks:
        runner.step({"a": 12}, a=12)
        for _ in range(7):
            runner.step(a=1)
    assert ranks[0].modes == ranks[1].modes
    assert [probe.counts.sampled for probe in probes] == [3, 0]
    assert probes[1].layers == [] and probes[1].counts.missed == 3
    assert "no layer is left" in probes[1].last_miss


def test_where_no_layer_can_be_read_nothing_is_replaced() -> None:
    runner = Runner({"model.layers.0.attn": Attention(backend="NEW_ATTN")})
    probe = probed(runner)
    assert probe.refused == ["model.layers.0.attn: the cache of NEW_ATTN was not read"]
    assert "execute_model" not in vars(runner)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder": ({"attn_type": "encoder_only"}, "no decoder's attention"),
    "quantised": ({"kv_cache": torch.zeros(4, 2, 4, 16, dtype=torch.uint8)}, "quantised"),
    "shape": ({"kv_cache": torch.zeros(2, 4, 4, 2, 8)}, "a cache of shape"),
    "values beside": ({"head_size_v": 4}, "a cache of shape"),
    "alibi": ({"use_alibi_sqrt": True}, "square root"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_otherwise_than_it_was_read_is_refused(name: str) -> None:
    changes, says = REFUSED[name]
    layer = Attention()
    vars(layer).update(changes)
    (reason,) = probed(Runner({"model.layers.0.attn": layer})).refused
    assert says in reason


def test_a_layer_with_a_mask_of_its_own_is_refused() -> None:
    class ChunkedLocalAttention(Attention): ...

    (reason,) = probed(Runner({"model.layers.0.attn": ChunkedLocalAttention()})).refused
    assert reason == "model.layers.0.attn: ChunkedLocalAttention has a mask of its own"


@pytest.mark.parametrize("name", ["mm_prefix_range", "dynamic_causal"])
def test_a_step_with_a_mask_that_no_rule_says_is_missed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker.Metadata, name, torch.ones(1), raising=False)
    runner = Runner(model(None))
    probe = probed(runner)
    runner.step({"a": 1}, a=1)
    assert (probe.counts.sampled, probe.counts.missed) == (0, 1)
    assert name in probe.last_miss


# --- prompts that are asked for ---


def asked(runner: Runner, action: str, **arguments: Any) -> dict[str, Any]:
    own = getattr(runner, "own_worker", None) or Worker(runner)
    runner.own_worker = own  # type: ignore[attr-defined]
    return worker.ullage_probe(own, action, arguments)


@BOTH
def test_a_prompt_is_read_over_its_chunks_beside_others(second: bool) -> None:
    runner = Runner(model(None, 5), second)
    asked(runner, "attach", every=0)
    assert "execute_model" not in vars(runner)
    runner.step({"other": 3}, other=3)
    weights = {"layer": 0, "head": 1, "row": 2}
    assert "error" not in asked(runner, "watch", key="mine", rows=5, weights=weights)
    runner.step({"mine-8f3a": 20}, **{"other": 1, "mine-8f3a": 12})
    runner.step(**{"other": 1, "mine-8f3a": 8})
    found = asked(runner, "take", key="mine")
    assert (found["tokens"], found["rows_read"], found["failure"]) == (20, 6, "")
    assert [(one["layer"], one["heads"][0]["rows"]) for one in found["layers"]] == [(0, 6), (1, 6)]
    assert len(found["weights"]) == 3 and sum(found["weights"]) == pytest.approx(1)
    # Nothing of it is among the decode steps, and nobody stands in vLLM's way any more.
    assert asked(runner, "report")["layers"] == []
    assert "execute_model" not in vars(runner)


def test_a_prompt_that_was_not_read_says_why() -> None:
    runner = Runner(model(None))
    asked(runner, "attach", every=0)
    asked(runner, "watch", key="mine", rows=5, weights=None)
    runner.input_batch = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        runner.step({"mine": 3}, mine=3)
    assert asked(runner, "take", key="mine")["rows_read"] == 0
    asked(runner, "watch", key="mine", rows=5, weights={"layer": 0, "head": 0, "row": 3})
    runner.input_batch = vllm_worker.SimpleNamespace(req_ids=[])
    runner.step({"mine": 3}, mine=3)
    assert "row: found 3, expected below 3" in asked(runner, "take", key="mine")["mistake"]


def test_no_more_than_four_prompts_at_a_time() -> None:
    runner = Runner(model(None))
    asked(runner, "attach", every=0)
    for number in range(4):
        assert "error" not in asked(runner, "watch", key=f"k{number}", rows=1, weights=None)
    assert "error" in asked(runner, "watch", key="k5", rows=1, weights=None)


@pytest.mark.parametrize(
    ("second", "name"),
    [
        (False, "execute_model"), (True, "execute_model"), (True, "prepare_inputs"),
        (False, "input_batch"),
    ],
)  # fmt: skip
def test_a_worker_without_what_is_needed_says_so_and_is_left_alone(second: bool, name: str) -> None:
    runner = Runner(model(None), second)
    setattr(runner, name, None)
    assert name in asked(runner, "attach", every=16)["error"]
    runner = Runner(model(None), second)
    owner: Any = runner.cudagraph_manager if second else runner.cudagraph_dispatcher
    owner.dispatch = lambda other: None
    assert "dispatch(" in asked(runner, "attach", every=16)["error"]
