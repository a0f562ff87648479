"""How much an adapter changes each weight: ‖scale·B·A‖ against ‖W‖, from the stored values.

Holds the norms only. What the change does to answers is measured on an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ullage.adapters.base import base_tree
from ullage.adapters.merge import Wide, wide_rows
from ullage.adapters.rewriting.placing import is_whole, place_all
from ullage.adapters.rewriting.values import decoded
from ullage.anatomy.adapters.adapter import Adapter
from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry
from ullage.anatomy.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """Frobenius norms: of ΔW, and of the base's W where its values are at hand (float types of a
    safetensors file). `module` is the base checkpoint's name for it."""

    module: str
    layer: int | None
    rank: int
    scale: float
    change_norm: float
    weight_norm: float | None

    @property
    def relative(self) -> float | None:
        return self.change_norm / self.weight_norm if self.weight_norm else None


def module_changes(
    adapter: Adapter, spec: ModelSpec, base: CheckpointIndex | None
) -> tuple[ModuleChange, ...]:
    """Every pair of the adapter. Raises FixRefused for what is not a plain pair of this base."""
    tree = base_tree(spec)
    entries = (
        {} if base is None or base.format != "safetensors" else {t.name: t for t in base.tensors}
    )
    pairs_only = tuple(module for module in adapter.modules if not is_whole(module))
    found = []
    for placed in place_all(pairs_only, tree, adapter.path):
        pair = placed.pair
        made_a, made_b = pair.written("")[:2]
        a: Wide = decoded(made_a.dtype, made_a.make(), made_a.shape).astype(np.float64)
        b: Wide = decoded(made_b.dtype, made_b.make(), made_b.shape).astype(np.float64)
        # ‖B·A‖² = Σ (BᵀB)∘(AAᵀ): rank × rank numbers instead of out × in.
        norm = abs(pair.scale) * float(np.sqrt(max(0.0, float(np.sum((b.T @ b) * (a @ a.T))))))
        match = tree.find(pair.module)
        layer = None if match is None else match.module.layer
        entry = entries.get(f"{pair.module}.weight")
        found.append(
            ModuleChange(
                pair.module, layer, pair.rank, pair.scale, norm,
                None if entry is None else _norm(entry),
            )
        )  # fmt: skip
    return tuple(found)


def by_layer(changes: tuple[ModuleChange, ...]) -> dict[int, float | None]:
    """Per layer ‖ΔW‖/‖W‖ over its adapted modules together; None where a W is not at hand."""
    layers: dict[int, list[ModuleChange]] = {}
    for change in changes:
        if change.layer is not None:
            layers.setdefault(change.layer, []).append(change)
    return {
        layer: None
        if any(not change.weight_norm for change in of)
        else (sum(c.change_norm**2 for c in of) / sum((c.weight_norm or 0.0) ** 2 for c in of))
        ** 0.5
        for layer, of in sorted(layers.items())
    }


def _norm(entry: TensorEntry) -> float | None:
    total = 0.0
    for rows in wide_rows(entry):
        if rows is None:
            return None
        total += float(np.vdot(rows, rows))
    return float(np.sqrt(total))
