"""PEFT's patterns for module paths, matched in bounded time: the patterns come from a stranger.

Holds `first_match`. Python's own engine backtracks, and a pattern of twenty characters can keep it
busy for years; here a pattern becomes an automaton (`automaton.py`), and plain paths a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from ullage.anatomy.adapters.automaton import Automaton, automaton_of

MAX_SHAPES = 2_000


def first_match(patterns: tuple[str, ...], module: str) -> int | None:
    """The index of the first of `patterns` that PEFT takes for `module`, None when none is.

    PEFT 0.21.2 (utils/other.py get_pattern_key) takes a pattern when the whole path, or what
    follows one of its dots, matches: `(.*\\.)?(PATTERN)$`.

    Raises ValueError: not a regular expression, or one that takes too much to follow.
    """
    table = _table(patterns)
    # `$` also stands before a line break that ends the text.
    texts = (module, module[:-1]) if module.endswith("\n") else (module,)
    best = min((i for text in texts if (i := table.first_plain(text)) is not None), default=None)
    for index, automaton in table.automata:
        if best is not None and index > best:
            break
        if any(automaton.matches(text) for text in texts):
            return index
    return best


@dataclass(slots=True)
class _Table:
    """Patterns of path characters by where their dots are, all others as automata, in order.

    A dot of a pattern stands for any character. Patterns of one length with dots in the same
    places differ only elsewhere, so one look into a dict tells which of them matches.
    """

    plain: dict[tuple[int, tuple[int, ...]], dict[str, int]] = field(default_factory=dict)
    automata: list[tuple[int, Automaton]] = field(default_factory=list)

    def first_plain(self, module: str) -> int | None:
        best = None
        for (length, dots), known in self.plain.items():
            start = len(module) - length
            if start < 0 or (start > 0 and module[start - 1] != "."):
                continue
            end = module[start:]
            if any(end[place] != "." for place in dots):
                end = _with_dots(end, dots)
            index = known.get(end)
            if index is not None and (best is None or index < best):
                best = index
        return best


def _with_dots(text: str, places: tuple[int, ...]) -> str:
    characters = list(text)
    for place in places:
        if characters[place] != "\n":
            characters[place] = "."
    return "".join(characters)


@lru_cache(maxsize=64)
def _table(patterns: tuple[str, ...]) -> _Table:
    table = _Table()
    for index, pattern in enumerate(patterns):
        if not _is_plain(pattern):
            table.automata.append((index, automaton_of(rf"(.*\.)?({pattern})", pattern)))
            continue
        dots = tuple(place for place, char in enumerate(pattern) if char == ".")
        table.plain.setdefault((len(pattern), dots), {}).setdefault(pattern, index)
        if len(table.plain) > MAX_SHAPES:
            raise ValueError(f"patterns of more than {MAX_SHAPES} shapes")
    return table


def _is_plain(pattern: str) -> bool:
    letters = pattern.replace("_", "").replace(".", "").replace("-", "")
    return letters.isascii() and letters.isalnum()
