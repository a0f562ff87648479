"""How the package's loops become machine code, and where that code is kept between runs.

Holds the decorator and the folder. numba is asked for at import of the modules with loops only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_CACHE_LINE = 64
Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be taken in any order and products fused; NaN and Inf keep their meaning, for a request
# whose numbers are not finite must be seen to end with an error.
FAST = frozenset({"reassoc", "contract", "arcp", "nsz"})


def available() -> bool:
    """Whether numba is installed and allowed to compile."""
    return find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"


@cache
def _sources() -> str:
    """A name for the present state of the kernels' sources.

    numba looks only at the file of the outermost function to know whether what it kept is stale;
    these functions are made of each other's, so the folder's name stands for all of them.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def cache_dirs() -> Iterator[Path]:
    """Where machine code may be kept, best first; one folder per state of the sources."""
    if said := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(said, _sources())
    else:
        # A process without HOME and without a line in passwd has no home (Path raises).
        with suppress(RuntimeError):
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            yield Path(home, "ullage", "kernels", _sources())
    # One folder, not one within another: of what lies in /tmp only the owner can rename the first.
    yield Path(tempfile.gettempdir(), f"ullage-kernels-{os.getuid()}-{_sources()}")


def note() -> str | None:
    """What to say before the first step, which compiles: None where it was kept from before."""
    folder = _writable()
    if folder is None:
        return (
            "compiling for this processor (about 20 s), at every start: none of "
            + ", ".join(map(str, cache_dirs()))
            + " can be written; set NUMBA_CACHE_DIR to a folder of your own"
        )
    if any(folder.rglob("*.nbi")):
        return None
    return f"compiling for this processor (about 20 s), kept in {folder}"


def compiled(function: Function, *, fast: bool = False) -> Function:
    """`function` as machine code that holds no interpreter lock, compiled at its first call.

    Kept on disk where a folder can be written, else compiled anew in every process.
    """
    import numba

    # False must be said: what is left open a callee takes over from its first caller (numba 0.68,
    # core/options.py, inherit_if_set), and rounding tricks do not survive FAST.
    fastmath = set(FAST) if fast else False
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    folder = _writable()
    if folder is None:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    compile_one = dispatcher.compile

    def compile_alone(signature: Any) -> Any:
        with _alone_in(folder):
            return compile_one(signature)

    dispatcher.compile = compile_alone
    return dispatcher  # type: ignore[no-any-return]


_this_process = threading.RLock()
_depth = 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one thread of one process at a time compile into `folder`, and what that calls for.

    numba numbers the files of a function's types by what it finds in its index (0.68, core/caching,
    IndexDataCacheFile.save). Two processes that write at once may give one number to two types,
    and whoever reads it later runs the code of the other storage. The second also need not compile
    what the first just did. Where files cannot be locked all goes on without.
    """
    global _depth
    with _this_process:
        held = -1
        if _depth == 0:
            with suppress(OSError):
                held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(held, fcntl.LOCK_EX)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if held >= 0:
                with suppress(OSError):
                    # Said, not left to the closing: a fork made meanwhile has it open still.
                    fcntl.flock(held, fcntl.LOCK_UN)
                os.close(held)


def aligned(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array [size] that begins at a cache line: vectors that lie across two cost twice."""
    dtype = np.dtype(dtype)
    room = np.empty(size * dtype.itemsize + _CACHE_LINE, np.uint8)
    first = -room.ctypes.data % _CACHE_LINE
    return room[first : first + size * dtype.itemsize].view(dtype)


def _writable() -> Path | None:
    for candidate in cache_dirs():
        try:
            candidate.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = candidate.stat()
        except OSError:
            continue
        # Machine code is executed: never from a folder that somebody else may write to.
        ours = place.st_uid == os.getuid() and not place.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if ours and os.access(candidate, os.W_OK):
            return candidate
    return None
