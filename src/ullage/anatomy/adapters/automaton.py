"""Regular expressions as automata: matched in time that a hostile expression cannot stretch.

Holds the automaton and its builder from Python's own parse of an expression. It answers only
whether a whole text matches; groups, references and looking back are not followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

MAX_CHARS = 10_000
MAX_STATES = 5_000
# How much may be worked out for one expression, over all texts: states visited for a new step of
# the deterministic automaton. The expressions of real adapters need some thousands.
MAX_WORK = 2_000_000
_MAX_REPEATED = 200
_MAX_DEPTH = 60
_MAX_BACKTRACKED_CHARS = 200

_ACCEPT = 1
_SINGLE = frozenset(("ANY", "IN", "LITERAL", "NOT_LITERAL"))
CharTest = Callable[[str], bool]


@dataclass(slots=True)
class Automaton:
    """States by number: 0 is where it begins, 1 where it accepts.

    `steps` are (test, target) on a character; `jumps` are (place, target) without one, where the
    place is None, "begin" or "end" of the text. Sets of states are worked out once per character
    and kept (`known`), so that texts with common beginnings cost one look per character.
    """

    steps: list[list[tuple[CharTest, int]]] = field(default_factory=lambda: [[], []])
    jumps: list[list[tuple[str | None, int]]] = field(default_factory=lambda: [[], []])
    known: dict[frozenset[int], dict[str, frozenset[int]]] = field(default_factory=dict)
    ends: dict[frozenset[int], bool] = field(default_factory=dict)
    begin: frozenset[int] = frozenset()
    work: int = 0

    def state(self) -> int:
        if len(self.steps) >= MAX_STATES:
            raise ValueError(f"it needs more than {MAX_STATES} states")
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def matches(self, text: str) -> bool:
        """Whether the automaton accepts the whole of `text`. Raises ValueError beyond MAX_WORK."""
        if not text:
            return _ACCEPT in self._closure({0}, ("begin", "end"))
        states = self.begin = self.begin or self._closure({0}, ("begin",))
        for char in text:
            after = self.known.setdefault(states, {})
            following = after.get(char)
            if following is None:
                following = after[char] = self._step(states, char)
            if not following:
                return False
            states = following
        accepted = self.ends.get(states)
        if accepted is None:
            accepted = self.ends[states] = _ACCEPT in self._closure(states, ("end",))
        return accepted

    def _step(self, states: frozenset[int], char: str) -> frozenset[int]:
        self.work += len(states)
        reached = {target for s in states for test, target in self.steps[s] if test(char)}
        return self._closure(reached, ())

    def _closure(
        self, states: set[int] | frozenset[int], places: tuple[str, ...]
    ) -> frozenset[int]:
        """`states` and all that is reached from them without a character."""
        found = set(states)
        pending = list(states)
        while pending:
            for place, target in self.jumps[pending.pop()]:
                if target not in found and (place is None or place in places):
                    found.add(target)
                    pending.append(target)
        self.work += len(found)
        if self.work > MAX_WORK:
            raise ValueError("it takes too long to follow")
        return frozenset(found)


@dataclass(slots=True)
class _Backtracked(Automaton):
    """An expression that looks ahead or at word boundaries, but has no way to run away.

    It repeats few single characters without end and nothing larger, in a short text.
    """

    compiled: Any = None

    def matches(self, text: str) -> bool:
        if len(text) > _MAX_BACKTRACKED_CHARS:
            raise ValueError(f"it looks ahead in a path of {len(text)} characters")
        return self.compiled.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def automaton_of(expression: str, shown: str) -> Automaton:
    """The automaton of a regular expression; `shown` is how errors name it.

    Raises ValueError: not an expression, or one that cannot be followed in bounded time.
    """
    import re
    from re import _parser  # type: ignore[attr-defined]

    if len(expression) > MAX_CHARS:
        raise ValueError(f"the pattern {shown[:80]!r}… has {len(shown)} characters")
    try:
        parsed = _parser.parse(expression)
        if _needs_backtracking(parsed):
            return _Backtracked(compiled=re.compile(expression))
        automaton = Automaton()
        _Builder(automaton).sequence(parsed, 0, _ACCEPT, 0)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"the pattern {shown[:80]!r} cannot be used: {reason}") from None
    return automaton


def _needs_backtracking(parsed: Any) -> bool:
    """Whether the expression looks around; ValueError when it could also run away."""
    looks, endless, wild = _census(parsed, 0)
    if looks and (wild or endless > 4):  # one of them is PEFT's own `.*`
        raise ValueError("it looks around and repeats too much")
    return looks > 0


def _census(parts: Any, depth: int) -> tuple[int, int, int]:
    """How often it looks around, repeats a character without end, and repeats anything larger."""
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    looks = endless = wild = 0
    for kind, value in parts:
        word = str(kind)
        inner: list[Any] = []
        if word in ("ASSERT", "ASSERT_NOT"):
            if value[0] < 0:
                raise ValueError("it looks back")
            looks, inner = looks + 1, [value[1]]
        elif word == "AT" and "BOUNDARY" in str(value):
            looks += 1
        elif word in ("MAX_REPEAT", "MIN_REPEAT"):
            _, high, repeated = value
            single = len(repeated) == 1 and str(repeated[0][0]) in _SINGLE
            wild += not single and str(high) != "1"
            endless += single and (str(high) == "MAXREPEAT" or high > 8)
            inner = [repeated]
        elif word == "SUBPATTERN":
            inner = [value[3]]
        elif word == "BRANCH":
            inner = value[1]
            wild += len(value[1]) > 8
        for part in inner:
            counts = _census(part, depth + 1)
            looks, endless, wild = looks + counts[0], endless + counts[1], wild + counts[2]
    return looks, endless, wild


class _Builder:
    """Adds the parts of a parsed expression to an automaton, between two given states."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton

    def sequence(self, parts: Any, begin: int, end: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        last = begin
        for kind, value in parts:
            following = self.automaton.state()
            self.part(str(kind), value, last, following, depth + 1)
            last = following
        self.automaton.jumps[last].append((None, end))

    def part(self, kind: str, value: Any, begin: int, end: int, depth: int) -> None:
        automaton = self.automaton
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            self.repeat(value, begin, end, depth)
        elif kind == "SUBPATTERN":
            _, on, off, inner = value
            if on or off:
                raise ValueError("it switches flags")
            self.sequence(inner, begin, end, depth)
        elif kind == "BRANCH":
            for inner in value[1]:
                self.sequence(inner, begin, end, depth)
        elif kind == "AT":
            automaton.jumps[begin].append((_PLACES[str(value)], end))
        else:
            automaton.steps[begin].append((_char_test(kind, value), end))

    def repeat(self, value: Any, begin: int, end: int, depth: int) -> None:
        low, high, inner = value
        unbounded = str(high) == "MAXREPEAT"
        if low > _MAX_REPEATED or (not unbounded and high > _MAX_REPEATED):
            raise ValueError(f"it repeats more than {_MAX_REPEATED}")
        automaton, last = self.automaton, begin
        for _ in range(low):
            following = automaton.state()
            self.sequence(inner, last, following, depth)
            last = following
        if unbounded:
            hub = automaton.state()
            automaton.jumps[last].append((None, hub))
            self.sequence(inner, hub, hub, depth)
            automaton.jumps[hub].append((None, end))
            return
        for _ in range(high - low):
            automaton.jumps[last].append((None, end))
            following = automaton.state()
            self.sequence(inner, last, following, depth)
            last = following
        automaton.jumps[last].append((None, end))


def _char_test(kind: str, value: Any) -> CharTest:
    if kind == "LITERAL":
        literal = chr(value)
        return lambda char: char == literal
    if kind == "NOT_LITERAL":
        other = chr(value)
        return lambda char: char != other
    if kind == "ANY":
        return lambda char: char != "\n"
    if kind == "IN":
        negated = bool(value) and str(value[0][0]) == "NEGATE"
        tests = [_member_test(str(k), v) for k, v in (value[1:] if negated else value)]
        return lambda char: any(test(char) for test in tests) is not negated
    raise ValueError(f"it uses {kind.lower()}")


def _member_test(kind: str, value: Any) -> CharTest:
    if kind == "RANGE":
        low, high = value
        return lambda char: low <= ord(char) <= high
    if kind == "CATEGORY":
        return _CATEGORIES[str(value)]
    return _char_test(kind, value)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_CATEGORIES: dict[str, CharTest] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda char: not char.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
    "CATEGORY_WORD": _is_word,
    "CATEGORY_NOT_WORD": lambda char: not _is_word(char),
}


_PLACES = {
    "AT_BEGINNING": "begin",
    "AT_BEGINNING_STRING": "begin",
    "AT_END": "end",
    "AT_END_STRING": "end",
}
