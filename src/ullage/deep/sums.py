"""The chunks of one tensor added up: `TensorSum` → TensorReading; and tensors that are the same.

Holds the adding up and the comparison byte by byte of what has equal hashes or checksums.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ullage.anatomy.checkpoint import TensorEntry, open_regular
from ullage.deep.chunks import ChunkReading, Layout
from ullage.deep.formats import BLOCKS, FLOATS, decode, decode_one
from ullage.deep.readings import (
    BlockReading,
    ChannelReading,
    RowReading,
    TensorReading,
    VectorReading,
)
from ullage.deep.sum64 import sum64

_LAYER = re.compile(r"\.[0-9]+\.")
_COMPARE_BYTES = 1 << 20
_RANDOM = np.random.default_rng()


class TensorSum:
    """The chunks of one tensor as they come in, in any order."""

    def __init__(self, tensor: TensorEntry, layout: Layout) -> None:
        self.tensor = tensor
        self.layout = layout
        self.left = tensor.num_bytes
        self.chunks: dict[int, tuple[int, ChunkReading]] = {}
        self.column_top: npt.NDArray[np.unsignedinteger] | None = None

    def add(self, offset: int, num_bytes: int, found: ChunkReading) -> bool:
        """Takes one chunk; True when it was the last one."""
        if found.column_top is not None:
            if self.column_top is None:
                self.column_top = found.column_top
            else:
                np.maximum(self.column_top, found.column_top, out=self.column_top)
            found.column_top = None
        self.chunks[offset] = (num_bytes, found)
        self.left -= num_bytes
        return self.left == 0

    def reading(self) -> TensorReading:
        """What all chunks say; rows with equal hashes are read again and compared."""
        tensor, layout = self.tensor, self.layout
        ordered = [(offset, *self.chunks[offset]) for offset in sorted(self.chunks)]
        parts = [part for _, _, part in ordered]
        sums = parts[0].row_sums
        if len(parts) > 1:
            sums = np.concatenate([part.row_sums for part in parts])
        floats = layout.reading == "floats"
        known = [part.nonzero for part in parts]
        return TensorReading(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=tensor.file,
            num_bytes=tensor.num_bytes,
            sum64=sum64(sums),
            reading=layout.reading,
            num_nan=sum(part.num_nan for part in parts) if floats else None,
            num_inf=sum(part.num_inf for part in parts) if floats else None,
            num_zero=sum(part.num_zero for part in parts) if layout.counts_zeros else None,
            first_bad=self._first_bad(ordered),
            largest=_top(parts, tensor.dtype) if floats else None,
            all_zero=None if None in known or not known else not any(known),
            rows=self._rows(parts, sums),
            vector=_vector(parts) if layout.is_vector and floats else None,
            channels=self._channels(),
            blocks=_blocks(parts, tensor.dtype) if layout.reading == "blocks" else None,
        )

    def _first_bad(self, ordered: list[tuple[int, int, ChunkReading]]) -> int | None:
        for offset, _, part in ordered:
            if part.first_bad is not None:
                size = np.dtype(FLOATS[self.layout.dtype].unsigned).itemsize
                return (offset - self.tensor.start) // size + part.first_bad
        return None

    def _rows(self, parts: list[ChunkReading], hashes: npt.NDArray[np.uint64]) -> RowReading | None:
        if not self.layout.compares_rows:
            return None
        zero: npt.NDArray[np.bool_] | None = None
        candidates = hashes
        if any(part.row_is_zero is not None for part in parts):
            zero = np.concatenate(
                [
                    np.zeros(len(part.row_sums), np.bool_)
                    if part.row_is_zero is None
                    else part.row_is_zero
                    for part in parts
                ]
            )
            candidates = hashes[~zero]
        ordered = np.sort(candidates)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        duplicates = 0
        if len(repeated):
            alike = np.isin(hashes, repeated)
            if zero is not None:
                alike &= ~zero
            rows = np.flatnonzero(alike)
            duplicates = self._compare(rows, hashes[rows])
        num_zero = 0 if zero is None else int(np.count_nonzero(zero))
        return RowReading(len(hashes), num_zero, duplicates)

    def _compare(self, rows: npt.NDArray[np.intp], hashes: npt.NDArray[np.uint64]) -> int:
        """How many of `rows`, whose hashes all occur twice or more, hold an earlier one's bytes."""
        size, total = self.layout.row_bytes, 0
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        begins = np.concatenate([[True], hashes[1:] != hashes[:-1]])
        seen: set[bytes] = set()
        with open_regular(Path(self.tensor.file)) as (stream, _):
            for row, is_first in zip(rows[order].tolist(), begins.tolist(), strict=True):
                found = os.pread(stream.fileno(), size, self.tensor.start + row * size)
                if is_first:
                    seen.clear()
                total += found in seen
                seen.add(found)
        return total

    def _channels(self) -> ChannelReading | None:
        if self.column_top is None:
            return None
        sizes = decode(self.layout.dtype, self.column_top)
        channel = int(sizes.argmax())
        return ChannelReading(channel, float(sizes[channel]), float(np.median(sizes)))


def _top(parts: list[ChunkReading], dtype: str) -> float:
    """The value of the largest finite pattern of all parts."""
    return decode_one(dtype, max((part.top for part in parts), default=0))


def _vector(parts: list[ChunkReading]) -> VectorReading | None:
    found = [part.vector for part in parts if part.vector is not None]
    count = sum(item[6] for item in found)
    if not count:
        return None
    return VectorReading(
        zero=sum(item[0] for item in found),
        negative=sum(item[1] for item in found),
        least=min(item[2] for item in found),
        greatest=max(item[3] for item in found),
        mean=sum(item[4] for item in found) / count,
        rms=(sum(item[5] for item in found) / count) ** 0.5,
    )


def _blocks(parts: list[ChunkReading], dtype: str) -> BlockReading:
    found = [part.scales for part in parts if part.scales is not None]
    return BlockReading(
        count=sum(item[0] for item in found),
        not_finite=sum(item[1] for item in found),
        zero=sum(item[2] for item in found),
        zero_but_packed=sum(item[3] for item in found),
        bound=_top(parts, BLOCKS[dtype].scale_dtype) * BLOCKS[dtype].reach,
    )


def same_across_layers(
    tensors: tuple[TensorEntry, ...], readings: tuple[TensorReading, ...]
) -> tuple[tuple[str, ...], ...]:
    """Groups of tensors that differ in the layer's number only and hold equal bytes.

    Constants (each element equal to the first: norms never trained, empty biases) are left out.
    """
    groups: dict[tuple[object, ...], list[TensorEntry]] = {}
    for tensor, reading in zip(tensors, readings, strict=True):
        pattern = _LAYER.sub(".{n}.", tensor.name, count=1)
        if pattern != tensor.name and tensor.num_bytes:
            key = (pattern, tensor.dtype, tensor.shape, reading.sum64)
            groups.setdefault(key, []).append(tensor)
    found = []
    for members in groups.values():
        if len(members) < 2 or _is_constant(members[0]):
            continue
        equal = [members[0], *(t for t in members[1:] if _same_bytes(members[0], t))]
        if len(equal) > 1:
            found.append(tuple(t.name for t in equal))
    return tuple(found)


def _bytes_of(tensor: TensorEntry) -> Iterator[bytes]:
    with open_regular(Path(tensor.file)) as (stream, _):
        stream.seek(tensor.start)
        for offset in range(0, tensor.num_bytes, _COMPARE_BYTES):
            yield stream.read(min(_COMPARE_BYTES, tensor.num_bytes - offset))


def _same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    return all(a == b for a, b in zip(_bytes_of(one), _bytes_of(other), strict=True))


def _is_constant(tensor: TensorEntry) -> bool:
    """Whether every element is the same. Told by the bytes: they repeat with the element's size."""
    size = tensor.num_bytes // tensor.num_elements if tensor.dtype not in BLOCKS else 1
    first = b""
    for part in _bytes_of(tensor):
        first = first or part[: max(size, 1)]
        if part != first * (len(part) // len(first)):
            return False
    return True
