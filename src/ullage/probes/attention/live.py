"""What the last rows that were read along come to: per layer and head, as of a prompt's rows.

Holds a ring of rows and their statistics. Who reads rows is `live`; a row is handed in by one
thread, while others may ask.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ullage.probes.attention.readings import HeadReading, LayerReading, Spread
from ullage.probes.baseline.usual import Attended

MOST_ROWS = 512
MOST_BYTES = 32 << 20
"""A model of many heads keeps fewer rows."""
QUANTILES = (0.05, 0.5, 0.95)
_COLUMNS = ("entropy_nats", "max_score", "first_mass", "band_mass")

_SPREAD = {"p5": 0.05, "p95": 0.95}

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """A copy of what was kept: float32 [columns, rows, layers, heads], visible [rows, layers].

    0 are visible of a row in a layer that was not read: it is none of that layer's rows.
    """

    columns_CRLH: Floats
    visible_RL: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.visible_RL)

    def layers(self) -> tuple[LayerReading, ...]:
        """As `ullage probe attention` reads a prompt; of the band the mass alone.

        All layers at once: somebody may ask every few seconds, and `HeadTotals` takes long enough
        to be felt by those who are served.
        """
        if not self.rows:
            return ()
        columns = dict(zip(_COLUMNS, self.columns_CRLH, strict=True))
        entropy_RLH = columns["entropy_nats"]
        good_RLH = np.isfinite(entropy_RLH) & np.isfinite(columns["max_score"])
        good_RLH &= (self.visible_RL > 0)[..., None]
        # Of one visible key the most is 0: such a row says nothing of how far it could have been.
        most_RL = np.log(np.where(self.visible_RL > 1, self.visible_RL, np.nan))
        with np.errstate(over="ignore", invalid="ignore"):
            means = {
                "mean": _mean(entropy_RLH, good_RLH),
                "entropy_normalized": _mean(entropy_RLH / most_RL[..., None], good_RLH),
                "sink_mass": _mean(columns["first_mass"], good_RLH),
                "band_mass": _mean(columns["band_mass"], good_RLH),
                "effective_context": _mean(np.exp(entropy_RLH.astype(np.float64)), good_RLH),
            }
        top_LH = np.where(good_RLH, columns["max_score"], -np.inf).max(axis=0)
        # Those that are no numbers come last.
        sorted_RLH = np.sort(np.where(good_RLH, entropy_RLH, np.nan), axis=0)
        count_LH, read_L = good_RLH.sum(axis=0), (self.visible_RL > 0).sum(axis=0)
        spreads = {name: _quantile(sorted_RLH, count_LH, q) for name, q in _SPREAD.items()}
        tables = {**means, **spreads, "max_score": np.where(count_LH > 0, top_LH, np.nan)}
        return tuple(
            LayerReading(
                layer,
                tuple(
                    _head({name: float(table[layer, head]) for name, table in tables.items()},
                          head, int(read_L[layer]), int(read_L[layer] - count_LH[layer, head]))
                    for head in range(count_LH.shape[1])
                ),
            )
            for layer in range(len(count_LH))
        )  # fmt: skip

    def entropy_quantiles(self) -> Doubles:
        """[layers, QUANTILES] over a layer's rows and heads; NaN where no row could say."""
        layers = self.columns_CRLH.shape[2]
        found = np.full((layers, len(QUANTILES)), np.nan)
        for layer in range(layers):
            entropy_RH = self.columns_CRLH[0, :, layer]
            read_R1 = self.visible_RL[:, layer, None] > 0
            known = entropy_RH[np.isfinite(entropy_RH) & read_R1]
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


def _mean(values_RLH: NDArray[Any], good_RLH: NDArray[np.bool_]) -> Doubles:
    """Over rows; NaN where none says anything."""
    known = good_RLH & np.isfinite(values_RLH)
    count_LH = known.sum(axis=0)
    total_LH = np.where(known, values_RLH, 0.0).sum(axis=0, dtype=np.float64)
    mean: Doubles = total_LH / np.where(count_LH > 0, count_LH, np.nan)
    return mean


def _quantile(sorted_RLH: Floats, count_LH: NDArray[np.int64], share: float) -> Doubles:
    """Of the first so many rows of each head, between the two that are nearest."""
    at_LH = share * np.maximum(count_LH - 1, 0)
    low_LH = np.floor(at_LH).astype(np.int64)
    high_LH = np.minimum(low_LH + 1, np.maximum(count_LH - 1, 0))
    low, high = (
        np.take_along_axis(sorted_RLH, at[None], axis=0)[0].astype(np.float64)
        for at in (low_LH, high_LH)
    )
    found: Doubles = low + (at_LH - low_LH) * (high - low)
    return found


def _head(told: Mapping[str, float], head: int, rows: int, not_finite: int) -> HeadReading:
    known = {name: None if math.isnan(value) else value for name, value in told.items()}
    mean, p5, p95 = known["mean"], known["p5"], known["p95"]
    return HeadReading(
        head=head,
        rows=rows,
        not_finite=not_finite,
        entropy_nats=(None if mean is None or p5 is None or p95 is None else Spread(mean, p5, p95)),
        entropy_normalized=known["entropy_normalized"],
        sink_mass=known["sink_mass"],
        band_mass=known["band_mass"],
        band_entropy_nats=None,
        effective_context=known["effective_context"],
        max_score=known["max_score"],
    )
