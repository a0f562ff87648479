"""Weights by role, in float32, from the tensors that `anatomy` found in safetensors or GGUF.

Holds reading and decoding. Headers were checked by `anatomy` before anything here is read; what
the model does with a role is `model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ullage.anatomy import Model
from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry, open_regular
from ullage.anatomy.gguf.names import INTERLEAVED_ROTARY, half_split_rows, hf_tensor_name
from ullage.engine.support import attention_of
from ullage.errors import MalformedCheckpoint, UnsupportedModel

# Role → name in Hugging Face checkpoints; {i} is the layer. A role with `_bias` ends in .bias.
NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "mixer_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "feed_forward_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Weights:
    """Tensors by role, each checked against the shape that the spec demands."""

    def __init__(self, model: Model) -> None:
        """Raises MalformedCheckpoint when there are no weights, or not all of them."""
        index = model.checkpoint
        self._place = model.files.path
        if index is None or not index.is_complete:
            raise MalformedCheckpoint(
                "weights are missing", file=self._place, expected="all of the model's weight files"
            )
        self._spec = model.anatomy.spec
        self._gguf = index.format == "gguf"
        self._architecture = _architecture(index) if self._gguf else None
        self._entries = {
            entry.name if self._architecture is None else name: entry
            for entry in index.tensors
            if (name := _hf_name(self._architecture, entry.name)) is not None
        }

    def tensor(self, role: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor of the model itself. Raises MalformedCheckpoint if absent or misshapen."""
        return self._read(NAMES[role], shape)

    def layer(self, index: int, role: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor of layer `index`, rows of Q and K in the order of Hugging Face."""
        base = role.removesuffix("_bias")
        name = NAMES[base].format(i=index)
        if base != role:
            name = name.removesuffix(".weight") + ".bias"
        tensor = self._read(name, shape)
        if base in ("q", "k") and self._architecture in INTERLEAVED_ROTARY:
            head_dim = attention_of(self._spec.layers[index]).head_dim
            return tensor[half_split_rows(shape[0] // head_dim, head_dim)]
        return tensor

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        entry = self._entries.get(name)
        if entry is None:
            raise MalformedCheckpoint(
                "missing", file=self._place, field=name, expected=f"a tensor {list(shape)}"
            )
        if entry.shape != shape:
            raise MalformedCheckpoint(
                f"shape {list(entry.shape)}", file=entry.file, field=name, expected=f"{list(shape)}"
            )
        return _from_gguf(entry) if self._gguf else read_tensor(entry)


def _architecture(index: CheckpointIndex) -> str:
    return dict(index.metadata)["general.architecture"]


def _hf_name(architecture: str | None, name: str) -> str | None:
    return name if architecture is None else hf_tensor_name(architecture, name)


def _bytes(entry: TensorEntry) -> bytes:
    with open_regular(Path(entry.file)) as (stream, _):
        stream.seek(entry.start)
        data = stream.read(entry.num_bytes)
    if len(data) != entry.num_bytes:
        raise MalformedCheckpoint("ends within a tensor", file=entry.file, field=entry.name)
    return data


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """One tensor of a safetensors file as float32. Raises UnsupportedModel for other dtypes."""
    dtype = SAFETENSORS_DTYPES.get(entry.dtype)
    if dtype is None:
        raise UnsupportedModel(
            f"dtype {entry.dtype} is not run by the embedded engine",
            file=entry.file,
            field=entry.name,
            expected=" or ".join(SAFETENSORS_DTYPES),
        )
    # bytearray: torch warns of memory that it must not write to.
    return torch.frombuffer(bytearray(_bytes(entry)), dtype=dtype).view(entry.shape).float()


def _from_gguf(entry: TensorEntry) -> torch.Tensor:
    """Decode any type that the `gguf` package decodes; its rows are the last dimension's blocks."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    num_rows = entry.num_elements // entry.shape[-1]
    data = np.frombuffer(_bytes(entry), dtype=np.uint8).reshape(num_rows, -1)
    try:
        decoded = dequantize(data, GGMLQuantizationType[entry.dtype])
    except (NotImplementedError, KeyError) as error:
        raise UnsupportedModel(
            f"GGUF type {entry.dtype} is not decoded", file=entry.file, field=entry.name
        ) from error
    # F32 comes back as a view of read-only bytes, which torch must not be given.
    writable = np.require(decoded, dtype=np.float32, requirements=["C", "W"])
    return torch.from_numpy(writable).view(entry.shape)
