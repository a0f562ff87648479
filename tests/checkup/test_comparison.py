"""Predicted beside actual: the slope of growth, and steps counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy.spec import Attention, Dense, LayerSpec, ModelSpec, Norm, Positions, Rope
from ullage.checkup.comparison import Serving, compared, fit_growth, step_bound
from ullage.checkup.figures import figure
from ullage.checkup.measure import Growth, GrowthPoint
from ullage.checkup.metrics import CacheInfo
from ullage.costs.hardware import HardwareSpec, measured_machine
from ullage.costs.step import Step

LAYER = LayerSpec(
    0,
    Attention(4, 2, 16, 16, rope=Rope(10_000.0, 16)),
    Dense(96, "silu", gated=True),
)
SPEC = ModelSpec(
    model_type="llama",
    architecture="LlamaForCausalLM",
    family="llama",
    kind="decoder",
    hidden_size=64,
    vocab_size=320,
    max_positions=512,
    layers=(LAYER, LAYER),
    norm=Norm("rms", 1e-5),
    positions=Positions("rope"),
    tie_embeddings=False,
    dtype="float32",
)
EACH = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32
CACHE = CacheInfo(num_blocks=100, block_size=16, kv_cache_tokens=1600, kv_cache_dtype="float32")


def machine(bandwidth: float = 1e9, flops: float = 1e10) -> HardwareSpec:
    return measured_machine(
        "here",
        memory_bytes=1 << 30,
        bandwidth_bytes_per_s=bandwidth,
        flops=(("float32", flops),),
        method="by hand",
    )


SERVING = Serving("float32", "float32", 4.0, machine())


def growth(*points: GrowthPoint) -> Growth:
    return Growth(points, 10.0, 50.0)


@given(
    bytes_per_block=st.integers(1, 10**7),
    block=st.sampled_from([1, 8, 16, 128]),
    gaps=st.lists(st.integers(1, 9), min_size=10, max_size=200),
    ahead=st.integers(0, 1),
)
def test_the_true_slope_lies_within_the_stated_resolution(
    bytes_per_block: int, block: int, gaps: list[int], ahead: int
) -> None:
    """However samples fall, and whether or not the next token's place is taken already."""
    tokens, points = 5, []
    for gap in gaps:
        tokens += gap
        used = -(-(tokens + ahead) // block) * bytes_per_block
        points.append(GrowthPoint(tokens, None, float(used)))
    cache = CacheInfo(1000, block, 1000 * block, "float32")
    fit = fit_growth(SPEC, growth(*points), cache, SERVING)
    assert fit is not None
    if fit.measured_bytes_per_token is None:
        assert fit.resolution is None
        return
    assert fit.resolution is not None
    truth = bytes_per_block / block
    # Rises of several blocks between two samples stretch the range by what a block holds.
    slack = block / max(1, points[-1].tokens - points[0].tokens - block)
    assert abs(fit.measured_bytes_per_token / truth - 1) <= fit.resolution + 2 * slack


def test_exact_samples_give_the_exact_price() -> None:
    points = [GrowthPoint(t, -(-t // 16) / 100, -(-t // 16) * 16.0 * EACH) for t in range(20, 120)]
    fit = fit_growth(SPEC, growth(*points), CACHE, SERVING)
    assert fit is not None
    assert fit.predicted_bytes_per_token == EACH
    assert fit.measured_bytes_per_token == pytest.approx(EACH)
    assert fit.resolution == pytest.approx(1 / 80)
    assert dict(fit.predicted)[33] == 3 * 16 * EACH
    assert dict(fit.predicted)[119] == 8 * 16 * EACH


def test_blocks_without_bytes_are_priced_and_said_to_be() -> None:
    points = [GrowthPoint(t, -(-t // 16) / 100, None) for t in range(20, 120)]
    fit = fit_growth(SPEC, growth(*points), CACHE, SERVING)
    assert fit is not None
    assert fit.seen[0] == (20, 2 * 16 * EACH)
    assert "no bytes are exported" in fit.bytes_source


@pytest.mark.parametrize(
    ("points", "cache"),
    [
        ([], CACHE),
        ([GrowthPoint(20, 0.02, None)], None),
        ([GrowthPoint(20, 0.02, None)], CacheInfo(None, 16, None, None)),
        ([GrowthPoint(20, None, None)], CACHE),
        ([GrowthPoint(20, 0.02, 5.0)], CacheInfo(100, None, None, None)),
    ],
)
def test_no_growth_is_claimed_where_none_was_seen(
    points: list[GrowthPoint], cache: CacheInfo | None
) -> None:
    assert fit_growth(SPEC, growth(*points), cache, SERVING) is None


def test_a_decode_step_is_bound_by_reading_every_weight_and_key_once() -> None:
    """By hand, of two layers and the head; norms and the embedding row are left out."""
    weights = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96) + 64 * 320
    bound = step_bound(SPEC, Step(1, 1, 100), SERVING)
    keys = 100 * EACH
    assert bound.num_bytes == pytest.approx(weights * 4 + keys, rel=0.05)
    assert bound.flops == pytest.approx(2 * weights + 2 * 2 * 2 * 4 * 16 * 101, rel=0.01)
    assert bound.seconds == pytest.approx(bound.num_bytes / 1e9, rel=0.01)


def test_a_long_prefill_is_bound_by_multiplying() -> None:
    slow = Serving("float32", "float32", 4.0, machine(bandwidth=1e12))
    bound = step_bound(SPEC, Step(1, 400), slow)
    assert bound.seconds == pytest.approx(bound.flops / 1e10, rel=0.01)


def test_where_no_roofline_can_be_drawn_the_reason_is_named() -> None:
    assert SERVING.unbounded is None
    nobody = Serving("bfloat16", "bfloat16", 2.0, None)
    assert nobody.unbounded is not None and "--gpu" in nobody.unbounded
    no_rate = Serving("bfloat16", "bfloat16", 2.0, machine())
    assert no_rate.unbounded is not None and "bfloat16" in no_rate.unbounded


def test_the_error_is_relative_to_the_prediction() -> None:
    row = compared("x", figure(50, "s", "modelled"), figure(60, "s", "measured"))
    assert row["error"]["value"] == pytest.approx(0.2)
