"""Timing of variants against each other: round by round in turn, so that noise meets all alike.

Holds the clock only. A machine that others use makes single timings worthless: each variant keeps
every round, and the median and the best of them are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median and best over `rounds`."""

    median_s: float
    best_s: float
    rounds: int


def race(variants: Mapping[str, Work], *, budget_s: float, least: int = 3) -> dict[str, Timing]:
    """Time every variant in turn, after one unmeasured call each, until `budget_s` is spent.

    At least `least` rounds, at most 200. Calls of less than a millisecond are repeated within a
    round, so that the clock's own cost stays small.
    """
    repeats: dict[str, int] = {}
    for name, work in variants.items():
        work()  # page faults and thread pools are not what is measured
        begin = time.perf_counter()
        work()
        once_s = max(time.perf_counter() - begin, 1e-7)
        repeats[name] = max(1, min(1000, round(1e-3 / once_s)))
    taken: dict[str, list[float]] = {name: [] for name in variants}
    deadline = time.perf_counter() + budget_s
    for turn in range(200):
        if turn >= least and time.perf_counter() > deadline:
            break
        for name, work in variants.items():
            begin = time.perf_counter()
            for _ in range(repeats[name]):
                work()
            taken[name].append((time.perf_counter() - begin) / repeats[name])
    return {
        name: Timing(statistics.median(values), min(values), len(values))
        for name, values in taken.items()
    }
