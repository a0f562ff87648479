"""What this computer can do, measured: read bandwidth, float32 matrix multiply, cores, memory.

Holds the measurement and its result. Turning it into a `HardwareSpec` is `sizing.py`; the catalogue
of bought hardware is `costs/hardware.toml`.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 512 << 20  # several times any last-level cache a core may use, so reads reach memory
GEMM_SIZE = 1536
BUDGET_S = 4.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Median, least and greatest of `num_runs` timings, in units per second.

    `high`, the best run, is what the machine can do; `median` is what it did beside other work.
    """

    median: float
    low: float
    high: float
    num_runs: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates are bytes/s (reads) and FLOP/s (float32 GEMM); memory in bytes."""

    cpu: str
    num_cores: int
    memory_bytes: int | None
    read_one_thread: Rate
    read_all_threads: Rate
    gemm_one_thread: Rate
    gemm_all_threads: Rate
    wall_s: float

    @property
    def read(self) -> Rate:
        """The reads whose best run is the best over all thread counts."""
        return max(self.read_one_thread, self.read_all_threads, key=lambda rate: rate.high)

    @property
    def gemm(self) -> Rate:
        """The multiplications whose best run is the best over all thread counts."""
        return max(self.gemm_one_thread, self.gemm_all_threads, key=lambda rate: rate.high)


def measure_machine() -> Machine:
    """Measure with PyTorch's own threads, since they are what the embedded engine runs on.

    A bound must hold whatever else ran meanwhile, so it is the best run (`Machine.read.high`);
    on a busy machine all threads may be slower than one. Takes about BUDGET_S seconds and 512 MiB
    (less where less is free).
    """
    import torch

    begin = time.perf_counter()
    before = torch.get_num_threads()
    cores = usable_cores()
    num_bytes = min(READ_BYTES, max(64 << 20, (available_bytes() or READ_BYTES) // 8))
    data = torch.ones(num_bytes // 4, dtype=torch.float32)
    a = torch.rand(GEMM_SIZE, GEMM_SIZE)
    b = torch.rand(GEMM_SIZE, GEMM_SIZE)
    out = torch.empty(GEMM_SIZE, GEMM_SIZE)
    share = BUDGET_S / 4
    try:
        rates: list[Rate] = []
        for work, units in (
            (lambda: data.sum(), float(num_bytes)),
            (lambda: torch.mm(a, b, out=out), 2.0 * GEMM_SIZE**3),
        ):
            for threads in (1, cores):
                torch.set_num_threads(threads)
                rates.append(_rate(work, units, threads, share))
    finally:
        torch.set_num_threads(before)
    read_one, read_all, gemm_one, gemm_all = rates
    return Machine(
        cpu=cpu_name(),
        num_cores=cores,
        memory_bytes=total_bytes(),
        read_one_thread=read_one,
        read_all_threads=read_all,
        gemm_one_thread=gemm_one,
        gemm_all_threads=gemm_all,
        wall_s=time.perf_counter() - begin,
    )


def usable_cores() -> int:
    """Cores that this process may run on, which a container may make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rate(work: Callable[[], object], units: float, threads: int, share_s: float) -> Rate:
    work()  # page faults, thread pool and instruction caches are not what is measured
    timings: list[float] = []
    deadline = time.perf_counter() + share_s
    while len(timings) < 3 or (time.perf_counter() < deadline and len(timings) < 50):
        begin = time.perf_counter()
        work()
        timings.append(time.perf_counter() - begin)
    return Rate(
        median=units / statistics.median(timings),
        low=units / max(timings),
        high=units / min(timings),
        num_runs=len(timings),
        num_threads=threads,
    )


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == key:
            words = rest.split()
            return int(words[0]) * 1024 if words and words[0].isdigit() else None
    return None


def total_bytes() -> int | None:
    """All memory that the kernel manages (MemTotal)."""
    return _meminfo("MemTotal")


def available_bytes() -> int | None:
    """What new work could get without swapping, by the kernel's estimate (MemAvailable)."""
    return _meminfo("MemAvailable")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Model", "Processor"} and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown CPU"
