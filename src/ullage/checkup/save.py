"""Putting report.json and report.html in place, both whole or neither.

Holds the writing only; the document is `document.py`, the page `html/`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ullage.checkup.html.page import render
from ullage.errors import BadUsage


def write_report(document: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write report.json and report.html under temporary names, then rename both.

    Raises:
        BadUsage: the directory cannot be made or written.
    """
    texts = {
        "report.json": json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "report.html": render(document),
    }
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
        raise BadUsage(
            f"cannot be written ({error.strerror})",
            file=directory,
            field="--save",
            expected="a directory that can be written",
        ) from error
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
    return directory / "report.json", directory / "report.html"
