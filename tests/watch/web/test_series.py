"""The past within bounds: rows against a plain list, no spike lost, any number of replicas."""

from __future__ import annotations

import itertools
import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.watch import sights
from ullage.watch.figures import figures_of
from ullage.watch.totals import totals_of
from ullage.watch.web import series
from ullage.watch.web.series import COLUMNS, NAMES, WIDTH, Past, Rows, Series, fleet_row, row_of

NUMBER = st.one_of(
    st.just(math.nan), st.just(math.inf), st.floats(0, 2.0**40, allow_nan=False, width=32)
)


def row(value: float) -> list[float]:
    return [value] * WIDTH


@settings(max_examples=40)
@given(st.lists(NUMBER, max_size=80), st.integers(1, 20), st.floats(-5, 90), st.floats(-5, 90))
def test_rows_are_the_latest_of_a_list(
    values: list[float], most: int, since: float, until: float
) -> None:
    rows = Rows(most)
    for time_s, value in enumerate(values):
        rows.add(float(time_s), row(value))
    kept = len(rows.times)
    assert min(most, len(values)) <= kept <= most + most // 4
    expected = [
        (float(t), v) for t, v in list(enumerate(values))[-kept:] if kept and since < t < until
    ]
    found = rows.since(since, until)
    assert [(t, repr(r[0])) for t, r in found] == [(t, repr(v)) for t, v in expected]
    assert all(len(r) == WIDTH for _, r in found)


@settings(max_examples=40)
@given(st.lists(NUMBER, min_size=1, max_size=200), st.sampled_from([1, 5, 30, 700]))
def test_no_spike_is_averaged_away(values: list[float], interval_s: int) -> None:
    kept = Series(8, 1000)
    for i, value in enumerate(values):
        kept.add(1e9 + i * interval_s, row(value))
    known = [value for value in values if value == value]
    shown = [*kept.coarse.since(0), (0.0, kept._pending)]
    for i, largest in enumerate(COLUMNS.values()):
        column = [r[i] for _, r in shown if r[i] == r[i]]
        assert bool(column) == bool(known)
        if known:
            assert (max(column) == max(known)) if largest else (min(column) == min(known))


@settings(max_examples=40)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(2, 300))
def test_no_time_is_left_out_between_coarse_and_fine(num: int, fine: int, coarse: int) -> None:
    kept = Series(fine, coarse)
    for i in range(num):
        kept.add(1e9 + 60 * i, row(float(i)))
    rows = kept.since(0)
    # Largest first: each row stands for itself and those before the next.
    assert rows[-1][1][0] == num - 1
    step = max(60.0, series.DAY_S / coarse) + 60
    assert all(b - a <= step for (a, _), (b, _) in itertools.pairwise(rows))


def test_old_rows_are_coarse_and_new_ones_fine_without_overlap() -> None:
    kept = Series(10, 1440)
    for i in range(500):
        kept.add(1e9 + 5 * i, row(float(i)))
    rows = kept.since(0)
    times = [time_s for time_s, _ in rows]
    assert times == sorted(set(times))
    assert times[0] == 1e9
    assert times[-10:] == [1e9 + 5 * i for i in range(490, 500)]
    steps = {round(b - a) for a, b in itertools.pairwise(times)}
    assert max(steps) <= 60
    assert kept.since(times[-2]) == rows[-1:]


@pytest.mark.parametrize("num", [1, 17, 120, 1500])
def test_all_replicas_together_stay_within_the_cells(num: int) -> None:
    past = Past(max_cells=400_000)
    cells = row(1.0)
    for time_s in range(num, num + 140):
        for i in range(num if num < 1000 else 20):
            past.add(f"r{(i * 7919) % num if num >= 1000 else i}", float(time_s * 600), cells)
    for i in range(num):
        past.add(f"r{i}", (num + 141) * 600.0, cells)
    held = sum(
        len(s.fine.cells) + len(s.coarse.cells)
        for s in (past.of(f"r{i}") for i in range(num))
        if s is not None
    )
    least = 2 * series.LEAST_ROWS * 1.25 * WIDTH * num
    assert held <= max(400_000, least)
    assert past.of("r0") is not None


def test_what_was_not_seen_for_a_day_is_forgotten_before_there_are_more() -> None:
    past = Past()
    for i in range(16):
        past.add(f"old{i}", 0.0, row(1.0))
    for i in range(16):
        past.add(f"new{i}", 2 * series.DAY_S, row(1.0))
    assert past.of("old0") is None
    assert past.of("new0") is not None
    assert len(past) == 16


def test_a_row_tells_what_the_figures_tell_and_nothing_else() -> None:
    figures = figures_of(sights.view())
    told = dict(zip(NAMES, row_of(figures), strict=True))
    assert told["kv_used_bytes"] == figures.numbers["kv_used_bytes"]
    assert told["waiting_capacity"] == 4.0
    spread = figures.spreads["ttft_s"]
    assert (told["ttft_p99_low_s"], told["ttft_p99_high_s"]) == (spread.p99.low, spread.p99.high)
    assert math.isnan(told["gpu_busy_ratio"])


def test_a_replica_that_does_not_answer_is_a_gap() -> None:
    assert all(map(math.isnan, row_of(figures_of(sights.down()))))


def test_the_fleets_row_is_of_the_totals() -> None:
    views = [sights.view(), sights.view("http://two:8000"), sights.down()]
    totals = totals_of(views, [figures_of(view) for view in views])
    told = dict(zip(NAMES, fleet_row(totals), strict=True))
    assert told["kv_used_bytes"] == 2 * sights.GAUGE_VALUES["kv_used_bytes"]
    assert told["waiting_deferred"] == 2.0
    assert told["kv_used_ratio"] == 0.75


def test_a_row_fits_into_single_precision() -> None:
    assert array("f", row(55e9))[0] == pytest.approx(55e9, rel=1e-6)
