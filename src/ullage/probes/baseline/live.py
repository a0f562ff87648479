"""Reading along in a running engine: some rows of some steps, all layers of them.

Holds who is sampled and what is made of a row: attention statistics for anybody to see, and, with
a baseline, a judgement. In which layers attention is read is `turns`'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.engine.batch import Batch, Span
from ullage.engine.engine import Engine
from ullage.engine.kv.codecs import turned
from ullage.engine.paging.layout import KVLayout
from ullage.engine.rule import AttentionRule
from ullage.engine.taps import Taps
from ullage.errors import UnsupportedModel
from ullage.probes.attention.rows import RowReader
from ullage.probes.attention.turns import Turns
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline import usual
from ullage.probes.baseline.relations import Relations, Residuals, Row, row_of
from ullage.probes.baseline.usual import Attended

EVERY = 16
"""Steps of which one is sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveReading:
    """What one row showed. `residuals` where there is a sketch to hold it against.

    `figures_read`: which figures were read; None: all of them.
    """

    request_id: str
    row: Row
    attended: Attended
    figures: NDArray[np.float64]
    figures_read: NDArray[np.bool_] | None
    residuals: Residuals | None
    compiled: bool


Seen = Callable[[LiveReading], None]


class LiveReader:
    """The engine's `Reader`: one row of every `every`-th step, each sequence in its turn.

    `see` gets what each showed, in the engine's thread.
    """

    def __init__(
        self,
        engine: Engine,
        see: Seen,
        relations: Relations | None = None,
        *,
        every: int = EVERY,
        all_rows: bool = False,
        all_layers: bool = False,
    ) -> None:
        """`all_rows` reads every sampled row of such a step, `all_layers` attention in all of them
        however long the context is, whatever it costs. Raises UnsupportedModel for a model whose
        rows cannot be read, or that has given back what the baseline's attention looks at."""
        self.form = sketches.form_of(engine.decoder)
        # What attention is held against is what the baseline's model does, not what this one does.
        rules = (self.form if relations is None else relations.form).rules
        _require_kept(rules, engine.kv.layout)
        self._relations, self._see = relations, see
        self._reader = RowReader(engine.kv, rules)
        self._turns = None if all_layers else Turns([rule.window for rule in rules])
        self._is_turned = engine.kv.format.bits == 4
        self.every, self._all_rows = every, all_rows
        self.steps = self.rows_read = 0
        self.spent_s = 0.0

    def rows(self, batch: Batch) -> Sequence[int]:
        self.steps += 1
        if self.steps % self.every or not len(batch.sampled_rows):
            return ()
        rows: list[int] = batch.sampled_rows.tolist()
        return rows if self._all_rows else (rows[self.rows_read % len(rows)],)

    def take(self, batch: Batch, taps: Taps, logits_SV: torch.Tensor) -> None:
        started_s = time.thread_time()
        sampled: list[int] = batch.sampled_rows.tolist()
        for number, at in enumerate(taps.rows):
            self.rows_read += 1
            self._see(self._reading(batch, taps, number, sampled.index(at), logits_SV))
        self.spent_s += time.thread_time() - started_s

    def _reading(
        self, batch: Batch, taps: Taps, number: int, where: int, logits_SV: torch.Tensor
    ) -> LiveReading:
        at, form = taps.rows[number], self.form
        # Where the row stands is told by what its sequence holds, not by what the step was given.
        span = _span_of(batch, at)
        token_id, position = int(batch.token_ids_T[at]), span.context - 1
        request = (*batch.sampled, *batch.proved)[where]
        row = row_of(taps, number, logits_SV[where], token_id, position)
        turned_LO = row.places["turned"]
        mixed = form.heads * form.head_dim
        queries = turned_LO[:, :mixed].reshape(form.layers, form.heads, -1)
        if self._is_turned and taps.compiled:
            # Keys of four bits are stored turned, and so are compiled queries: turned once more
            # they are as they were.
            queries = turned(torch.from_numpy(queries.copy())).numpy()
            turned_LO[:, :mixed] = queries.reshape(form.layers, mixed)
        layers = None if self._turns is None else self._turns.due(request.id, span.context)
        found = self._reader.read(span, queries, layers)
        attended = Attended(
            found.entropy_nats, found.max_score, found.first_mass, found.band_mass, found.visible
        )
        row = replace(
            row,
            adapter=None if request.lora is None else request.lora.name,
            attended=found.output_LHD,
            attended_L=attended.read_L,
        )
        residuals = None if self._relations is None else self._relations.of(row)
        figures = usual.of_row(form, row, attended)
        read = usual.read_of(figures, attended)
        return LiveReading(request.id, row, attended, figures, read, residuals, taps.compiled)


def _require_kept(rules: Sequence[AttentionRule], layout: KVLayout) -> None:
    """Blocks that a layer's window has passed are given back: there is nothing to read there."""
    for layer, rule in enumerate(rules):
        kept = layout.groups[layout.group_of[layer]].window
        if kept is None or (rule.window is not None and rule.window <= kept):
            continue
        usual = "all tokens" if rule.window is None else f"{rule.window:,}"
        raise UnsupportedModel(
            f"a window of {kept:,} tokens in layer {layer}",
            field="sliding_window",
            expected=f"the baseline's, {usual}: what lies further back is not kept to be judged",
        )


def _span_of(batch: Batch, row: int) -> Span:
    """The sequence whose last row it is."""
    spans = (*batch.decodes, *batch.prefills)
    return next(span for span in spans if span.first + span.count - 1 == row)
