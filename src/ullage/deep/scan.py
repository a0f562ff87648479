"""Streams every tensor of a checkpoint once, on threads with windows of their own → `DeepScan`.

Holds the cutting into chunks, the threads and the adding up. What a chunk says is `chunks.py`.
Memory is a few chunks per thread and one number per row of the tensors that are being read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry, open_regular
from ullage.anatomy.gguf.types import GGML_BLOCKS
from ullage.deep.chunks import MIN_ROW_ELEMENTS, Layout, look, reading_of
from ullage.deep.formats import FLOATS, INTEGERS
from ullage.deep.names import is_scale
from ullage.deep.readings import DeepScan, Reading, TensorReading
from ullage.deep.sum64 import FLAT_ROW_BYTES, MAX_ROW_BYTES
from ullage.deep.sums import TensorSum, same_across_layers
from ullage.errors import MalformedCheckpoint

CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 1 << 20
MAX_JOBS = 4
_PROGRESS_S = 0.1

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called now and then from the calling thread with bytes read and bytes in all."""


def scan_checkpoint(
    index: CheckpointIndex, *, jobs: int | None = None, progress: Progress | None = None
) -> DeepScan:
    """Reads all bytes of all tensors of `index`, `jobs` threads at once (default: one per core).

    Raises MalformedCheckpoint when a file cannot be read, or is shorter than its header said.
    """
    started = time.perf_counter()
    jobs = max(1, min(jobs or os.cpu_count() or 1, MAX_JOBS))
    work = _Work(index)
    threads = [
        threading.Thread(target=work.run, name=f"ullage-deep-{n}", daemon=True) for n in range(jobs)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_PROGRESS_S)
                if progress is not None:
                    progress(work.done_bytes, index.num_bytes)
    finally:
        work.stop = True
        for thread in threads:
            thread.join()
    if work.error is not None:
        raise work.error
    readings = tuple(work.readings[tensor.name] for tensor in index.tensors)
    groups = same_across_layers(index.tensors, readings)
    return DeepScan(readings, groups, index.num_bytes, time.perf_counter() - started, jobs)


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
    """(offset in the tensor, bytes) of each chunk, in whole units but for the last one."""
    step = max(1, CHUNK_BYTES // max(layout.unit, 1)) * max(layout.unit, 1)
    for offset in range(0, tensor.num_bytes, step):
        yield offset, min(step, tensor.num_bytes - offset)


def _element_bytes(dtype: str, reading: Reading) -> int:
    if reading == "floats":
        return np.dtype(FLOATS[dtype].unsigned).itemsize
    if reading == "integers":
        return INTEGERS[dtype]
    return GGML_BLOCKS[dtype][1] if reading == "blocks" else 1


class _Work:
    """What the threads share. Each reads a file of its own while there are enough of them."""

    def __init__(self, index: CheckpointIndex) -> None:
        by_file: dict[str, list[TensorEntry]] = {}
        for tensor in index.tensors:
            by_file.setdefault(tensor.file, []).append(tensor)
        self.lock = threading.Lock()
        self.waiting = [_FileWork(file, tensors) for file, tensors in reversed(by_file.items())]
        self.started: list[_FileWork] = []
        self.readings: dict[str, TensorReading] = {}
        self.done_bytes = 0
        self.stop = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """A thread's whole life: file after file until none is left."""
        try:
            sizes = (WINDOW_BYTES + 2 * MAX_ROW_BYTES, MAX_ROW_BYTES, MAX_ROW_BYTES)
            buffers = tuple(np.empty(size, np.uint8) for size in sizes)
            while (file := self._next_file()) is not None:
                with open_regular(Path(file.name)) as (stream, _):
                    self._read(stream.fileno(), file, *buffers)
        except BaseException as error:  # the calling thread raises it
            self.stop = True
            self.error = self.error or error

    def _next_file(self) -> _FileWork | None:
        with self.lock:
            if self.stop:
                return None
            if self.waiting:
                self.started.append(self.waiting.pop())
                return self.started[-1]
            return next((file for file in self.started if not file.exhausted), None)

    def _read(
        self, descriptor: int, file: _FileWork, buffer: Bytes, aligned: Bytes, scratch: Bytes
    ) -> None:
        while not self.stop:
            with self.lock:
                window = next(file.windows, None)
                if window is None:
                    file.exhausted = True
                    return
            begin = window[0].begin
            data = buffer[: window[-1].end - begin]
            _fill(descriptor, data, begin, file.name)
            complete = [self._look(item, data, begin, aligned, scratch) for item in window]
            for total in filter(None, complete):
                reading = total.reading(descriptor)
                with self.lock:
                    self.readings[total.tensor.name] = reading

    def _look(
        self, item: _Item, window: Bytes, begin: int, aligned: Bytes, scratch: Bytes
    ) -> TensorSum | None:
        """Reads one chunk; its tensor's sum when that was the last one of it."""
        num_bytes = item.end - item.begin
        data = window[item.begin - begin : item.end - begin]
        if (item.begin - begin) % 8:
            aligned[:num_bytes] = data
            data = aligned[:num_bytes]
        found = look(data, item.total.layout, scratch)
        with self.lock:
            self.done_bytes += num_bytes
            return item.total if item.total.add(item.begin, num_bytes, found) else None


@dataclass(frozen=True, slots=True)
class _Item:
    """One chunk: absolute byte offsets in its file, and the sum that it adds to."""

    total: TensorSum
    begin: int
    end: int


class _FileWork:
    """The chunks of one file that nobody has taken yet, by windows that are read at once."""

    def __init__(self, name: str, tensors: list[TensorEntry]) -> None:
        self.name = name
        self.exhausted = False
        self.windows = self._windows(tensors)

    def _windows(self, tensors: list[TensorEntry]) -> Iterator[list[_Item]]:
        window: list[_Item] = []
        for item in self._items(tensors):
            if window and not window[0].begin <= item.begin <= window[0].begin + WINDOW_BYTES:
                yield window
                window = []
            window.append(item)
        if window:
            yield window

    def _items(self, tensors: list[TensorEntry]) -> Iterator[_Item]:
        big_endian = _is_big_endian(self.name)
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            layout = layout_of(tensor, big_endian=big_endian)
            total = TensorSum(tensor, layout)
            if not tensor.num_bytes:
                yield _Item(total, tensor.start, tensor.start)
            for offset, num_bytes in chunks_of(tensor, layout):
                yield _Item(total, tensor.start + offset, tensor.start + offset + num_bytes)


def _is_big_endian(file: str) -> bool:
    """Whether a GGUF file is of the other byte order, whose numbers are not read here."""
    with open_regular(Path(file)) as (stream, _):
        start = stream.read(8)
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
