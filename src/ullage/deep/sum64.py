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
    rows, rest = len(data) // row_bytes, len(data) % row_bytes
    words = -(-row_bytes // 8)
    weights = first_factors(words)
    if not rows:
        return np.asarray(_padded(data, 1, words) @ weights)
    sums: npt.NDArray[np.uint64]
    if row_bytes % 8:  # copied into rows of whole words, which costs less than looking askew
        sums = np.einsum("ij,j->i", _padded(data[: rows * row_bytes], rows, words), weights)
    else:
        whole = data[: rows * row_bytes].view("<u8").reshape(rows, words)
        sums = np.einsum("ij,j->i", whole, weights)
    if not rest:
        return sums
    return np.append(sums, _padded(data[rows * row_bytes :], 1, words) @ weights)


def _padded(data: npt.NDArray[np.uint8], rows: int, words: int) -> npt.NDArray[np.uint64]:
    """`data` as rows of so many words [rows, words], zeros behind each row's bytes."""
    width = len(data) // rows
    padded = np.empty((rows, words * 8), np.uint8)  # pages of zeros would be new ones every time
    padded[:, :width] = data.reshape(rows, width)
    padded[:, width:] = 0
    return padded.view("<u8")


def sum64(sums: npt.NDArray[np.uint64]) -> int:
    """The tensor's checksum from the sums of all its rows, in order."""
    # Floats widened from bfloat16 leave the low half of their words, and of the sums, empty.
    folded = sums ^ (sums >> np.uint64(32))
    return int((folded * first_factors(len(sums))).sum(dtype=np.uint64))
