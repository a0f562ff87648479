"""Tensors by what they are for: `Slots` finds the expected tensor of a slot of the naming table.

A view of `expected.py` for readers that want "the down projection of layer 3", whatever it is
called. Slots are the keys of `naming/paths.py`; whether a model has a tensor is `expected.py`'s
word.
"""

from __future__ import annotations

from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.naming.row import ExpertLayout
from ullage.anatomy.spec import ModelSpec
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.anatomy.tensors.tensor import TensorSpec


class Slots:
    """The expected tensors of a model's main stack, by (slot, layer, suffix)."""

    def __init__(self, spec: ModelSpec, experts: ExpertLayout | None = None) -> None:
        """`experts`: how routed experts lie on disk, where that is not as the family does it."""
        self._paths = naming_for(spec.architecture, spec.model_type, spec.family).paths
        self._by_name = {
            tensor.name: tensor
            for tensor in expected_tensors(spec, experts)
            if tensor.stack in ("decoder", "encoder")
        }

    def find(
        self, slot: str, layer: int | None = None, suffix: str = ".weight"
    ) -> TensorSpec | None:
        """The tensor of `slot` of one layer (None: outside the layers), or None if it has none.

        `suffix` is `.weight`, `.bias`, or empty for tensors that are named without one.
        """
        path = self._paths.get(slot)
        if not path:
            return None
        if layer is not None:
            path = self._paths["layer"].replace("{i}", str(layer)) + "." + path
        return self._by_name.get(path + suffix)
