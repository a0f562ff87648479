"""The checksum of a tensor: `sum64`, at the speed of memory, and a number per row on the way.

A row's sum is Σ word × weight modulo 2^64 over its little-endian 64-bit words, so equal rows have
equal sums; the tensor's is Σ row sum (upper half folded in) × an odd factor of the row. It finds
what copying, truncation and flipped bits do. It is no signature: for that, sha256 of whole files.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FLAT_ROW_BYTES = 4096
"""The width of a row where a tensor has none of its own that are compared."""
MAX_ROW_BYTES = 4 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def odd_factors(first: int, count: int) -> npt.NDArray[np.uint64]:
    """Factors number `first` … `first + count - 1`: odd, and without a visible pattern.

    n → golden × (n + 1), folded by its upper half, × a constant, folded again, made odd.
    """
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX
    mixed ^= mixed >> np.uint64(29)
    return mixed | np.uint64(1)


_FACTORS = odd_factors(0, 1 << 14)


def first_factors(count: int) -> npt.NDArray[np.uint64]:
    """Factors number 0 … count - 1."""
    return _FACTORS[:count] if count <= len(_FACTORS) else odd_factors(0, count)


def row_sums(data: npt.NDArray[np.uint8], row_bytes: int) -> npt.NDArray[np.uint64]:
    """The sum of each row of `data`; a last row that is shorter counts as if zeros followed."""
    rows, words = len(data) // row_bytes, row_bytes // 8
    weights = first_factors(-(-row_bytes // 8))
    sums = np.zeros(rows, np.uint64)
    if words and rows:
        whole = np.ndarray((rows, words), "<u8", data, 0, (row_bytes, 8))
        sums = np.einsum("ij,j->i", whole, weights[:words])
    rest = row_bytes % 8
    if rest and rows:
        tail = np.zeros((rows, 8), np.uint8)
        tail[:, :rest] = data[: rows * row_bytes].reshape(rows, row_bytes)[:, words * 8 :]
        sums += tail.view("<u8")[:, 0] * weights[words]
    short = data[rows * row_bytes :]
    if not len(short):
        return sums
    padded = np.zeros(-(-len(short) // 8) * 8, np.uint8)
    padded[: len(short)] = short
    last = (padded.view("<u8") * weights[: len(padded) // 8]).sum(dtype=np.uint64)
    return np.append(sums, last)


def sum64(sums: npt.NDArray[np.uint64]) -> int:
    """The tensor's checksum from the sums of all its rows, in order."""
    # Floats widened from bfloat16 leave the low half of their words, and of the sums, empty.
    folded = sums ^ (sums >> np.uint64(32))
    return int((folded * first_factors(len(sums))).sum(dtype=np.uint64))
