"""The output-quality watch as a server has it: on the engine's logits and outputs, and as series.

Holds the series and when they are set. What is watched, and what fires, is `probes.quality`'s; the
route is `control`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ullage.engine.engine import Engine
from ullage.engine.request import Request
from ullage.engine.steps import Output
from ullage.findings.finding import State
from ullage.probes.quality.quality import ENDS, Ended, Quality
from ullage.probes.quality.rules import RULES
from ullage.probes.quality.traits import TRAITS

TENTHS = tuple(tenth / 10 for tenth in range(1, 11))
STATES_EVERY = 16
"""Answers after which rules are asked again while nothing has begun or ceased to fire."""
STATES: Mapping[State, float] = {"fired": 1.0, "clear": 0.0, "not_evaluable": float("nan")}


class AnswerWatch:
    """One engine's. Used by the engine's thread only; the registry is read by others."""

    def __init__(
        self, engine: Engine, registry: CollectorRegistry, labels: Mapping[str, str]
    ) -> None:
        assert engine.tokenizer is not None, "answers of text are watched"
        self._quality = Quality(engine.tokenizer)
        engine.on_logits = self._quality.look

        def counter(name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
            made = Counter(name, text, (*labels, label), registry=registry)
            return {value: made.labels(**labels, **{label: value}) for value in values}

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(name, text, tuple(labels), registry=registry, buckets=TENTHS)
            return made.labels(**labels)

        traits = [trait.name for trait in TRAITS]
        self._ended = counter(
            "ullage_answer_ends",
            "Answers that ended: judged by the quality watch, or why not.",
            "kind",
            ENDS,
        )
        self._asked = counter(
            "ullage_answer_trait_looks",
            "Judged answers that could have a trait, by what is known so far.",
            "trait",
            traits,
        )
        self._had = counter("ullage_answer_traits", "Those of them that had it.", "trait", traits)
        self._repetition = histogram(
            "ullage_answer_repetition_ratio",
            "Share of the 4-grams in an answer's last 256 tokens that had come before among them.",
        )
        self._confidence = histogram(
            "ullage_answer_confidence_ratio",
            "Mean probability of the likeliest next token over an answer, of the model's logits.",
        )
        states = Gauge(
            "ullage_answer_finding",
            "1 while a rule on answers fires, 0 while it is clear, NaN while it has too little to "
            "tell.",
            (*labels, "rule"),
            registry=registry,
        )
        self._states = {rule.id: states.labels(**labels, rule=rule.id) for rule in RULES}
        self._fired: frozenset[str] = frozenset()
        self._say_states()

    def take(self, outputs: Iterable[Output]) -> None:
        """What a step gave."""
        for output in outputs:
            ended = self._quality.take(output)
            if ended is not None:
                self._count(ended)

    def gone(self, request: Request) -> None:
        """A request that has ended, if `take` has not heard of it: it was cut between two steps."""
        if self._quality.runs(request):
            self._count(self._quality.end(request))

    def document(self) -> dict[str, Any]:
        """What GET /ullage/quality says."""
        return self._quality.document()

    def _count(self, ended: Ended) -> None:
        self._ended[ended.how].inc()
        for name, has in ended.traits.items():
            self._asked[name].inc()
            self._had[name].inc(int(has))
        if ended.reading is None:
            return
        if ended.reading.repetition_ratio is not None:
            self._repetition.observe(ended.reading.repetition_ratio)
        if ended.reading.confidence is not None:
            self._confidence.observe(ended.reading.confidence)
        watch = self._quality.watch
        if watch.fired != self._fired or watch.num_judged % STATES_EVERY == 0:
            self._say_states()

    def _say_states(self) -> None:
        self._fired = self._quality.watch.fired
        for finding in self._quality.findings():
            self._states[finding.id].set(STATES[finding.state])
