"""A server's answers against its own past: what was recent, what was before, what has changed.

Holds the windows and the evidence of each trait. What traits mean together is `rules`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from ullage.probes.quality.answer import AnswerReading
from ullage.probes.quality.evidence import Detector
from ullage.probes.quality.traits import HIGHEST_BOUND, TRAITS, Past, Rate, past_of, rate_of

RECENT_ANSWERS = 100
PAST_ANSWERS = 1_000
"""The last so many before the recent ones; what changes slower than that is taken for usual."""
REFRESH_ANSWERS = 32
HELD_ANSWERS = 1_000
"""While a finding lasts the past stays as it was, up to so many answers: then they are usual."""


@dataclass(frozen=True, slots=True)
class Means:
    """Of some answers; None where none tells."""

    tokens: float | None
    repetition_ratio: float | None
    confidence: float | None
    temperature: float | None


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What the watch knows now; rates by name of trait. `fired`: traits beyond chance and usual.

    `judged` of all answers since the start; `begun_anew`: how often what had fired became usual.
    """

    judged: int
    recent: int
    past: int
    begun_anew: int
    fired: frozenset[str]
    recent_rates: Mapping[str, Rate]
    past_rates: Mapping[str, Rate]
    recent_means: Means
    past_means: Means


@dataclass(slots=True)
class QualityWatch:
    """Takes readings of answers as they end. Bounded: of an answer only its reading is kept."""

    num_judged: int = 0
    num_begun_anew: int = 0
    _recent: deque[AnswerReading] = field(default_factory=deque)
    _before: deque[AnswerReading] = field(default_factory=lambda: deque(maxlen=PAST_ANSWERS))
    _past: Past = field(default_factory=lambda: past_of(()))
    _new: int = 0
    _held: int = 0
    _detectors: dict[str, Detector] = field(
        default_factory=lambda: {trait.name: Detector() for trait in TRAITS}
    )

    def take(self, reading: AnswerReading) -> dict[str, bool]:
        """One answer that was given to its end; which traits it has, of those that it could have.

        What it is held against is the past before it.
        """
        self.num_judged += 1
        found: dict[str, bool] = {}
        for trait in TRAITS:
            has = trait.has(reading, self._past.thresholds)
            if has is None:
                continue
            found[trait.name] = has
            bound = self._past.rates[trait.name].bound
            if bound is not None and bound < HIGHEST_BOUND:
                self._detectors[trait.name].take(has, bound)
        self._recent.append(reading)
        if len(self._recent) > RECENT_ANSWERS:
            self._leave(self._recent.popleft())
        return found

    @property
    def fired(self) -> frozenset[str]:
        """The names of the traits whose rate has risen beyond chance and what is usual."""
        return frozenset(name for name, one in self._detectors.items() if one.fired)

    def report(self) -> QualityReport:
        """Everything, now."""
        past = self._past
        return QualityReport(
            self.num_judged,
            len(self._recent),
            past.num,
            self.num_begun_anew,
            self.fired,
            {t.name: rate_of(t, self._recent, past.thresholds) for t in TRAITS},
            past.rates,
            means_of(self._recent),
            means_of(self._before),
        )

    def _leave(self, reading: AnswerReading) -> None:
        """An answer is recent no more: it becomes part of the past unless something is wrong."""
        if self.fired:
            self._held += 1
            if self._held < HELD_ANSWERS:
                return
            self._before.clear()
            self._before.extend(self._recent)
            self._detectors = {trait.name: Detector() for trait in TRAITS}
            self.num_begun_anew += 1
            self._new = REFRESH_ANSWERS
        else:
            self._before.append(reading)
            self._new += 1
        self._held = 0
        if self._new >= REFRESH_ANSWERS:
            self._new = 0
            self._past = past_of(self._before)


def means_of(readings: Iterable[AnswerReading]) -> Means:
    """Each figure over the answers that have it."""
    found = list(readings)
    return Means(
        _mean(one.num_tokens for one in found),
        _mean(one.repetition_ratio for one in found),
        _mean(one.confidence for one in found),
        _mean(one.temperature for one in found),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
