"""Sylvester's matrices, written out: the oracle of the butterflies that turn heads of four bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def hadamard(dim: int) -> npt.NDArray[np.float64]:
    """Orthonormal [dim, dim]: blocks of the largest power of two that divides dim."""
    block = np.ones((1, 1))
    while dim % (2 * len(block)) == 0:
        block = np.kron([[1.0, 1.0], [1.0, -1.0]], block)
    return np.kron(np.eye(dim // len(block)), block) / np.sqrt(len(block))
