"""Numbers and units as people read them, and escaping. Shared by the page, the charts, the table.

Holds formatting only. Byte units are decimal (1 GB = 10⁹ bytes); exact values are in report.json.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
COUNT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
# A minus that is as wide as a digit, so that columns of signed numbers align.
MINUS = "−"
# What rules lack that another question of ullage gives → what they judge, and that question.
QUIET_LACKS: Mapping[str, tuple[str, str]] = {
    "the tensors' values (--deep reads them)": (
        "the values of tensors",
        "ullage audit --deep MODEL reads them",
    ),
    "--deployment FILE": (
        "a deployment file",
        "ullage audit --deployment FILE MODEL judges one",
    ),
}
NOT_KNOWN = "not known"


def escape(text: object) -> str:
    """Text that comes from anywhere, safe between tags and inside quoted attributes."""
    cleaned = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(text)
    )
    return html.escape(cleaned, quote=True)


def significant(value: float, digits: int = 3) -> str:
    """`value` to so many significant digits, with thousands separators, never in exponents."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{abs(value):,.{places}f}"
    return (MINUS if value < 0 else "") + text


def byte_size(value: float, digits: int = 3) -> str:
    return _with_unit(value, BYTE_UNITS, digits)


def seconds(value: float, digits: int = 3) -> str:
    if abs(value) >= 1 or value == 0:
        return f"{significant(value, digits)} s"
    if abs(value) >= 1e-3:
        return f"{significant(value * 1e3, digits)} ms"
    return f"{significant(value * 1e6, digits)} µs"


def count(value: float) -> str:
    return f"{value:,.0f}".replace("-", MINUS)


def large_count(value: float) -> str:
    """134,515,008 → 135 M; below a million in full."""
    return _with_unit(value, COUNT_UNITS, 3) if abs(value) >= 1e6 else count(value)


def percent(ratio: float, digits: int = 0) -> str:
    return f"{ratio * 100:.{digits}f}%".replace("-", MINUS)


def signed_percent(ratio: float) -> str:
    """An error: +12%, −3.1%, 0%. One decimal below ten percent, where it matters."""
    digits = 0 if abs(ratio) >= 0.0995 else 1
    text = f"{abs(ratio) * 100:.{digits}f}%"
    if float(text[:-1]) == 0:
        return "0%" if ratio == 0 else "0.0%"
    return (MINUS if ratio < 0 else "+") + text


def _with_unit(value: float, units: tuple[tuple[float, str], ...], digits: int) -> str:
    for size, unit in units:
        if abs(value) >= size:
            return f"{significant(value / size, digits)} {unit}"
    return f"{significant(value, digits)} {units[-1][1]}"


RATES = {"FLOP/s": ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))}


def quantity(value: float, unit: str) -> str:
    """One number with its unit: bytes, seconds, rates, ratios and counts each in their own way."""
    match unit:
        case "bytes":
            return byte_size(value)
        case "bytes/s":
            return f"{byte_size(value)}/s"
        case "bytes/token":
            return f"{count(value)} B/token"
        case "s":
            return seconds(value)
        case "ratio":
            return percent(value, 1)
        case "FLOP/s":
            return _with_unit(value, RATES["FLOP/s"], 3)
        case "tokens/s" | "requests/s":
            return f"{significant(value)} {unit}"
        case "requests":
            # A share of a request counts: concurrency is compared with no tolerance.
            return f"{round(value, 4):,} requests"
        case "parameters":
            return large_count(value)
        case "":
            return count(value)
        case _:
            return f"{count(value) if float(value).is_integer() else significant(value)} {unit}"


def figure_text(figure: Mapping[str, Any] | None) -> str:
    """A figure of the document as text: its value, its range, or that it is not known."""
    if figure is None:
        return NOT_KNOWN
    unit = str(figure.get("unit", ""))
    if "min" in figure:
        return f"{quantity(figure['min'], unit)} to {quantity(figure['max'], unit)}"
    value = figure.get("value")
    if value is None:
        return NOT_KNOWN
    return quantity(value, unit) if isinstance(value, int | float) else str(value)


def value_and_unit(figure: Mapping[str, Any]) -> tuple[str, str]:
    """A figure's text cut where its unit begins: ("451", "tokens/s"), ("38.0%", "")."""
    number, _, unit = figure_text(figure).partition(" ")
    return (number, unit) if "value" in figure else (figure_text(figure), "")
