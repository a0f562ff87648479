"""The ids in a tokenizer.json: `read_vocabulary`, a scan in bounded memory and time.

Holds no verdict. The file is mapped and only the vocabulary and the added tokens are looked at;
merges, often most of the file, are not.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ullage.anatomy.files.json_scan import ONCE

MAX_BYTES = 64 << 20
"""Larger files are not scanned: the largest vocabularies of published models take about 35 MB."""

MAX_ADDED_BYTES = 8 << 20
FIRST_ADDED_BYTES = 64 << 10  # nearly always enough, and decoding more costs milliseconds

# In JSON a quote inside a string follows a backslash, so that these cannot begin inside a string.
_VOCAB = re.compile(rb'(?<!\\)"vocab"\s*+:\s*+([\[{])')
_ADDED = re.compile(rb'(?<!\\)"added_tokens"\s*+:\s*+\[')
_ONCE = ONCE.encode()
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*' + _ONCE + b'"'
# One match for all of them, which notes the last id: faster than one at a time.
_ENTRIES = re.compile(
    rb"\s*+(?:" + _STRING + rb"\s*+:\s*+(\d{1,12}+)\s*+(?:,\s*+|(?=\})))*" + _ONCE, re.DOTALL
)
_ENTRY = _STRING + rb"\s*+:\s*+(\d{1,12}+)"
_PIECE = rb"\[\s*+" + _STRING + rb"\s*+,\s*+-?[0-9][0-9.eE+-]*+\s*+\]"
_PIECES = rb"(?:\s*+,?\s*+" + _PIECE + rb")*" + _ONCE
_END = re.compile(rb"\s*+[\]}]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer can give: the largest ids (None: there is none)."""

    largest_base: int | None
    largest_added: int | None


def read_vocabulary(path: Path) -> Vocabulary | str:
    """The ids of a tokenizer.json, or what keeps them unknown, in words."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            info = os.fstat(stream.fileno())
            if not stat.S_ISREG(info.st_mode):
                return "a tokenizer.json that is a regular file"
            if not 0 < info.st_size <= MAX_BYTES:
                return f"a tokenizer.json of 1 to {MAX_BYTES:,} bytes"
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
                return _scan(text)
    except (OSError, ValueError):
        return "a tokenizer.json that can be read"


def _scan(text: mmap.mmap) -> Vocabulary | str:
    start = _VOCAB.search(text)
    if start is None:
        return "model.vocab in tokenizer.json"
    # By id, or Unigram: pieces with scores, where the id is the place in the list.
    largest = (_largest_id if start[1] == b"{" else _last_place)(text, start.end())
    if largest is None:
        return "a model.vocab of known form in tokenizer.json"
    added = _added(text)
    if isinstance(added, str):
        return added
    return Vocabulary(largest if largest >= 0 else None, added)


def _largest_id(text: mmap.mmap, pos: int) -> int | None:
    """The largest id of the entries from `pos` on, −1 without any, None for another form."""
    whole = _ENTRIES.match(text, pos)
    if whole is None or _END.match(text, whole.end()) is None:
        return None
    if whole[1] is None:
        return -1
    # The library writes entries in the order of their ids: as a rule no number beyond the last id
    # follows any colon, in a string or out of one, and that takes half the time of looking at each.
    last = int(whole[1])
    if _number_beyond(last).search(text, pos, whole.end()) is None:
        return last
    found = re.compile(_ENTRY, re.DOTALL).findall(text, pos, whole.end())
    return max(map(int, found))


def _number_beyond(limit: int) -> re.Pattern[bytes]:
    """A colon and a number above `limit`, or one with more digits; nothing smaller matters."""
    digits = str(limit + 1).encode()
    rest = len(digits)
    larger = [digits, rb"\d{%d}" % (rest + 1)]
    for place, digit in enumerate(digits):
        rest -= 1
        if digit < ord("9"):
            larger.append(digits[:place] + rb"[%c-9]\d{%d}" % (digit + 1, rest))
    return re.compile(rb":\s*+(?=\d{%d})(?:" % len(digits) + b"|".join(larger) + b")")


def _last_place(text: mmap.mmap, pos: int) -> int | None:
    """The place of the last piece of the list from `pos` on, −1 without any, None if no list."""
    whole = re.compile(_PIECES, re.DOTALL).match(text, pos)
    if whole is None or _END.match(text, whole.end()) is None:
        return None
    return len(re.compile(_PIECE, re.DOTALL).findall(text, pos, whole.end())) - 1


def _added(text: mmap.mmap) -> int | str | None:
    start = _ADDED.search(text)
    if start is None:
        return None
    tokens = None
    for size in (FIRST_ADDED_BYTES, MAX_ADDED_BYTES):
        piece = text[start.end() - 1 : start.end() + size].decode("latin-1")
        try:
            tokens, _ = json.JSONDecoder(strict=False).raw_decode(piece)
            break
        except (ValueError, RecursionError):
            continue
    if tokens is None:
        return "added_tokens of known form in tokenizer.json"
    ids = [token.get("id") for token in tokens if isinstance(token, dict)]
    largest = max((number for number in ids if type(number) is int), default=None)
    if len(ids) != len(tokens) or any(type(number) is not int for number in ids):
        return "added_tokens of known form in tokenizer.json"
    return largest
