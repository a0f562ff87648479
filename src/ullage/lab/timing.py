"""Timing of variants against each other: round by round in turn, the fastest round counts.

Holds the clock only. Whatever else a machine does only ever adds time, so the fastest of many
rounds is what comes nearest to a variant's own; taking turns lets all meet the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]


def race(variants: Mapping[str, Work], *, budget_s: float, least: int = 3) -> dict[str, float]:
    """Seconds of each variant's fastest call; they run in turn until `budget_s` is spent.

    Each is called once before, unmeasured. At least `least` rounds, at most 200. Calls of less
    than a millisecond are repeated within a round, so that the clock's own cost stays small.
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
    return {name: min(values) for name, values in taken.items()}
