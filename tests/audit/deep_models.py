"""Whole small models whose tensors hold numbers, with or without a planted fault.

Numbers are normal as training leaves them: norms around one, matrices around zero.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from audit_pool import Config, tensors_of, write_directory, write_safetensors

from ullage.anatomy import load
from ullage.anatomy.files.safetensors import read_safetensors
from ullage.deep.readings import DeepScan
from ullage.deep.scan import scan_checkpoint

Arrays = dict[str, np.ndarray]
Plant = Callable[[Arrays], None]


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 patterns (truncated)."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def fill(file: Path, plant: Plant | None = None) -> None:
    """Random bfloat16 into every BF16 tensor of a file; `plant` changes the patterns in place."""
    rng = np.random.default_rng(7)
    data = np.memmap(file, np.uint8, "r+")
    arrays: Arrays = {}
    for tensor in read_safetensors(file)[0]:
        patterns = np.ndarray(tensor.shape, "<u2", data, tensor.start)
        values = rng.standard_normal(tensor.shape) * 0.02
        patterns[...] = bf16(values + 1 if "norm" in tensor.name else values)
        arrays[tensor.name] = patterns
    if plant is not None:
        plant(arrays)
    data.flush()


def filled(plant: Plant | None = None) -> Callable[[Path, Config], Path]:
    """A directory whose model.safetensors holds numbers."""

    def build(place: Path, config: Config) -> Path:
        write_directory(place, config)
        write_safetensors(place / "model.safetensors", tensors_of(place))
        fill(place / "model.safetensors", plant)
        return place

    return build


def tall(plant: Plant | None = None) -> Callable[[Path, Config], Path]:
    """As `filled`, with four layers, so that a layer has others to be held against."""

    def build(place: Path, config: Config) -> Path:
        changed = copy.deepcopy(config)
        for part in (changed, changed.get("text_config", {})):
            if "num_hidden_layers" in part:
                part["num_hidden_layers"] = 4
            if "layer_types" in part:
                part["layer_types"] = (part["layer_types"] * 4)[:4]
        return filled(plant)(place, changed)

    return build


def scaled(ending: str, factor: float) -> Plant:
    """Multiplies every number of the first tensor whose name ends so."""

    def plant(arrays: Arrays) -> None:
        array = next(a for name, a in arrays.items() if name.endswith(ending))
        array[...] = bf16((array.astype(np.uint32) << 16).view(np.float32) * factor)

    return plant


def untrained(arrays: Arrays) -> None:
    for name, array in arrays.items():
        if "norm" in name:
            array[...] = 0x3F80


def put_at(ending: str, where: object, pattern: int) -> Plant:
    """Sets a bit pattern at an index of the first tensor whose name ends so."""

    def plant(arrays: Arrays) -> None:
        array = next(a for name, a in arrays.items() if name.endswith(ending))
        array[where] = pattern

    return plant


def copy_row(ending: str, count: int) -> Plant:
    """The first row of a tensor over the `count` rows that follow it."""

    def plant(arrays: Arrays) -> None:
        array = next(a for name, a in arrays.items() if name.endswith(ending))
        array[1 : count + 1] = array[0]

    return plant


def copy_layer(arrays: Arrays) -> None:
    arrays["model.layers.1.mlp.up_proj.weight"][...] = arrays["model.layers.0.mlp.up_proj.weight"]


def with_scales(pattern: int) -> Callable[[Path, Config], Path]:
    """An FP8 model whose one BF16 scale tensor has `pattern` in the middle."""

    def build(place: Path, config: Config) -> Path:
        write_directory(place, config)
        tensors = tensors_of(place)
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = ("BF16", (4, 2))
        write_safetensors(place / "model.safetensors", tensors)
        fill(place / "model.safetensors", put_at("weight_scale_inv", (2, 1), pattern))
        return place

    return build


@cache
def deep_of(place: Path) -> DeepScan | None:
    """What `--deep` reads there; None when there is nothing to read."""
    index = load(place).checkpoint
    return None if index is None or not index.has_headers else scan_checkpoint(index, jobs=1)


def pickled(*names: str) -> bytes:
    """A pickle that imports each `module attribute` and puts it in a list; never to be loaded."""
    body = b"".join(b"c" + name.replace(" ", "\n").encode() + b"\n" for name in names)
    return b"\x80\x02(" + body + b"l."


def with_pickle(file: str, *names: str) -> Callable[[Path, Config], Path]:
    def build(place: Path, config: Config) -> Path:
        write_directory(place, config)
        (place / file).write_bytes(pickled(*names))
        return place

    return build


def write_tensors(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A safetensors file of the given dtypes, shapes and bytes, in that order."""
    header, position = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + len(raw)],
        }
        position += len(raw)
    text = json.dumps(header).encode()
    file.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values())
    )
    return file
