"""What is kept of the rows that were read: the last ones, and what they come to.

Columns per layer and head; means and percentiles are exact, over the rows that are
still there, and taken only when somebody asks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ullage_vllm.entropy import COLUMNS
from ullage_vllm.layers import Layer

MOST_ROWS = 512
MOST_BYTES = 32 << 20
"""Of one worker's memory; a model of many heads keeps fewer rows."""
QUANTILES = tuple(at / 100 for at in range(0, 101, 5))
"""Of a layer's entropies, over rows and this rank's heads: what ranks can put together."""


@dataclass(frozen=True)
class Row:
    """One row in all layers that were read: `columns_HC` of the heads of all, layer by layer."""

    columns_HC: torch.Tensor
    position: int
    layers: tuple[Layer, ...]


class Memory:
    """The last `capacity` rows."""

    def __init__(self, layers: Sequence[Layer], capacity: int | None = None) -> None:
        row_bytes = sum(layer.heads for layer in layers) * len(COLUMNS) * 4 or 1
        most = capacity or max(32, min(MOST_ROWS, MOST_BYTES // row_bytes))
        self._rows: deque[Row] = deque(maxlen=most)
        self._refused: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        self._rows.append(row)

    def forget(self, layer: Layer) -> None:
        self._refused.add(layer.number)

    def report(self, tp_rank: int) -> list[dict[str, Any]]:
        """`layers` of the document of `ullage probe attention`, of this rank's heads."""
        found = []
        for layer, columns_RHC, visible_R in self._by_layer():
            first, sinks = tp_rank * layer.heads, layer.rule.sinks_H is not None
            heads = [
                _head(first + head, columns_RHC[:, head], visible_R, sinks)
                for head in range(layer.heads)
            ]
            found.append({"layer": layer.number, "heads": heads})
        return found

    def entropies(self) -> list[tuple[int, list[float]]]:
        """Of each layer QUANTILES of the entropy over rows and heads."""
        found = []
        for layer, columns_RHC, _ in self._by_layer():
            values = columns_RHC[..., 0].reshape(-1)
            values = values[values.isfinite()].double()
            if len(values):
                at = torch.tensor(QUANTILES, dtype=torch.float64)
                found.append((layer.number, torch.quantile(values, at).tolist()))
        return found

    def _by_layer(self) -> Iterator[tuple[Layer, torch.Tensor, torch.Tensor]]:
        """Each layer, its columns [rows, heads, columns] and how many keys each row sees."""
        parts: dict[int, list[torch.Tensor]] = {}
        visible: dict[int, list[int]] = {}
        known: dict[int, Layer] = {}
        for row in self._rows:
            split = torch.split(row.columns_HC.cpu(), [layer.heads for layer in row.layers])
            for layer, columns_HC in zip(row.layers, split, strict=True):
                known[layer.number] = layer
                parts.setdefault(layer.number, []).append(columns_HC)
                seen = row.position + 1 - layer.rule.low(row.position)
                visible.setdefault(layer.number, []).append(seen)
        for number in sorted(known.keys() - self._refused):
            yield known[number], torch.stack(parts[number]), torch.tensor(visible[number])


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
