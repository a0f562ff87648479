"""Angles per token equal transformers' inverse frequencies; precision equals brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy.spec import Rope
from ullage.audit.frequencies import FORMULAS, angles_per_token
from ullage.audit.positions import _angle_error, table_error

YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = [
    pytest.param("default", 1.0, None, {}, 128, 128, id="default"),
    pytest.param("default", 1.0, None, {}, 64, 256, id="partial"),
    pytest.param("linear", 4.0, None, {}, 128, 128, id="linear"),
    pytest.param("dynamic", 4.0, 4096, {}, 128, 128, id="dynamic"),
    pytest.param("yarn", 40.0, 4096, YARN, 64, 64, id="yarn"),
    pytest.param("yarn", 32.0, 4096, {**YARN, "truncate": False}, 64, 64, id="yarn-untruncated"),
    pytest.param("llama3", 8.0, 8192, LLAMA3, 128, 128, id="llama3"),
    pytest.param("proportional", 1.0, None, {}, 128, 512, id="proportional"),
    pytest.param(
        "longrope",
        1.0,
        4096,
        {
            "short_factor": [1.0 + i / 40 for i in range(48)],
            "long_factor": [1.0 + i for i in range(48)],
        },
        96,
        96,
        id="longrope",
    ),
]


@pytest.mark.parametrize(("kind", "factor", "original", "numbers", "rotary", "head_dim"), KINDS)
def test_angles_equal_transformers(kind, factor, original, numbers, rotary, head_dim):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    length = 32_768
    theta = 500_000.0
    settings = {"rope_type": kind, "rope_theta": theta, "factor": factor, **numbers}
    if original is not None:
        settings["original_max_position_embeddings"] = original
    if rotary != head_dim:
        settings["partial_rotary_factor"] = rotary / head_dim
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        # dynamic scaling counts from max_position_embeddings
        max_position_embeddings=original if kind == "dynamic" else length,
        original_max_position_embeddings=original,
        rope_parameters=settings,
    )
    if kind == "default":
        import torch

        steps = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
        expected = (1.0 / theta**steps).tolist()
    else:
        function = rope_utils.ROPE_INIT_FUNCTIONS[kind]
        inverse, _ = function(config, "cpu", seq_len=length)
        expected = inverse.double().tolist()
    parameters = tuple(
        sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in numbers.items())
    )
    rope = Rope(theta, rotary, kind, factor, original, parameters=parameters)
    ours = angles_per_token(rope, head_dim=head_dim, length=length)
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-12)


def test_what_is_not_known_is_not_guessed():
    assert angles_per_token(Rope(1e4, 64, "openpangu"), head_dim=64, length=4096) is None
    assert angles_per_token(Rope(1e4, 64, "yarn", 4.0), head_dim=64, length=4096) is None
    assert angles_per_token(Rope(1e4, 64, "llama3", 8.0, 8192), head_dim=64, length=4096) is None


@pytest.mark.parametrize("numbers", [("beta_slow", 0), ("beta_fast", 0.0), ("beta_fast", -1.5)])
def test_yarn_between_no_turns_is_not_known(numbers):
    rope = Rope(1e4, 64, "yarn", 8.0, 8192, parameters=(numbers,))
    assert angles_per_token(rope, head_dim=64, length=4096) is None


@pytest.mark.parametrize("scaling", FORMULAS)
@given(
    factor=st.floats(min_value=0, max_value=1e6, exclude_min=True),
    theta=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    original=st.integers(1, 1 << 24),
)
def test_angles_are_numbers_or_not_known(scaling, factor, theta, original):
    rope = Rope(theta, 64, scaling, factor, original)
    angles = angles_per_token(rope, head_dim=64, length=4096)
    assert angles is None or all(math.isfinite(angle) for angle in angles)


@pytest.mark.parametrize("last", [4_095, 131_071, 1_048_575, 10_485_759])
@pytest.mark.parametrize("seed", range(3))
def test_the_angle_error_bounds_what_float32_really_loses(last, seed):
    numpy = pytest.importorskip("numpy")
    angle = float(numpy.float32(numpy.random.default_rng(seed).uniform(0.3, 0.99)))
    # Products of exactly representable factors, near the last position: brute force.
    positions = numpy.arange(max(0, last - 20_000), last + 1)
    exact = positions.astype(numpy.float64) * angle
    rounded = (positions.astype(numpy.float32) * numpy.float32(angle)).astype(numpy.float64)
    worst = float(numpy.abs(exact - rounded).max())
    bound = _angle_error(angle, last)
    assert worst <= bound
    assert worst > bound / 4 or math.floor(math.log2(angle * last)) < 4


def test_whole_radians_are_exact():
    assert _angle_error(1.0, 10_485_759) == 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_finished_table_loses_the_same_at_every_position(dtype):
    torch = pytest.importorskip("torch")
    for first in (0, 1_000_000):
        angles = torch.arange(first, first + 200_000, dtype=torch.float64) * 0.7
        lost = (angles.cos().to(getattr(torch, dtype)).double() - angles.cos()).abs().max().item()
        # torch narrows float64 by way of float32, which adds a rounding of its own.
        assert 0.9 * table_error(dtype) <= lost <= table_error(dtype) + 2.0**-24
