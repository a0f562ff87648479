"""The last rows that were read along: a ring within bounds, the same figures as of a prompt."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from ullage.probes.attention.entropy import HeadTotals, RowReadings
from ullage.probes.attention.live import MOST_BYTES, MOST_ROWS, LiveAttention
from ullage.probes.baseline.usual import Attended


def row(entropy: float, visible: int, layers: int = 2, heads: int = 3) -> Attended:
    def filled(value: float) -> np.ndarray:  # type: ignore[type-arg]
        return np.full((layers, heads), value, np.float32)

    return Attended(
        filled(entropy), filled(10 * entropy), filled(0.25), filled(0.5), np.full(layers, visible)
    )


def test_the_oldest_rows_make_room() -> None:
    found = LiveAttention(2, 3, capacity=4)
    for number in range(10):
        found.add(row(number / 10, 16))
    kept = found.kept()
    assert (found.added, kept.rows) == (10, 4)
    for layer in kept.layers():
        for head in layer.heads:
            assert head.entropy_nats is not None
            assert head.entropy_nats.mean == pytest.approx(0.75)
            assert head.max_score == pytest.approx(9)
            assert head.entropy_normalized == pytest.approx(0.75 / np.log(16))
            assert head.effective_context == pytest.approx(np.exp([0.6, 0.7, 0.8, 0.9]).mean())
            assert (head.sink_mass, head.band_mass, head.band_entropy_nats) == (0.25, 0.5, None)
    assert kept.entropy_quantiles()[:, 1] == pytest.approx([0.75, 0.75])


def test_what_was_taken_out_does_not_change() -> None:
    found = LiveAttention(2, 3, capacity=4)
    found.add(row(0.5, 16))
    kept = found.kept()
    for _ in range(4):
        found.add(row(9.0, 16))
    assert kept.entropy_quantiles()[0].tolist() == [0.5, 0.5, 0.5]


def test_rows_that_are_not_finite_are_counted_and_in_no_figure() -> None:
    found = LiveAttention(2, 3)
    found.add(row(float("nan"), 16))
    found.add(row(0.5, 1))
    (head, *_) = found.kept().layers()[0].heads
    assert (head.rows, head.not_finite, head.entropy_normalized) == (2, 1, None)
    assert found.kept().entropy_quantiles()[0].tolist() == [0.5, 0.5, 0.5]


def test_the_figures_are_those_of_a_prompts_rows() -> None:
    """Against `HeadTotals`, which reads prompts: random rows, some not finite, some of one key."""
    draw = np.random.default_rng(7)
    found, parts = LiveAttention(3, 4, capacity=64), []
    for number in range(50):
        entropy = draw.random((3, 4), np.float32) * 5
        if number % 7 == 0:
            entropy[draw.integers(3), draw.integers(4)] = np.nan
        if number % 11 == 0:
            entropy[1, 2] = np.inf
        entropy[2, 3] = np.nan  # a head of which nothing is known
        columns = [entropy, *(draw.random((3, 4), np.float32) for _ in range(3))]
        visible = draw.integers(1, 40, 3)
        found.add(Attended(*columns, visible))
        parts.append((columns, visible))
    for layer in found.kept().layers():
        totals = HeadTotals()
        for columns, visible in parts:
            entropy, score, first, band = (
                torch.from_numpy(one[layer.layer][None].copy()) for one in columns
            )
            seen = torch.tensor([visible[layer.layer]])
            unknown = torch.full_like(entropy, torch.nan)
            totals.add(RowReadings(entropy, score, first, band, unknown, seen))
        for ours, theirs in zip(layer.heads, totals.readings(), strict=True):
            one, other = asdict(ours), asdict(theirs)
            for name, value in other.items():
                assert one[name] == (value if value is None else pytest.approx(value, rel=1e-5)), (
                    name
                )


def test_without_rows_nothing_is_known() -> None:
    kept = LiveAttention(2, 3).kept()
    assert kept.layers() == ()
    assert np.isnan(kept.entropy_quantiles()).all()


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (30, 9), (80, 64), (126, 128)])
def test_memory_is_bounded(layers: int, heads: int) -> None:
    found = LiveAttention(layers, heads)
    kept = found._columns.nbytes + found._visible.nbytes
    assert found.capacity <= MOST_ROWS
    assert kept <= MOST_BYTES * 1.1


def test_a_layer_that_was_not_read_has_one_row_less_and_nothing_that_is_not_finite() -> None:
    """Whatever stands in its place; a row in which it is not finite is counted as such still."""
    found, alone = LiveAttention(2, 3), LiveAttention(2, 3)
    for number, read_L in enumerate(((1, 1), (1, 0), (0, 1), (1, 0), (0, 0))):
        one = row(float("nan") if number == 3 else 0.1 + number / 10, 16)
        found.add(replace(one, visible_L=one.visible_L * read_L, **filled_out(one, read_L, number)))
        if read_L[0]:
            alone.add(one)
    ours, theirs = found.kept(), alone.kept()
    assert ours.layers()[0] == theirs.layers()[0]
    assert ours.entropy_quantiles()[0].tolist() == theirs.entropy_quantiles()[0].tolist()
    for layer, rows, not_finite in ((0, 3, 1), (1, 2, 0)):
        for head in ours.layers()[layer].heads:
            assert (head.rows, head.not_finite) == (rows, not_finite)


def filled_out(one: Attended, read_L: tuple[int, int], number: int) -> dict[str, Any]:
    """Its columns, with something else where it was not read."""
    other = (np.nan, 1e9)[number % 2]
    names = ("entropy_nats", "max_score", "first_mass", "band_mass")
    read = np.array(read_L, np.bool_)[:, None]
    return {n: np.where(read, getattr(one, n), np.float32(other)) for n in names}


def test_a_layer_of_which_no_kept_row_was_read_says_nothing() -> None:
    found = LiveAttention(2, 3)
    one = row(0.5, 16)
    found.add(replace(one, visible_L=np.array([16, 0])))
    for head in found.kept().layers()[1].heads:
        assert (head.rows, head.not_finite, head.entropy_nats) == (0, 0, None)
    assert np.isnan(found.kept().entropy_quantiles()[1]).all()
