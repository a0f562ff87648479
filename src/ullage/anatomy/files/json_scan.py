"""Reading large JSON objects member by member, so that hostile text cannot grow in memory.

Holds a small pull reader over `json.JSONDecoder`. `json.loads` turns 3 bytes of `{},` into 70 bytes
of objects, so a 100 MB header could cost gigabytes; here each member is read, checked and dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from json import JSONDecoder

MAX_DEPTH = 64

# Behind the repeat of a group: never give a repetition back. The first releases of CPython 3.11 (so
# 3.11.2 of Debian 12; gh-106052) let such a match end within a repetition that failed; there a
# plain repeat finds the same, as long as no repetition can match in two ways.
ONCE = "" if any(re.findall("(?:ab?c)*+", "ab")) else "+"

_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_NEXT = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN_STRING = re.compile(r'"([ !#-\[\]-~]*)"')  # printable ASCII without escapes
_STRUCTURE = re.compile(r'[\[\]{}"]')
_PLAIN_END = re.compile(r"[,}\]\s]|\Z")


def unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """`object_pairs_hook` that refuses a key given twice (ValueError), as the formats do."""
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {excerpt(key)} is given twice")
            seen.add(key)
    return members


_decode = JSONDecoder(object_pairs_hook=unique_members).raw_decode


def excerpt(text: str, limit: int = 120) -> str:
    """`text` in quotation marks, shortened to `limit` characters: for error sentences."""
    return f'"{text}"' if len(text) <= limit else f'"{text[:limit]}…" ({len(text)} characters)'


def read_string(text: str, pos: int) -> tuple[str, int]:
    """The JSON string at `pos` and the position after it; ValueError when there is none."""
    plain = _PLAIN_STRING.match(text, pos)
    if plain is not None:
        return plain.group(1), plain.end()
    if text[pos : pos + 1] != '"':
        raise ValueError(f"a quoted string is missing at character {pos}")
    value, end = _decode(text, pos)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"half a surrogate pair in the string at character {pos}") from None
    return value, end


def value_end(text: str, pos: int, max_chars: int) -> int:
    """Where the JSON value at `pos` ends, without building it.

    Raises ValueError: nested deeper than MAX_DEPTH, or much longer than max_chars.
    """
    start, mark = pos, text[pos : pos + 1]
    if mark == '"':
        return read_string(text, pos)[1]
    if mark not in ("{", "["):
        found = _PLAIN_END.search(text, pos)
        return found.start() if found else len(text)
    depth = 0
    while found := _STRUCTURE.search(text, pos):
        mark = found.group()
        pos = found.end()
        if pos - start > max_chars:
            raise ValueError(f"a value of more than {max_chars} characters at character {start}")
        if mark == '"':
            pos = read_string(text, pos - 1)[1]
        elif mark in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"values nested deeper than {MAX_DEPTH} at character {pos}")
        else:
            depth -= 1
            if depth == 0:
                return pos
    raise ValueError("the text ends inside a value")


def read_value(text: str, pos: int, max_chars: int) -> tuple[object, int]:
    """The JSON value at `pos`, at most `max_chars` long, and the position after it."""
    end = value_end(text, pos, max_chars)
    if end - pos > max_chars:
        raise ValueError(f"a value of more than {max_chars} characters at character {pos}")
    value, used = _decode(text[pos:end])
    if used != end - pos:
        raise ValueError(f"unexpected text at character {pos + used}")
    return value, end


def read_flat_object(text: str, pos: int, max_chars: int) -> tuple[dict[str, object], int]:
    """The object at `pos`, which holds no object itself (so the first `}` ends it)."""
    if text[pos : pos + 1] != "{":
        raise ValueError(f"an object is missing at character {pos}")
    end = text.find("}", pos, pos + max_chars) + 1
    if end == 0:
        raise ValueError(f"no end of the object within {max_chars} characters")
    value, used = _decode(text[pos:end])
    if used != end - pos:
        raise ValueError(f"unexpected text at character {pos + used}")
    return value, end


def read_members(
    text: str,
    pos: int,
    read_member: Callable[[str, int], int],
    read_usual: Callable[[int], int] = int,
) -> int:
    """Walks the object at `pos`: `read_member(key, value_pos)` returns where that value ends.

    `read_usual(pos)` may take whole members, with their commas, off the beginning and return the
    position of the first that it leaves; before every member it is asked again.

    Returns the position after the object. Raises ValueError for text that is not JSON; keys given
    twice are the caller's to notice, who keeps them anyway.
    """
    if text[pos : pos + 1] != "{":
        raise ValueError(f"an object is missing at character {pos}")
    pos = skip_space(text, pos + 1)
    if text[pos : pos + 1] == "}":
        return pos + 1
    while True:
        key, pos = read_string(text, read_usual(pos))
        colon = _COLON.match(text, pos)
        if colon is None:
            raise ValueError(f"a colon is missing at character {pos}")
        pos = read_member(key, colon.end())
        step = _NEXT.match(text, pos)
        if step is None:
            raise ValueError(f"a comma or closing brace is missing at character {pos}")
        if step.group(1) == "}":
            return step.end(1)
        pos = step.end()


def skip_space(text: str, pos: int) -> int:
    """The first position from `pos` on that is not JSON white space."""
    found = _SPACE.match(text, pos)
    return found.end() if found else pos
