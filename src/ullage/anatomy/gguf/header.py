"""The header of one GGUF file: metadata and tensors, with every claim checked against the file.

Holds our own reader of versions 2 and 3, either byte order, without numpy. Long arrays (the
vocabulary) are stepped over and decoded on request. What the metadata mean is `config.py`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NoReturn

from ullage.anatomy.checkpoint import TensorEntry, open_regular
from ullage.anatomy.files.json_scan import excerpt
from ullage.anatomy.gguf.types import GGML_TYPES, VALUE_KINDS, WITHDRAWN_GGML_TYPES
from ullage.errors import MalformedCheckpoint

# Limits that keep a lying header from costing time or memory. Real headers stay far below: the
# largest vocabularies give 10 MB, some 600,000 strings, and a chat template of a few kilobytes.
MAX_HEADER_BYTES = 512 * 2**20
MAX_TENSORS = 65_536  # experts are stacked: the largest models have some 2,000
MAX_METADATA_KEYS = 65_536
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 4 * 2**20
MAX_STRINGS_BYTES = 64 * 2**20
MAX_ARRAY_STRINGS = 2_000_000
MAX_ARRAY_DEPTH = 4
_EAGER_ELEMENTS = 4096
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array that was stepped over: `length` elements of `kind`, bytes start to end of the file.

    `kind` is string, array (of arrays), or a number's name such as float32.
    """

    kind: str
    length: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"[{self.length} × {self.kind}]"


# Short arrays of numbers come decoded, as tuples.
GgufValue = int | float | bool | str | tuple[int | float | bool, ...] | GgufArray


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """One GGUF file without its data. Tensors are in the order of the header, row-major shapes."""

    file: str
    version: int
    byte_order: Literal["little", "big"]
    alignment: int
    metadata: Mapping[str, GgufValue]
    tensors: tuple[TensorEntry, ...]


def read_gguf(file: Path) -> GgufHeader:
    """Metadata and tensors of one GGUF file (of a split model: of this part).

    Raises MalformedCheckpoint: not GGUF, version 1 or unknown, counts or lengths beyond the file,
    a key given twice, an unknown tensor type, tensors that overlap, are misaligned or stick out.
    """
    with _mapped(file) as cursor:
        header = _read_header(cursor)
        _check_ranges(header.tensors, header.alignment, cursor.file_bytes)
    return header


def gguf_header_bytes(file: Path) -> int | None:
    """Where the header ends, when `file` holds only a GGUF file's beginning; None if not all of it.

    Raises MalformedCheckpoint when what is there is wrong, however the file goes on.
    """
    with _mapped(file) as cursor:
        try:
            _read_header(cursor)
        except _Truncated:
            return None
        return cursor.position


class _Truncated(ValueError):
    """The bytes that the header claims go on behind the end of the file."""


def read_gguf_array(header: GgufHeader, key: str) -> tuple[int | float | bool | str, ...]:
    """The elements of the array `key`, such as `tokenizer.ggml.tokens`.

    Raises KeyError when the header has no such key, MalformedCheckpoint when it is not a flat array
    or no longer lies where the header was read.
    """
    value = header.metadata[key]
    if isinstance(value, tuple):
        return value
    if not isinstance(value, GgufArray) or value.kind == "array":
        raise MalformedCheckpoint(
            excerpt(str(value)), file=header.file, field=key, expected="a flat array"
        )
    if value.length > MAX_ARRAY_STRINGS:
        raise MalformedCheckpoint(
            f"{value.length} elements",
            file=header.file,
            field=key,
            expected=f"at most {MAX_ARRAY_STRINGS}",
        )
    with _mapped(Path(header.file)) as cursor:
        cursor.big_endian = header.byte_order == "big"
        cursor.position, cursor.field = value.start, key
        if value.kind == "string":
            return tuple(cursor.string(MAX_STRING_BYTES) for _ in range(value.length))
        number = next(n for n, kind in VALUE_KINDS.items() if kind[0] == value.kind)
        return cursor.numbers(number, value.length)


class _Cursor:
    """A position in the mapped header; every read is checked against the end.

    A ValueError raised here is turned into MalformedCheckpoint, with `field`, by `_mapped`.
    """

    def __init__(self, file: Path, data: mmap.mmap, file_bytes: int) -> None:
        self.file = file
        self.data = data
        self.file_bytes = file_bytes
        self.end = len(data)
        self.position = 0
        self.field: str | None = None
        self.strings_left = MAX_ARRAY_STRINGS
        self.string_bytes_left = MAX_STRINGS_BYTES
        self.big_endian = False

    @property
    def order(self) -> str:
        return ">" if self.big_endian else "<"

    def left(self) -> int:
        return self.end - self.position

    def fail(self, needed: int) -> NoReturn:
        """Raises ValueError: `needed` bytes do not lie between the position and the end."""
        if self.end < self.file_bytes:
            raise ValueError(f"the header is longer than {MAX_HEADER_BYTES} bytes")
        raise _Truncated(
            f"{needed} bytes are claimed at byte {self.position}, the file ends at {self.end}"
        )

    def step(self, num_bytes: int) -> int:
        """Moves on by `num_bytes` that must exist; returns where they begin."""
        begin = self.position
        if num_bytes > self.end - begin:
            self.fail(num_bytes)
        self.position = begin + num_bytes
        return begin

    def u32(self) -> int:
        number: int = struct.unpack_from(self.order + "I", self.data, self.step(4))[0]
        return number

    def u64(self) -> int:
        number: int = struct.unpack_from(self.order + "Q", self.data, self.step(8))[0]
        return number

    def string(self, max_bytes: int) -> str:
        num_bytes = self.u64()
        if num_bytes > self.left():
            self.fail(num_bytes)
        if num_bytes > max_bytes or num_bytes > self.string_bytes_left:
            raise ValueError(
                f"a string of {num_bytes} bytes at byte {self.position}; at most "
                f"{min(max_bytes, self.string_bytes_left)} are read"
            )
        self.string_bytes_left -= num_bytes
        begin = self.step(num_bytes)
        try:
            return self.data[begin : self.position].decode()
        except UnicodeDecodeError:
            raise ValueError(f"the string at byte {begin} is not UTF-8") from None

    def numbers(self, kind: int, length: int) -> tuple[int | float | bool, ...]:
        name, code, size = VALUE_KINDS[kind]
        begin = self.step(length * size)
        values = struct.unpack_from(f"{self.order}{length}{code}", self.data, begin)
        if name != "bool":
            return values
        if any(value > 1 for value in values):
            raise ValueError(f"a bool at byte {begin} is neither 0 nor 1")
        return tuple(map(bool, values))

    def value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self.string(MAX_STRING_BYTES)
        if kind != _ARRAY:
            return self.numbers(_known(kind), 1)[0]
        element, length = _known(self.u32()), self.u64()
        begin = self.position
        name, _, size = VALUE_KINDS[element]
        if size and length <= _EAGER_ELEMENTS:
            return self.numbers(element, length)
        self.skip_elements(element, length, depth=1)
        return GgufArray(name, length, begin, self.position)

    def skip_elements(self, element: int, length: int, depth: int) -> None:
        """Steps over `length` array elements without keeping any."""
        size = VALUE_KINDS[element][2]
        if size:
            self.step(length * size)
            return
        # Each string takes 8 bytes at least, each array 12: a count that cannot be is caught here.
        if length * 8 > self.left():
            self.fail(length * 8)
        self.strings_left -= length
        if self.strings_left < 0:
            raise ValueError(f"arrays hold more than {MAX_ARRAY_STRINGS} strings or arrays")
        if element == _STRING:
            self.skip_strings(length)
            return
        if depth >= MAX_ARRAY_DEPTH:
            raise ValueError(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        for _ in range(length):
            self.skip_elements(_known(self.u32()), self.u64(), depth + 1)

    def skip_strings(self, length: int) -> None:
        position, data = self.position, self.data
        unpack = struct.Struct(self.order + "Q").unpack_from
        try:
            for _ in range(length):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError, IndexError):
            self.position = min(position, self.end)
            self.fail(8)
        if position > self.end:
            self.fail(position - self.position)
        self.position = position


@contextmanager
def _mapped(file: Path) -> Iterator[_Cursor]:
    """A cursor over the beginning of `file`, where its header must lie."""
    with open_regular(file) as (stream, file_bytes):
        if file_bytes < 24:
            raise MalformedCheckpoint(
                f"{file_bytes} bytes", file=file, expected="a GGUF file of at least 24 bytes"
            )
        window = min(file_bytes, MAX_HEADER_BYTES)
        with mmap.mmap(stream.fileno(), window, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(file, data, file_bytes)
            try:
                yield cursor
            except ValueError as error:
                raise MalformedCheckpoint(str(error), file=file, field=cursor.field) from None


def _known(kind: int) -> int:
    if kind not in VALUE_KINDS:
        raise ValueError(f"the value kind {kind} is not known")
    return kind


def _read_header(cursor: _Cursor) -> GgufHeader:
    version = _read_version(cursor)
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    # The shortest tensor entry takes 24 bytes, the shortest key-value 13.
    for number, most, least_bytes, what in (
        (num_tensors, MAX_TENSORS, 24, "tensors"),
        (num_keys, MAX_METADATA_KEYS, 13, "metadata keys"),
    ):
        if number > most or number * least_bytes > cursor.left():
            kind = ValueError if number > most else _Truncated
            raise kind(f"{number} {what} are claimed in {cursor.file_bytes} bytes")
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(metadata)
    cursor.field = "tensor list"
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    cursor.field = None
    file = str(cursor.file)
    return GgufHeader(
        file=file,
        version=version,
        byte_order="big" if cursor.big_endian else "little",
        alignment=alignment,
        metadata=MappingProxyType(metadata),
        tensors=tuple(
            TensorEntry(name, dtype, shape, file, data_start + offset, data_start + offset + size)
            for name, dtype, shape, offset, size in infos
        ),
    )


def _read_version(cursor: _Cursor) -> int:
    """The version (2 or 3); sets the byte order on the way."""
    magic = cursor.data[: cursor.step(4) + 4]
    if magic != b"GGUF":
        old = magic in (b"ggml", b"lmgg", b"tjgg", b"fmgg", b"algg")
        kind = "an older ggml format" if old else "not a GGUF file"
        raise ValueError(f"begins with {magic!r}, which is {kind}")
    version = cursor.u32()
    if version & 0xFFFF == 0 and version:
        cursor.big_endian = True
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version == 1:
        raise ValueError("GGUF version 1, which no engine reads any more; versions 2 and 3 are")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; versions 2 and 3 are known")
    return version


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_keys):
        cursor.field = "metadata"
        key = cursor.string(MAX_KEY_BYTES)
        if key in metadata:
            raise ValueError(f"the key {excerpt(key)} is given twice")
        cursor.field = key if len(key) <= 120 else key[:120] + "…"
        metadata[key] = cursor.value(cursor.u32())
    cursor.field = None
    return metadata


def _alignment(metadata: Mapping[str, GgufValue]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment}; a power of two is expected")
    return alignment


def _read_tensor_info(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, type, row-major shape, offset in the data section and size in bytes of one tensor."""
    name = cursor.string(MAX_KEY_BYTES)
    num_dimensions = cursor.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"{excerpt(name)} has {num_dimensions} dimensions; at most 4 are allowed")
    sizes = tuple(cursor.u64() for _ in range(num_dimensions))
    number, offset = cursor.u32(), cursor.u64()
    if number not in GGML_TYPES:
        what = WITHDRAWN_GGML_TYPES.get(number)
        kind = f"{what}, which ggml has withdrawn" if what else "not known"
        raise ValueError(f"{excerpt(name)} is of the type {number}, {kind}")
    dtype, block_elements, block_bytes = GGML_TYPES[number]
    num_elements = 1
    for size in sizes:
        num_elements *= size
    if num_elements >= 2**63 or max(sizes, default=0) >= 2**63:
        raise ValueError(f"{excerpt(name)} has the impossible shape {list(reversed(sizes))}")
    row = sizes[0] if sizes else 1
    if row % block_elements:
        raise ValueError(
            f"{excerpt(name)} has rows of {row} elements; {dtype} packs them by {block_elements}"
        )
    num_bytes = num_elements // block_elements * block_bytes
    return name, dtype, tuple(reversed(sizes)), offset, num_bytes


def _check_ranges(tensors: tuple[TensorEntry, ...], alignment: int, file_bytes: int) -> None:
    """ValueError unless names differ and ranges are aligned, apart and inside the file."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"the tensor {excerpt(tensor.name)} is given twice")
        names.add(tensor.name)
        if tensor.start % alignment:
            raise ValueError(
                f"{excerpt(tensor.name)} begins at byte {tensor.start}, "
                f"which is not a multiple of {alignment}"
            )
        if tensor.end > file_bytes:
            raise ValueError(
                f"{excerpt(tensor.name)} ends at byte {tensor.end}; the file has {file_bytes}, "
                "so it is truncated or its header lies"
            )
    position, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start < position:
            raise ValueError(f"{excerpt(tensor.name)} overlaps {excerpt(before)}")
        position, before = tensor.end, tensor.name
