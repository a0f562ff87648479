"""A checkpoint's files cut into chunks and read by windows: `read_windows`, each chunk an `Item`.

Holds the cutting and the reading. What a chunk says is `chunks.py`, the threads are `scan.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from ullage.anatomy.checkpoint import TensorEntry, open_regular
from ullage.anatomy.gguf.types import GGML_BLOCKS
from ullage.deep.chunks import MIN_ROW_ELEMENTS, Layout, reading_of
from ullage.deep.formats import FLOATS, INTEGERS
from ullage.deep.names import is_scale
from ullage.deep.readings import Reading
from ullage.deep.sum64 import FLAT_ROW_BYTES, MAX_ROW_BYTES
from ullage.deep.sums import TensorSum
from ullage.errors import MalformedCheckpoint

CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 1 << 20
MAX_WINDOW_BYTES = WINDOW_BYTES + 2 * MAX_ROW_BYTES

Bytes = npt.NDArray[np.uint8]


def layout_of(tensor: TensorEntry, *, big_endian: bool = False) -> Layout:
    """How the bytes of a tensor are cut; types that are not understood are plain bytes."""
    reading = "bytes" if big_endian else reading_of(tensor.dtype)
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = tensor.num_elements // columns if columns else 0
    if rows == 0:
        reading, rows, columns = "bytes", 1, tensor.num_bytes
    row_bytes = tensor.num_bytes // rows
    whole_rows = reading != "bytes" and row_bytes <= MAX_ROW_BYTES
    compares = (
        whole_rows and reading in ("floats", "blocks") and rows > 1 and columns >= MIN_ROW_ELEMENTS
    )
    is_vector = whole_rows and len(tensor.shape) == 1
    counts_zeros = (
        reading == "floats" and FLOATS[tensor.dtype].signed and (is_vector or is_scale(tensor.name))
    )
    unit = row_bytes if compares or is_vector else _element_bytes(tensor.dtype, reading)
    sum_bytes = row_bytes if compares else FLAT_ROW_BYTES
    if not compares and not is_vector:
        unit = lcm(unit, sum_bytes)
        whole_rows = False
    return Layout(
        tensor.dtype, reading, rows, columns, row_bytes, whole_rows, compares, is_vector,
        counts_zeros, unit, sum_bytes,
    )  # fmt: skip


def chunks_of(tensor: TensorEntry, layout: Layout) -> Iterator[tuple[int, int]]:
    """(offset in the tensor, bytes) of each chunk, in whole units but for the last one.

    Where it can be had chunks are whole words too, so that the next one begins at a word.
    """
    unit = max(layout.unit, 1)
    if lcm(unit, 8) <= CHUNK_BYTES:
        unit = lcm(unit, 8)
    step = max(1, CHUNK_BYTES // unit) * unit
    for offset in range(0, tensor.num_bytes, step):
        yield offset, min(step, tensor.num_bytes - offset)


def _element_bytes(dtype: str, reading: Reading) -> int:
    if reading == "floats":
        return np.dtype(FLOATS[dtype].unsigned).itemsize
    if reading == "integers":
        return INTEGERS[dtype]
    return GGML_BLOCKS[dtype][1] if reading == "blocks" else 1


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk: absolute byte offsets in its file, and the sum that it adds to."""

    total: TensorSum
    begin: int
    end: int


def read_windows(
    name: str, tensors: list[TensorEntry], free: SimpleQueue[Bytes | None]
) -> Iterator[tuple[list[Item], Bytes]]:
    """The chunks of one file by windows, each read into a buffer that `free` gives; ends at None.

    A window holds whole chunks; its first byte is its first chunk's.
    """
    with open_regular(Path(name)) as (stream, _):
        descriptor = stream.fileno()
        for items in _windows(_items(tensors, big_endian=_is_big_endian(descriptor))):
            buffer = free.get()
            if buffer is None:
                return
            begin = items[0].begin
            _fill(descriptor, buffer[: items[-1].end - begin], begin, name)
            yield items, buffer


def _windows(items: Iterator[Item]) -> Iterator[list[Item]]:
    window: list[Item] = []
    for item in items:
        if window and not window[0].begin <= item.begin <= window[0].begin + WINDOW_BYTES:
            yield window
            window = []
        window.append(item)
    if window:
        yield window


def _items(tensors: list[TensorEntry], *, big_endian: bool) -> Iterator[Item]:
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        layout = layout_of(tensor, big_endian=big_endian)
        total = TensorSum(tensor, layout)
        if not tensor.num_bytes:
            yield Item(total, tensor.start, tensor.start)
        for offset, num_bytes in chunks_of(tensor, layout):
            yield Item(total, tensor.start + offset, tensor.start + offset + num_bytes)


def _is_big_endian(descriptor: int) -> bool:
    """Whether a GGUF file is of the other byte order, whose numbers are not read here."""
    start = os.pread(descriptor, 8, 0)
    return start[:4] == b"GGUF" and start[4:6] == b"\0\0"


def _fill(descriptor: int, window: Bytes, begin: int, file: str) -> None:
    """Reads exactly len(window) bytes at `begin`.

    Reading, not mapping: what was cut off a mapped file kills whoever touches it, and faulting
    pages in is slower where they come from a disk.
    """
    view, done = window.data, 0
    while done < len(window):
        num = os.preadv(descriptor, [view[done:]], begin + done)
        if num == 0:
            raise MalformedCheckpoint("the file shrank while it was read", file=file)
        done += num
