"""A sequential test over many cells at once, with a stated rate of false alarms.

Holds the test and nothing of models. Each reading is a z: what is seen, in units of what a healthy
model shows at most. Readings may depend on each other in any way.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

WIDTH = 3.0
"""Faults of about so many z are found soonest; others a little later."""
RUN_LENGTH = 1_000_000
"""Healthy readings of all cells, on average, before one of them gives an alarm."""


class Detectors:
    """One Shiryaev-Roberts detector for each cell: R ← (R + 1)·e, an alarm at R ≥ cells × run.

    e = exp(z²w²/(2(1+w²)))/√(1+w²) is the mean of exp(λz − λ²/2) over λ from N(0, w²). While z is
    sub-Gaussian with variance proxy 1 given what was before, E[e] ≤ 1, so R − n is a
    supermartingale and the mean number of readings before an alarm of a cell is at least the
    threshold (Shin, Ramdas, Rinaldo: E-detectors, 2024); over all cells it is `run_length`.
    """

    def __init__(self, cells: int, run_length: float = RUN_LENGTH, width: float = WIDTH) -> None:
        self.threshold = math.log(max(cells, 1) * run_length)
        self._slope = width**2 / (2 * (1 + width**2))
        self._offset = 0.5 * math.log1p(width**2)
        self.log_r: Doubles = np.full(cells, -np.inf)
        self.readings = np.zeros(cells, np.int64)

    def see(self, z: Doubles) -> NDArray[np.bool_]:
        """Take in one reading of each cell (NaN: none) and say which stand at an alarm.

        A cell whose alarm stands goes on with the threshold as its most, so that it ends within a
        bounded number of healthy readings.
        """
        read = ~np.isnan(z)
        gain = np.where(read, z, 0.0) ** 2 * self._slope - self._offset
        risen = np.logaddexp(self.log_r, 0.0) + gain
        self.log_r = np.where(read, np.minimum(risen, self.threshold), self.log_r)
        self.readings += read
        return self.log_r >= self.threshold

    @property
    def alarms(self) -> NDArray[np.bool_]:
        return self.log_r >= self.threshold
