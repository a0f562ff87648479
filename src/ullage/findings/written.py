"""A file that is written whole or not at all.

Holds the one function. What is in the file is its callers'.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ullage.errors import BadUsage


def write_whole(path: str | Path, content: str | bytes, *, field: str) -> None:
    """Write under a temporary name beside `path`, then rename. `field` is the flag that named it.

    A link stays one: what it leads to is written. What is no file (/dev/stdout, a pipe) is written
    where it is: to rename over it would put a file in the place of the device.

    Raises:
        BadUsage: it cannot be written; what was there before is untouched.
    """
    final = temporary = Path(path)
    try:
        if final.is_file() or not final.exists():
            final = final.resolve()
            temporary = final.with_name(f".{final.name}.{os.getpid()}.part")
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(final)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a usable path"
        raise BadUsage(
            f"cannot be written ({reason})", file=path, field=field,
            expected="a path that can be written",
        ) from error  # fmt: skip
    finally:
        if temporary != final:
            with suppress(OSError, ValueError):
                temporary.unlink(missing_ok=True)
