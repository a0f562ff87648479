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

MAX_BYTES = 64 << 20
"""Larger files are not scanned: the largest vocabularies of published models take about 35 MB."""

MAX_ADDED_BYTES = 8 << 20
FIRST_ADDED_BYTES = 64 << 10  # nearly always enough, and decoding more costs milliseconds

# In JSON a quote inside a string follows a backslash, so that these cannot begin inside a string.
_VOCAB = re.compile(rb'(?<!\\)"vocab"\s*+:\s*+([\[{])')
_ADDED = re.compile(rb'(?<!\\)"added_tokens"\s*+:\s*+\[')
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_ENTRY = re.compile(_STRING + rb"\s*+:\s*+(\d{1,12}+)", re.DOTALL)
_ENTRIES = re.compile(
    rb"(?:\s*+,?\s*+" + _STRING + rb"\s*+:\s*+\d{1,12}+)*+", re.DOTALL
)  # one match for all of them: faster than one at a time
_PIECE = rb"\[\s*+" + _STRING + rb"\s*+,\s*+-?[0-9][0-9.eE+-]*+\s*+\]"
_PIECES = re.compile(rb"(?:\s*+,?\s*+" + _PIECE + rb")*+", re.DOTALL)
_ONE_PIECE = re.compile(_PIECE, re.DOTALL)
_END = re.compile(rb"\s*+[\]}]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer can give: how many base tokens, the largest ids (None: there is none)."""

    num_base: int
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
    by_id = start[1] == b"{"  # else Unigram: pieces with scores, the id is the place in the list
    whole = (_ENTRIES if by_id else _PIECES).match(text, start.end())
    if whole is None or _END.match(text, whole.end()) is None:
        return "a model.vocab of known form in tokenizer.json"
    found = (_ENTRY if by_id else _ONE_PIECE).findall(text, start.end(), whole.end())
    if by_id and found:
        digits = max(map(len, found))
        largest = max(int(token) for token in found if len(token) == digits)
    else:
        largest = len(found) - 1
    added = _added(text)
    if isinstance(added, str):
        return added
    return Vocabulary(len(found), largest if found else None, added)


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
