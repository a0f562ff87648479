"""The bounds hold: by simulation where requests are independent, by real traces where not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.watch.rules.cases import seen_as
from tests.watch.rules.test_healthy import NO_TRACES, TRACES, in_blocks, rows_of
from ullage.telemetry.histogram import Histogram
from ullage.watch.rules.sampling import (
    DRIFT,
    distance,
    least_sample,
    noise,
    share_above,
)

VALUES = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


def observed(values: list[int]) -> Histogram:
    return seen_as("request_prompt_tokens", *((float(v), 1.0) for v in values))


@given(VALUES, VALUES)
def test_the_distance_of_buckets_is_at_most_the_true_one(one: list[int], two: list[int]):
    true = max(
        abs(sum(x <= v for x in one) / len(one) - sum(x <= v for x in two) / len(two))
        for v in {*one, *two}
    )
    found = distance(observed(one), observed(two))
    assert abs(found) <= true + 1e-12
    on_bounds = all(v in observed(one).bounds for v in (*one, *two))
    assert not on_bounds or abs(found) == pytest.approx(true)


@given(VALUES)
def test_the_distance_has_the_sign_of_the_move(values: list[int]):
    longer = [v * 20 for v in values]
    assert distance(observed(values), observed(longer)) >= 0
    assert distance(observed(longer), observed(values)) <= 0
    assert distance(observed(values), observed(values)) == 0


def test_other_buckets_have_no_distance():
    other = Histogram((1.0, math.inf), (1.0, 2.0), 3.0)
    assert distance(observed([3]), other) is None
    assert distance(observed([3]), Histogram(observed([3]).bounds, (0.0,) * 18, 0.0)) is None


@given(VALUES, st.sampled_from((1.0, 20.0, 500.0, 5000.0)))
def test_the_share_above_a_bound_is_exact(values: list[int], bound: float):
    assert share_above(observed(values), bound) == pytest.approx(
        sum(v > bound for v in values) / len(values)
    )


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_noise_falls_with_requests_and_grows_with_the_fleet(num: int, replicas: int):
    assert 0 < noise(2 * num, replicas) <= noise(num, replicas) <= noise(num, 2 * replicas) <= 1


@given(st.floats(0.05, 0.9), st.integers(1, 1000))
def test_the_least_sample_is_the_first_with_which_anything_could_be_told(
    threshold: float, replicas: int
):
    least = least_sample(threshold, replicas)
    assert threshold + noise(least, replicas) <= 1 + 1e-9
    assert least == 1 or threshold + noise(least - 1, replicas) >= 1


def test_independent_requests_stay_within_the_noise():
    """10,000 windows of 50 coin throws: the bound is for one in ten million."""
    rng = random.Random(0)  # noqa: S311
    bound = noise(50, 1)
    worst = max(abs(rng.getrandbits(50).bit_count() / 50 - 0.5) for _ in range(10_000))
    assert worst < bound < 1


@pytest.mark.skipif(not TRACES.is_dir(), reason=NO_TRACES)
@pytest.mark.parametrize("trace", ["code", "conv", "mooncake"])
def test_real_traffic_stays_within_drift_and_noise(trace: str):
    """Every five minutes of a trace against all that came before, prompts and answers."""
    blocks = in_blocks(rows_of(trace), 150.0)
    far = []
    for column in (1, 2):
        for end in range(6, len(blocks)):
            past = [row[column] for block in blocks[: end - 2] for row in block]
            recent = [row[column] for block in blocks[end - 2 : end] for row in block]
            if len(recent) >= least_sample(DRIFT, 1):
                gap = abs(distance(observed(past), observed(recent)))
                far.append(gap - noise(len(recent), 1))
    assert far and max(far) < 0.8 * DRIFT
