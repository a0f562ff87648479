"""What the last rows that were read along come to: per layer and head, as of a prompt's rows.

Holds a ring of rows and their statistics. Who reads rows is `live`; a row is handed in by one
thread, while others may ask.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.probes.entropy import HeadTotals, RowReadings
from ullage.probes.readings import LayerReading
from ullage.probes.usual import Attended

MOST_ROWS = 512
MOST_BYTES = 32 << 20
"""A model of many heads keeps fewer rows."""
QUANTILES = (0.05, 0.5, 0.95)
_COLUMNS = ("entropy_nats", "max_score", "first_mass", "band_mass")

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """A copy of what was kept: float32 [columns, rows, layers, heads], visible [rows, layers]."""

    columns_CRLH: Floats
    visible_RL: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.visible_RL)

    def layers(self) -> tuple[LayerReading, ...]:
        """As `ullage probe attention` reads a prompt; of the band the mass alone."""
        if not self.rows:
            return ()
        return tuple(map(self._layer, range(self.visible_RL.shape[1])))

    def _layer(self, layer: int) -> LayerReading:
        of = {
            name: torch.from_numpy(self.columns_CRLH[at, :, layer])
            for at, name in enumerate(_COLUMNS)
        }
        unknown = torch.full_like(of["entropy_nats"], float("nan"))
        visible_R = torch.from_numpy(np.ascontiguousarray(self.visible_RL[:, layer]))
        totals = HeadTotals()
        totals.add(RowReadings(**of, band_entropy_nats=unknown, visible=visible_R))
        return LayerReading(layer, totals.readings())

    def entropy_quantiles(self) -> NDArray[np.float64]:
        """[layers, QUANTILES] over a layer's rows and heads; NaN where no row could say."""
        layers = self.columns_CRLH.shape[2]
        found = np.full((layers, len(QUANTILES)), np.nan)
        for layer in range(layers):
            entropy_RH = self.columns_CRLH[0, :, layer]
            known = entropy_RH[np.isfinite(entropy_RH)]
            if len(known):
                found[layer] = np.quantile(known.astype(np.float64), QUANTILES)
        return found


class LiveAttention:
    """The last `capacity` rows of all layers and heads."""

    def __init__(self, layers: int, heads: int, capacity: int | None = None) -> None:
        row_bytes = layers * heads * len(_COLUMNS) * 4
        self.capacity = capacity or max(32, min(MOST_ROWS, MOST_BYTES // row_bytes))
        self._columns = np.zeros((len(_COLUMNS), self.capacity, layers, heads), np.float32)
        self._visible = np.zeros((self.capacity, layers), np.int64)
        self._lock = threading.Lock()
        self.added = 0

    def add(self, attended: Attended) -> None:
        """Take in one row; the oldest makes room."""
        place = self.added % self.capacity
        with self._lock:
            for at, name in enumerate(_COLUMNS):
                self._columns[at, place] = getattr(attended, name)
            self._visible[place] = attended.visible_L
            self.added += 1

    def kept(self) -> KeptRows:
        """What is there now. For any thread."""
        with self._lock:
            count = min(self.added, self.capacity)
            return KeptRows(self._columns[:, :count].copy(), self._visible[:count].copy())
