"""The plugin's probe in a real vLLM, held to the embedded engine's on the same weights and tokens.

Prompts that are asked for, decode steps that were sampled, on models whose rules differ: windows,
soft caps, slopes, latent attention. Both run in float32.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from plugin_server import DEV, ON, Server, Servers, eventually, prompt_of, spawned
from tests.adapters.live.models import TEXT, TinyModel

from ullage.probes.attention.embedded import read_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SETUP = Path(__file__).parents[2] / "tools" / "vllm_setup.sh"
PROBE = {**ON, **DEV, "ULLAGE_VLLM_PROBE": "16"}
FLAGS = ("--num-gpu-blocks-override", "129", "--max-num-seqs", "4", "--max-model-len", "1024")
WITHIN = 1e-4
"""Nats, and as much of a share or a score."""
CLOSE = ("entropy_normalized", "sink_mass", "band_mass", "band_entropy_nats")


def _gemma2() -> Any:
    import transformers

    return transformers.Gemma2Config(
        **{**TEXT, "max_position_embeddings": 1024},
        sliding_window=40,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    )


def _bloom() -> Any:
    import transformers

    return transformers.BloomConfig(
        vocab_size=160, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.15
    )


MODELS = {
    "gemma2": TinyModel("gemma2", "Gemma2ForCausalLM", _gemma2),
    "bloom": TinyModel("bloom", "BloomForCausalLM", _bloom),
}


DEEPER = {"bloom": 2e-3}
"""vLLM 0.32 computes BLOOM's GELU by the error function, which is trained with the tanh form: from
layer 1 on its scores are other numbers."""


@pytest.fixture(scope="module")
def server(launched: Servers) -> Iterator[Server]:
    """A Llama, whose every sixteenth decode step is read."""
    yield launched.start(FLAGS, PROBE)
    launched.stop()


def expected(model: Path, tokens: list[int], rows: int | None = None) -> list[dict[str, Any]]:
    reading = read_prompt(model, tuple(tokens), rows=rows)
    return [asdict(layer) for layer in reading.layers]


def hold(found: list[dict[str, Any]], wanted: list[dict[str, Any]], deeper: float = WITHIN) -> None:
    """Every figure of every head; `deeper`: within how much from layer 1 on."""
    assert [(one["layer"], len(one["heads"])) for one in found] == [
        (one["layer"], len(one["heads"])) for one in wanted
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        within = deeper if ours["layer"] else WITHIN
        for head, other in zip(ours["heads"], theirs["heads"], strict=True):
            where = (ours["layer"], head["head"])
            assert (head["head"], head["rows"]) == (other["head"], other["rows"]), where
            assert head["not_finite"] == other["not_finite"] == 0
            assert head["entropy_nats"] == pytest.approx(other["entropy_nats"], abs=within), where
            for name in CLOSE:
                assert head[name] == pytest.approx(other[name], abs=within), (where, name)
            for name in ("effective_context", "max_score"):
                assert head[name] == pytest.approx(other[name], rel=within, abs=within), where


def attention(server: Server, **asked: Any) -> dict[str, Any]:
    return dict(server.http.post("/ullage/attention", json=asked).raise_for_status().json())


@pytest.mark.parametrize(("length", "rows"), [(1, 64), (300, 256), (700, 64)])
def test_a_prompt_reads_as_in_the_embedded_engine(
    server: Server, launched: Servers, length: int, rows: int
) -> None:
    prompt = prompt_of(length % 100, length)
    found = attention(server, prompt=prompt, rows=rows)
    assert (found["tokens"], found["rows"]) == (length, min(rows, length))
    assert found["not_read"] == []
    hold(found["layers"], expected(launched.model, prompt, rows))


def test_nothing_of_a_prompt_is_taken_from_the_prefix_cache(
    server: Server, launched: Servers
) -> None:
    prompt = prompt_of(3, 200)
    server.ask(prompt, 1)
    assert server.kv()["cached_blocks"] > 0
    for _ in range(2):
        found = attention(server, prompt=prompt)
        assert found["rows"] == 64
        hold(found["layers"], expected(launched.model, prompt, 64))


def test_a_text_is_read_as_its_tokens(server: Server) -> None:
    by_text = attention(server, prompt="w17 w40 w99 w5")
    by_ids = attention(server, prompt=[17, 40, 99, 5])
    assert by_text["layers"] == by_ids["layers"]


def test_the_weights_of_a_row_have_the_entropy_that_is_told(server: Server) -> None:
    found = attention(
        server, prompt=prompt_of(5, 90), rows=1, weights={"layer": 1, "head": 3, "row": 89}
    )
    told = found["weights"]
    assert (told["first_key"], len(told["values"])) == (0, 90)
    assert sum(told["values"]) == pytest.approx(1)
    head = found["layers"][1]["heads"][3]
    assert told["values"][0] == pytest.approx(head["sink_mass"], abs=1e-6)
    assert sum(told["values"][-17:]) == pytest.approx(head["band_mass"], abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, -3]}, "prompt"),
        ({"prompt": [1, 100_000]}, "prompt"),
        ({"prompt": [5] * 5000}, "prompt"),
        ({"prompt": [5], "rows": 100_000}, "rows"),
        ({"prompt": [5], "row": 1}, "'row'"),
        ({"prompt": [5], "weights": {"layer": 0, "head": 0, "row": 1}}, "row"),
        ({"prompt": [5], "weights": {"layer": 9, "head": 0, "row": 0}}, "weights"),
        ({"prompt": [5], "weights": {"layer": 0, "head": 4, "row": 0}}, "weights"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(
    server: Server, asked: dict[str, Any], says: str
) -> None:
    answer = server.http.post("/ullage/attention", json=asked)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert attention(server, prompt=[7, 8, 9])["tokens"] == 3


def sampled_at(server: Server, every: int) -> dict[str, Any]:
    path = f"/ullage/entropy?every={every}"
    return dict(server.http.post(path).raise_for_status().json())


def test_every_decode_step_of_an_answer_reads_as_in_the_embedded_engine(
    launched: Servers,
) -> None:
    """A server of its own: what it has read are these rows alone."""
    fresh = launched.start(FLAGS, PROBE)
    sampled_at(fresh, 1)
    prompt = prompt_of(11, 60)
    answer = fresh.ask(prompt, 41, return_token_ids=True).raise_for_status().json()
    tokens = prompt + answer["choices"][0]["token_ids"]
    found = fresh.http.get("/ullage/entropy").raise_for_status().json()
    assert (found["every"], found["missed"], found["not_read"]) == (1, 0, [])
    assert (found["steps"], found["sampled"], found["rows"]) == (40, 40, 40)
    # The first token of an answer is a prompt's last row, and the last one asks nothing any more.
    import ullage.probes.attention.embedded as embedded

    rows = tuple(range(60, 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "spread_rows", lambda *_: rows)
        hold(found["layers"], expected(launched.model, tokens[:100], 40))
    metrics = eventually(lambda: _renewed(fresh))
    assert metrics["ullage_probe_missed_steps_total"] == 0
    for layer in (0, 1):
        p5, p50, p95 = (
            metrics[f'ullage_attn_entropy_{name}_nats{{layer="{layer}"}}']
            for name in ("p5", "p50", "p95")
        )
        assert 0 <= p5 < p50 < p95
    stopped = sampled_at(fresh, 0)
    fresh.ask(prompt_of(12, 60), 41).raise_for_status()
    again = fresh.http.get("/ullage/entropy").json()
    assert (again["steps"], again["sampled"]) == (stopped["steps"], stopped["sampled"])


def _renewed(server: Server) -> dict[str, float] | None:
    metrics = server.metrics()
    return metrics if metrics["ullage_probe_sampled_steps_total"] == 40 else None


@pytest.mark.parametrize("name", MODELS)
def test_windows_soft_caps_and_slopes(launched: Servers, tmp_path: Path, name: str) -> None:
    MODELS[name].save(tmp_path / name)
    before, launched.model = launched.model, tmp_path / name
    try:
        server = launched.start(FLAGS, PROBE)
        prompt = prompt_of(21, 300)
        found = attention(server, prompt=prompt, rows=200)
        assert found["not_read"] == []
        hold(found["layers"], expected(tmp_path / name, prompt, 200), DEEPER.get(name, WITHIN))
        sampled_at(server, 1)
        server.ask(prompt, 60).raise_for_status()
        state = server.http.get("/ullage/entropy").json()
        assert (state["sampled"], state["missed"], state["not_read"]) == (59, 0, [])
    finally:
        launched.stop()
        launched.model = before


def test_the_oldest_vllm_reads_the_same(launched: Servers) -> None:
    subprocess.run(["bash", str(SETUP), "0.30"], check=True)
    python = Path("~/.cache/ullage/vllm-0.30/bin/python").expanduser()
    prompt = prompt_of(31, 300)
    with spawned(python, launched.model, FLAGS, PROBE) as server:
        found = attention(server, prompt=prompt)
        sampled_at(server, 1)
        server.ask(prompt, 30).raise_for_status()
        state = server.http.get("/ullage/entropy").json()
    assert found["not_read"] == []
    hold(found["layers"], expected(launched.model, prompt, 64))
    assert (state["sampled"], state["missed"], state["not_read"]) == (29, 0, [])


@pytest.mark.parametrize("version", ["0.30", "0.32"])
def test_vllms_own_dispatchers_give_no_full_graph_to_a_step_that_is_read(
    vllm_python: Path, version: str
) -> None:
    """A graph replays without calling Python. What mode runs instead is vLLM's own choice."""
    python = vllm_python
    if version != "0.32":
        subprocess.run(["bash", str(SETUP), version], check=True)
        home = Path(f"~/.cache/ullage/vllm-{version}").expanduser()
        python = home / "bin" / "python"
    script = Path(__file__).with_name("dispatching.py")
    run = subprocess.run([python, script], capture_output=True, text=True, check=True, timeout=300)
    told = json.loads(run.stdout.splitlines()[-1])
    assert len(told) == 10
    for modes, (otherwise, read) in told.items():
        full = "FULL" in modes.split()[1]
        assert otherwise == ("FULL" if full else modes.split()[1]), modes
        assert read in (("PIECEWISE", "NONE") if full else (otherwise,)), modes


def test_without_its_switch_nothing_is_there(launched: Servers) -> None:
    server = launched.start(FLAGS, {**ON, **DEV})
    for method, path in (
        ("GET", "/ullage/entropy"),
        ("POST", "/ullage/entropy"),
        ("POST", "/ullage/attention"),
    ):
        answer = server.http.request(method, path)
        assert answer.status_code == 501
        assert "ULLAGE_VLLM_PROBE=1" in answer.json()["error"]["message"]
    assert not any("probe" in name or "attn" in name for name in server.metrics())
