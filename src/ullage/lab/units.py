"""Values with their units as people read them: for the table in a terminal, and for the page.

Holds formatting only; the exact numbers are in the JSON.
"""

from __future__ import annotations

from ullage.pages import words

NOT_KNOWN = "–"


def shown(value: float | int | str | None, unit: str) -> str:
    """One value: bytes, s, ratio, tokens/s, times, perplexity, … as `words.quantity` has them."""
    if value is None:
        return NOT_KNOWN
    if isinstance(value, str):
        return value
    match unit:
        case "perplexity":
            return f"{value:.4f}"
        case "times":
            return f"{words.significant(value)}×"
        case "change" if value == 0:
            return "0%"
        case "change":
            return f"{'+' if value >= 0 else words.MINUS}{words.significant(abs(value) * 100)}%"
        case "ms":
            return words.seconds(value / 1e3)
        case "":
            whole = isinstance(value, int) or float(value).is_integer()
            return words.count(value) if whole else words.significant(value)
        case _:
            return words.quantity(value, unit)


def times(ratio: float) -> str:
    """A ratio in a sentence: 3.2 times."""
    return f"{words.significant(ratio, 2)} times"
