"""One chunk of a tensor's bytes → what it says: `look`, a function of bytes and format.

Holds the arithmetic on bit patterns; reading files and adding chunks up is `scan.py`. A chunk is
small enough for the processor's cache, so the passes over it cost little beside reading it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ullage.anatomy.gguf.types import GGML_BLOCKS
from ullage.deep.formats import BLOCKS, FLOATS, INTEGERS, Array, BlockFormat, FloatFormat, decode
from ullage.deep.readings import Reading
from ullage.deep.sum64 import row_sums

Patterns = npt.NDArray[np.unsignedinteger]
MIN_ROW_ELEMENTS = 16
"""Shorter rows repeat by chance (scales, biases stored as columns), so they are not compared."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor's bytes are cut: `rows` of `columns` elements, `row_bytes` each.

    `whole_rows` False: a row is longer than a chunk, so nothing is said of rows or channels.
    `compares_rows` False: rows are too few, too short, or not of numbers. `unit` bytes are never
    cut; chunks hold whole ones. `sum_bytes` is the width of a row of the checksum (`sum64`).
    """

    dtype: str
    reading: Reading
    rows: int
    columns: int
    row_bytes: int
    whole_rows: bool
    compares_rows: bool
    is_vector: bool
    counts_zeros: bool
    unit: int
    sum_bytes: int


def reading_of(dtype: str) -> Reading:
    """How a stored type is read here."""
    if dtype in FLOATS:
        return "floats"
    if dtype in INTEGERS:
        return "integers"
    return "blocks" if dtype in BLOCKS else "bytes"


@dataclass(slots=True)
class ChunkReading:
    """What one chunk says; fields as in TensorReading, patterns where values are not decoded yet.

    `top` is the pattern of the largest finite magnitude (of blocks: of their scales).
    `column_top` holds each column's largest finite pattern. `row_sums` holds one 64-bit number per
    row of the checksum (equal rows, equal numbers). `row_is_zero` is None where no row is.
    `vector` is (zeros, negatives, least, greatest, sum, sum of squares, finite count). `scales` is
    (count, not finite, zero, zero but packed).
    """

    row_sums: npt.NDArray[np.uint64]
    num_nan: int = 0
    num_inf: int = 0
    num_zero: int = 0
    first_bad: int | None = None
    top: int = 0
    nonzero: bool | None = None
    column_top: Patterns | None = None
    hashes: npt.NDArray[np.uint64] | None = None
    row_is_zero: npt.NDArray[np.bool_] | None = None
    vector: tuple[int, int, float, float, float, float, int] | None = None
    scales: tuple[int, int, int, int] | None = None


def look(
    data: npt.NDArray[np.uint8], layout: Layout, scratch: npt.NDArray[np.uint8]
) -> ChunkReading:
    """Reads one chunk: `data` [bytes], whole rows where the layout has them, 8-byte aligned.

    `scratch` is at least as large as `data` and is overwritten.
    """
    return look_at_values(data, layout, scratch, ChunkReading(row_sums(data, layout.sum_bytes)))


def look_at_values(
    data: npt.NDArray[np.uint8],
    layout: Layout,
    scratch: npt.NDArray[np.uint8],
    found: ChunkReading,
) -> ChunkReading:
    """Adds to `found` all that `look` says but the sums, and returns it."""
    if layout.reading == "floats":
        _look_at_floats(data, layout, scratch, found)
    elif layout.reading == "integers":
        found.nonzero = bool(data.any())
    elif layout.reading == "blocks":
        _look_at_blocks(data, layout, BLOCKS[layout.dtype], scratch, found)
    return found


def _look_at_floats(
    data: npt.NDArray[np.uint8],
    layout: Layout,
    scratch: npt.NDArray[np.uint8],
    found: ChunkReading,
) -> None:
    kind = FLOATS[layout.dtype]
    patterns = data.view(kind.unsigned)
    sizes = scratch[: len(data)].view(kind.unsigned)
    np.bitwise_and(patterns, patterns.dtype.type(kind.mask), out=sizes)
    bad = _not_finite(kind, patterns, sizes)
    if layout.counts_zeros:
        found.num_zero = int(np.count_nonzero(sizes == 0))
    if bad is not None:
        _count_bad(kind, sizes, bad, found)
        sizes[bad] = 0
    by_row = sizes.reshape(-1, layout.columns) if layout.whole_rows else sizes.reshape(1, -1)
    row_top = by_row.max(axis=1)
    top = row_top.max()
    found.top = int(top)
    if kind.signed:
        found.nonzero = bool(top) or bad is not None
    if layout.compares_rows:
        found.column_top = by_row.max(axis=0)
        if kind.signed:
            is_zero = np.asarray(row_top == 0)
            if bad is not None:
                is_zero &= ~bad.reshape(by_row.shape).any(axis=1)
            found.row_is_zero = is_zero if is_zero.any() else None
    if layout.is_vector:
        values = decode(layout.dtype, patterns)
        if bad is not None:
            values = values[~bad]
        with np.errstate(over="ignore"):  # float64's largest numbers alone: their square is Inf
            squares = float(values @ values)
        found.vector = (
            int(np.count_nonzero(values == 0)),
            int(np.count_nonzero(values < 0)),
            float(values.min(initial=np.inf)),
            float(values.max(initial=-np.inf)),
            float(values.sum()),
            squares,
            values.size,
        )


def _not_finite(
    kind: FloatFormat, patterns: Patterns, sizes: Patterns
) -> npt.NDArray[np.bool_] | None:
    """Which elements are NaN or Inf; None when none is, which costs one pass."""
    if kind.nan_pattern is not None:
        bad = patterns == kind.nan_pattern
        return bad if bad.any() else None
    if sizes.max(initial=0) < kind.inf:
        return None
    return sizes >= kind.inf


def _count_bad(
    kind: FloatFormat,
    sizes: Patterns,
    bad: npt.NDArray[np.bool_],
    found: ChunkReading,
) -> None:
    total = int(np.count_nonzero(bad))
    if kind.has_inf:
        found.num_inf = int(np.count_nonzero(sizes == kind.inf))
    found.num_nan = total - found.num_inf
    found.first_bad = int(bad.argmax())


def _look_at_blocks(
    data: npt.NDArray[np.uint8],
    layout: Layout,
    block: BlockFormat,
    scratch: npt.NDArray[np.uint8],
    found: ChunkReading,
) -> None:
    block_bytes = GGML_BLOCKS[layout.dtype][1]
    num_blocks = len(data) // block_bytes
    kind = FLOATS[block.scale_dtype]
    # The scales of a block lie side by side, so one word holds them all.
    word = np.dtype(f"<u{np.dtype(kind.unsigned).itemsize * len(block.scales)}")
    mask = np.array([kind.mask] * len(block.scales), kind.unsigned).view(word)[0]
    stored: Array = np.ndarray((num_blocks,), word, data, block.scales[0], (block_bytes,))
    words = scratch[: num_blocks * word.itemsize].view(word)
    np.bitwise_and(stored, mask, out=words)
    sizes = words.view(kind.unsigned)
    num_scales, not_finite = len(sizes), 0
    found.top = int(sizes.max(initial=0))
    if found.top >= kind.inf:
        bad = sizes >= kind.inf
        not_finite = int(np.count_nonzero(bad))
        found.top = int(sizes[~bad].max(initial=0))
    if not kind.signed or words.min(initial=1):  # no block is zero: the usual case
        found.scales = (num_scales, not_finite, 0, 0)
        found.nonzero = True if kind.signed else None
        return
    zero = words == 0
    begin, end = block.packed
    packed = data.reshape(num_blocks, block_bytes)[zero, begin:end]
    packed_zero = int(np.count_nonzero((packed != packed[:, :1]).any(axis=1)))
    num_zero = int(np.count_nonzero(zero))
    found.scales = (num_scales, not_finite, num_zero, packed_zero)
    found.nonzero = num_zero < num_blocks
    if layout.compares_rows:
        found.row_is_zero = np.asarray(zero.reshape(len(data) // layout.row_bytes, -1).all(axis=1))
