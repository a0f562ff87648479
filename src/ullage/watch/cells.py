"""Figures as the short texts of a terminal: ranges, durations, bars, and text that is not trusted.

Holds words only; which figure stands where is `terminal.py`'s. Nothing here knows a terminal.
"""

from __future__ import annotations

import math

from ullage.pages.words import byte_size, count, large_count
from ullage.telemetry.histogram import Quantile
from ullage.watch.figures import TimeToFull

NONE = "–"
FULL, EMPTY = "█", "░"
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
SPANS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
LONGEST_S = 30 * 86_400.0
PLAIN = {
    "█": "#", "░": ".", "–": "-", "−": "-", "→": "->", "≤": "<=", "≥": ">=", "·": "|", "µ": "u",
    "…": "...", "×": "x", "\N{REPLACEMENT CHARACTER}": "?",
}  # fmt: skip
_ASCII = str.maketrans(PLAIN)


def clean(text: str, most: int = 200) -> str:
    """Text of a server's, on one line, without what would steer a terminal."""
    kept = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: most + 1])
    return f"{kept[: most - 1]}…" if len(text) > most else kept


def shorten(text: str, width: int) -> str:
    """At most `width` characters; what tells replicas apart is at the end, so that is kept."""
    return text if len(text) <= width else f"…{text[len(text) - max(width, 1) + 1 :]}"


def plain(text: str) -> str:
    """For a stream that spells only ASCII."""
    return text.translate(_ASCII)


def bar(ratio: float, width: int) -> str:
    """`width` cells, full from the left. Only an empty cache has no full cell, only a full one all:
    a bar that is rounded to either end would lie about what matters most."""
    num = round(min(1.0, max(0.0, ratio)) * width)
    if width > 1 and 0.0 < ratio < 1.0:
        num = min(max(num, 1), width - 1)
    return FULL * num + EMPTY * (width - num)


def percent(ratio: float) -> str:
    """Whole per cent; a decimal near the ends, where 99.6% must not read as full."""
    value = ratio * 100
    near_an_end = 0 < value < 1 or 99 < value < 100
    text = f"{math.floor(value * 10) / 10:.1f}" if near_an_end else f"{value:.0f}"
    return f"{text}%" if text != "0.0" else "<0.1%"


def used_of(used: float, total: float) -> str:
    """`60 of 80 GB`: the unit once, that of the total."""
    whole = byte_size(total)
    unit = whole.rpartition(" ")[2]
    part = byte_size(used)
    number, _, same = part.rpartition(" ")
    return f"{number} of {whole}" if same == unit else f"{part} of {whole}"


def tokens_of(used: float, total: float) -> str:
    """In full up to 100 million, where the last digits say something no more."""
    show = count if total < 1e8 else large_count
    return f"{show(used)} of {show(total)} tokens"


def time_range(quantile: Quantile) -> str:
    """`0.25–0.5 s`, `≤ 10 ms`, `> 2 s`: what the buckets allow, and no more."""
    finite = quantile.low if math.isinf(quantile.high) else quantile.high
    size, unit = next((pair for pair in TIMES if finite >= pair[0] * 0.1), TIMES[-1])
    low, high = _short(quantile.low / size), _short(quantile.high / size)
    if math.isinf(quantile.high):
        return f"> {low} {unit}"
    if quantile.low <= 0:
        return f"≤ {high} {unit}"
    return f"{low}–{high} {unit}"


def duration(seconds: float) -> str:
    """`45 s`, `4 min`, `2.5 h`; beyond thirty days only that."""
    if seconds > LONGEST_S:
        return "> 30 days"
    size, unit = next((pair for pair in SPANS if seconds >= pair[0] * 2), SPANS[-1])
    return f"{two_digits(seconds / size)} {unit}"


def to_full(found: TimeToFull) -> str:
    """`full in 40–55 s`, `full in over 2 min`, `full in < 1 s`, `full`."""
    if found.high_s <= 0:
        return "full"
    if found.high_s < 1:
        return "full in < 1 s"
    if math.isinf(found.high_s):
        return f"full in over {duration(found.low_s)}"
    low, high = duration(found.low_s), duration(found.high_s)
    if low == high:
        return f"full in {low}"
    number, _, unit = low.partition(" ")
    same = unit == high.partition(" ")[2]
    return f"full in {number if same else low}–{high}"


def rate(per_s: float) -> str:
    """`0`, `0.4/s`, `1,200/s`; never 0 for what is not."""
    return "0" if per_s == 0 else f"{two_digits(per_s)}/s"


def hertz(value: float) -> str:
    return f"{value / 1e9:.2f} GHz"


def _short(value: float) -> str:
    """A bucket's bound as its engine wrote it: six digits, no trailing zeros."""
    return f"{value:.6g}"


def two_digits(value: float) -> str:
    """Two digits where they say something."""
    if 0 < value < 1e-3:
        return "<0.001"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
