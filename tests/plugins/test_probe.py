"""What an API process makes of workers' answers about attention, and how it is asked."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from ullage_vllm import metrics, probe, probe_series, versions
from ullage_vllm.engines import Engines, NoAnswer
from ullage_vllm.probe import Probing, asked_of, layers, pooled, state
from ullage_vllm.routes import Refusal

from tests.plugins.test_routes import Server
from tests.plugins.vllm_core import Client


def worker(rank: int = 0, **own: Any) -> dict[str, Any]:
    heads = [{"head": 2 * rank + at, "rows": 3} for at in (0, 1)]
    return {
        "every": 16,
        "steps": 40,
        "sampled": 2,
        "missed": 0,
        "rows": 4,
        "without_graph": 0,
        "seconds": 0.5,
        "last_miss": "",
        "not_read": [],
        "layers": [{"layer": 0, "heads": heads}],
        **own,
    }


class Core:
    """An engine core whose workers answer `workers`; what it was asked is in `asked`."""

    def __init__(self, *workers: dict[str, Any]) -> None:
        self.workers, self.asked = list(workers), list[tuple[str, dict[str, Any]]]()

    def ullage_probe(self, action: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append((action, arguments))
        return self.workers


def probing_of(*cores: Core, generate: Any = None) -> Probing:
    client = SimpleNamespace(engine_core=Client(list(cores)), generate=generate)
    return Probing(client, Engines(client), "vLLM 0.32.0")


def test_heads_of_all_ranks_make_one_layer_in_order() -> None:
    (layer,) = layers([[worker(1), worker(0)]])
    assert (layer["layer"], [head["head"] for head in layer["heads"]]) == (0, [0, 1, 2, 3])


def test_layers_of_several_engines_say_whose_they_are() -> None:
    found = layers([[worker()], [worker()]])
    assert [(one["engine"], one["layer"]) for one in found] == [(0, 0), (1, 0)]


def test_ranks_of_one_engine_looked_at_the_same_steps_and_engines_at_others() -> None:
    first = [worker(0, missed=1, last_miss="why"), worker(1, seconds=0.75, not_read=["layer 3"])]
    told = state([first, [worker()]])
    assert (told["steps"], told["sampled"], told["missed"]) == (80, 4, 1)
    assert (told["seconds"], told["last_miss"], told["not_read"]) == (1.25, "why", ["layer 3"])


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantiles_of_ranks_are_those_of_all_their_heads(share: float) -> None:
    import numpy as np

    draw = np.random.default_rng(3)
    ranks = [draw.gamma(2.0 + rank, size=4000) for rank in range(3)]
    grids = [np.quantile(one, [at / 100 for at in range(0, 101, 5)]).tolist() for one in ranks]
    exact = np.concatenate(ranks)
    found = pooled(grids, share)
    assert abs((exact < found).mean() - share) < 0.04


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_quantiles_of_one_rank_are_its_own(share: float) -> None:
    grid = [at * at / 7 for at in range(21)]
    assert pooled([grid], share) == pytest.approx(grid[round(20 * share)])


def test_a_worker_that_cannot_is_told_of() -> None:
    found = probing_of(Core({"error": "this vLLM lacks x"}))
    with pytest.raises(Refusal, match="this vLLM lacks x") as refused:
        asyncio.run(found.entropy({}))
    assert refused.value.status == 501


def test_the_document_says_where_from_and_how_much() -> None:
    core = Core(worker())
    told = asyncio.run(probing_of(core).entropy({}))
    assert (told["source"], told["sampled"], told["missed"]) == ("vLLM 0.32.0", 2, 0)
    assert core.asked == [("report", {})]


@pytest.mark.parametrize("every", ["", "-1", "x", "1.5", "1000001", "٣"])
def test_a_number_of_steps_that_is_none_is_refused(every: str) -> None:
    with pytest.raises(Refusal, match="every"):
        asyncio.run(probing_of(Core(worker())).sample({"every": every}))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"{}", b'{"prompt": []}', b'{"prompt": [true]}', b'{"prompt": [1.5]}',
        b'{"prompt": {"a": 1}}', b'{"prompt": "x", "rows": 0}', b'{"prompt": "x", "rows": 257}',
        b'{"prompt": "x", "rows": true}', b'{"prompt": "x", "layers": [1]}',
        b'{"prompt": "x", "weights": {"layer": 0}}', b'{"prompt": "x", "weights": 5}',
        b'{"prompt": "x", "weights": {"layer": 0, "head": -1, "row": 0}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_body_that_does_not_say_what_is_meant_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        asked_of(body)
    assert refused.value.status == 400


class VLLMClientError(Exception): ...


class VLLMValidationError(VLLMClientError): ...


class Engine:
    """AsyncLLM.generate: notes what it was given; `error` is raised, `hangs` never ends."""

    def __init__(self, error: Exception | None = None, hangs: bool = False) -> None:
        self.given: list[Any] = []
        self.error, self.hangs = error, hangs

    async def __call__(self, prompt: Any, parameters: Any, key: str) -> Any:
        self.given.append((prompt, parameters, key))
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        yield None


@pytest.fixture
def _parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    module = SimpleNamespace(SamplingParams=lambda **told: told)
    monkeypatch.setitem(sys.modules, "vllm", module)


READ = {"failure": "", "mistake": "", "tokens": 3, "rows_read": 3, "weights": None}


@pytest.mark.usefixtures("_parameters")
def test_a_prompt_runs_once_by_itself_and_is_forgotten() -> None:
    engine, core = Engine(), Core(worker(**READ))
    body = json.dumps({"prompt": [5, 6, 7], "rows": 8}).encode()
    told = asyncio.run(probing_of(core, generate=engine).attention(body))
    ((prompt, parameters, key),) = engine.given
    assert prompt == {"prompt_token_ids": [5, 6, 7]}
    assert parameters["max_tokens"] == 1 and parameters["skip_reading_prefix_cache"]
    assert core.asked == [
        ("watch", {"key": key, "rows": 8, "weights": None}),
        ("take", {"key": key}),
    ]
    assert (told["tokens"], told["rows"]) == (3, 3)


@pytest.mark.usefixtures("_parameters")
@pytest.mark.parametrize(
    ("engine", "raises"),
    [
        (Engine(error=ValueError("too long")), Refusal),
        (Engine(error=VLLMValidationError("no such token")), Refusal),
        (Engine(error=RuntimeError("dead")), NoAnswer),
        (Engine(hangs=True), NoAnswer),
    ],
)
def test_a_prompt_that_does_not_run_is_forgotten_too(
    engine: Engine, raises: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROMPT_S", 0.05)
    core = Core(worker(**READ))
    with pytest.raises(raises):
        asyncio.run(probing_of(core, generate=engine).attention(b'{"prompt": "x"}'))
    assert [action for action, _ in core.asked] == ["watch", "take"]


@pytest.mark.usefixtures("_parameters")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"layers": None}, "no engine told"),
        ({**READ, "failure": "2 layers were not called in Python"}, "2 layers were not called"),
    ],
)
def test_a_prompt_that_was_not_read_is_no_answer(answer: dict[str, Any], says: str) -> None:
    found = probing_of(Core(worker(**answer)), generate=Engine())
    with pytest.raises(Refusal, match=says):
        asyncio.run(found.attention(b'{"prompt": "x"}'))


@pytest.mark.usefixtures("_parameters")
def test_a_row_that_the_prompt_does_not_have_is_the_askers_mistake() -> None:
    found = probing_of(Core(worker(**{**READ, "mistake": "row: found 9"})), generate=Engine())
    with pytest.raises(Refusal, match="row: found 9") as refused:
        asyncio.run(found.attention(b'{"prompt": "x"}'))
    assert refused.value.status == 400


# --- over HTTP ---


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/ullage/entropy"), ("POST", "/ullage/entropy"), ("POST", "/ullage/attention")],
)
def test_the_routes_want_a_key_and_say_that_the_probe_is_off(method: str, path: str) -> None:
    server = Server()
    assert asyncio.run(server.call(method, path, authorization=None)).status == 401
    answer = asyncio.run(server.call(method, path, "every=1" if path.endswith("entropy") else ""))
    assert answer.status == 501
    assert "ULLAGE_VLLM_PROBE=1" in answer.json()["error"]["message"]


def test_a_server_that_drains_takes_no_prompt() -> None:
    """It would be a request more, and what drains waits for it."""
    server = Server()
    assert server.site is not None
    server.site.probing = probing_of(Core(worker(**READ)))
    asyncio.run(server.call("POST", "/ullage/drain"))
    answer = asyncio.run(server.call("POST", "/ullage/attention"))
    assert answer.status == 503
    assert "draining" in answer.json()["error"]["message"]


# --- the switch ---


@pytest.mark.parametrize(
    ("told", "every"), [(None, 0), ("", 0), ("0", 0), ("1", 16), ("64", 64), (" 2 ", 2)]
)
def test_the_switch(told: str | None, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.PROBE_SWITCH, raising=False)
    if told is not None:
        monkeypatch.setenv(versions.PROBE_SWITCH, told)
    assert versions.probe_every() == every


@pytest.mark.parametrize("told", ["yes", "-1", "1.5", "٣"])
def test_a_switch_that_says_nothing_is_named(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(versions.PROBE_SWITCH, told)
    with pytest.raises(ValueError, match="ULLAGE_VLLM_PROBE: found"):
        versions.probe_every()


def test_such_a_switch_leaves_the_probe_off_and_all_else_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ullage_vllm import plugin

    monkeypatch.setattr(plugin, "_warned", set())
    monkeypatch.setenv(versions.PROBE_SWITCH, "often")
    assert plugin._probe_every() == 0
    assert "does not look at attention: ULLAGE_VLLM_PROBE: found 'often'" in caplog.text


# --- series ---


class Series:
    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], float] = {}

    def __call__(self, name: str, labelnames: list[str], **_: Any) -> Series:
        self.labels_of = {**getattr(self, "labels_of", {}), name: labelnames}
        made = Series()
        made.values, made.name = self.values, name  # type: ignore[attr-defined]
        return made

    def labels(self, *labels: str) -> Any:
        key = (self.name, *labels)  # type: ignore[attr-defined]
        self.values.setdefault(key, 0.0)
        return SimpleNamespace(
            set=lambda value: self.values.__setitem__(key, value),
            inc=lambda by: self.values.__setitem__(key, self.values[key] + by),
        )


def test_three_series_a_layer_and_counters_that_only_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_made", {})
    made = Series()
    grid = [float(at) for at in range(21)]
    core = Core(worker(entropies=[[0, grid], [1, grid]]))
    series = probe_series.ProbeSeries(probing_of(core), "m", [0], made, made)
    assert made.values["ullage_probe_missed_steps", "m", "0"] == 0
    asyncio.run(series.round())
    core.workers[0].update(sampled=7, missed=2)
    asyncio.run(series.round())
    assert made.values["ullage_attn_entropy_p95_nats", "m", "0", "1"] == 19
    assert made.values["ullage_probe_sampled_steps", "m", "0"] == 7
    assert made.values["ullage_probe_missed_steps", "m", "0"] == 2
    gauges = [name for name in made.values if "entropy" in name[0]]
    assert len(gauges) == 3 * 2
    core.workers[0] = {"error": "gone"}
    asyncio.run(series.round())
    assert all(made.values[name] != made.values[name] for name in gauges)
