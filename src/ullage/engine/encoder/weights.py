"""An encoder's weights by slot of the naming table, in float32, out of safetensors.

Holds finding and checking. Which slots a model has is `anatomy`'s word; what is done with them is
`encoder`.
"""

from __future__ import annotations

import torch

from ullage.anatomy import Model
from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.tensors.slots import Slots
from ullage.engine.model.weights import read_tensor
from ullage.errors import MalformedCheckpoint, UnsupportedModel

# What BERT's first files call a norm's weight and bias.
_OLD_ENDS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class EncoderWeights:
    """Tensors by slot, each checked against the shape that the spec demands."""

    def __init__(self, model: Model) -> None:
        """Raises MalformedCheckpoint when there are no weights, or not all of them."""
        index = model.checkpoint
        self._place = model.files.path
        if index is None or not index.is_complete:
            raise MalformedCheckpoint(
                "weights are missing", file=self._place, expected="all of the model's weight files"
            )
        if index.format == "gguf":
            raise UnsupportedModel(
                "encoders are not read from GGUF by the embedded engine", file=self._place
            )
        spec = model.anatomy.spec
        naming = naming_for(spec.architecture, spec.model_type, spec.family)
        self._root = naming.paths["root"] + "."
        self._slots = Slots(spec)
        self._entries = {entry.name: entry for entry in index.tensors}

    def has(self, slot: str, layer: int | None = None, suffix: str = ".weight") -> bool:
        """Whether the spec has this slot."""
        return self._slots.find(slot, layer, suffix) is not None

    def tensor(self, slot: str, layer: int | None = None, suffix: str = ".weight") -> torch.Tensor:
        """The tensor of a slot. Raises MalformedCheckpoint if it is absent or misshapen."""
        expected = self._slots.find(slot, layer, suffix)
        if expected is None:
            raise UnsupportedModel(
                f"no tensor is known for {slot}{suffix}", file=self._place, field=slot
            )
        return self._read(expected.name, expected.shape)

    def optional(
        self, slot: str, layer: int | None = None, suffix: str = ".weight"
    ) -> torch.Tensor | None:
        """As `tensor`, or None for a slot that the spec does not have."""
        return self.tensor(slot, layer, suffix) if self.has(slot, layer, suffix) else None

    def named(self, end: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of the family's own, by its name below the root."""
        return self._read(self._root + end, shape)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        entry = next((self._entries[n] for n in self._spellings(name) if n in self._entries), None)
        if entry is None:
            raise MalformedCheckpoint(
                "missing", file=self._place, field=name, expected=f"a tensor {list(shape)}"
            )
        if entry.shape != shape:
            raise MalformedCheckpoint(
                f"shape {list(entry.shape)}", file=entry.file, field=name, expected=f"{list(shape)}"
            )
        return read_tensor(entry)

    def _spellings(self, name: str) -> list[str]:
        """The name, and without the root: a bare encoder is often saved so."""
        names = [name, name.removeprefix(self._root)]
        return names + [
            spelling.removesuffix(new) + old
            for spelling in names
            for new, old in _OLD_ENDS.items()
            if spelling.endswith(new)
        ]
