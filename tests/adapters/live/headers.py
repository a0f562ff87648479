"""Adapters in a few hundred bytes: what a file holds without its values, and back into files.

Writing needs no torch, so that the recorded outcomes can be asked of ullage in a blink.
"""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I8": 8, "U8": 8}
FILLING = b"\x3c"
"""Repeated, a small positive number in every float format: a matrix of it has an effect."""


def describe(folder: Path) -> dict[str, Any]:
    """Every file under `folder`: JSON as it is, safetensors by their headers, others whole."""
    return {
        str(path.relative_to(folder)): _describe_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".md"
    }


def _describe_file(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return {"json": json.loads(path.read_text())}
    if path.suffix == ".safetensors":
        return {"safetensors": _describe_safetensors(path.read_bytes())}
    return {"zlib": base64.b64encode(zlib.compress(_of_ones(path), 9)).decode()}


def _of_ones(path: Path) -> bytes:
    """A file of torch.save with every value 1: the same names and shapes, and it compresses."""
    import torch

    written = io.BytesIO()
    tensors = torch.load(path, weights_only=True)
    torch.save({name: torch.ones_like(value) for name, value in tensors.items()}, written)
    return written.getvalue()


def _describe_safetensors(raw: bytes) -> dict[str, Any]:
    """Name → [dtype, shape], and `true` after them when every value is zero."""
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    said: dict[str, Any] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        said[name] = [entry["dtype"], entry["shape"]] + [True] * (not any(raw[start:end]))
    return said


def write(files: dict[str, Any], folder: Path) -> None:
    """The files again, with other values: equal headers, nothing zero that was not zero."""
    for name, said in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "json" in said:
            path.write_text(json.dumps(said["json"]))
        elif "safetensors" in said:
            path.write_bytes(_safetensors(said["safetensors"]))
        else:
            path.write_bytes(zlib.decompress(base64.b64decode(said["zlib"])))


def _safetensors(said: dict[str, Any]) -> bytes:
    header, values, offset = {}, [], 0
    for name, (dtype, shape, *zero) in said.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        values.append((b"\0" if zero else FILLING) * size)
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(values)
