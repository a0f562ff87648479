"""The sequential test: fair bets, a stated rate of false alarms, and bounds held to exact sums."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.probes.quality import evidence as quality_evidence
from ullage.probes.quality.evidence import (
    DEPENDENT,
    PAST_ERROR,
    Detector,
    divergence,
    upper_bound,
)

rates = st.floats(0.01, 0.94)


@given(rates, st.floats(0, 1), st.floats(0, 1e6))
def test_while_the_rate_is_within_the_bound_evidence_is_not_expected_to_grow(
    bound: float, part: float, before: float
) -> None:
    """Beyond the one that every answer adds: so its mean after n answers is at most n."""
    rate = part * bound
    means = []
    for observed in (True, False):
        detector = Detector()
        detector._sums = [before] * len(detector._sums)
        detector.take(observed, bound)
        means.append(detector._sums)
    for with_it, without in zip(*means, strict=True):
        assert rate * with_it + (1 - rate) * without <= (before + 1) * (1 + 1e-9)


@given(rates, st.floats(0, 1))
def test_that_holds_for_pairs_of_answers_that_are_the_same(bound: float, part: float) -> None:
    """Two answers of one client are one observation, and gain no more than one."""
    rate = part * bound
    gains = []
    for observed in (True, False):
        detector = Detector()
        detector._sums = [1e9] * len(detector._sums)  # beside it what is added does not count
        detector.take(observed, bound)
        detector.take(observed, bound)
        gains.append([after / 1e9 for after in detector._sums])
    for with_it, without in zip(*gains, strict=True):
        assert rate * with_it + (1 - rate) * without <= 1 + 1e-6


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7])
def test_false_alarms_are_as_rare_as_said(bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one in 1,000 answers at most, which can be counted, at the very bound."""
    monkeypatch.setattr(quality_evidence, "ANSWERS_PER_FALSE_ALARM", 1_000.0)
    draw, alarms, num = random.Random(3), 0, 60_000  # noqa: S311
    detector = Detector()
    for _ in range(num):
        detector.take(draw.random() < bound, bound)
        if detector.fired:
            alarms, detector = alarms + 1, Detector()
    assert alarms <= num / 1_000


@pytest.mark.parametrize(
    ("bound", "rate", "within"), [(0.3, 1.0, 40), (0.3, 0.8, 80), (0.55, 1.0, 70), (0.55, 0.9, 150)]
)
def test_a_change_is_found_soon(bound: float, rate: float, within: int) -> None:
    """The median of many draws."""
    delays = []
    for seed in range(25):
        draw, detector, delay = random.Random(seed), Detector(), 0  # noqa: S311
        for _ in range(500):
            detector.take(draw.random() < 0.5 * bound, bound)
        while not detector.fired and delay < 10_000:
            detector.take(draw.random() < rate, bound)
            delay += 1
        delays.append(delay)
    assert sorted(delays)[len(delays) // 2] <= within


def test_a_finding_ends_soon_after_its_cause() -> None:
    detector = Detector()
    for _ in range(100_000):
        detector.take(True, 0.3)
    assert detector.fired
    num = 0
    while detector.fired:
        detector.take(False, 0.3)
        num += 1
        assert num < 100


@given(st.integers(0, 300), st.integers(1, 300))
def test_the_upper_bound_holds_by_exact_binomial_sums(seen: int, num: int) -> None:
    """Of independent runs: were the rate higher, so few would be seen less often than said."""
    seen = min(seen, num)
    bound = upper_bound(seen / num, int(num * DEPENDENT))
    assert seen / num <= bound <= 1
    if bound < 1:
        below = sum(
            math.comb(num, k) * bound**k * (1 - bound) ** (num - k) for k in range(seen + 1)
        )
        assert below <= PAST_ERROR * (1 + 1e-6)


def test_the_upper_bound_of_nothing_is_everything() -> None:
    assert upper_bound(0.0, 0) == 1
    assert upper_bound(1.0, 5) == 1
    assert upper_bound(0.1, 10**9) == pytest.approx(0.1, abs=1e-3)


def test_divergence_of_coins() -> None:
    assert divergence(0.3, 0.3) == 0
    assert divergence(0.0, 0.5) == pytest.approx(math.log(2))
    assert divergence(0.5, 0.0) == divergence(0.5, 1.0) == math.inf
