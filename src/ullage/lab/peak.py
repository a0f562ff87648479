"""The peak memory of one attention call, measured in a process of its own.

`python -m ullage.lab.peak` is that process; `peak_bytes` starts it. Linux only (/proc).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ullage.lab.kernels import Job

TIMEOUT_S = 180.0
# glibc gives blocks above this back to the system at once, so that what one call frees does not
# hide what the next one takes.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak_bytes(name: str, jobs: Sequence[Job]) -> list[int | None]:
    """Bytes that one call of each job takes beyond its inputs, its result included.

    The child resets the kernel's high-water mark (VmHWM) before each call and subtracts what it
    held by then; None where the system does not tell.
    """
    asked = json.dumps({"name": name, "jobs": [asdict(job) for job in jobs]})
    ended = subprocess.run(
        [sys.executable, "-m", "ullage.lab.peak"],
        input=asked,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | MALLOC,
        check=False,
    )
    if ended.returncode != 0:
        return [None] * len(jobs)
    found: list[int | None] = json.loads(ended.stdout)
    return found


def _measure(name: str, job: Job) -> int | None:
    from dataclasses import replace

    from ullage.lab.kernels import attention_call

    attention_call(name, replace(job, context=32))()  # kernels and thread pools exist by now
    call = attention_call(name, job)
    if not _reset_high_water():
        return None
    before = _status_bytes("VmRSS")
    result = call()
    peak = _status_bytes("VmHWM")
    del result
    return None if before is None or peak is None else max(0, peak - before)


def _reset_high_water() -> bool:
    """proc(5): writing 5 to clear_refs sets VmHWM to the present size."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int | None:
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _main() -> None:
    import ullage.engine  # noqa: F401 - before torch, see there
    from ullage.lab.kernels import Job

    asked = json.loads(sys.stdin.read())
    jobs = [Job(**job) for job in asked["jobs"]]
    print(json.dumps([_measure(asked["name"], job) for job in jobs]))


if __name__ == "__main__":
    _main()
