"""Which engine's page this is: by the metrics on it and by what the server said of itself.

Never by an address or a port. A page of nobody, or of two engines at once, is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ullage.telemetry.dialects.source import Dialect
from ullage.telemetry.dialects.table import DIALECTS


@dataclass(frozen=True, slots=True)
class Identified:
    """The dialect, or None and the reason in words."""

    dialect: Dialect | None
    reason: str = ""


def identify(
    names: Iterable[str], told: str = "", dialects: Sequence[Dialect] = DIALECTS
) -> Identified:
    """Whose metrics these are. `told`: the engine that the server's other routes show, "" if none.

    A server may pass on another's metrics beside its own; then only what it says of itself tells.
    """
    seen = set(names)
    found = [dialect for dialect in dialects if _speaks(dialect, seen)]
    if len(found) == 1:
        return Identified(found[0])
    chosen = [dialect for dialect in found if dialect.engine == told]
    if len(chosen) == 1:
        return Identified(chosen[0])
    if found:
        titles = " and ".join(dialect.title for dialect in found)
        return Identified(None, f"the page has metrics of {titles}, so whose it is is not known")
    if not seen:
        return Identified(None, "the page holds no metrics")
    marks = ", ".join(mark for dialect in dialects for mark in dialect.marks)
    return Identified(None, f"no metric on the page is of an engine that is known ({marks})")


def _speaks(dialect: Dialect, names: set[str]) -> bool:
    return _any(names, dialect.marks) and not _any(names, dialect.unless)


def _any(names: set[str], beginnings: tuple[str, ...]) -> bool:
    return bool(beginnings) and any(name.startswith(beginnings) for name in names)
