"""The header of one safetensors file → its tensors, with every claim checked against the file.

Holds the reader of a single file; sharded checkpoints are `index.py`. Only the header is read. The
format: 8 bytes little-endian length, a JSON object, then the data without holes (safetensors 0.8).
"""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

from ullage.anatomy.checkpoint import TensorEntry, open_regular
from ullage.anatomy.files.json_scan import (
    ONCE,
    excerpt,
    read_flat_object,
    read_members,
    read_string,
    skip_space,
)
from ullage.errors import MalformedCheckpoint

# The reference implementation refuses longer headers (safetensors 0.8, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS_PER_FILE = 200_000
MAX_METADATA_KEYS = 100_000
_MAX_ENTRY_CHARS = 4096
_MAX_DIMENSION = 2**63
_RANGE = attrgetter("start", "end")

# Members as every known writer lays them out, up to 1,000 at a time. Only a shortcut (five times as
# fast as decoding the objects one by one): whatever does not match, or is wrong, goes through the
# JSON reader and its checks. No part of a member can match in two ways, so none is tried twice.
_NUMBER = "(?:0|[1-9][0-9]{0,17}+)"
_SIZES = rf"(?:{_NUMBER}(?:, ?{_NUMBER}){{0,15}}{ONCE})?{ONCE}"


def _member(name: str, dtype: str, sizes: str, number: str) -> str:
    return (
        rf'"{name}": ?\{{"dtype": ?"{dtype}", ?"shape": ?\[{sizes}\], ?'
        rf'"data_offsets": ?\[{number}, ?{number}\]\}}, ?'
    )


_PARTS = (r"[ !#-\[\]-~]{1,1000}+", "[A-Z0-9_]{1,16}+", _SIZES, _NUMBER)
_USUAL_MEMBER = re.compile(_member(*(f"({part})" for part in _PARTS)))
_USUAL_RUN = re.compile(f"(?:{_member(*_PARTS)}){{0,1000}}{ONCE}")

# Bits per element of every dtype of the format (safetensors 0.8).
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def read_safetensors(file: Path) -> tuple[tuple[TensorEntry, ...], tuple[tuple[str, str], ...]]:
    """Tensors in the order of their data, and the `__metadata__` key-values.

    Raises MalformedCheckpoint: truncated or overlong header, not JSON, a key given twice, an
    unknown dtype, sizes that contradict shapes, ranges that overlap, leave holes or leave the file.
    """
    text, data_start, file_bytes = _read_header(file)
    try:
        tensors, metadata = _parse_header(text, file, data_start)
    except (ValueError, RecursionError) as error:
        raise MalformedCheckpoint(f"the header is not valid: {_reason(error)}", file=file) from None
    del text
    return _in_file_order(tensors, file, data_start, file_bytes), metadata


def _reason(error: Exception) -> str:
    return "values nested too deeply" if isinstance(error, RecursionError) else str(error)


def _read_header(file: Path) -> tuple[str, int, int]:
    """The header's text, the offset at which data begins, and the size of the file."""
    with open_regular(file) as (stream, file_bytes):
        if file_bytes < 8:
            raise MalformedCheckpoint(
                f"{file_bytes} bytes", file=file, expected="a safetensors file of at least 8 bytes"
            )
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise MalformedCheckpoint(
                f"claims {header_bytes} bytes",
                file=file,
                field="header length",
                expected=f"at most {MAX_HEADER_BYTES}",
            )
        if 8 + header_bytes > file_bytes:
            raise MalformedCheckpoint(
                f"claims {header_bytes} bytes, but {file_bytes - 8} follow it",
                file=file,
                field="header length",
                expected="a file that is complete",
            )
        raw = stream.read(header_bytes)
    if len(raw) != header_bytes:
        raise MalformedCheckpoint("the file shrank while it was read", file=file)
    # Counting is a thousand times faster than finding out while parsing.
    if raw.count(b'"data_offsets"') > MAX_TENSORS_PER_FILE:
        raise MalformedCheckpoint(f"more than {MAX_TENSORS_PER_FILE} tensors", file=file)
    try:
        return raw.decode(), 8 + header_bytes, file_bytes
    except UnicodeDecodeError as error:
        raise MalformedCheckpoint(
            f"byte {error.start} of the header is not UTF-8", file=file
        ) from None


def _parse_header(
    text: str, file: Path, data_start: int
) -> tuple[list[TensorEntry], tuple[tuple[str, str], ...]]:
    """All tensors in the order of the text. ValueError for what is not JSON."""
    name_of_file = str(file)
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    has_metadata, all_sound = False, True

    def read_metadata(key: str, pos: int) -> int:
        if key in metadata:
            raise ValueError(f"the metadata key {excerpt(key)} is given twice")
        if len(metadata) >= MAX_METADATA_KEYS:
            raise ValueError(f"more than {MAX_METADATA_KEYS} metadata keys")
        metadata[key], end = read_string(text, pos)
        return end

    def read_tensor(name: str, pos: int) -> int:
        nonlocal has_metadata
        if name == "__metadata__":
            if has_metadata:
                raise ValueError('the key "__metadata__" is given twice')
            has_metadata = True
            # serde's Option: an explicit null is an absent map.
            return (
                pos + 4 if text.startswith("null", pos) else read_members(text, pos, read_metadata)
            )
        if name in tensors:
            raise ValueError(f"the tensor {excerpt(name)} is given twice")
        if len(tensors) >= MAX_TENSORS_PER_FILE:
            raise ValueError(f"more than {MAX_TENSORS_PER_FILE} tensors")
        try:
            fields, after = read_flat_object(text, pos, _MAX_ENTRY_CHARS)
        except ValueError as error:
            raise ValueError(f"tensor {excerpt(name)}: {error}") from None
        values = (fields.get("dtype"), fields.get("shape"), fields.get("data_offsets"))
        tensors[name] = _entry(name, *values, file, name_of_file, data_start)
        return after

    def read_usual(pos: int) -> int:
        nonlocal all_sound
        if all_sound:  # else the reader of single members is about to say what is wrong
            pos, all_sound = _read_usual(text, pos, tensors, name_of_file, data_start)
        return pos

    end = read_members(text, 0, read_tensor, read_usual)
    if skip_space(text, end) != len(text):
        raise ValueError(f"text after the closing brace, at character {end}")
    return list(tensors.values()), tuple(metadata.items())


def _read_usual(
    text: str, pos: int, tensors: dict[str, TensorEntry], name_of_file: str, data_start: int
) -> tuple[int, bool]:
    """Takes members in the usual layout; the first position that it leaves, and if all were sound.

    Stops before a run of members of which any is wrong.
    """
    layouts: dict[tuple[str, str], tuple[str, tuple[int, ...], int]] = {}
    while True:
        run = _USUAL_RUN.match(text, pos)
        if run is None or run.end() == pos:
            return pos, True
        members = _USUAL_MEMBER.findall(text, pos, run.end())
        made = {}
        for name, dtype, sizes, begin_text, end_text in members:
            # A checkpoint has hundreds of tensors of each dtype and shape.
            layout = layouts.get((dtype, sizes)) or _layout(layouts, dtype, sizes)
            begin, end = int(begin_text), int(end_text)
            if (end - begin) * 8 != layout[2]:
                return pos, False
            made[name] = TensorEntry(
                name, layout[0], layout[1], name_of_file, data_start + begin, data_start + end
            )
        is_new = len(made) == len(members) and tensors.keys().isdisjoint(made)
        room = MAX_TENSORS_PER_FILE - len(tensors)
        if not is_new or len(made) > room or "__metadata__" in made:
            return pos, False
        tensors.update(made)
        pos = run.end()


def _layout(
    layouts: dict[tuple[str, str], tuple[str, tuple[int, ...], int]], dtype: str, sizes: str
) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and bits of one tensor, noted for the next; −1 bits for an unknown dtype."""
    shape = tuple(map(int, sizes.split(","))) if sizes else ()
    bits = DTYPE_BITS.get(dtype, -1)
    for size in shape:
        bits *= size
    layouts[dtype, sizes] = layout = (dtype, shape, bits if dtype in DTYPE_BITS else -1)
    return layout


def _entry(
    name: str,
    dtype: object,
    shape: object,
    offsets: object,
    file: Path,
    name_of_file: str,
    data_start: int,
) -> TensorEntry:
    """One tensor whose dtype, shape and offsets are well-formed and agree with each other."""
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        raise _wrong(file, name, "dtype", dtype, "one of " + ", ".join(DTYPE_BITS))
    if type(shape) is not list:
        raise _wrong(file, name, "shape", shape, "a list of non-negative integers")
    if type(offsets) is not list or len(offsets) != 2:
        raise _wrong(file, name, "data_offsets", offsets, "two byte offsets, begin ≤ end")
    num_elements = 1
    for size in shape:
        if type(size) is not int or not 0 <= size < _MAX_DIMENSION:
            raise _wrong(file, name, "shape", shape, "a list of non-negative integers")
        num_elements *= size
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < _MAX_DIMENSION:
        raise _wrong(file, name, "data_offsets", offsets, "two byte offsets, begin ≤ end")
    if (end - begin) * 8 != num_elements * DTYPE_BITS[dtype]:
        raise MalformedCheckpoint(
            f"{end - begin} bytes for the shape {_short(shape)} in {dtype}",
            file=file,
            field=f"{excerpt(name)} data_offsets",
            expected=f"{num_elements * DTYPE_BITS[dtype]} bits in whole bytes",
        )
    return TensorEntry(
        name, dtype, tuple(shape), name_of_file, data_start + begin, data_start + end
    )


def _wrong(file: Path, name: str, field: str, found: object, expected: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(
        _short(found), file=file, field=f"{excerpt(name)} {field}", expected=expected
    )


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "…"


def _in_file_order(
    tensors: list[TensorEntry], file: Path, data_start: int, file_bytes: int
) -> tuple[TensorEntry, ...]:
    """`tensors` sorted by their ranges, which must cover the data from first to last byte."""
    tensors.sort(key=_RANGE)
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps the tensor before it" if tensor.start < position else "leaves a hole"
            raise MalformedCheckpoint(
                f"begins at byte {tensor.start} and {what}",
                file=file,
                field=f"{excerpt(tensor.name)} data_offsets",
                expected=f"byte {position}",
            )
        position = tensor.end
    if position != file_bytes:
        kind = "truncated" if file_bytes < position else "longer than its tensors"
        raise MalformedCheckpoint(
            f"{file_bytes} bytes, so the file is {kind}", file=file, expected=f"{position} bytes"
        )
    return tuple(tensors)
