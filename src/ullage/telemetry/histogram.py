"""A Prometheus histogram at one instant, what was added between two, and quantiles with bounds.

Pure arithmetic. A quantile is known only to the bucket that holds it, so it is a range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantile:
    """The true quantile of what was observed lies in (low, high]; `high` may be infinite.

    `estimate` is linear within the bucket, as Prometheus' histogram_quantile gives it; in the last
    bucket, which has no end, it is `low`.
    """

    low: float
    high: float
    estimate: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` observations are at most `bounds[i]`; the last bound is +Inf. Cumulative.

    `sum` is None where the page has none that is finite.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float | None

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.sum is not None and self.count > 0 else None

    def since(self, before: Histogram) -> Histogram | None:
        """What was observed after `before`; all of it where the counts went back (a restart).

        None where the bounds are not the same: then nothing can be said.
        """
        if self.bounds != before.bounds:
            return None
        if any(now < then for now, then in zip(self.counts, before.counts, strict=True)):
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        known = self.sum is not None and before.sum is not None
        added = (self.sum or 0.0) - (before.sum or 0.0) if known else None
        return Histogram(self.bounds, counts, added)

    def plus(self, other: Histogram) -> Histogram | None:
        """Both together; None where the bounds are not the same."""
        if self.bounds != other.bounds:
            return None
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        known = self.sum is not None and other.sum is not None
        total = (self.sum or 0.0) + (other.sum or 0.0) if known else None
        return Histogram(self.bounds, counts, total)

    def quantile(self, q: float) -> Quantile | None:
        """The q-quantile, 0 < q ≤ 1; None of no observations.

        The rank is ⌈q × count⌉, counted from one: that observation lies in the first bucket whose
        cumulative count reaches it. `estimate`: Prometheus, promql/quantile.go (BucketQuantile).
        """
        total = self.count
        if total <= 0:
            return None
        rank = max(1, math.ceil(q * total - 1e-9))
        at = next(i for i, count in enumerate(self.counts) if count >= rank)
        low = self.bounds[at - 1] if at else min(0.0, self.bounds[0])
        high = self.bounds[at]
        if math.isinf(high):
            return Quantile(low, high, low)
        below = self.counts[at - 1] if at else 0.0
        inside = self.counts[at] - below
        share = (q * total - below) / inside if inside > 0 else 1.0
        return Quantile(low, high, low + (high - low) * min(1.0, max(0.0, share)))
