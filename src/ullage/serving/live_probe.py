"""The live probe as a server has it: it reads along in the engine, judges by a baseline, exports.

Holds who is asked when, and the series. What a row shows is `probes.live`'s, what is wrong
`probes.judging`'s; imported only where a server is asked to read along.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ullage.anatomy.spec import Attention, Dense, ModelSpec
from ullage.engine.batch import Batch
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.taps import Taps
from ullage.errors import UnsupportedModel
from ullage.findings.answer import NotEvaluable, finding_of
from ullage.probes.attention.embedded import SOURCE
from ullage.probes.attention.live import KeptRows, LiveAttention
from ullage.probes.attention.readings import AttentionReading
from ullage.probes.baseline import baseline as baselines
from ullage.probes.baseline import usual
from ullage.probes.baseline.baseline import Baseline, Sizes
from ullage.probes.baseline.judging import Judge
from ullage.probes.baseline.live import EVERY, LiveReader, LiveReading
from ullage.probes.baseline.relations import Relations
from ullage.probes.baseline.rules import RULES
from ullage.probes.baseline.verdicts import Located, verdicts
from ullage.serving.metric_table import PROBE_COUNTERS, PROBE_FINDINGS, PROBE_GAUGES

log = logging.getLogger("ullage.serving")
MANY = "many"
MOST_SERIES = 32
"""Of findings that fired; what is more is told of all layers together."""
STATES: Mapping[str, float] = {"clear": 0.0, "not_evaluable": math.nan}


@dataclass(frozen=True, slots=True)
class Asked:
    """`every`-th step is sampled; `baseline` was read from `file`."""

    every: int
    baseline: Baseline | None
    file: str | None


def asked_of(every: int | None, file: str | None, spec: ModelSpec, options: EngineOptions) -> Asked:
    """Raises BadInput for a baseline that is none or is not this model's as it will be run,
    UnsupportedModel for a model of which no rows can be read; both before weights are loaded.
    """
    sizes = _sizes_of(spec)
    every = EVERY if every is None else every
    if file is None:
        return Asked(every, None, None)
    baseline = baselines.read(file)
    baselines.require_for(baseline, sizes, baselines.precision_of(options), file)
    return Asked(every, baseline, file)


def _sizes_of(spec: ModelSpec) -> Sizes:
    kinds = {type(layer.feed_forward) for layer in spec.layers}
    if kinds != {Dense}:
        raise UnsupportedModel("live activations are not read of experts", field="--probe")
    mixer, mlp = spec.layers[0].mixer, spec.layers[0].feed_forward
    assert isinstance(mixer, Attention)
    assert isinstance(mlp, Dense)
    return Sizes(
        len(spec.layers), spec.hidden_size, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim,
        mlp.intermediate, spec.vocab_size, mlp.gated,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What the engine's thread hands over; made into a document by others."""

    kept: KeptRows
    findings: tuple[Located, ...] | None
    rows: int
    steps: int
    seconds: float


class LiveProbe:
    """One engine's. `begin`, `seen` and what the reader calls run in the engine's thread."""

    def __init__(
        self,
        engine: Engine,
        asked: Asked,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
    ) -> None:
        """Raises UnsupportedModel for a model whose rows cannot be read."""
        self._engine, self._asked, self._labels = engine, asked, dict(labels)
        baseline = asked.baseline
        self._relations = None
        if baseline is not None:
            self._relations = Relations(baseline.sketch, baseline.rounding)
        # During the warm-up every step is read and nobody is told: what is compiled or allocated
        # for a sampled step is so by then.
        warming = LiveReader(engine, lambda _: None, self._relations, every=1)
        engine.reader = warming
        self._reader: LiveReader | None = None
        self._attention = LiveAttention(warming.form.layers, warming.form.heads)
        self._judge = None if baseline is None else Judge(baseline)
        # What stands at an alarm, and of what anything was judged: findings follow from these.
        self._state: tuple[frozenset[int], frozenset[str], bool] | None = None
        self._strange_rows = 0
        self.failure: str | None = None
        self._told = self._findings()
        self._quantiles: tuple[int, NDArray[np.float64]] | None = None
        registry.register(self)

    def begin(self) -> None:
        """The warm-up is over, steps are somebody's: read what is to be read, and remember it."""
        every = self._asked.every
        self._reader = LiveReader(self._engine, self._see, self._relations, every=every)
        self._engine.reader = self

    def rows(self, batch: Batch) -> Sequence[int]:
        """As the reader's."""
        assert self._reader is not None
        try:
            return self._reader.rows(batch)
        except Exception as error:
            self._give_up(error)
            return ()

    def take(self, batch: Batch, taps: Taps, logits_SV: torch.Tensor) -> None:
        """As the reader's."""
        assert self._reader is not None
        try:
            self._reader.take(batch, taps, logits_SV)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Answers go on without the probe; that it is off, and why, is said wherever it speaks."""
        log.exception("the live probe failed and is off")
        self._engine.reader = None
        self.failure = f"{type(error).__name__}: {error}"[:200]
        self._told = self._findings()

    def _findings(self) -> tuple[Located, ...]:
        if self._judge is None:
            return ()
        if self.failure is None:
            return verdicts(self._judge, self._strange_rows)
        missing = NotEvaluable((f"the probe itself, which failed: {self.failure}",))
        return tuple(Located(finding_of(rule, missing), rule.kinds[0], ()) for rule in RULES)

    def _see(self, reading: LiveReading) -> None:
        self._attention.add(reading.attended)
        judge = self._judge
        if judge is None or reading.residuals is None:
            return
        judge.see(
            reading.residuals, reading.figures, reading.request_id, compiled=reading.compiled,
            figures_read=reading.figures_read,
        )  # fmt: skip
        adapter = reading.row.adapter
        self._strange_rows += adapter is not None and adapter not in judge.baseline.sketch.adapters
        state = (judge.standing(), judge.read_kinds(), self._strange_rows > 0)
        if state != self._state:
            self._state, self._told = state, self._findings()

    def seen(self) -> Seen:
        """What there is by now. In the engine's thread, between two steps."""
        findings = None if self._judge is None else self._findings()
        return Seen(self._attention.kept(), findings, *self._counts())

    def _counts(self) -> tuple[int, int, float]:
        """Rows read, steps, processor seconds."""
        reader = self._reader
        return (0, 0, 0.0) if reader is None else (reader.rows_read, reader.steps, reader.spent_s)

    def document(self, seen: Seen, model: str) -> dict[str, Any]:
        """What GET /ullage/entropy says. For any thread: it takes some milliseconds."""
        known, findings = self._asked.baseline, seen.findings
        reading = AttentionReading(model, SOURCE, 0, seen.kept.rows, seen.kept.layers())
        layers = reading.to_json()["layers"]
        if known is not None:
            _mark(layers, known)
        return {
            "model": model,
            "source": SOURCE,
            "every": self._asked.every,
            "steps": seen.steps,
            "rows": seen.rows,
            "rows_kept": seen.kept.rows,
            "seconds": seen.seconds,
            "failure": self.failure,
            "baseline": None if known is None else _told_of(known, self._asked.file),
            "findings": None if findings is None else [one.document() for one in findings],
            "layers": layers,
        }

    # --- series, made when they are asked for ---

    def describe(self) -> Iterable[Metric]:
        """All families, without values."""
        return self._families().values()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry, in the HTTP thread."""
        families, labels = self._families(), list(self._labels.values())
        for name, column in zip(PROBE_GAUGES, self._entropies().T, strict=True):
            for layer, value in enumerate(column.tolist()):
                families[name].add_metric([*labels, str(layer)], value)
        rows, _, seconds = self._counts()
        for name, count in zip(PROBE_COUNTERS, (rows, seconds), strict=True):
            families[name].add_metric(labels, count)
        for name in PROBE_FINDINGS:
            for of, value in series_of(self._told).items():
                families[name].add_metric([*labels, *of], value)
        return families.values()

    def _families(self) -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
        names = list(self._labels)
        told = PROBE_FINDINGS if self._judge is not None else {}
        return {
            **{
                n: GaugeMetricFamily(n, t, labels=[*names, "layer"])
                for n, t in PROBE_GAUGES.items()
            },
            **{n: CounterMetricFamily(n, t, labels=names) for n, t in PROBE_COUNTERS.items()},
            **{
                n: GaugeMetricFamily(n, t, labels=[*names, "id", "kind", "layer"])
                for n, t in told.items()
            },
        }

    def _entropies(self) -> NDArray[np.float64]:
        """[layers, quantiles], taken anew where a row has come."""
        if self._quantiles is None or self._quantiles[0] != self._attention.added:
            added = self._attention.added
            self._quantiles = (added, self._attention.kept().entropy_quantiles())
        return self._quantiles[1]


def series_of(findings: Iterable[Located]) -> dict[tuple[str, str, str], float]:
    """By (id, kind, layer) 1 where a rule fired; of one that did not 0, or NaN, without a place."""
    found: dict[tuple[str, str, str], float] = {}
    for one in findings:
        rule, state = one.finding.id, one.finding.state
        if state != "fired":
            found[rule, "", ""] = STATES[state]
            continue
        place = MANY if len(one.layers) > 1 else "".join(map(str, one.layers))
        if sum(value == 1.0 for value in found.values()) >= MOST_SERIES:
            place = MANY
        found[rule, one.kind, place] = 1.0
    return found


def _told_of(known: Baseline, file: str | None) -> dict[str, Any]:
    return {
        "file": file,
        "model": known.model,
        "by": known.by,
        "precision": asdict(known.precision),
        "rows": known.rows,
        "prompts": known.prompts,
    }


def _mark(layers: list[dict[str, Any]], known: Baseline) -> None:
    """Beside each head's entropy what the baseline's prompts had, and whether it is far from that:
    further than requests may differ (`usual.z_of` above 1)."""
    form = known.sketch.form
    count = form.layers * form.heads
    mean, spread = known.usual.mean[:count], known.usual.spread[:count]
    heads = [head for layer in layers for head in layer["heads"]]
    now = np.array([head["entropy_normalized"] for head in heads], np.float64)
    z = usual.z_of(now, mean, spread) if heads else now
    for at, head in enumerate(heads):
        if np.isnan(mean[at]):
            head["usual_entropy_normalized"] = None
        else:
            told = {"mean": float(mean[at]), "spread": float(spread[at])}
            head["usual_entropy_normalized"] = told
        head["outside"] = None if np.isnan(z[at]) else bool(z[at] > 1)
