"""Weights by slot, from the tensors that `anatomy` expects and found in safetensors or GGUF.

Holds reading and decoding. Headers were checked by `anatomy` before anything here is read; what
the model does with a slot is `model/loading.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ullage.anatomy import Model
from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry, open_regular
from ullage.anatomy.gguf.names import (
    INTERLEAVED_ROTARY,
    SHIFTED_NORMS,
    TRANSPOSED,
    half_split_rows,
    hf_tensor_name,
)
from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.naming.row import ExpertLayout
from ullage.anatomy.spec import ModelSpec
from ullage.anatomy.stored import aligned_prefix, without_common_end
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.anatomy.tensors.slots import Slots
from ullage.anatomy.tensors.tensor import TensorSpec
from ullage.errors import MalformedCheckpoint, UnsupportedModel

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Architectures whose names and layout were held against llama.cpp (tests/engine/test_gguf.py).
GGUF_ARCHITECTURES = frozenset(
    {
        *("llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2"),
        *("gemma3", "phi2", "phi3", "starcoder", "starcoder2", "stablelm", "olmo", "olmo2"),
        *("olmoe", "granite", "smollm3", "exaone4", "glm4", "ernie4_5", "seed_oss", "command-r"),
        *("cohere2", "nemotron", "gpt2", "gptneox", "arcee", "bloom", "falcon"),
    }
)


class Weights:
    """Tensors by (slot, layer), each checked against the shape that the spec demands."""

    def __init__(self, model: Model) -> None:
        """Raises MalformedCheckpoint when there are no weights, or not all of them.

        Raises UnsupportedModel for GGUF files of an architecture that was not compared.
        """
        index = model.checkpoint
        self._place = model.files.path
        if index is None or not index.is_complete:
            raise MalformedCheckpoint(
                "weights are missing", file=self._place, expected="all of the model's weight files"
            )
        spec = model.anatomy.spec
        self.expert_layout = _expert_layout(spec, index)
        self.slots = Slots(spec, self.expert_layout)
        self.architecture = _architecture(index) if index.format == "gguf" else None
        if self.from_gguf and self.architecture not in GGUF_ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.architecture} is not read from GGUF by the embedded engine",
                file=self._place,
                field="general.architecture",
                expected="one of " + ", ".join(sorted(GGUF_ARCHITECTURES)),
            )
        self._entries = {
            entry.name if self.architecture is None else name: entry
            for entry in index.tensors
            if (name := _hf_name(self.architecture, entry.name)) is not None
        }
        # The same model is stored with and without `transformer.` or `model.` in front.
        expected = expected_tensors(spec)
        self._prefixes = without_common_end(*aligned_prefix(expected, self._entries))

    @property
    def from_gguf(self) -> bool:
        return self.architecture is not None

    @property
    def norms_hold_offset(self) -> bool:
        """Whether a stored norm of a unit-offset family is 1 + weight already."""
        return self.architecture in SHIFTED_NORMS

    def has(self, slot: str, layer: int | None = None, suffix: str = ".weight") -> bool:
        """Whether the spec expects a tensor there."""
        return self.slots.find(slot, layer, suffix) is not None

    def tensor(self, slot: str, layer: int | None = None, suffix: str = ".weight") -> torch.Tensor:
        """The tensor of a slot in float32, a matrix as [out, in] however it is stored.

        Raises MalformedCheckpoint if it is absent or misshapen, UnsupportedModel for its dtype.
        """
        spec = self.slots.find(slot, layer, suffix)
        assert spec is not None, f"the spec has no {slot}{suffix}"
        return self._read(spec, spec.name, spec.shape)

    def heads(self, slot: str, layer: int, head_dim: int, suffix: str = ".weight") -> torch.Tensor:
        """`tensor` with the rows of queries or keys in the order of Hugging Face."""
        tensor = self.tensor(slot, layer, suffix)
        if self.architecture in INTERLEAVED_ROTARY:
            return tensor[half_split_rows(tensor.shape[0] // head_dim, head_dim)]
        return tensor

    def expert(self, slot: str, layer: int, expert: int) -> torch.Tensor:
        """One expert's matrix [out, in] of a slot whose tensors lie one by one, in float32.

        GGUF stacks them: only the bytes of this one are read and decoded.
        """
        spec = self.slots.find(slot, layer)
        assert spec is not None, f"the spec has no {slot}"
        stack = self._entries.get(spec.name)
        if stack is None:
            return self._read(spec, spec.name.replace("{e}", str(expert)), spec.shape)
        self._require_shape(stack, spec.name, (spec.count, *spec.shape))
        size = stack.num_bytes // spec.count
        start = stack.start + expert * size
        return self._decode(stack._replace(shape=spec.shape, start=start, end=start + size))

    def _read(self, spec: TensorSpec, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        entry = self._entry(name)
        if entry is None:
            raise MalformedCheckpoint(
                "missing", file=self._place, field=name, expected=f"a tensor {list(shape)}"
            )
        turned = spec.in_dim == 0 and len(shape) == 2  # [in, out], as Conv1D keeps it
        if turned and self._turned_back(entry):
            shape, turned = shape[::-1], False
        self._require_shape(entry, name, shape)
        tensor = self._decode(entry)
        return tensor.T.contiguous() if turned else tensor

    def _decode(self, entry: TensorEntry) -> torch.Tensor:
        return _from_gguf(entry) if self.from_gguf else read_tensor(entry)

    def _require_shape(self, entry: TensorEntry, name: str, shape: tuple[int, ...]) -> None:
        if entry.shape != shape:
            raise MalformedCheckpoint(
                f"shape {list(entry.shape)}", file=entry.file, field=name, expected=f"{list(shape)}"
            )

    def _entry(self, name: str) -> TensorEntry | None:
        entry = self._entries.get(name)
        ours, theirs = self._prefixes
        if entry is None and name.startswith(ours):
            entry = self._entries.get(theirs + name.removeprefix(ours))
        return entry

    def _turned_back(self, entry: TensorEntry) -> bool:
        """Whether this GGUF file holds the matrix as [out, in] though Hugging Face does not."""
        part = entry.name.removesuffix(".weight").rpartition(".")[2]
        return part in TRANSPOSED.get(self.architecture or "", frozenset())


def _expert_layout(spec: ModelSpec, index: CheckpointIndex) -> ExpertLayout:
    """How routed experts lie in these files: some families are found one by one and stacked."""
    naming = naming_for(spec.architecture, spec.model_type, spec.family)
    if index.format == "gguf" or any(".experts.0." in entry.name for entry in index.tensors):
        return "each"
    if any(entry.name.endswith(".experts.gate_up_proj") for entry in index.tensors):
        return "stacked" if naming.experts == "each" else naming.experts
    return naming.experts


def _architecture(index: CheckpointIndex) -> str:
    return dict(index.metadata)["general.architecture"]


def _hf_name(architecture: str | None, name: str) -> str | None:
    return name if architecture is None else hf_tensor_name(architecture, name)


def _bytes(entry: TensorEntry) -> bytearray:
    data = bytearray(entry.num_bytes)
    with open_regular(Path(entry.file)) as (stream, _):
        stream.seek(entry.start)
        if stream.readinto(data) != len(data):  # type: ignore[attr-defined]
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
    return torch.frombuffer(_bytes(entry), dtype=dtype).view(entry.shape).float()


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
    return torch.from_numpy(np.ascontiguousarray(decoded, dtype=np.float32)).view(entry.shape)
