"""Where a finding stands: the file and, where a key or a flag is at fault, its line.

Reads the places that evidence names (`config: text_config.rope_theta`, `flag: --dtype`) and looks
the key up in the file's text. Used by the outputs that point at lines; judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ullage.anatomy.open import ModelFiles, read_text
from ullage.errors import BadInput
from ullage.findings.finding import Finding
from ullage.findings.place import Place, PlaceOf


def place_finder(
    files: ModelFiles, flag_places: Mapping[str, Place] | None = None, server: Place | None = None
) -> PlaceOf:
    """A function from a finding to its place.

    `flag_places` say where a deployment file gives each flag, `server` where its command starts;
    both are empty without such a file.
    """
    texts: dict[str, str | None] = {}
    return partial(_place, files, flag_places or {}, server, texts)


def _place(
    files: ModelFiles,
    flag_places: Mapping[str, Place],
    server: Place | None,
    texts: dict[str, str | None],
    finding: Finding,
) -> Place:
    named: Place | None = None
    for evidence in finding.evidence:
        kind, _, rest = evidence.source.partition(": ")
        if kind == "flag" and rest in flag_places:
            return flag_places[rest]
        if kind == "deployment" and server is not None and named is None:
            named = _said_line(rest) or server
        file = _file(files, kind)
        if file is None or named is not None:
            continue
        line = _line(file, rest, texts)
        if line is not None:
            named = Place(file, line)
    return named or Place(files.config_file if files.config is not None else str(files.path))


def _said_line(text: str) -> Place | None:
    """The place that `FILE:LINE` names."""
    file, _, line = text.rpartition(":")
    return Place(file, int(line)) if file and line.isascii() and line.isdecimal() else None


def _file(files: ModelFiles, kind: str) -> str | None:
    if files.kind == "gguf":
        return None
    if kind == "config":
        return files.config_file
    if kind == "side file":
        name = files.quant_side_file
        return None if name is None else str(Path(files.config_file).with_name(name))
    if kind in ("generation_config.json", "tokenizer_config.json"):
        return str(Path(files.config_file).with_name(kind))
    return None


def _line(file: str, dotted: str, texts: dict[str, str | None]) -> int | None:
    """The line of a dotted key in a JSON file, None when it is not there."""
    if file not in texts:
        try:
            texts[file] = read_text(Path(file))
        except BadInput:
            texts[file] = None
    text = texts[file]
    return None if text is None else key_line(text, dotted.split("."))


def key_line(text: str, keys: list[str]) -> int | None:
    """The line, from 1, on which a JSON document gives `keys` (outermost first), or None.

    The document is known to be valid. A configuration may lie inside another object: the full path
    wins, then the first path that ends in `keys`.
    """
    from json.decoder import JSONDecoder  # a table needs no lines

    read = JSONDecoder().raw_decode
    path: list[str | None] = []
    position, expecting_key, inner = 0, False, None
    while position < len(text):
        mark = text[position]
        if mark == '"':
            start = position
            word, position = read(text, position)
            if expecting_key:
                path[-1], expecting_key = word, False
                if path == keys:
                    return text.count("\n", 0, start) + 1
                if inner is None and path[-len(keys) :] == keys:
                    inner = start
            continue
        if mark in "{[":
            path.append(None)
            expecting_key = mark == "{"
        elif mark in "}]":
            path.pop()
            expecting_key = False
        elif mark == "," and path[-1] is not None:
            expecting_key = True
        position += 1
    return None if inner is None else text.count("\n", 0, inner) + 1
