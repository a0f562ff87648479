"""How much of what was observed differs by chance: the bounds that comparisons must clear.

Holds the arithmetic, with a stated rate of false alarms. What is compared is `shifts.py`'s.
"""

from __future__ import annotations

import math

from ullage.telemetry.histogram import Histogram

FALSE_ALARMS_PER_DAY = 0.01
"""Of the whole fleet, were requests independent in runs of DEPENDENT."""
LOOKS_PER_DAY = 86_400 / 5 * 4
"""Rounds of five seconds, four comparisons each: every look is counted as one more chance."""
DEPENDENT = 2.0
"""Requests come in bursts and sessions; two of them tell as much as one that is independent."""
DRIFT = 0.4
"""Distance of distributions that healthy traffic moves by within an hour, and that no bound for
independent requests covers. Of 4,246 windows of five minutes in four public traces (Azure 2023 code
and conversation, Mooncake, ServeGen over two days), as recorded and stretched 4 and 12 times, each
against the hour before, the largest distance beyond `noise` was 0.31 (at the seam between
ServeGen's two days); the next trace's was 0.22."""


def noise(num: float, num_replicas: int) -> float:
    """How far a share of `num` requests may lie from the true one, in a fleet of `num_replicas`.

    Hoeffding's bound; for a whole distribution function it is Dvoretzky, Kiefer, Wolfowitz and
    Massart's, which is the same.
    """
    if num <= 0:
        return 1.0
    alpha = FALSE_ALARMS_PER_DAY / (LOOKS_PER_DAY * max(1, num_replicas))
    return min(1.0, math.sqrt(math.log(2 / alpha) * DEPENDENT / (2 * num)))


def least_sample(threshold: float, num_replicas: int) -> int:
    """The fewest requests with which a difference of 1 clears `threshold` and the noise."""
    alpha = FALSE_ALARMS_PER_DAY / (LOOKS_PER_DAY * max(1, num_replicas))
    return math.ceil(math.log(2 / alpha) * DEPENDENT / (2 * (1 - threshold) ** 2))


def share_above(observed: Histogram, bound: float) -> float:
    """The share of observations above a bound of the histogram's, exact."""
    at = observed.bounds.index(bound)
    return 1.0 - observed.counts[at] / observed.count


def distance(one: Histogram, two: Histogram) -> float | None:
    """Kolmogorov and Smirnov's distance as far as buckets tell it, 0 to 1: at most the true one.

    Positive where `two` has the larger values at the place where they differ most, negative where
    it has the smaller. None where the bounds differ or one is empty.
    """
    num_one, num_two = one.count, two.count
    if one.bounds != two.bounds or not num_one or not num_two:
        return None
    gaps = [a / num_one - b / num_two for a, b in zip(one.counts, two.counts, strict=True)]
    least, most = min(gaps), max(gaps)
    return most if most >= -least else least
