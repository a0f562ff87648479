"""Prometheus text and OpenMetrics text → series and their numbers, from bytes of anybody.

Holds the parser and what it dropped; it raises nothing. What a metric means is the dialects'.
Source: the Prometheus exposition format 0.0.4 and OpenMetrics 1.0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]

MOST_LINES = 200_000
"""A page of a thousand adapters has some ten thousand."""
MOST_KEY_BYTES = 1 << 16
"""Name and labels of one series. The longest that engines write lists every adapter that runs."""
MOST_KEPT = 32_768
"""Series that are remembered between pages: those of many servers with one set of names."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line's name and its labels, sorted by name. Shared between pages: never changed."""

    name: str
    labels: Labels


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a page held that was not read.

    `truncated`: bytes after the last line's end. `malformed`: lines that are no sample.
    `duplicates`: samples of a series that had one before. `beyond`: lines past MOST_LINES.
    """

    truncated: int = 0
    malformed: int = 0
    duplicates: int = 0
    beyond: int = 0

    def in_words(self) -> str:
        """ "" when everything was read."""
        said = (
            (self.truncated, "bytes of an unfinished last line"),
            (self.malformed, "malformed lines"),
            (self.duplicates, "repeated samples"),
            (self.beyond, f"lines beyond the first {MOST_LINES:,}"),
        )
        return ", ".join(f"{count:,} {what}" for count, what in said if count)


@dataclass(slots=True, eq=False)
class Rows:
    """A page's lines, each cut before its last word: `keys[i]` names what `values[i]` is of.

    Two pages with one digest differ at most in their numbers. Made by `rows_of`; `settled` sees to
    lines that are cut elsewhere (a timestamp or an exemplar follows the number).
    """

    keys: list[bytes]
    values: list[bytes]
    truncated: int
    beyond: int

    def digest(self) -> bytes:
        """Bytes that tell this page's keys from any others."""
        return hashlib.sha256(b"\n".join(self.keys), usedforsecurity=False).digest()


@dataclass(frozen=True, slots=True)
class Page:
    """Every sample: name → labels → number. Of several samples of one series the first stays."""

    samples: Mapping[str, Mapping[Labels, float]]
    dropped: Dropped

    def get(self, name: str) -> Mapping[Labels, float]:
        """The series of that name, empty when there are none."""
        return self.samples.get(name, {})


def rows_of(body: bytes) -> Rows:
    """The page cut into lines and these into keys and values; an unfinished last line is left."""
    lines = body.split(b"\n")
    truncated = len(lines.pop())
    beyond = max(0, len(lines) - MOST_LINES)
    if beyond:
        del lines[MOST_LINES:]
    cut = [line.rpartition(b" ") for line in lines]
    # A line of one word is all key.
    keys = [head if space else word for head, space, word in cut]
    values = [word if space else b"" for _, space, word in cut]
    return Rows(keys, values, truncated, beyond)


@dataclass(frozen=True, slots=True)
class Settled:
    """Rows with every sample cut where its number begins, and the series of each row.

    Comments and what is no sample have no series, and keys and values that are empty, so that
    pages that differ in these alone are one. `malformed` counts the rows that should be samples
    and are not, `damaged` are the metrics that they begin with. `plain`: no line was malformed
    and each was cut before its last word.
    """

    rows: Rows
    series: list[Series | None]
    malformed: int
    damaged: frozenset[str]
    plain: bool


def settled(rows: Rows) -> Settled:
    """See Settled."""
    keys, values = list(rows.keys), list(rows.values)
    found: list[Series | None] = []
    damaged: list[str] = []
    plain = True
    malformed = 0
    for at, key in enumerate(keys):
        series = _KEPT.get(key)
        if series is None or number_of(values[at]) is None:
            line = key + b" " + values[at]
            if line.lstrip()[:1] in (b"#", b""):
                keys[at] = values[at] = b""
                series = None
            else:
                keys[at], values[at], series = _sample(key, values[at], line)
                plain = plain and series is not None and keys[at] == key
                if series is None:
                    malformed += 1
                    damaged += _beginning(line)
        found.append(series)
    settled_rows = Rows(keys, values, rows.truncated, rows.beyond)
    return Settled(settled_rows, found, malformed, frozenset(damaged), plain)


def number_of(value: bytes) -> float | None:
    """The number that a value's bytes spell, None where they spell none."""
    # float() takes underscores, the format does not.
    if b"_" in value:
        return None
    try:
        return float(value)
    except ValueError:
        return None


def page_of(body: bytes) -> Page:
    """All samples of a page. What is no sample is counted, never guessed at."""
    found = settled(rows_of(body))
    samples: dict[str, dict[Labels, float]] = {}
    duplicates = 0
    for series, value in zip(found.series, found.rows.values, strict=True):
        if series is None:
            continue
        named = samples.setdefault(series.name, {})
        if series.labels in named:
            duplicates += 1
        else:
            named[series.labels] = float(value)
    dropped = Dropped(found.rows.truncated, found.malformed, duplicates, found.rows.beyond)
    return Page(samples, dropped)


# --- one line -------------------------------------------------------------------------------------

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_QUOTED = rb'"(?:[^"\\]|\\.)*+"'
_TERM = rb"[ \t]*+(?:(?:[a-zA-Z_][a-zA-Z0-9_]*+|" + _QUOTED + rb")[ \t]*+=[ \t]*+)?+" + _QUOTED
_KEY = rb"[ \t]*+(?:%b[ \t]*+)?+(?:\{(?:%b[ \t]*+(?:,%b[ \t]*+)*+,?)?+[ \t]*+\})?+[ \t]*+" % (
    _NAME,
    _TERM,
    _TERM,
)
_WHOLE_KEY = re.compile(_KEY)
_FIRST_NAME = re.compile(rb"[ \t]*+(" + _NAME + rb")")
_LABEL = re.compile(
    rb"(?:([a-zA-Z_][a-zA-Z0-9_]*+|" + _QUOTED + rb")[ \t]*+=[ \t]*+)?+(" + _QUOTED + rb")"
)
_ESCAPE = re.compile(r'\\[\\n"]')
_ESCAPED = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}
# A number, then perhaps a timestamp, then perhaps an exemplar.
_AFTER_KEY = re.compile(rb"([^ \t]++)(?:[ \t]++[-+.0-9eE]++)?+[ \t\r]*+(?:#[ \t].*)?+", re.DOTALL)

_KEPT: dict[bytes, Series] = {}
_PAIRS: dict[tuple[bytes, bytes], tuple[str, str]] = {}


def _sample(key: bytes, value: bytes, line: bytes) -> tuple[bytes, bytes, Series | None]:
    """Key, value and series of a line; `key` and `value` are it, cut before its last word."""
    if _WHOLE_KEY.fullmatch(key) and number_of(value) is not None:
        series = _series(key)
        return (key, value, series) if series else (b"", b"", None)
    head = _WHOLE_KEY.match(line)
    # The key ends with its white space: without any, or a brace before it, no number can begin.
    if head is None or not head.group() or head.group()[-1:] not in b" \t}":
        return b"", b"", None
    rest = _AFTER_KEY.fullmatch(line, head.end())
    if rest is None or number_of(rest.group(1)) is None:
        return b"", b"", None
    key = head.group().strip(b" \t")
    series = _KEPT.get(key) or _series(key)
    return (key, rest.group(1), series) if series else (b"", b"", None)


def _beginning(line: bytes) -> list[str]:
    """The name that a line begins with, if it does."""
    found = _FIRST_NAME.match(line)
    return [found.group(1).decode()] if found else []


def _series(key: bytes) -> Series | None:
    """The series that a well-formed key names; None where it names none, or a label twice."""
    if len(key) > MOST_KEY_BYTES:
        return None
    name, brace, inside = key.partition(b"{")
    name = name.strip(b" \t")
    pairs: list[tuple[str, str]] = []
    for label, text in _LABEL.findall(inside) if brace else ():
        if label:
            pairs.append(_pair(label, text))
        elif name or pairs:
            return None  # a bare string is the metric's name, which stands first and once
        else:
            name = _unquoted(text).encode()
    if not name or len({label for label, _ in pairs}) < len(pairs):
        return None
    series = Series(name.decode("utf-8", "replace"), tuple(sorted(pairs)))
    if len(_KEPT) >= MOST_KEPT:
        # Rare: what was crowded out is read anew with the next page.
        _KEPT.clear()
        _PAIRS.clear()
    _KEPT[key] = series
    return series


def _pair(label: bytes, text: bytes) -> tuple[str, str]:
    kept = _PAIRS.get((label, text))
    if kept is None:
        name = _unquoted(label) if label.startswith(b'"') else label.decode()
        kept = _PAIRS[label, text] = (name, _unquoted(text))
    return kept


def _unquoted(text: bytes) -> str:
    inner = text[1:-1].decode("utf-8", "replace")
    return _ESCAPE.sub(lambda found: _ESCAPED[found.group()], inner) if "\\" in inner else inner


def select(series: Sequence[Series | None]) -> dict[str, list[tuple[int, Labels]]]:
    """Name → the rows of its series, the first of each, as (row, labels)."""
    places: dict[str, list[tuple[int, Labels]]] = {}
    seen: set[Series] = set()
    for at, one in enumerate(series):
        if one is not None and one not in seen:
            seen.add(one)
            places.setdefault(one.name, []).append((at, one.labels))
    return places
