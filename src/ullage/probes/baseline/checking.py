"""A check by a baseline: a model answers prompts, some of its rows are judged; or a server tells.

Holds the run and what came of it. What is judged, and how, is `judging`'s and `verdicts`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ullage.engine.engine import Engine
from ullage.engine.lora import LoraAdapter
from ullage.engine.options import EngineOptions
from ullage.engine.request import FinishReason, SamplingParams
from ullage.errors import BadUsage
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline.baseline import Baseline, precision_of, require_for
from ullage.probes.baseline.judging import Alarm, Judge
from ullage.probes.baseline.live import EVERY, LiveReader, LiveReading
from ullage.probes.baseline.relations import Cell, Relations
from ullage.probes.baseline.usual import Figure
from ullage.probes.baseline.verdicts import Located, lacking_kinds, of_alarms, unread_kinds

NEW_TOKENS = 64
"""Answered to each prompt."""


@dataclass(frozen=True, slots=True)
class Checked:
    """`first_alarm_row` and `first_alarm_tokens`: rows read and tokens generated up to the first
    alarm, that row among them; None where there was none. `prompts` are prompts times adapters."""

    findings: tuple[Located, ...]
    rows: int
    steps: int
    tokens: int
    prompts: int
    first_alarm_row: int | None
    first_alarm_tokens: int | None

    @property
    def fired(self) -> tuple[Located, ...]:
        return tuple(one for one in self.findings if one.finding.state == "fired")


class Watched:
    """An engine that is read along and judged. Alarms stay, also once they have ended."""

    def __init__(
        self,
        engine: Engine,
        baseline: Baseline,
        *,
        every: int = EVERY,
        all_rows: bool = False,
        all_layers: bool = False,
    ) -> None:
        self._engine = engine
        self.judge = Judge(baseline)
        self.tokens = 0
        self.first_alarm: tuple[int, int] | None = None
        self._alarms: dict[Cell | Figure, Alarm] = {}
        self._exchanged: set[int] = set()
        relations = Relations(baseline.sketch, baseline.rounding)
        self.reader = LiveReader(
            engine, self._see, relations, every=every, all_rows=all_rows, all_layers=all_layers
        )
        engine.reader = self.reader

    def answer(
        self,
        name: str,
        ids: tuple[int, ...],
        params: SamplingParams,
        lora: LoraAdapter | None,
        every: int | None = None,
    ) -> bool:
        """Answer one request alone, reading one step of `every`; whether it came to its end."""
        reader, usual = self.reader, self.reader.every
        reader.every = every or usual
        (request,) = self._engine.add_request(name, ids, params, lora)
        while self._engine.has_work:
            report = self._engine.step()
            self.tokens += sum(one.token_id is not None for one in report.outputs)
        reader.every = usual
        return request.finish_reason is not FinishReason.ERROR

    def _see(self, reading: LiveReading) -> None:
        assert reading.residuals is not None
        judge = self.judge
        if judge.see(
            reading.residuals, reading.figures, reading.request_id, compiled=reading.compiled,
            figures_read=reading.figures_read,
        ):  # fmt: skip
            # Of the token that this very step is about to choose, the row is a part.
            self.first_alarm = self.first_alarm or (judge.rows, self.tokens + 1)
        for alarm in judge.alarms():
            self._alarms[alarm.at] = alarm
            layer = alarm.at.layer
            if isinstance(alarm.at, Cell) and alarm.at.part in ("gate", "up"):
                assert layer is not None
                # More rows may refute what some explained.
                (self._exchanged.add if judge.exchanged(layer) else self._exchanged.discard)(layer)

    def findings(self) -> tuple[Located, ...]:
        """All that stood at an alarm at any row so far."""
        order = {at: number for number, at in enumerate((*self.judge.cells, *self.judge.figures))}
        alarms = sorted(self._alarms.values(), key=lambda one: order[one.at])
        return of_alarms(
            alarms,
            self.judge.rows,
            self._exchanged.__contains__,
            unread_kinds(self.judge),
            lacking=lacking_kinds(self.judge),
        )


_OF_THE_BASELINE = ("--max-model-len", "--kv-cache-memory-bytes")
"""Refusals of the engine's that speak of flags which a check has not: it runs what the baseline
says."""


def options_of(baseline: Baseline) -> EngineOptions:
    """An engine's as the baseline's model ran."""
    precision = baseline.precision
    return EngineOptions(
        dtype=precision.dtype,
        quantization=precision.quantization,
        kv_cache_dtype=precision.kv_cache_dtype,
        max_model_len=baseline.max_model_len,
    )


def load(model: str | Path, baseline: Baseline, file: str, adapters: Mapping[str, str]) -> Engine:
    """The engine, ready to be judged, with its adapters.

    Raises BadUsage where the baseline is of another model or knows no such adapter.
    """
    for name in adapters:
        if name not in baseline.sketch.adapters:
            known = ", ".join(baseline.sketch.adapters) or "no adapter"
            raise BadUsage(
                f"the baseline knows {known}", file=file, field=f"--lora {name}",
                expected="an adapter that was there when it was taken, by the same name",
            )  # fmt: skip
    options = replace(options_of(baseline), enable_lora=bool(adapters))
    try:
        engine = Engine.load(model, options)
    except BadUsage as error:
        if error.field not in _OF_THE_BASELINE:
            raise
        raise BadUsage(
            f"taken at {baseline.max_model_len} tokens, which this model does not run ({error})",
            file=file, expected="a baseline of this model",
        ) from error  # fmt: skip
    if engine.tokenizer is None:
        raise BadUsage("the model has no tokenizer, and prompts are text", file=model)
    require_for(baseline, sketches.form_of(engine.decoder), precision_of(options), file)
    for name, path in adapters.items():
        engine.load_lora(name, path)
    return engine


def check(
    engine: Engine,
    baseline: Baseline,
    prompts: Sequence[str],
    *,
    new_tokens: int = NEW_TOKENS,
    every: int = EVERY,
) -> Checked:
    """Answer every prompt alone, and once more with each adapter; judge the rows that are read."""
    assert engine.tokenizer is not None
    watched = Watched(engine, baseline, every=every, all_layers=True)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    longest = engine.max_model_len - new_tokens
    if longest < 1:
        raise BadUsage(
            str(new_tokens), field="--tokens", expected=f"fewer than the {engine.max_model_len} "
            "tokens that the model was run with",
        )  # fmt: skip
    count = 0
    for text in prompts:
        ids = tuple(engine.tokenizer.encode(text))[:longest]
        if not ids:
            raise BadUsage("an empty prompt", field="--prompts", expected="text")
        for lora in (None, *engine.loras.values()):
            if not watched.answer(str(count), ids, params, lora):
                # Numbers that are not finite end a request, perhaps before a step of it is due.
                watched.answer(f"{count} again", ids, params, lora, every=1)
            count += 1
    engine.reader = None
    row, tokens = watched.first_alarm or (None, None)
    return Checked(
        watched.findings(), watched.judge.rows, watched.reader.steps, watched.tokens, count, row,
        tokens,
    )  # fmt: skip
