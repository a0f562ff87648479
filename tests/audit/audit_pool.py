"""The subjects that the rules are tried on: own small models, the shared real ones, dressed up.

Own models lie in `models/` as configurations; a *whole* model is such a configuration with side
files and safetensors of zeros whose names and shapes are those that its family stores.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import Path

from ullage.anatomy import Model, load
from ullage.anatomy.tensors.expected import expected_tensors

OWN = Path(__file__).parent / "models"
SHARED = Path(__file__).parents[3] / "shared" / "configs"
NO_SHARED = f"the real configurations are not here ({SHARED})"
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1}
Config = dict[str, object]


def own_names() -> list[str]:
    return sorted(path.stem for path in OWN.glob("*.json"))


def shared_names() -> list[str]:
    """The shared configurations by name, the quantisation side files not among them."""
    names = (path.name.removesuffix("_config.json") for path in SHARED.glob("*_config.json"))
    return sorted(name for name in names if not name.endswith("_hf_quant"))


def config_path(name: str) -> Path:
    own = OWN / f"{name}.json"
    return own if own.is_file() else SHARED / f"{name}_config.json"


@cache
def _config_text(name: str) -> str:
    return config_path(name).read_text()


def config_of(name: str) -> Config:
    return json.loads(_config_text(name))


def side_file_of(name: str) -> Config | None:
    path = SHARED / f"{name}_hf_quant_config.json"
    return json.loads(path.read_text()) if path.is_file() else None


@cache
def plain_model(name: str) -> Model:
    return load(config_path(name))


def text_part(config: Config) -> Config:
    """The part of a configuration that describes the language model (the same object)."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def write_directory(
    place: Path, config: Config, files: Mapping[str, object] = {}, side: Config | None = None
) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    if side is not None:
        (place / "hf_quant_config.json").write_text(json.dumps(side))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (place / name).write_text(text)
    return place


def side_files(config: Config) -> dict[str, object]:
    """Generation and tokenizer settings that agree with a configuration."""
    text = text_part(config)
    ends = config.get("eos_token_id") or text.get("eos_token_id") or 2
    first = ends[0] if isinstance(ends, list) else ends
    return {
        "generation_config.json": {"eos_token_id": ends},
        "tokenizer_config.json": {
            "eos_token": "<end>",
            "added_tokens_decoder": {str(first): {"content": "<end>", "special": True}},
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        },
        "tokenizer.json": {
            "added_tokens": [{"id": first, "content": "<end>", "special": True}],
            "model": {"type": "BPE", "vocab": {"a": 0, '"vocab": {': 1, "b\\": 2}, "merges": []},
        },
        "README.md": "---\nlicense: apache-2.0\n---\nA model.\n",
    }


Tensors = dict[str, tuple[str, tuple[int, ...]]]


def tensors_of(place: Path, dtype: str = "BF16") -> Tensors:
    """Name → (dtype, shape) of what the configuration in `place` stores, experts written out."""
    found: Tensors = {}
    for tensor in expected_tensors(load(place).anatomy.spec):
        for expert in range(tensor.count):
            found[tensor.name.replace("{e}", str(expert))] = (dtype, tensor.shape)
    return found


def write_safetensors(path: Path, tensors: Tensors) -> int:
    """A file of zeros (sparse on disk) with these tensors; returns the bytes of tensor data."""
    header: dict[str, object] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BYTES[dtype]
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + position)
    return position


def write_whole(
    place: Path,
    config: Config,
    files: Mapping[str, object] | None = None,
    alter: Callable[[Tensors], None] | None = None,
    dtype: str = "BF16",
) -> Path:
    """A directory with configuration, side files and one model.safetensors."""
    write_directory(place, config, side_files(config) if files is None else files)
    tensors = tensors_of(place, dtype)
    if alter is not None:
        alter(tensors)
    write_safetensors(place / "model.safetensors", tensors)
    return place


def changed(name: str, change: Callable[[Config], None] | None) -> Config:
    config = copy.deepcopy(config_of(name))
    if change is not None:
        change(config)
    return config
