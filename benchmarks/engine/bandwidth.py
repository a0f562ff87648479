"""How fast this machine reads memory: a sum over an array that fits no cache, on all threads.

The bound of every decode step, measured in the same run as the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

ARRAY_BYTES = 1 << 29


@numba.njit(parallel=True, fastmath=True, cache=False)  # type: ignore[untyped-decorator]
def _sum(values: Any) -> Any:
    total = 0.0
    for index in numba.prange(values.size):
        total += values[index]
    return total


def reader(threads: int) -> Callable[[], float]:
    """A function that reads the array once and says bytes per second; compiled when this ends."""
    numba.set_num_threads(threads)
    values = np.ones(ARRAY_BYTES // 4, dtype=np.float32)
    _sum(values)

    def read() -> float:
        started = time.perf_counter()
        _sum(values)
        return ARRAY_BYTES / (time.perf_counter() - started)

    return read
