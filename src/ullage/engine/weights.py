"""Weights by role, in float32, from safetensors files or a GGUF file.

Holds names and decoding. What the model does with a role is `model`; header checks that guard
against lying files are `anatomy`'s and run before anything here is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ullage.anatomy.spec import ModelSpec
from ullage.engine.support import attention_of
from ullage.errors import MalformedCheckpoint, UnsupportedModel

# Role → name in Hugging Face checkpoints and in GGUF files. {i} is the layer. Biases end in .bias.
HF_NAMES: Mapping[str, str] = {
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
GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "mixer_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "feed_forward_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}
# llama.cpp's converter interleaves the rotary halves of Q and K for this architecture (which also
# covers Mistral and SmolLM2), because its kernel for it turns neighbouring dimensions.
GGUF_INTERLEAVED_ARCHITECTURES = frozenset({"llama"})
GGUF_ROPE_DIVISORS = "rope_freqs.weight"
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Store(Protocol):
    """Named tensors of one checkpoint."""

    names: Mapping[str, str]
    place: Path

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in float32, row-major [out, in]. Raises MalformedCheckpoint."""


class Weights:
    """Tensors by role, each checked against the shape that the spec demands."""

    def __init__(self, spec: ModelSpec, store: Store) -> None:
        self._spec = spec
        self._store = store

    def tensor(self, role: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor of the model itself. Raises MalformedCheckpoint if absent or misshapen."""
        return self._read(self._store.names[role], shape)

    def layer(self, index: int, role: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor of layer `index`; Q and K in the halves order of Hugging Face."""
        base = role.removesuffix("_bias")
        name = self._store.names[base].format(i=index)
        if base != role:
            name = name.removesuffix(".weight") + ".bias"
        tensor = self._read(name, shape)
        if base in ("q", "k") and isinstance(self._store, GgufStore):
            tensor = self._store.in_halves(tensor, attention_of(self._spec.layers[index]).head_dim)
        return tensor

    def rope_divisors(self) -> torch.Tensor | None:
        """Per-pair divisors of the rope frequencies that a GGUF file carries, or None."""
        if GGUF_ROPE_DIVISORS in self._store:
            return self._store.read(GGUF_ROPE_DIVISORS)
        return None

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._store:
            raise MalformedCheckpoint(
                "missing", file=self._store.place, field=name, expected=f"a tensor {list(shape)}"
            )
        tensor = self._store.read(name)
        if tuple(tensor.shape) != shape:
            raise MalformedCheckpoint(
                f"shape {list(tensor.shape)}",
                file=self._store.place,
                field=name,
                expected=f"{list(shape)}",
            )
        return tensor


def open_store(model: Path) -> Store:
    """The checkpoint at `model`: a GGUF file, a safetensors file, or a directory of one of them."""
    if model.is_file():
        return GgufStore(model) if model.suffix == ".gguf" else SafetensorsStore(model, [model])
    safetensors = sorted(model.glob("*.safetensors"))
    if safetensors:
        return SafetensorsStore(model, _listed(model) or safetensors)
    ggufs = sorted(model.glob("*.gguf"))
    if len(ggufs) == 1:
        return GgufStore(ggufs[0])
    raise MalformedCheckpoint(
        f"{len(ggufs)} GGUF files and no safetensors file", file=model, expected="weights"
    )


def _listed(model: Path) -> list[Path]:
    """The files that the sharded checkpoint's index names, or none without an index."""
    index = model / "model.safetensors.index.json"
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [model / name for name in sorted(names)]


class SafetensorsStore:
    """One or several safetensors files, read tensor by tensor."""

    names = HF_NAMES

    def __init__(self, place: Path, files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self.place = place
        self._handles: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise MalformedCheckpoint(str(error), file=file) from error
            names: list[str] = handle.keys()  # type: ignore[no-untyped-call]
            self._handles.update(dict.fromkeys(names, handle))

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise UnsupportedModel(
                f"dtype {tensor.dtype} is not run by the embedded engine",
                file=self.place,
                field=name,
                expected="float32, float16 or bfloat16",
            )
        return tensor.float()


class GgufStore:
    """One GGUF file; every quantised type that the `gguf` package decodes becomes float32."""

    names = GGUF_NAMES

    def __init__(self, place: Path) -> None:
        from gguf import GGUFReader

        self.place = place
        self.reader = GGUFReader(place)
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = str(self.metadata("general.architecture"))

    def metadata(self, key: str) -> Any:
        """The value of one metadata key, or None."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        stored = self._tensors[name]
        try:
            data = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"type {stored.tensor_type.name} cannot be decoded", file=self.place, field=name
            ) from error
        # A copy: float32 tensors would otherwise be read-only views of the mapped file.
        return torch.from_numpy(np.array(data, dtype=np.float32))

    def in_halves(self, tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Undo the converter's interleaving of each head's rows: (0, d/2, 1, …) → (0, 1, …)."""
        if self.architecture not in GGUF_INTERLEAVED_ARCHITECTURES:
            return tensor
        pairs = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
