"""The Hadamard turn of a head: what one dimension holds is spread over all of them.

Products of two turned heads are as before, and turning twice undoes it. Bit for bit what
`kv.codecs.turned` gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ullage.engine.kernels.compiling import compiled


def _turn(x_D: Any) -> None:
    """In place, by blocks of the largest power of two that divides the size."""
    size = x_D.shape[0]
    block = size & -size
    half = 1
    while half < block:
        for first in range(0, size, 2 * half):
            for i in range(first, first + half):
                low, high = x_D[i], x_D[i + half]
                x_D[i] = low + high
                x_D[i + half] = low - high
        half *= 2
    factor = np.float32(1) / np.sqrt(np.float32(block))
    for i in range(size):
        x_D[i] *= factor


turn = compiled(_turn)
