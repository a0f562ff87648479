"""The sequential test: its stated rate of false alarms, and how soon it finds what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.probes.baseline.sequential import Detectors


def first_alarm(detectors: Detectors, draw: Callable[[], Any], most: int) -> int:
    """After how many readings an alarm stands; `most` where none does."""
    for count in range(1, most):
        if detectors.see(draw()).any():
            return count
    return most


def test_the_mean_time_to_a_false_alarm_is_at_least_the_stated_one() -> None:
    """Standard normal readings, the worst that the test allows, over many detectors."""
    random, run = np.random.default_rng(1), 200
    lengths = [
        first_alarm(Detectors(1, run_length=run), lambda: random.standard_normal(1), 20 * run)
        for _ in range(60)
    ]
    assert np.mean(lengths) > run


def test_cells_that_move_together_give_no_more_alarms() -> None:
    random, run = np.random.default_rng(2), 200
    lengths = [
        first_alarm(
            Detectors(50, run_length=run), lambda: np.full(50, random.standard_normal()), 4 * run
        )
        for _ in range(40)
    ]
    assert np.mean(lengths) > run


@pytest.mark.parametrize(("z", "most"), [(50.0, 1), (8.0, 1), (4.0, 5), (3.0, 9), (2.0, 40)])
def test_faults_are_found_within_readings(z: float, most: int) -> None:
    detectors = Detectors(5_000)
    readings = np.zeros(5_000)
    readings[17] = z
    assert first_alarm(detectors, lambda: readings, most + 1) <= most
    assert detectors.alarms.nonzero()[0].tolist() == [17]


def test_an_alarm_ends_soon_after_the_fault() -> None:
    detectors = Detectors(100)
    for _ in range(1000):
        detectors.see(np.full(100, 60.0))
    assert detectors.alarms.all()
    for _ in range(2):
        detectors.see(np.full(100, 0.3))
    assert not detectors.alarms.any()


def test_what_is_not_finite_is_an_alarm_and_what_is_not_read_is_none() -> None:
    detectors = Detectors(3)
    found = detectors.see(np.array([math.inf, math.nan, 0.1]))
    assert found.tolist() == [True, False, False]
    assert detectors.readings.tolist() == [1, 0, 1]
    assert detectors.log_r[1] == -math.inf


@given(st.lists(st.floats(-6, 6), min_size=1, max_size=60))
def test_it_is_the_shiryaev_roberts_sum(readings: list[float]) -> None:
    """Against the sum over all moments at which the fault could have begun."""
    detectors, width = Detectors(1, width=3.0), 3.0
    for z in readings:
        detectors.see(np.array([z]))
    each = [math.exp(z * z * 9 / 20) / math.sqrt(1 + width**2) for z in readings]
    total = sum(math.prod(each[start:]) for start in range(len(each)))
    expected = min(math.log(total), detectors.threshold) if total > 0 else -math.inf
    partial, capped = 0.0, False
    for e in each:
        partial = (partial + 1) * e
        capped |= math.log(partial) > detectors.threshold
    if not capped:
        assert detectors.log_r[0] == pytest.approx(expected, abs=1e-9)
