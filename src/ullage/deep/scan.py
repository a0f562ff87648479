"""Streams every tensor of a checkpoint once → `DeepScan`: threads that read, threads that look.

Holds the threads. Cutting and reading is `windows.py`, what a chunk says `chunks.py`, adding up
`sums.py`. Memory is a few windows and one number per row of the tensors that are being read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry
from ullage.deep import chunks
from ullage.deep.chunks import ChunkReading, Layout
from ullage.deep.readings import DeepScan, TensorReading
from ullage.deep.sums import same_across_layers
from ullage.deep.windows import MAX_WINDOW_BYTES, Bytes, Item, read_windows

MAX_JOBS = 4
WINDOWS_AHEAD = 5
"""How many windows are read before they are looked at; more of them were no faster."""
COMPILED_AHEAD = 2
"""Machine code is faster than disks are, and windows that stay in the cache help it more."""
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
    """Reads all bytes of all tensors of `index`, `jobs` files at once (default: one per core).

    `compiled` asks for machine code (True), or numpy alone (False); by default the size decides.
    Where numba is missing or cannot keep what it compiles, numpy gives the same answers.

    Raises MalformedCheckpoint when a file cannot be read, or is shorter than its header said.
    """
    started = time.perf_counter()
    jobs = max(1, min(jobs or os.cpu_count() or 1, MAX_JOBS))
    if compiled is None:
        compiled = index.num_bytes >= COMPILED_FROM_BYTES
    look = _machine_code(index) if compiled else None
    # numpy's many short calls hand the interpreter's lock to and fro between threads, which costs
    # more than the calls do; so then one thread looks at what the others read.
    work = (
        _Work(index, look, num_readers=jobs, num_lookers=jobs, ahead=COMPILED_AHEAD)
        if look
        else _Work(index, chunks.look, num_readers=jobs, num_lookers=1, ahead=WINDOWS_AHEAD)
    )
    try:
        for thread in work.threads:
            thread.start()
        for thread in work.threads:
            while thread.is_alive():
                thread.join(_PROGRESS_S)
                if progress is not None:
                    progress(work.done_bytes, index.num_bytes)
    finally:
        work.end()
        for thread in work.threads:
            if thread.ident is not None:
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
    """What the threads share: files to read, windows that are free, windows that are full.

    Each reader takes a file of its own; one stream per file is what the kernel reads ahead of.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        look: Look,
        *,
        num_readers: int,
        num_lookers: int,
        ahead: int,
    ) -> None:
        by_file: dict[str, list[TensorEntry]] = {}
        for tensor in index.tensors:
            by_file.setdefault(tensor.file, []).append(tensor)
        self.look = look
        self.files = list(reversed(by_file.items()))
        self.free: SimpleQueue[Bytes | None] = SimpleQueue()
        self.full: SimpleQueue[tuple[list[Item], Bytes] | None] = SimpleQueue()
        self.readings: dict[str, TensorReading] = {}
        self.done_bytes = 0
        self.error: BaseException | None = None
        self.ended = False
        self.lock = threading.Lock()
        self.num_readers = max(1, min(num_readers, len(by_file)))
        self.num_lookers = num_lookers
        self.reading = self.num_readers
        tasks = [self._read] * self.num_readers + [self._look] * num_lookers
        self.threads = [
            threading.Thread(target=self._guard, args=(task,), name=f"ullage-deep-{n}", daemon=True)
            for n, task in enumerate(tasks)
        ]
        for _ in range(ahead + self.num_readers + num_lookers):
            self.free.put(np.empty(MAX_WINDOW_BYTES, np.uint8))

    def end(self) -> None:
        """No thread waits any longer, nor takes another window."""
        self.ended = True
        for _ in range(self.num_readers):
            self.free.put(None)
        for _ in range(self.num_lookers):
            self.full.put(None)

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # the calling thread raises it
            self.error = self.error or error
            self.end()

    def _read(self) -> None:
        """A reader's whole life: file after file until none is left."""
        while (file := self._next_file()) is not None:
            for window in read_windows(*file, self.free):
                if self.ended:
                    return
                self.full.put(window)
        with self.lock:
            self.reading -= 1
            if not self.reading:
                for _ in range(self.num_lookers):
                    self.full.put(None)

    def _next_file(self) -> tuple[str, list[TensorEntry]] | None:
        with self.lock:
            return self.files.pop() if self.files and not self.ended else None

    def _look(self) -> None:
        """A looker's whole life: window after window until the readers are done."""
        aligned, scratch = (np.empty(MAX_WINDOW_BYTES, np.uint8) for _ in range(2))
        while (window := self.full.get()) is not None and not self.ended:
            items, buffer = window
            begin = items[0].begin
            for item in items:
                num_bytes = item.end - item.begin
                data = buffer[item.begin - begin : item.end - begin]
                if (item.begin - begin) % 8:
                    aligned[:num_bytes] = data
                    data = aligned[:num_bytes]
                found = self.look(data, item.total.layout, scratch)
                with self.lock:
                    self.done_bytes += num_bytes
                    complete = item.total.add(item.begin, num_bytes, found)
                if complete:
                    self.readings[item.total.tensor.name] = item.total.reading()
            self.free.put(buffer)
