"""A real `ullage serve` process, with the engine's own invariants checked at every step."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from soak_client import Target


@dataclass(slots=True)
class Served:
    """A server that is ready."""

    target: Target
    process: subprocess.Popen[str]
    _log: IO[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def terminate(self, timeout_s: float = 120.0) -> tuple[int, str]:
        """SIGTERM, then the exit code and what it said on stderr."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        return code, self.log()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()


@contextmanager
def serve(arguments: Sequence[str], threads: int = 1) -> Iterator[Served]:
    """`ullage serve ARGUMENTS` on a free port, killed at the end if it still runs."""
    key = secrets.token_hex(8)
    command = [sys.executable, "-m", "ullage", "serve", *arguments]
    command += ["--port", "0", "--api-key", key]
    environment = {
        **os.environ,
        "ULLAGE_CHECK": "1",
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
    }
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"ready on http://([\d.]+):(\d+)", line)
            if found is None:
                log.seek(0)
                raise RuntimeError(f"it did not get ready: {line!r} {log.read()[-2000:]}")
            yield Served(Target(found[1], int(found[2]), key), process, log)
        finally:
            if process.poll() is None:
                process.kill()
