"""Whether this server takes new requests, known to all of its API processes at once.

Holds the state and the count of requests in flight. A server with several API processes shares a
folder (vLLM gives them one, PROMETHEUS_MULTIPROC_DIR): a file there says that it drains, and each
process then writes how many requests it has in flight. Refusing them is `routes`'.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

ACKNOWLEDGED_S = 3.0
"""How old another process' count may be."""


class Draining:
    """Of one API process. `folder` is shared by all `num_processes`; None where there is one."""

    def __init__(self, folder: Path | None = None, index: int = 0, num_processes: int = 1) -> None:
        self._folder, self._index, self._num_processes = folder, index, num_processes
        self._asked = False
        self._next = 0
        # Ticket → when it came, time.time().
        self._came_s: dict[int, float] = {}

    @property
    def asked(self) -> bool:
        """Looked up for every request: one `stat` where there are several processes."""
        if not self._asked and self._folder is not None:
            self._asked = self._marker.exists()
        return self._asked

    def begin(self) -> None:
        """For all processes. Raises OSError."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._marker.touch()
        self._asked = True
        self.tell()

    # --- requests in flight ---

    def enter(self) -> int:
        self._next += 1
        self._came_s[self._next] = time.time()
        return self._next

    def leave(self, ticket: int) -> None:
        del self._came_s[ticket]

    @property
    def oldest_s(self) -> float | None:
        """When the oldest request came that this process has in flight, in Unix time."""
        return next(iter(self._came_s.values()), None)

    def tell(self) -> None:
        """Write this process' count for the others; once a second while the server drains."""
        if self._folder is None or not self.asked:
            return
        mine = self._count_file(self._index)
        written = mine.with_name(f"{mine.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            written.write_text(str(len(self._came_s)))
            written.replace(mine)

    def in_flight(self) -> InFlight:
        """HTTP requests that have not been answered to the end, in all processes."""
        count, unknown = len(self._came_s), 0
        if self._folder is None:
            return InFlight(count, unknown)
        for other in range(self._num_processes):
            if other != self._index:
                told = _told(self._count_file(other))
                count, unknown = count + (told or 0), unknown + (told is None)
        return InFlight(count, unknown)

    @property
    def _marker(self) -> Path:
        assert self._folder is not None
        return self._folder / "draining"

    def _count_file(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"in_flight.{index}"


@dataclass(frozen=True)
class InFlight:
    """HTTP requests in flight, and how many API processes did not say theirs."""

    requests: int
    unknown_processes: int


def shared_folder(num_processes: int) -> Path | None:
    """Where the API processes of this server meet; None where there is only one.

    Named by the process that started them all, so that nothing stays for the next server. Raises
    RuntimeError where vLLM gave them no folder.
    """
    if num_processes <= 1:
        return None
    given = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not given:
        raise RuntimeError(f"{num_processes} API processes, but no PROMETHEUS_MULTIPROC_DIR")
    parent = os.getppid()
    return Path(given) / f"ullage-{parent}-{_started(parent)}"


def _started(pid: int) -> str:
    """When a process was started, in clock ticks since boot; "" where that is not told."""
    try:
        # After the name, which may hold spaces: field 22 of proc(5).
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _told(file: Path) -> int | None:
    """A process' count; None if it has not written it lately."""
    try:
        if time.time() - file.stat().st_mtime > ACKNOWLEDGED_S:
            return None
        return int(file.read_text())
    except (OSError, ValueError):
        return None
