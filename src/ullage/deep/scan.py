"""Streams every tensor of a checkpoint once, on threads with windows of their own → `DeepScan`.

Holds the cutting into chunks, the threads and the adding up. What a chunk says is `chunks.py`.
Memory is a few chunks per thread and one number per row of the tensors that are being read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np

from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry
from ullage.deep import chunks
from ullage.deep.chunks import ChunkReading, Layout
from ullage.deep.readings import DeepScan, TensorReading
from ullage.deep.sum64 import MAX_ROW_BYTES
from ullage.deep.sums import TensorSum, same_across_layers
from ullage.deep.windows import WINDOW_BYTES, Bytes, FileWindows, Item

MAX_JOBS = 4
COMPILED_FROM_BYTES = 4 << 30
"""From here on machine code is worth the third of a second that importing numba takes. Measured:
benchmarks/deep/RESULTS.md."""
_PROGRESS_S = 0.1

Look = Callable[[Bytes, Layout, Bytes], ChunkReading]
Progress = Callable[[int, int], None]
"""Called now and then from the calling thread with bytes read and bytes in all."""


def scan_checkpoint(
    index: CheckpointIndex,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    compiled: bool | None = None,
) -> DeepScan:
    """Reads all bytes of all tensors of `index`, `jobs` threads at once (default: one per core).

    `compiled` asks for machine code (True), or numpy alone (False); by default the size decides.
    Where numba is missing or cannot keep what it compiles, numpy gives the same answers.

    Raises MalformedCheckpoint when a file cannot be read, or is shorter than its header said.
    """
    started = time.perf_counter()
    jobs = max(1, min(jobs or os.cpu_count() or 1, MAX_JOBS))
    if compiled is None:
        compiled = index.num_bytes >= COMPILED_FROM_BYTES
    look = _machine_code(index) if compiled else None
    work = _Work(index, look or chunks.look)
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
    seconds = time.perf_counter() - started
    return DeepScan(readings, groups, index.num_bytes, seconds, jobs, look is not None)


def _machine_code(index: CheckpointIndex) -> Look | None:
    """`kernels.look`, ready for the types in `index`; None where numba cannot be used."""
    try:
        from ullage.deep import kernels

        kernels.prepare({tensor.dtype for tensor in index.tensors})
    except (ImportError, RuntimeError, OSError):
        return None
    return kernels.look


class _Work:
    """What the threads share. Each reads a file of its own while there are enough of them."""

    def __init__(self, index: CheckpointIndex, look: Look) -> None:
        self.look = look
        by_file: dict[str, list[TensorEntry]] = {}
        for tensor in index.tensors:
            by_file.setdefault(tensor.file, []).append(tensor)
        self.lock = threading.Lock()
        self.waiting = [FileWindows(file, tensors) for file, tensors in reversed(by_file.items())]
        self.started: list[FileWindows] = []
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
                self._read(file, *buffers)
        except BaseException as error:  # the calling thread raises it
            self.stop = True
            self.error = self.error or error

    def _next_file(self) -> FileWindows | None:
        with self.lock:
            if self.stop:
                return None
            if self.waiting:
                self.started.append(self.waiting.pop())
                return self.started[-1]
            return next((file for file in self.started if not file.exhausted), None)

    def _read(self, file: FileWindows, window: Bytes, aligned: Bytes, scratch: Bytes) -> None:
        while not self.stop and (items := file.read_next(window)):
            begin = items[0].begin
            complete = [self._look(item, window, begin, aligned, scratch) for item in items]
            for total in filter(None, complete):
                self.readings[total.tensor.name] = total.reading()

    def _look(
        self, item: Item, window: Bytes, begin: int, aligned: Bytes, scratch: Bytes
    ) -> TensorSum | None:
        """Reads one chunk; its tensor's sum when that was the last one of it."""
        num_bytes = item.end - item.begin
        data = window[item.begin - begin : item.end - begin]
        if (item.begin - begin) % 8:
            aligned[:num_bytes] = data
            data = aligned[:num_bytes]
        found = self.look(data, item.total.layout, scratch)
        with self.lock:
            self.done_bytes += num_bytes
            return item.total if item.total.add(item.begin, num_bytes, found) else None
