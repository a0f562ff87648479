"""Which layers' attention is read of a sequence's next row: all of a short one, in turn of a long.

A step's attention grows with the context and so does reading it again: read whole, one row of
sixteen steps would come near a sixteenth of them. Holds whose turn it is; rows are `rows`'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

FREE_POSITIONS = 256
"""Up to so many visible ones a row is read in every layer; beyond, so many times the layers. Of
SmolLM2's steps in int8 reading is then 1.1 to 1.7% by its own clock; it was 1.9 at 500 tokens."""
MOST_ROWS = 3
"""Rows of a sequence within which every layer is read, however long it is: of the default sampling
four rows are read within 64 tokens."""
MOST_SEQUENCES = 4096


class Turns:
    """One engine's. Not thread-safe."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        """Of every layer, in order; None: it sees all that was before."""
        furthest = np.iinfo(np.int64).max
        self._windows = np.array([one or furthest for one in windows], np.int64)
        # By sequence, those that were read last at the end: the layer that is next.
        self._next: dict[str, int] = {}
        self._last = 0

    def due(self, request_id: str, context: int) -> Ints | None:
        """The layers to read of this row, in ascending order; None: all of them.

        Every `MOST_ROWS` rows of a sequence hold every layer. One that is new begins where another
        left off, so that short ones do not all show the same.
        """
        count = self._num_due(context)
        layers = len(self._windows)
        first = self._next.pop(request_id, self._last)
        self._last = self._next[request_id] = (first + count) % layers
        if len(self._next) > MOST_SEQUENCES:
            del self._next[next(iter(self._next))]
        if count == layers:
            return None
        return np.sort((first + np.arange(count, dtype=np.int64)) % layers)

    def _num_due(self, context: int) -> int:
        layers = len(self._windows)
        seen = float(np.minimum(self._windows, context).mean())
        if seen <= FREE_POSITIONS:
            return layers
        return max(int(layers * FREE_POSITIONS / seen), math.ceil(layers / MOST_ROWS))
