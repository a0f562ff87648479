"""A figure of the report: a value or a range, its unit, and where it comes from.

Holds the constructors only. The document is plain JSON data, so a figure is a dict with `value`
(or `min` and `max`), `unit`, `source` and sometimes `note`.
"""

from __future__ import annotations

from typing import Any

Figure = dict[str, Any]


def figure(value: float | int | str | None, unit: str, source: str, note: str = "") -> Figure:
    """One known value. `source` is config, header, engine, measured, or modelled with its basis."""
    made: Figure = {"value": value, "unit": unit, "source": source}
    if note:
        made["note"] = note
    return made


def span(low: float | int, high: float | int, unit: str, source: str, note: str = "") -> Figure:
    """A value known only between two bounds; a plain value where they agree."""
    if low == high:
        return figure(low, unit, source, note)
    made: Figure = {"min": low, "max": high, "unit": unit, "source": source}
    if note:
        made["note"] = note
    return made


def named(name: str, value: Figure) -> dict[str, Any]:
    return {"name": name, "figure": value}
