"""Parameter counts by part: they add up, and active counts agree with what releases state."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from ullage.anatomy.config.read import read_config
from ullage.anatomy.parameters import count_parameters, parameter_counts
from ullage.anatomy.spec import ModelSpec

SHARED = Path(__file__).parents[3] / "shared" / "configs"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared configurations are absent")


def spec_of(name: str) -> ModelSpec:
    raw = json.loads((SHARED / f"{name}_config.json").read_text())
    return read_config(raw, file=name).spec


# What the releases call their models: billions in all and per token, to the digits that they give.
STATED = {
    "Qwen--Qwen3-235B-A22B": (235, 22),
    "Qwen--Qwen3-30B-A3B": (30.5, 3.3),
    "deepseek-ai--DeepSeek-V3": (671, 37),
    "openai--gpt-oss-120b": (116.8, 5.7),  # the model card counts 5.1 without embeddings
    "mistralai--Mixtral-8x7B-v0.1": (46.7, 12.9),
    "moonshotai--Kimi-K2-Instruct": (1026, 32),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (109, 17),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": (120.6, 12.7),
}


@pytest.mark.parametrize(("name", "stated"), STATED.items())
def test_active_parameters_are_what_the_release_states(
    name: str, stated: tuple[float, float]
) -> None:
    counts = parameter_counts(spec_of(name))
    assert counts.total == pytest.approx(stated[0] * 1e9, rel=0.015)
    assert counts.active == pytest.approx(stated[1] * 1e9, rel=0.06)


@pytest.mark.parametrize("name", ["Qwen--Qwen3-0.6B", *STATED])
def test_parts_add_up_to_the_whole(name: str) -> None:
    spec = spec_of(name)
    counts = parameter_counts(spec)
    parts = {f.name: getattr(counts, f.name) for f in fields(counts)}
    whole, active, mtp = parts.pop("total"), parts.pop("active"), parts.pop("mtp")
    assert sum(parts.values()) == whole == count_parameters(spec)
    assert 0 < active <= whole
    assert mtp >= 0


def test_a_dense_model_uses_all_of_itself() -> None:
    counts = parameter_counts(spec_of("meta-llama--Meta-Llama-3.1-8B"))
    assert counts.active == counts.total == 8_030_261_248
    assert counts.embedding == 2 * 128_256 * 4096
    assert counts.ffn == 32 * 3 * 4096 * 14336
    assert counts.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert counts.small == 65 * 4096
