"""Norm weights are found under every family's spelling, and real trained ones are usual."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from audit_pool import config_of
from deep_models import deep_of, write_tensors

from ullage.anatomy import load
from ullage.audit import find_rule, judge, prepare
from ullage.costs.deployment import Deployment

SPELLINGS = [
    "model.layers.{n}.input_layernorm.weight",
    "encoder.layer.{n}.attention.output.LayerNorm.weight",
    "transformer.h.{n}.ln_1.weight",
    "blk.{n}.attn_norm.weight",
    "visual.blocks.{n}.norm1.weight",
    "rwkv.blocks.{n}.ln1.weight",
]


def judged(tmp_path: Path, name: str, layers: list[np.ndarray]):
    """The finding of A160 on one norm of so many layers, float32."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    write_tensors(
        tmp_path / "model.safetensors",
        {
            name.format(n=n): ("F32", values.shape, values.astype(np.float32).tobytes())
            for n, values in enumerate(layers)
        },
    )
    deep = deep_of.__wrapped__(tmp_path)
    return judge(find_rule("A160"), prepare(load(tmp_path), Deployment(), deep=deep)[0])


def usual(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(0.3, 0.1, 64)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize(("factor", "state"), [(1.0, "clear"), (1000.0, "fired")])
def test_every_spelling_of_a_norm_is_judged(tmp_path: Path, name, factor, state) -> None:
    found = judged(tmp_path, name, [usual(0), usual(1) * factor, usual(2)])
    assert found.state == state
    if state == "fired":
        assert name.format(n=1) in found.cause


def test_of_two_layers_nobody_can_say_which_is_unusual(tmp_path: Path) -> None:
    found = judged(tmp_path, SPELLINGS[0], [usual(0), usual(1) * 1000])
    assert found.state == "not_evaluable" and "3 layers" in found.missing[0]


def test_signs_and_a_small_first_layer_are_usual(tmp_path: Path) -> None:
    # SmolLM2's first norm: an eighth of the median layer's, nearly half of it negative.
    first = np.random.default_rng(5).normal(0, 0.04, 64)
    assert judged(tmp_path, SPELLINGS[0], [first, *map(usual, range(5))]).state == "clear"


def test_one_flipped_exponent_bit_is_found(tmp_path: Path) -> None:
    layers = [usual(n).astype(np.float32) for n in range(4)]
    layers[2].view(np.uint32)[9] ^= 1 << 30  # the highest bit of the exponent: × 2^128
    found = judged(tmp_path, SPELLINGS[0], layers)
    assert found.state == "fired" and "layers.2." in found.cause


def test_zeros_are_left_to_their_own_rule(tmp_path: Path) -> None:
    found = judged(tmp_path, SPELLINGS[0], [usual(0), usual(1), np.zeros(64), usual(2)])
    assert found.state == "clear"
