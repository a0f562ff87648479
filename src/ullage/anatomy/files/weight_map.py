"""A `*.safetensors.index.json` → which file holds each tensor.

Holds the reading and checking of that one file. The shards themselves are `index.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ullage.anatomy.checkpoint import MAX_TENSORS, open_regular
from ullage.anatomy.files.json_scan import (
    ONCE,
    excerpt,
    read_members,
    read_string,
    read_value,
    skip_space,
    value_end,
)
from ullage.errors import MalformedCheckpoint

MAX_INDEX_BYTES = 128 * 2**20
_MAX_NAME_BYTES = 255
_MAX_METADATA_CHARS = 1_000_000

# `"tensor": "file",` as every writer lays it out, up to 1,000 at a time. As in safetensors.py, only
# a shortcut for what is sound.
_TEXT = r"[ !#-\[\]-~]{1,1000}+"
_GAP = r"[ \t\n\r]*+"
_PLACE = f'"{{0}}"{_GAP}:{_GAP}"{{0}}"{_GAP},{_GAP}'
_USUAL_PLACE = re.compile(_PLACE.format(f"({_TEXT})"))
_USUAL_PLACES = re.compile(f"(?:{_PLACE.format(_TEXT)}){{0,1000}}{ONCE}")


def read_weight_map(index_file: Path) -> tuple[dict[str, str], int | None]:
    """Tensor name → file name of a `*.safetensors.index.json`, and its declared total bytes.

    Raises MalformedCheckpoint: not JSON, no weight_map, a tensor given twice, or a file name that
    is not a plain name (so that nothing outside the directory is ever opened).
    """
    text = _read_index_text(index_file)
    all_sound = True
    places: dict[str, str] = {}
    sections: dict[str, object] = {}

    def read_place(name: str, pos: int) -> int:
        if name in places:
            raise ValueError(f"the tensor {excerpt(name)} is given twice")
        if len(places) >= MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} tensors")
        file, end = read_string(text, pos)
        places[name] = known_files.get(file) or known_files.setdefault(file, _plain_name(file))
        return end

    def read_usual(pos: int) -> int:
        nonlocal all_sound
        while all_sound and (run := _USUAL_PLACES.match(text, pos)) and run.end() != pos:
            pairs = _USUAL_PLACE.findall(text, pos, run.end())
            made = dict(pairs)
            is_new = len(made) == len(pairs) and places.keys().isdisjoint(made)
            all_sound = is_new and len(places) + len(made) <= MAX_TENSORS
            for file in set(made.values()) if all_sound else ():
                if file not in known_files:
                    known_files[file] = _plain_name(file)
            if all_sound:
                places.update(zip(made, map(known_files.__getitem__, made.values()), strict=True))
                pos = run.end()
        return pos

    def read_section(key: str, pos: int) -> int:
        if key in sections:
            raise ValueError(f"the key {excerpt(key)} is given twice")
        if len(sections) >= 100:
            raise ValueError("more than 100 keys beside weight_map")
        sections[key] = None
        if key == "weight_map":
            return read_members(text, pos, read_place, read_usual)
        if key == "metadata":
            sections[key], end = read_value(text, pos, _MAX_METADATA_CHARS)
            return end
        return value_end(text, pos, _MAX_METADATA_CHARS)

    known_files: dict[str, str] = {}
    try:
        end = read_members(text, skip_space(text, 0), read_section)
        if skip_space(text, end) != len(text):
            raise ValueError(f"text after the closing brace, at character {end}")
        if "weight_map" not in sections:
            raise ValueError("it has no weight_map")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise MalformedCheckpoint(f"the index is not valid: {reason}", file=index_file) from None
    return places, _declared_bytes(sections.get("metadata"))


def _declared_bytes(metadata: object) -> int | None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, int | float):
        return None
    return int(total) if 0 <= total < 2**63 and total == int(total) else None


def _plain_name(name: str) -> str:
    """`name` when it can only mean a file of the directory itself; ValueError otherwise."""
    plain = name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
    if not plain or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"the file name {excerpt(name)} is not a plain name inside the directory")
    if not name.endswith(".safetensors"):
        raise ValueError(f"the file {excerpt(name)} is not a .safetensors file")
    return name


def _read_index_text(index_file: Path) -> str:
    with open_regular(index_file) as (stream, file_bytes):
        if file_bytes > MAX_INDEX_BYTES:
            raise MalformedCheckpoint(
                f"{file_bytes} bytes", file=index_file, expected=f"at most {MAX_INDEX_BYTES}"
            )
        raw = stream.read(MAX_INDEX_BYTES)
    # Counting is a thousand times faster than finding out while parsing.
    if raw.count(b'.safetensors"') > MAX_TENSORS:
        raise MalformedCheckpoint(f"more than {MAX_TENSORS} tensors", file=index_file)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise MalformedCheckpoint(f"byte {error.start} is not UTF-8", file=index_file) from None
