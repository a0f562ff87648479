"""The values of an adapter's tensors: reading, decoding, and writing safetensors.

Holds bytes and arrays; which tensor becomes which is `fix.py`. The only module here with numpy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ullage.anatomy.adapters.adapter import AdapterTensor
from ullage.anatomy.checkpoint import open_regular
from ullage.errors import MalformedCheckpoint, UnsupportedModel

Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[np.generic]

# Types whose values can be told; others are only copied. BF16 is the upper half of a float32.
_VIEWS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor to be written: what the header says, and how its bytes are made when it is due.

    `sources` are the keys that it is made from.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    make: Callable[[], bytes]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * element_bytes(self.dtype)


def element_bytes(dtype: str) -> int:
    """Bytes of one element. Raises UnsupportedModel for types whose values are not read."""
    if dtype not in _VIEWS:
        raise UnsupportedModel(f"values of type {dtype} are not read", expected=" or ".join(_VIEWS))
    return np.dtype(_VIEWS[dtype]).itemsize


def read_raw(tensor: AdapterTensor) -> Raw:
    """The tensor as stored, in its shape; BF16 as its 16-bit patterns.

    Raises MalformedCheckpoint when the file ends within it, UnsupportedModel for other types.
    """
    element_bytes(tensor.dtype)
    if tensor.start is None:
        raise UnsupportedModel("a pickle, which is never loaded", file=tensor.file)
    with open_regular(Path(tensor.file)) as (stream, _):
        stream.seek(tensor.start)
        data = stream.read(tensor.num_bytes)
    if len(data) != tensor.num_bytes:
        raise MalformedCheckpoint("ends within a tensor", file=tensor.file, field=tensor.key.text)
    return np.frombuffer(data, dtype=_VIEWS[tensor.dtype]).reshape(tensor.shape)


def raw_rows(
    file: str, start: int, dtype: str, shape: tuple[int, ...], first: int, last: int
) -> Raw:
    """Rows first … last−1 of a tensor at offset `start` of `file`, as stored.

    Raises MalformedCheckpoint when the file ends before them.
    """
    width = int(np.prod(shape[1:], dtype=np.int64)) * element_bytes(dtype)
    with open_regular(Path(file)) as (stream, _):
        stream.seek(start + first * width)
        data = stream.read((last - first) * width)
    if len(data) != (last - first) * width:
        raise MalformedCheckpoint("ends within a tensor", file=file)
    return np.frombuffer(data, dtype=_VIEWS[dtype]).reshape(last - first, *shape[1:])


def decoded(dtype: str, data: bytes, shape: tuple[int, ...]) -> Floats:
    """Stored bytes as float32 values of `shape`."""
    raw: Raw = np.frombuffer(data, dtype=_VIEWS[dtype])
    return floats(dtype, raw.reshape(shape))


def floats(dtype: str, raw: Raw) -> Floats:
    """Stored values as float32 (F64 is rounded)."""
    if dtype == "BF16":
        return (raw.astype("<u4") << np.uint32(16)).view("<f4")
    return raw.astype(np.float32)


def read_floats(tensor: AdapterTensor) -> Floats:
    """The tensor's values as float32, in its shape."""
    return floats(tensor.dtype, read_raw(tensor))


def header_of(tensors: Sequence[Made]) -> bytes:
    """The head of a safetensors file that holds `tensors` one after another, length included."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def write_hole(file: Path, tensors: Sequence[Made]) -> None:
    """The file with its header and, for the values, a hole: enough for all that reads headers."""
    with file.open("wb") as stream:
        stream.write(header_of(tensors))
        stream.truncate(stream.tell() + sum(tensor.num_bytes for tensor in tensors))


def fill(file: Path, tensors: Iterable[Made]) -> None:
    """Write the values behind the header of a file that `write_hole` made."""
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        stream.seek(8 + length)
        for tensor in tensors:
            data = tensor.make()
            assert len(data) == tensor.num_bytes, tensor.name
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
