"""When a rate has risen beyond what it was: a sequential test with a stated rate of false alarms.

Holds the arithmetic of yes-or-no observations. What is observed, and against which past, is
`watch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ANSWERS_PER_FALSE_ALARM = 1e8
"""At least so many answers pass on average until a false alarm of one detector, however many looks
are taken: a Shiryaev-Roberts sum of bets whose expected gain is at most 0 while the rate stays
within the bound (Shin, Ramdas, Rinaldo: E-detectors, 2024)."""
DEPENDENT = 2.0
"""Answers come in bursts and sessions: two of them tell as much as one that is independent. A bet's
gain to the power 1/2 is what it would gain were each answer the same as the next."""
STAKES = (0.3, 0.6, 0.9)
"""Shares of what may be bet; the mean of bets is a bet. High ones see a large change soon."""
PAST_ERROR = 1e-4
"""How often a past of independent runs of DEPENDENT answers has a rate above its upper bound."""
CEILING = 30 * ANSWERS_PER_FALSE_ALARM
"""Evidence is not kept beyond this, so that a finding ends soon after its cause."""


@dataclass(slots=True)
class Detector:
    """The evidence that a rate is above its bound, from one answer to the next."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * len(STAKES))

    def take(self, observed: bool, bound: float) -> None:
        """One answer; `bound` is what the rate may be, 0 < bound < 1, known before the answer."""
        for at, stake in enumerate(STAKES):
            gain = 1.0 + stake * (1.0 - bound) / bound if observed else 1.0 - stake
            self._sums[at] = min((self._sums[at] + 1.0) * gain ** (1.0 / DEPENDENT), CEILING)

    @property
    def fired(self) -> bool:
        """Whether chance no longer explains it."""
        return sum(self._sums) / len(self._sums) >= ANSWERS_PER_FALSE_ALARM


def upper_bound(share: float, num: int) -> float:
    """The highest rate of which `num` answers would still show only `share`, but for PAST_ERROR.

    Chernoff's bound: the largest q with num/DEPENDENT · kl(share, q) ≤ ln(1/PAST_ERROR).
    """
    if num <= 0:
        return 1.0
    allowed = math.log(1.0 / PAST_ERROR) * DEPENDENT / num
    low, high = share, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if divergence(share, middle) <= allowed:
            low = middle
        else:
            high = middle
    return high


def divergence(p: float, q: float) -> float:
    """Kullback and Leibler's, of a coin of rate p from one of rate q, in nats."""
    found = 0.0
    for one, two in ((p, q), (1.0 - p, 1.0 - q)):
        if one > 0.0:
            if two <= 0.0:
                return math.inf
            found += one * math.log(one / two)
    return found
