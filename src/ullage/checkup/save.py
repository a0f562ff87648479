"""Putting report.json and report.html in place, both whole or neither.

Holds the writing only (the lab writes by it too); the document is `document.py`, the page `html/`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage.checkup.html.page import render
from ullage.errors import BadUsage

NAMES = ("report.json", "report.html")


def check_place(directory: Path, names: Sequence[str] = NAMES) -> None:
    """Raise BadUsage where files of those names could not be written, before minutes are spent.

    Makes nothing: the nearest directory that exists is asked.
    """
    place = directory
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        reason = None
        if not place.is_dir():
            reason = f"{place} is not a directory"
        elif not os.access(place, os.W_OK | os.X_OK):
            reason = f"{place} cannot be written"
        elif taken := [name for name in names if (directory / name).is_dir()]:
            reason = f"{taken[0]} in it is a directory"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise _unwritable(directory, reason)


def write_report(document: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write report.json and report.html. Raises BadUsage as `write_files` does."""
    texts = {
        "report.json": json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "report.html": render(document),
    }
    json_path, html_path = write_files(directory, texts)
    return json_path, html_path


def write_files(directory: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Write every text under a temporary name, then rename them all; their paths in order.

    Raises:
        BadUsage: the directory cannot be made or written.
    """
    written: list[tuple[Path, Path]] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            temporary = directory / f".{name}.{os.getpid()}.part"
            written.append((temporary, directory / name))
            # Names from files may hold lone surrogates; they are shown, not fatal.
            temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
        for temporary, final in written:
            temporary.replace(final)
    except OSError as error:
        raise _unwritable(directory, error.strerror) from error
    finally:
        for temporary, _ in written:
            with contextlib.suppress(OSError):  # a file system that became read-only
                temporary.unlink(missing_ok=True)
    return tuple(final for _, final in written)


def _unwritable(directory: Path, reason: str | None) -> BadUsage:
    return BadUsage(
        f"cannot be written ({reason})",
        file=directory,
        field="--save",
        expected="a directory that can be written",
    )
