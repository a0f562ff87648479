"""The usual chunk looked at by machine code: `look`, the same answers as `chunks.look`, faster.

Holds loops for numba, which compiles them once and keeps the code in its cache. What is unusual
(NaN or Inf in a chunk, types with a NaN of their own) is left to `chunks.look`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numba
import numpy as np
import numpy.typing as npt

from ullage.deep import chunks
from ullage.deep.chunks import ChunkReading, Layout, Patterns
from ullage.deep.formats import FLOATS
from ullage.deep.sum64 import first_factors

Words = npt.NDArray[np.uint64]


def _sum_rows(words: Words, factors: Words, sums: Words) -> None:
    """Row sums of `words` [rows, words of a row] into `sums` [rows], as `sum64.row_sums` gives."""
    for row in range(words.shape[0]):
        total = np.uint64(0)
        for n in range(words.shape[1]):
            total += words[row, n] * factors[n]
        sums[row] = total


def _look_at_rows(
    patterns: Patterns, words: Words, factors: Words, mask: np.unsignedinteger,
    sums: Words, bits: Words, column_top: Patterns,
) -> None:  # fmt: skip
    """Of each row its sum and the bits set anywhere in it; of each column the largest pattern.

    `patterns` [rows, columns] and `words` [rows, words of a row] are the same bytes. Loops over one
    row stay in the nearest cache, and each is of one kind of work, which LLVM makes vectors of.
    """
    for row in range(words.shape[0]):
        total = np.uint64(0)
        set_bits = np.uint64(0)
        for n in range(words.shape[1]):
            total += words[row, n] * factors[n]
            set_bits |= words[row, n]
        sums[row] = total
        bits[row] = set_bits
        for n in range(patterns.shape[1]):
            column_top[n] = max(column_top[n], patterns[row, n] & mask)


_compile = numba.njit(nogil=True, cache=True)
_fast_sums: Callable[..., None] = _compile(_sum_rows)
_fast_rows: Callable[..., None] = _compile(_look_at_rows)


def prepare(dtypes: Iterable[str]) -> None:
    """Compiles what `dtypes` need, or takes it from the cache, before threads ask for it.

    Raises RuntimeError when numba does not compile here, OSError when it cannot keep the code.
    """
    if getattr(numba.config, "DISABLE_JIT", False):
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    kinds = {FLOATS[d].unsigned for d in dtypes if d in FLOATS and not FLOATS[d].nan_pattern}
    words, factors = np.zeros((1, 1), np.uint64), first_factors(1)
    sums, bits = np.empty(1, np.uint64), np.empty(1, np.uint64)
    try:
        _fast_sums(words, factors, sums)
        for unsigned in kinds:
            patterns = words.view(unsigned)
            top = np.zeros(patterns.shape[1], patterns.dtype)
            _fast_rows(patterns, words, factors, top.dtype.type(1), sums, bits, top)
    except numba.errors.NumbaError as error:
        raise RuntimeError(str(error)) from error


def look(
    data: npt.NDArray[np.uint8], layout: Layout, scratch: npt.NDArray[np.uint8]
) -> ChunkReading:
    """As `chunks.look`."""
    if layout.sum_bytes % 8 or not len(data) or len(data) % layout.sum_bytes:
        return chunks.look(data, layout, scratch)
    words = data.view("<u8").reshape(-1, layout.sum_bytes // 8)
    sums = np.empty(len(words), np.uint64)
    if not _is_usual(layout):
        _fast_sums(words, first_factors(words.shape[1]), sums)
        return chunks.look_at_values(data, layout, scratch, ChunkReading(sums))
    kind = FLOATS[layout.dtype]
    patterns = data.view(kind.unsigned).reshape(len(words), layout.columns)
    mask = patterns.dtype.type(kind.mask)
    bits = np.empty(len(words), np.uint64)
    column_top = np.zeros(layout.columns, patterns.dtype)
    _fast_rows(patterns, words, first_factors(words.shape[1]), mask, sums, bits, column_top)
    found = ChunkReading(sums, top=int(column_top.max()), column_top=column_top)
    if found.top >= kind.inf:
        return chunks.look_at_values(data, layout, scratch, ChunkReading(sums))
    if kind.signed:
        is_zero = bits & np.full(8 // patterns.itemsize, mask).view(np.uint64) == 0
        found.row_is_zero = is_zero if is_zero.any() else None
        found.nonzero = found.top > 0
    return found


def _is_usual(layout: Layout) -> bool:
    """Whether chunks are rows of floats that the fused loop understands."""
    return (
        layout.reading == "floats"
        and layout.compares_rows
        and not layout.counts_zeros
        and FLOATS[layout.dtype].nan_pattern is None
    )
