"""What pairs of measurements say of a ratio: its mean, and 95% bounds by Student's t.

Pure arithmetic. What is measured is `cost.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[float, float]
"""(Without, with)."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of `count` ratios, and both ends of its 95% interval."""

    mean: float
    low: float
    high: float
    count: int


def ratio_of(pairs: Sequence[Pair]) -> Ratio:
    """With over without, as if every pair were independent. Raises ValueError below two."""
    return _bounded([_log(pair) for pair in pairs])


def ratio_of_groups(groups: Sequence[Sequence[Pair]]) -> Ratio:
    """The same where pairs of one group may be alike: a group counts once. As many pairs in each.

    Raises ValueError for fewer than two groups.
    """
    return _bounded([math.fsum(map(_log, group)) / len(group) for group in groups])


def adjusted_ratio(pairs: Sequence[Pair], controls: Sequence[Pair]) -> Ratio:
    """The same, less what shows as well in a control that the thing measured cannot change.

    The intercept of a straight line through the logarithms: what is left where the control of a
    pair is alike on both sides. Raises ValueError below three, and where the control never moves.
    """
    found, control = [_log(pair) for pair in pairs], [_log(pair) for pair in controls]
    count = len(found)
    if count < 3:
        raise ValueError(f"{count} ratios say nothing of their spread about a line")
    middle = math.fsum(control) / count
    spread = math.fsum((one - middle) ** 2 for one in control)
    if not spread:
        raise ValueError("the control never moves")
    mean = math.fsum(found) / count
    both = zip(found, control, strict=True)
    slope = math.fsum((y - mean) * (x - middle) for y, x in both) / spread
    rest = [y - mean - slope * (x - middle) for y, x in zip(found, control, strict=True)]
    variance = math.fsum(one**2 for one in rest) / (count - 2)
    at = mean - slope * middle
    error = math.sqrt(variance * (1 / count + middle**2 / spread))
    half = t_quantile(0.975, count - 2) * error
    return Ratio(math.exp(at), math.exp(at - half), math.exp(at + half), count)


def _log(pair: Pair) -> float:
    lacking, having = pair
    return math.log(having / lacking)


def _bounded(logs: Sequence[float]) -> Ratio:
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} ratios say nothing of their spread")
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((one - mean) ** 2 for one in logs) / (len(logs) - 1)
    half = t_quantile(0.975, len(logs) - 1) * math.sqrt(variance / len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def t_quantile(probability: float, degrees: int) -> float:
    """Of Student's t distribution, by bisection over its integrated density."""
    low, high = 0.0, 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        if t_probability(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_probability(t: float, degrees: int) -> float:
    """P(T ≤ t) for t ≥ 0: Simpson's rule in the angle, where the density is a power of a cosine."""
    # T = √ν·tan θ, and the density of θ is proportional to cos^(ν−1) θ.
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    angle, steps = math.atan2(t, math.sqrt(degrees)), 200
    width = angle / steps
    total = 1.0 + math.cos(angle) ** (degrees - 1)
    for step in range(1, steps):
        total += (4 if step % 2 else 2) * math.cos(step * width) ** (degrees - 1)
    return 0.5 + scale * total * width / 3
