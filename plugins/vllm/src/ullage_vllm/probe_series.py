"""The probe's series in vLLM's own /metrics: entropy per layer, and what looking cost.

Three gauges a layer and four counters an engine, whatever the number of heads and requests. Asked
of the workers every ten seconds, by the one API process that has the other series too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from ullage_vllm.engines import NoAnswer
from ullage_vllm.metrics import LABELS, _once
from ullage_vllm.probe import Probing, pooled, state
from ullage_vllm.routes import Refusal

EVERY_S = 10.0
QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
COUNTERS = {
    "ullage_probe_sampled_steps": ("sampled", "Decode steps whose attention was read."),
    "ullage_probe_missed_steps": (
        "missed", "Decode steps that were to be read and were not; GET /ullage/entropy says why.",
    ),
    "ullage_probe_rows": ("rows", "Query rows that were read, each in all layers and heads."),
    "ullage_probe_seconds": ("seconds", "Time that reading took, the forward left out."),
}  # fmt: skip


class ProbeSeries:
    """Set by `run` until the server ends."""

    def __init__(
        self,
        probing: Probing,
        model_name: str,
        engines: list[int],
        gauge: Callable[..., Any],
        counter: Callable[..., Any],
    ) -> None:
        self._probing, self._model, self._engines = probing, model_name, engines
        self._gauges = {
            name: _once(
                gauge,
                f"ullage_attn_entropy_{name}_nats",
                documentation=(
                    f"Attention entropy that {share:.0%} of the last rows and heads of a layer "
                    "stay below; NaN until rows were read."
                ),
                labelnames=[*LABELS, "layer"],
                multiprocess_mode="mostrecent",
            )
            for name, share in QUANTILES.items()
        }
        self._counters = {
            name: _once(counter, name, documentation=text, labelnames=LABELS)
            for name, (_, text) in COUNTERS.items()
        }
        self._counted: dict[tuple[int, str], float] = {}
        self._known: set[tuple[str, str, str]] = set()
        for engine in engines:
            for series in self._counters.values():
                series.labels(model_name, str(engine))

    async def run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(EVERY_S)

    async def round(self) -> None:
        try:
            answers = await self._probing.ask("summary")
        except (NoAnswer, Refusal):
            self._forget()
            return
        for engine, workers in zip(self._engines, answers, strict=False):
            self._record(engine, workers)

    def _record(self, engine: int, workers: list[dict[str, Any]]) -> None:
        labels = (self._model, str(engine))
        told = state([workers])
        for name, (field, _) in COUNTERS.items():
            before = self._counted.get((engine, name), 0.0)
            self._counters[name].labels(*labels).inc(max(told[field] - before, 0))
            self._counted[engine, name] = told[field]
        grids: dict[int, list[list[float]]] = {}
        for layer, grid in (one for worker in workers for one in worker["entropies"]):
            grids.setdefault(layer, []).append(grid)
        for layer, listed in grids.items():
            self._known.add((*labels, str(layer)))
            for name, share in QUANTILES.items():
                self._gauges[name].labels(*labels, str(layer)).set(pooled(listed, share))

    def _forget(self) -> None:
        """The workers say nothing any more: what they said of now is not known."""
        for labels in self._known:
            for gauge in self._gauges.values():
                gauge.labels(*labels).set(math.nan)
