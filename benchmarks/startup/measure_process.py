"""One fresh `ullage` process: its wall and processor time and its peak memory.

Holds the measuring of one run; which runs, and the tables, are the benchmarks'.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ULLAGE = Path(sys.executable).with_name("ullage")


@dataclass(frozen=True)
class Sample:
    """One run: wall seconds, processor seconds and peak resident megabytes (10^6 bytes)."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def run_once(arguments: list[str]) -> Sample:
    """Run `ullage` in a fresh process with its output thrown away."""
    started = time.perf_counter()
    child = os.posix_spawn(
        ULLAGE,
        [str(ULLAGE), *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    wall_s = time.perf_counter() - started
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        sys.exit(f"ullage {' '.join(arguments)} ended with {code}")
    return Sample(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def cpu_name() -> str:
    """The processor as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
