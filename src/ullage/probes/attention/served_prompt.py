"""A prompt read in a running engine between two of its steps, and one row's weights on request.

Holds the asking and the weights; rows are read by `embedded`'s path. The engine's own blocks are
used and free again afterwards, and nothing of the prompt stays in its prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ullage.engine.attention import AttentionPath, AttentionStep
from ullage.engine.attention.protocol import first_visible
from ullage.engine.batch import Batch, Span
from ullage.engine.engine import Engine
from ullage.engine.kv import KVCache
from ullage.engine.rule import AttentionRule
from ullage.errors import BadUsage
from ullage.probes.attention.embedded import SOURCE, ProbedAttention, Sampled, spread_rows
from ullage.probes.attention.entropy import HeadTotals, RowReadings
from ullage.probes.attention.readings import AttentionReading, LayerReading
from ullage.probes.attention.sums import bend

ROWS = 64
MOST_ROWS = 1024
MOST_WEIGHTS = 4096


@dataclass(frozen=True, slots=True)
class OneRow:
    """Whose weights are asked for."""

    layer: int
    head: int
    row: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the keys that the row sees, from `first_key` on, the MOST_WEIGHTS largest, by position.

    Learned sinks are left out. `left_out` keys are not told; they weigh `left_out_mass` together.
    """

    of: OneRow
    first_key: int
    positions: tuple[int, ...]
    values: tuple[float, ...]
    left_out: int
    left_out_mass: float

    def to_json(self) -> dict[str, Any]:
        told = asdict(self)
        return {**told.pop("of"), **told}


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """`layers` None: all."""

    prompt_ids: tuple[int, ...]
    rows: int = ROWS
    layers: Collection[int] | None = None
    weights: OneRow | None = None


@dataclass(frozen=True, slots=True)
class PromptRead:
    """What a prompt showed; layers are read, means are not yet taken."""

    tokens: int
    rows: int
    totals: dict[int, HeadTotals]
    weights: Weights | None

    def to_json(self, model: str) -> dict[str, Any]:
        """As `ullage probe attention` answers, with the weights where they were asked for."""
        layers = tuple(
            LayerReading(layer, self.totals[layer].readings()) for layer in sorted(self.totals)
        )
        document = AttentionReading(model, SOURCE, self.tokens, self.rows, layers).to_json()
        weights = {} if self.weights is None else {"weights": self.weights.to_json()}
        return {**document, **weights}


def require_possible(engine: Engine, asked: AskedPrompt) -> None:
    """Raise BadUsage for layers, a head or a row that are not there."""
    heads = [layer.num_heads for layer in engine.decoder.layers]
    of = asked.weights
    wanted = [("layers", max(asked.layers, default=0), len(heads))] if asked.layers else []
    if of is not None:
        wanted.append(("weights.layer", of.layer, len(heads)))
        wanted.append(("weights.head", of.head, heads[min(of.layer, len(heads) - 1)]))
        wanted.append(("weights.row", of.row, len(asked.prompt_ids)))
    for field, found, count in wanted:
        if found >= count:
            raise BadUsage(str(found), field=field, expected=f"0 to {count - 1}")


def read_prompt(engine: Engine, asked: AskedPrompt) -> PromptRead:
    """Run the prompt and read it. In the engine's thread, between two steps.

    Raises RequestRefused for a prompt that never fits, OutOfBlocks while those who run leave too
    few, BadUsage as `require_possible`.
    """
    require_possible(engine, asked)
    wanted = frozenset(spread_rows(len(asked.prompt_ids), asked.rows))
    totals: dict[int, HeadTotals] = {}

    def choose(batch: Batch) -> Iterator[Sampled]:
        for span in batch.decodes + batch.prefills:
            inside = range(span.start, span.start + span.count)
            yield Sampled(span, tuple(position for position in inside if position in wanted))

    def take(layer: int, _: Sampled, readings: RowReadings) -> None:
        totals.setdefault(layer, HeadTotals()).add(readings)

    path: AttentionPath = ProbedAttention(
        engine.attention_path, engine.kv, choose, take, asked.layers
    )
    weighed = None if asked.weights is None else WeighedRow(path, engine.kv, asked.weights)
    engine.read_prompt(asked.prompt_ids, weighed or path)
    weights = None if weighed is None else weighed.found
    return PromptRead(len(asked.prompt_ids), len(wanted), totals, weights)


class WeighedRow:
    """Another path, and the weights of one row of one head as it passes. For one sequence."""

    def __init__(self, inner: AttentionPath, kv: KVCache, of: OneRow) -> None:
        self._inner, self._kv, self._of = inner, kv, of
        self.found: Weights | None = None

    def watches(self, batch: Batch) -> bool:
        return self._span(batch) is not None or self._inner.watches(batch)

    def _span(self, batch: Batch) -> Span | None:
        spans = batch.decodes + batch.prefills
        return next((s for s in spans if s.start <= self._of.row < s.start + s.count), None)

    def prepare(self, batch: Batch) -> AttentionStep:
        step, span = self._inner.prepare(batch), self._span(batch)
        if span is None:
            return step

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,
            v_TKD: torch.Tensor,
            rule: AttentionRule,
        ) -> torch.Tensor:
            out_THD = step(layer, q_THD, k_TKD, v_TKD, rule)
            if layer == self._of.layer:
                q_HD = q_THD[span.first + self._of.row - span.start]
                self.found = self._weigh(span, q_HD, rule)
            return out_THD

        return attend

    def _weigh(self, span: Span, q_HD: torch.Tensor, rule: AttentionRule) -> Weights:
        of, size = self._of, self._kv.block_size
        table = span.tables[self._kv.layout.group_of[of.layer]]
        first = first_visible(span, rule.window) // size
        k_SKD = self._kv.read_keys(of.layer, table[first : of.row // size + 1])
        low = 0 if rule.window is None else max(of.row - rule.window + 1, 0)
        kv_head = of.head * k_SKD.shape[1] // len(q_HD)
        k_SD = k_SKD[low - first * size : of.row + 1 - first * size, kv_head]
        scores_HRS = (q_HD.double() @ k_SD.double().T)[:, None]
        bend(scores_HRS, rule, torch.tensor([of.row]), torch.arange(low, of.row + 1))
        weights_S = scores_HRS[of.head, 0].softmax(0)
        kept = weights_S.topk(min(MOST_WEIGHTS, len(weights_S))).indices.sort().values
        left_out = len(weights_S) - len(kept)
        told = weights_S[kept]
        return Weights(
            of,
            low,
            tuple((kept + low).tolist()),
            tuple(told.tolist()),
            left_out,
            max(1.0 - float(told.sum()), 0.0) if left_out else 0.0,
        )
