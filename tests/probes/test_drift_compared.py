"""Two readings of sizes: which part drifted, and how often sound models are said to have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probes.test_drift import Family, Tensors, changed, read, zero_k
from ullage.errors import BadUsage
from ullage.probes.drift import drift
from ullage.probes.drift.drift import DriftReading, compare


def test_other_prompts_of_one_model_are_no_drift(family_dir: Family) -> None:
    found = compare(read(family_dir("llama"), seed=1), read(family_dir("llama"), seed=2))
    assert found.drifted == () and found.p is not None and found.p > drift.FALSE_ALARMS
    assert found.visible_factor is not None and found.visible_factor < 3


def scale_head(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"][16:32] *= 4


def double_norm(tensors: Tensors) -> None:
    tensors["model.layers.1.post_attention_layernorm.weight"][9] *= 4


def last_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"][3] *= 4


def dead_gate(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.gate_proj.weight"][50] = 0


FAULTS: dict[str, tuple[Callable[[Tensors], None], int | None, str, set[int], float]] = {
    "one head's q times 4": (scale_head, 1, "q", set(range(16, 32)), 4.0),
    "k zeroed": (zero_k, 2, "k", set(range(64, 96)), 0.0),
    "one norm weight times 4": (double_norm, 1, "norm", {9}, 4.0),
    "the last norm": (last_norm, None, "norm", {3}, 4.0),
    "a dead channel": (dead_gate, 0, "mlp", {50}, 0.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_located_though_the_prompts_are_others(
    fault: str, family_dir: Family, tmp_path: Path
) -> None:
    change, layer, kind, channels, factor = FAULTS[fault]
    before = read(family_dir("llama"), seed=1)
    now = read(changed(family_dir("llama"), tmp_path / "model", change), seed=2)
    found = compare(now, before)
    first = found.drifted[0]
    assert (first.layer, first.kind) == (layer, kind)
    assert set(first.some) <= channels and first.channels == len(channels)
    assert first.factor == pytest.approx(factor, rel=0.6, abs=1e-6)
    assert first.died == (factor == 0.0)
    assert found.p is not None and found.p <= drift.FALSE_ALARMS


def made(table: np.ndarray[Any, Any], prompts: tuple[str, ...] = ()) -> DriftReading:
    """A reading of one layer whose channels are these; of other prompts than all others."""
    made.count += 1  # type: ignore[attr-defined]
    prompts = prompts or (str(made.count),) * len(table)  # type: ignore[attr-defined]
    count, width = table.shape
    widths = dict.fromkeys(drift.PLACES, 1) | {"hidden": width - 8}
    return DriftReading(
        "made", "", "float32", 1, widths, (1, 1, 1), (2,) * count, prompts, (),
        table.astype(np.float32),
    )  # fmt: skip


made.count = 0  # type: ignore[attr-defined]


def test_sound_models_raise_no_more_alarms_than_stated() -> None:
    """Channels that depend on each other and on the sort of text, with heavy tails: 400 times."""
    generator = np.random.default_rng(5)
    alarms = 0
    for _ in range(400):
        common = generator.standard_t(3, (20, 3)) @ generator.normal(size=(3, 300))
        kinds = generator.integers(0, 3, 20)[:, None] * generator.normal(size=(1, 300))
        table = np.clip(common * 0.3 + kinds + generator.standard_t(2, (20, 300)) * 0.2, -20, 32)
        alarms += bool(compare(made(table[:8]), made(table[8:])).drifted)
    # Of 400 at a rate of 0.01, 13 or more have a chance below 0.0003.
    assert alarms <= 12


def test_sound_models_over_the_same_prompts_raise_no_more_alarms_than_stated() -> None:
    """Differences far above the least change, that channels share, of heavy tails: 400 times."""
    generator, marks = np.random.default_rng(6), tuple("abcdefghijkl")
    alarms = 0
    for _ in range(400):
        table = generator.normal(size=(12, 300))
        noise = generator.standard_t(3, (12, 3)) @ generator.normal(size=(3, 300))
        noise += generator.standard_t(2, (12, 300))
        found = compare(made(table, marks), made(np.clip(table + noise, -20, 32), marks))
        assert found.paired
        alarms += bool(found.drifted)
    assert alarms <= 12


@pytest.mark.parametrize("count", [8, 12])
def test_the_same_prompts_show_what_other_prompts_hide(count: int) -> None:
    generator, marks = np.random.default_rng(7), tuple("abcdefghijkl"[:count])
    table = generator.normal(0, 1.0, (count, 60))
    moved = table + generator.normal(0, 0.005, table.shape)
    moved[:, 20] += 0.4
    # Rounding of another kind: small, and always to one side.
    moved[:, 40] += 0.1
    found = compare(made(moved, marks), made(table, marks))
    assert [(one.spot.place, one.some) for one in found.drifted] == [("hidden", (14,))]
    assert found.drifted[0].factor == pytest.approx(math.exp(0.4), rel=0.02)
    assert compare(made(moved), made(table)).drifted == ()


def test_seven_prompts_are_too_few_to_be_held_against_themselves() -> None:
    table, marks = np.random.default_rng(7).normal(size=(7, 60)), tuple("abcdefg")
    assert not compare(made(table, marks), made(table, marks)).paired


@settings(deadline=None, max_examples=20)
@given(st.integers(5, 12), st.integers(5, 12), st.integers(0, 2**31))
def test_a_shift_far_beyond_the_spread_is_found(before: int, now: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    table = generator.normal(0, 0.1, (before + now, 60))
    table[before:, 33] += 3.0
    found = compare(made(table[before:]), made(table[:before]))
    # Channel 33 is the 27th of the feed-forward, behind six places of one channel.
    assert any(one.spot.place == "hidden" and 27 in one.some for one in found.drifted)


def test_too_few_prompts_decide_nothing(family_dir: Family) -> None:
    one, two = read(family_dir("llama"), 1, count=4), read(family_dir("llama"), 2, count=3)
    found = compare(one, two)
    assert found.p is None and found.drifted == () and found.why_not is not None


@pytest.mark.parametrize(("before", "now"), [(5, 5), (15, 2), (4, 6), (99, 1)])
def test_as_few_prompts_as_can_decide_do(before: int, now: int) -> None:
    """With all ways of telling the prompts apart looked at, the true one is the extreme one."""
    table = np.random.default_rng(1).normal(0, 0.1, (before + now, 60))
    table[before:, 33] += 5.0
    found = compare(made(table[before:]), made(table[:before]))
    assert found.drifted and found.p is not None
    ways = math.comb(before + now, now) / (2 if before == now else 1)
    assert found.p == pytest.approx(1 / ways, rel=1e-6)


def test_t_is_that_of_scipys_formula() -> None:
    """Written out for one channel: pooled variance, and the least spread beside it."""
    generator = np.random.default_rng(3)
    table = generator.normal(size=(11, 5)).astype(np.float32)
    labels = np.zeros((1, 11), np.float32)
    labels[0, 6:] = 1
    t, _ = drift._t_of_two(table, labels)
    before, now = table[:6].astype(float), table[6:].astype(float)
    pooled = (before.var(0, ddof=1) * 5 + now.var(0, ddof=1) * 4) / 9 + drift.LEAST_SPREAD**2
    expected = (now.mean(0) - before.mean(0)) / np.sqrt(pooled * (1 / 6 + 1 / 5))
    np.testing.assert_allclose(t[0], expected, rtol=1e-4)


def test_t_of_differences_is_that_of_the_formula() -> None:
    table = np.random.default_rng(3).normal(size=(9, 5)).astype(np.float32)
    t, _ = drift._t_of_one(table, np.ones((1, 9), np.float32))
    wide = table.astype(float)
    expected = wide.mean(0) / np.sqrt((wide.var(0, ddof=1) + drift.LEAST_SPREAD**2) / 9)
    np.testing.assert_allclose(t[0], expected, rtol=1e-4)


def test_unlike_models_are_refused(family_dir: Family) -> None:
    with pytest.raises(BadUsage, match="widths"):
        compare(read(family_dir("llama")), read(family_dir("llama-wide-heads")))
