"""What is looked at in answers, as yes-or-no traits: loops, ends too soon, runs on, unsure, script.

Holds the table of traits and the thresholds that a past gives them. Counting is `watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ullage.probes.quality.answer import LOOP_TOKENS, AnswerReading
from ullage.probes.quality.evidence import upper_bound

NEEDED = 50
"""Fewer answers of the past that could have a trait bound its rate by nothing useful."""
LENGTHS_NEEDED = 30
STRATUM_NEEDED = 40
LEAST_LOOKS = 3
HIGHEST_BOUND = 0.95
"""A trait that so many answers may have is not looked for: there is nothing left to see."""
SHORT_PART = 4
"""Too short is a quarter of what nine in ten answers of the past exceeded."""
LEAST_REPETITION = 0.3
"""Code and tables of many lines repeat so many of their 4-grams; below it nothing is repetitive."""
TEMPERATURES = (0.2, 0.5, 0.9, 1.3)
DRIFT = 0.4
"""What healthy traffic moves a distribution by (watch/rules/sampling.py, from public traces)."""

Stratum = tuple[str | None, int]
ANY: Stratum = (None, -1)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the past makes of unusual; None where it is too small to say.

    `confidence`: of each stratum with answers enough; under ANY of all answers, for those of none.
    """

    short_tokens: int | None = None
    long_tokens: int | None = None
    repetition: float | None = None
    confidence: Mapping[Stratum, tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class Trait:
    """`has` says it of one answer, None where the answer cannot tell. `dead_zone`: by how much
    healthy traffic may raise its rate. `most`: a bound that holds whatever the past was."""

    name: str
    words: str
    has: Callable[[AnswerReading, Thresholds], bool | None]
    dead_zone: float = 0.0
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """`share` of the `num` answers that could have a trait, None of none; `bound` on what it may
    be, None where the past is too small to say."""

    num: int
    share: float | None
    bound: float | None = None


def stratum(reading: AnswerReading) -> Stratum:
    """Answers that are comparably sure: asked in one script, at about one temperature."""
    return reading.prompt_script, sum(reading.temperature >= t for t in TEMPERATURES)


def _loops(reading: AnswerReading, _: Thresholds) -> bool | None:
    return reading.looping if reading.num_tokens >= LOOP_TOKENS else None


def _stuck(reading: AnswerReading, _: Thresholds) -> bool | None:
    return reading.stuck if reading.num_tokens >= LOOP_TOKENS else None


def _repeats(reading: AnswerReading, past: Thresholds) -> bool | None:
    if past.repetition is None or reading.repetition_ratio is None:
        return None
    return reading.repetition_ratio > past.repetition


def _short(reading: AnswerReading, past: Thresholds) -> bool | None:
    if past.short_tokens is None or reading.at_limit:
        return None
    return reading.num_tokens <= past.short_tokens


def _runs_on(reading: AnswerReading, past: Thresholds) -> bool | None:
    if past.long_tokens is None:
        return None
    return reading.at_limit and reading.num_tokens > past.long_tokens


def _usual(reading: AnswerReading, past: Thresholds) -> tuple[float, float] | None:
    if past.confidence is None or reading.num_looks < LEAST_LOOKS:
        return None
    return past.confidence.get(stratum(reading), past.confidence.get(ANY))


def _unsure(reading: AnswerReading, past: Thresholds) -> bool | None:
    usual = _usual(reading, past)
    if usual is None or reading.confidence is None:
        return None
    return reading.confidence < usual[0]


def _sure(reading: AnswerReading, past: Thresholds) -> bool | None:
    usual = _usual(reading, past)
    if usual is None or reading.confidence is None:
        return None
    return reading.confidence > usual[1]


def _strays(reading: AnswerReading, _: Thresholds) -> bool | None:
    return True if reading.mixed else reading.switched


LOOPS, STUCK, REPEATS, SHORT, RUNS_ON, UNSURE, SURE, STRAYS = TRAITS = (
    Trait("looping", "end in a loop", _loops, 0.15),
    Trait("stuck", "repeat a few tokens up to the token limit", _stuck, most=0.3),
    Trait("repetitive", "repeat themselves more than nine in ten did", _repeats, DRIFT),
    Trait("short", "end by themselves after very few tokens", _short, 0.3),
    Trait("running_on", "run on to the token limit", _runs_on, 0.2),
    Trait("unsure", "are less sure than nine in ten were", _unsure, DRIFT),
    Trait("sure", "are surer than nine in ten were", _sure, DRIFT),
    Trait("other_script", "are in a script that was not asked for, or in three", _strays, 0.25),
)


@dataclass(frozen=True, slots=True)
class Past:
    """What the answers of a past say of those to come: thresholds, and each trait's rate."""

    num: int
    thresholds: Thresholds
    rates: Mapping[str, Rate]


def past_of(readings: Sequence[AnswerReading]) -> Past:
    """The summary of these; of none it knows nothing but the bounds that need no past."""
    found = thresholds_of(readings)
    rates = {t.name: _bounded(t, rate_of(t, readings, found)) for t in TRAITS}
    return Past(len(readings), found, rates)


def rate_of(trait: Trait, readings: Iterable[AnswerReading], thresholds: Thresholds) -> Rate:
    """How many of these have a trait, held against the thresholds of a past."""
    seen = [has for one in readings if (has := trait.has(one, thresholds)) is not None]
    return Rate(len(seen), sum(seen) / len(seen) if seen else None)


def _bounded(trait: Trait, past: Rate) -> Rate:
    """With what the rate may be from now on: what chance hid in the past, and the dead zone."""
    if trait.most is not None:
        return replace(past, bound=trait.most)
    if past.share is None or past.num < NEEDED:
        return past
    return replace(past, bound=upper_bound(past.share, past.num) + trait.dead_zone)


def thresholds_of(readings: Sequence[AnswerReading]) -> Thresholds:
    """What nine in ten of these stayed within."""
    ended = sorted(one.num_tokens for one in readings if not one.at_limit)
    repetition = sorted(
        one.repetition_ratio for one in readings if one.repetition_ratio is not None
    )
    strata: dict[Stratum, list[float]] = {}
    for one in readings:
        if one.confidence is not None and one.num_looks >= LEAST_LOOKS:
            strata.setdefault(stratum(one), []).append(one.confidence)
            strata.setdefault(ANY, []).append(one.confidence)
    short = int(_tenth(ended) // SHORT_PART) if len(ended) >= LENGTHS_NEEDED else 0
    return Thresholds(
        short or None,
        int(_tenth(ended, 9)) if len(ended) >= LENGTHS_NEEDED else None,
        max(_tenth(repetition, 9), LEAST_REPETITION) if len(repetition) >= NEEDED else None,
        {
            key: (_tenth(found), _tenth(found, 9))
            for key, values in strata.items()
            if len(values) >= STRATUM_NEEDED
            for found in (sorted(values),)
        },
    )


def _tenth(ordered: Sequence[float], tenths: int = 1) -> float:
    """The value that so many tenths of `ordered` lie at or below."""
    return ordered[max(0, -(-len(ordered) * tenths // 10) - 1)]
