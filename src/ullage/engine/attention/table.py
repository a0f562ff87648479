"""Which attention path runs: a table in order of preference, asked once at start.

Every path obeys every rule (`rule`), so only the machine and the storage decide. Measurements
stand in docs/engine.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ullage.engine.attention.gathered import GatheredAttention
from ullage.engine.attention.protocol import AttentionPath
from ullage.engine.attention.reference import ReferenceAttention
from ullage.engine.kernels.compiling import available
from ullage.engine.kv import KVCache
from ullage.errors import BadUsage

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Path:
    """`lacks` says what a cache or the machine lacks for this path, None when it runs."""

    name: str
    make: Callable[[KVCache], AttentionPath]
    lacks: Callable[[KVCache], str | None]
    by_default: bool = True


def _paged(kv: KVCache) -> AttentionPath:
    # numba takes a third of a second to import; only who needs it waits.
    from ullage.engine.attention.paged import PagedAttention

    return PagedAttention(kv)


def _paged_lacks(kv: KVCache) -> str | None:
    if not available():
        return "numba, which is not installed or not allowed to compile"
    multiple = 16 if kv.format.bits == 4 else 8
    for shape in kv.shapes:
        if shape.head_dim % multiple:
            return f"heads of a multiple of {multiple} dimensions: {shape.head_dim}"
    return None


def _nothing(kv: KVCache) -> None:  # noqa: ARG001
    return None


PATHS: tuple[Path, ...] = (
    Path("paged", _paged, _paged_lacks),
    Path("gathered", GatheredAttention, _nothing),
    Path("reference", ReferenceAttention, _nothing, by_default=False),
)
ATTENTION_PATHS: Mapping[str, Callable[[KVCache], AttentionPath]] = {p.name: p.make for p in PATHS}


def choose_path(asked: str, kv: KVCache) -> tuple[str, AttentionPath]:
    """The path's name and the path: the one asked for, or with AUTO the first that runs here.

    Raises BadUsage for a path that does not run here, or that is unknown.
    """
    if asked == AUTO:
        found = next(path for path in PATHS if path.by_default and path.lacks(kv) is None)
        return found.name, found.make(kv)
    by_name = {path.name: path for path in PATHS}
    if asked not in by_name:
        raise BadUsage(asked, field="attention", expected=" or ".join((AUTO, *by_name)))
    lack = by_name[asked].lacks(kv)
    if lack is not None:
        raise BadUsage(asked, field="attention", expected=f"{AUTO} or another; it lacks {lack}")
    return asked, by_name[asked].make(kv)
