"""PEFT's patterns for module paths, matched in linear time: the patterns come from a stranger.

Holds `first_match`. Python's own engine backtracks, and a pattern of twenty characters can keep it
busy for years; here a pattern becomes an automaton whose states are all followed at once.
"""

from __future__ import annotations

import re
from functools import lru_cache


def first_match(patterns: tuple[str, ...], module: str) -> int | None:
    """The index of the first of `patterns` that PEFT takes for `module`, None when none is.

    PEFT 0.21.2 (utils/other.py get_pattern_key) takes a pattern when the whole path, or what
    follows one of its dots, matches: `(.*\\.)?(PATTERN)$`.

    Raises ValueError: not a regular expression, or one that is too large.
    """
    for index, pattern in enumerate(patterns):
        if _compiled(pattern).match(module):
            return index
    return None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern[:80]!r} is not valid: {error}") from None
