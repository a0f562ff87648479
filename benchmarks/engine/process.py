"""The asking side of a peer: starts its process, sends it calls, keeps it still in between.

Holds processes and pipes; what is asked is `peers/protocol.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

PEERS = Path(__file__).with_name("peers")


class PeerFailed(Exception):
    """The engine refused or died; the message is its own, with the end of its log."""


class PeerProcess:
    """One engine. Between calls it is stopped (SIGSTOP), so that it disturbs nobody."""

    def __init__(
        self,
        python: Path,
        script: str,
        settings: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start and wait until it is ready. Raises PeerFailed."""
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [str(python), str(PEERS / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**_inherited(), **(environment or {})},
        )
        try:
            self.about: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise
        self._pause()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the peer. Raises PeerFailed."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerFailed(f"it has died: {self._log_end()}") from error
        found = self._answer()
        self._pause()
        return found

    def close(self) -> None:
        """End the process. Safe to repeat."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"it ended: {self._log_end()}")
        body = json.loads(line)
        if "error" in body:
            raise PeerFailed(f"{body['error']}: {self._log_end()}")
        return body["ok"]

    def _log_end(self) -> str:
        if self._log.closed:
            return "(no log)"
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-2000:]


def _inherited() -> dict[str, str]:
    """This process's environment without what importing ullage.engine put into it."""
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
