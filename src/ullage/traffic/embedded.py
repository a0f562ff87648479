"""The embedded engine as a child process: started, awaited, ended by its pid whatever happens.

Holds the process's life only. What it serves is `serving/`; talking to it is `load.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
URL_START = "http://127.0.0.1:"

# The child asks the kernel to be ended with its parent (Linux: prctl(PR_SET_PDEATHSIG = 1)), so
# that not even SIGKILL of the checkup leaves an engine behind. Then it becomes `ullage` itself.
CHILD = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
from ullage.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


class EngineDidNotStart(Exception):
    """The child ended or stayed silent before it served; `str()` is its own last sentence.

    Not an UllageError: a checkup without a run is still a checkup, and says so.
    """


@dataclass(frozen=True, slots=True)
class EmbeddedEngine:
    """A running child. `load_s` is from start to its first answer, weights and warm-up included."""

    url: str
    pid: int
    load_s: float


@contextlib.contextmanager
def embedded_engine(
    model: str, flags: Sequence[str] = (), *, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[EmbeddedEngine]:
    """`ullage serve MODEL --port 0 FLAGS…` for the length of the `with` block.

    Raises:
        EngineDidNotStart: with the child's last line of stderr as the reason.
    """
    begin = time.perf_counter()
    command = [sys.executable, "-c", CHILD, str(os.getpid()), "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Its own session: Ctrl-C reaches the checkup alone, which then ends the child in order.
        start_new_session=True,
    )
    said = _Output(process)
    try:
        url = said.wait_for_url(begin + start_timeout_s)
        yield EmbeddedEngine(url, process.pid, time.perf_counter() - begin)
    finally:
        _end(process)
        said.close()


class _Output:
    """Reads both pipes to their ends in threads, so that a talkative child never blocks on them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._url: str | None = None
        self._tail: list[str] = []
        self._ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_url(self, deadline: float) -> str:
        while time.perf_counter() < deadline:
            if self._ready.wait(0.05):
                assert self._url is not None, "set before the event"
                return self._url
            if self._process.poll() is not None:
                for thread in self._threads:
                    thread.join(1.0)
                raise EngineDidNotStart(self._reason())
        raise EngineDidNotStart("it was not ready in time")

    def close(self) -> None:
        """Join the readers, which end with the child, and close the pipes."""
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _read(self, stream: Iterator[str]) -> None:
        for line in stream:
            at = line.find(URL_START)
            if at >= 0 and not self._ready.is_set():
                self._url = line[at:].split()[0].rstrip("/.,:;")
                self._ready.set()
            if line.strip():
                self._tail = [*self._tail[-19:], line.strip()]

    def _reason(self) -> str:
        last = self._tail[-1] if self._tail else "it said nothing"
        return last.removeprefix("ullage serve: ")


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, a while to finish, SIGKILL; returns only when the child is gone."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def private_bytes(pid: int) -> int | None:
    """Memory that only this process holds (anonymous pages, /proc's RssAnon), None without /proc.

    Pages of files are left out: the kernel may drop them, and counts them as available.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "RssAnon" and words and words[0].isdigit():
            return int(words[0]) * 1024
    return None
