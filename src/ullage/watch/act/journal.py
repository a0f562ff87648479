"""What was done, as JSON lines in a file that is only ever added to, and read again at the start.

Holds writing and reading. A watcher that is started anew finds in it what it did in the last hour,
so that its limits hold across restarts.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from ullage.errors import BadInput
from ullage.watch.act.decide import Done
from ullage.watch.act.policy import HOUR_S

MAX_READ_BYTES = 4 << 20
BEGUN = "begun"
"""The outcome of the line that is written before something is done."""


class Journal:
    """An open journal. Writing fails loudly: what cannot be logged must not be done."""

    def __init__(self, path: str) -> None:
        """Open it, made when it is not there. Raises BadInput when it cannot be written."""
        self._path = path
        try:
            # Unbuffered: what could not be written must not be tried again when it is closed.
            self._stream = Path(path).open("ab", buffering=0)  # noqa: SIM115 (closed by __exit__)
            self._on_disk = stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a usable path"
            raise BadInput(
                f"cannot be written ({reason})", file=path, expected="a journal of what is done"
            ) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def write(self, entry: Mapping[str, object]) -> None:
        """One line, on the disk when this returns, where it is a file.

        Raises OSError that names the journal.
        """
        line = (json.dumps(entry, allow_nan=False) + "\n").encode("ascii")
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._on_disk:
                os.fsync(self._stream.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def attempts(self, now_s: float) -> tuple[Done, ...]:
        """What was really attempted in the hour before `now_s` (Unix), oldest first; up to an hour
        after it too, where a clock was set back since.

        Lines that are not an entry of ours are passed over. Raises BadInput when it cannot be
        read.
        """
        try:
            with Path(self._path).open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - MAX_READ_BYTES))
                lines = stream.read(MAX_READ_BYTES).split(b"\n")
        except OSError as error:
            raise BadInput(
                f"cannot be read ({error.strerror})", file=self._path,
                expected="what was done in the last hour",
            ) from error  # fmt: skip
        found = [done for line in lines if (done := _attempt(line)) is not None]
        recent = (done for done in found if abs(now_s - done.time_s) < HOUR_S)
        return tuple(sorted(recent, key=lambda done: done.time_s))


def _attempt(line: bytes) -> Done | None:
    """The attempt that a line tells of; None for a dry run, a refusal or anything else."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("dry_run") is not False:
        return None
    if entry.get("outcome") != BEGUN:
        return None
    time_s, texts = entry.get("time_s"), [entry.get(name) for name in ("url", "action", "do")]
    if not isinstance(time_s, int | float) or isinstance(time_s, bool):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    return Done(float(time_s), *texts, scrape_s=float(time_s))  # type: ignore[arg-type, misc]
