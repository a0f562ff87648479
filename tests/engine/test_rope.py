"""Rotary tables against transformers' own frequencies, and exactness far from the start."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ullage.anatomy.spec import Rope
from ullage.engine.rope import frequencies, rope_tables, rotate
from ullage.errors import UnsupportedModel

LLAMA3 = Rope(
    500_000.0,
    128,
    scaling="llama3",
    factor=8.0,
    original_max_positions=8192,
    parameters=(("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
)


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(10_000.0, 64), {"rope_type": "default"}),
        (Rope(10_000.0, 64, scaling="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            LLAMA3,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_frequencies_equal_those_of_transformers(rope: Rope, parameters: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=rope.rotary_dim * 2,
        num_attention_heads=2,
        head_dim=rope.rotary_dim,
        max_position_embeddings=131_072,
        rope_parameters={**parameters, "rope_theta": rope.theta},
    )
    theirs = LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    np.testing.assert_allclose(frequencies(rope), theirs, rtol=2e-6)


def test_angles_are_exact_at_the_last_of_many_positions() -> None:
    rope = Rope(10_000.0, 8)
    cos, sin = rope_tables(rope, 131_072)
    position = 131_071
    for pair in range(4):
        angle = math.fmod(position * 10_000.0 ** (-2 * pair / 8), 2 * math.pi)
        assert cos[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin[position, pair + 4].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotation_turns_pairs_of_halves_as_complex_numbers() -> None:
    x = torch.randn(5, 3, 8)
    cos, sin = rope_tables(Rope(100.0, 8), 5)
    turned = rotate(x, cos[:, None], sin[:, None])
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)[:, None, :4]
    torch.testing.assert_close(turned, torch.cat([as_complex.real, as_complex.imag], dim=-1))


def test_partial_rotation_leaves_the_rest() -> None:
    x = torch.randn(5, 3, 12)
    cos, sin = rope_tables(Rope(100.0, 8), 5)
    turned = rotate(x, cos[:, None], sin[:, None])
    torch.testing.assert_close(turned[..., :8], rotate(x[..., :8], cos[:, None], sin[:, None]))
    assert torch.equal(turned[..., 8:], x[..., 8:])


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        (Rope(1e4, 64, scaling="made-up"), "rope_scaling"),
        (Rope(1e4, 64, sections=(8, 12, 12)), "mrope_section"),
        (Rope(1e4, 64, interleaved=True), "rope_interleave"),
        (Rope(1e4, 64, scaling="llama3"), "low_freq_factor"),
    ],
)
def test_what_is_not_known_is_refused_by_name(rope: Rope, field: str) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        rope_tables(rope, 4)
