"""What is kept of the rows that were read: the last ones of each layer, and what they come to.

A ring of columns per layer and head; means and percentiles are exact, over the rows that are
still there, and taken only when somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ullage_vllm.entropy import COLUMNS
from ullage_vllm.layers import Layer

MOST_ROWS = 512
MOST_BYTES = 32 << 20
"""Of one worker's memory; a model of many heads keeps fewer rows."""
QUANTILES = tuple(at / 100 for at in range(0, 101, 5))
"""Of a layer's entropies, over rows and this rank's heads: what ranks can put together."""


class Memory:
    """The last `capacity` rows of each layer."""

    def __init__(self, layers: Sequence[Layer], capacity: int | None = None) -> None:
        row_bytes = sum(layer.heads for layer in layers) * len(COLUMNS) * 4 or 1
        self.capacity = capacity or max(32, min(MOST_ROWS, MOST_BYTES // row_bytes))
        self._sinks = {layer.number: layer.rule.sinks_H is not None for layer in layers}
        self._rings: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._added: dict[int, int] = {}

    def add(self, layer: Layer, columns_RHC: torch.Tensor, positions: Sequence[int]) -> None:
        if layer.number not in self._rings:
            shape = (self.capacity, layer.heads, len(COLUMNS))
            ring = columns_RHC.new_zeros(shape), torch.zeros(self.capacity)
            self._rings[layer.number] = ring
        columns_WHC, visible_W = self._rings[layer.number]
        added = self._added.get(layer.number, 0)
        for at, position in enumerate(positions):
            place = (added + at) % self.capacity
            columns_WHC[place] = columns_RHC[at]
            visible_W[place] = position + 1 - layer.rule.low(position)
        self._added[layer.number] = added + len(positions)

    def forget(self, layer: Layer) -> None:
        self._rings.pop(layer.number, None)
        self._added.pop(layer.number, None)

    def report(self, tp_rank: int) -> list[dict[str, Any]]:
        """`layers` of the document of `ullage probe attention`, of this rank's heads."""
        found = []
        for number in sorted(self._rings):
            columns, visible = self._kept(number)
            first = tp_rank * columns.shape[1]
            heads = [
                _head(first + head, columns[:, head], visible, self._sinks[number])
                for head in range(columns.shape[1])
            ]
            found.append({"layer": number, "heads": heads})
        return found

    def entropies(self) -> list[tuple[int, list[float]]]:
        """Of each layer QUANTILES of the entropy over rows and heads."""
        found = []
        for number in sorted(self._rings):
            values = self._kept(number)[0][..., 0].reshape(-1)
            values = values[values.isfinite()].double()
            if len(values):
                at = torch.tensor(QUANTILES, dtype=torch.float64)
                found.append((number, torch.quantile(values, at).tolist()))
        return found

    def _kept(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        columns, visible = self._rings[number]
        count = min(self._added[number], self.capacity)
        return columns[:count].cpu(), visible[:count]


def _head(
    head: int, columns_RC: torch.Tensor, visible_R: torch.Tensor, sinks: bool
) -> dict[str, Any]:
    told = dict(zip(COLUMNS, columns_RC.double().unbind(-1), strict=True))
    good_R = told["entropy_nats"].isfinite() & told["max_score"].isfinite()
    told = {name: column[good_R] for name, column in told.items()}
    entropy_R, visible_R = told["entropy_nats"], visible_R[good_R].double()
    # Of one visible key the most is 0: such a row says nothing of how far it could have been.
    normalized_R = (entropy_R / visible_R.log())[visible_R > 1]
    document = {
        "head": head,
        "rows": len(good_R),
        "not_finite": int((~good_R).sum()),
        "entropy_nats": _spread(entropy_R),
        "entropy_normalized": _mean(normalized_R),
        "sink_mass": _mean(told["sink_mass"]),
        "band_mass": _mean(told["band_mass"]),
        "band_entropy_nats": _mean(told["band_entropy_nats"]),
        "effective_context": _mean(entropy_R.exp()),
        "max_score": float(told["max_score"].max()) if len(entropy_R) else None,
    }
    if sinks:
        document["entropy_with_sink_nats"] = _spread(told["entropy_with_sink_nats"])
        document["learned_sink_mass"] = _mean(told["learned_sink_mass"])
    return document


def _mean(values: torch.Tensor) -> float | None:
    values = values[values.isfinite()]
    mean = float(values.mean()) if len(values) else math.nan
    return mean if math.isfinite(mean) else None


def _spread(values: torch.Tensor) -> dict[str, float] | None:
    if not len(values):
        return None
    p5, p95 = torch.quantile(values, values.new_tensor([0.05, 0.95])).tolist()
    return {"mean": float(values.mean()), "p5": p5, "p95": p95}
