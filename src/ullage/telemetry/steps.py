"""How one field is made of one scrape's numbers: a step each, comparable, so that plans share them.

Holds the arithmetic. A number that cannot be raises Unknown with the reason; nothing is bent.
Which numbers a step takes is the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ullage.telemetry.dialects.source import Metric
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import ProbeFinding

Numbers = Sequence[float]


class Unknown(Exception):
    """Why a number cannot be had from this page, in words."""


class Number(Protocol):
    """One number of a scrape's numbers. Raises Unknown."""

    def of(self, numbers: Numbers) -> float: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Where a metric's numbers stand among those that a plan takes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that stands in a label: the `at`-th from the end of the numbers."""

    at: int

    def of(self, numbers: Numbers) -> float:
        return numbers[-self.at]


@dataclass(frozen=True, slots=True)
class Combined:
    """A metric's series as one number, as the metric says."""

    metric: Metric
    part: Part

    def of(self, numbers: Numbers) -> float:
        return combined(numbers[self.part.start : self.part.end], self.metric)


@dataclass(frozen=True, slots=True)
class Weighted:
    """The mean of a metric's series, weighted by those of another, in the same order."""

    metric: Metric
    part: Part
    by: Part

    def of(self, numbers: Numbers) -> float:
        values = numbers[self.part.start : self.part.end]
        weights = numbers[self.by.start : self.by.end]
        pairs = [
            (value, weight)
            for value, weight in zip(values, weights, strict=True)
            if value == value or not self.metric.nan
        ]
        if not pairs:
            raise Unknown(f"{self.metric} is NaN: {self.metric.nan}")
        total = sum(weight for _, weight in pairs)
        value = sum(value * weight for value, weight in pairs)
        if not (math.isfinite(value) and min(min(pair) for pair in pairs) >= 0 and total > 0):
            raise Unknown(f"{self.metric}, weighted by {self.metric.weight}, is no number")
        return value / total * self.metric.scale


@dataclass(frozen=True, slots=True)
class Joined:
    """Two numbers by an operation; `text` names it in reasons."""

    left: Number
    op: Literal["×", "÷", "+"]
    right: Number
    text: str

    def of(self, numbers: Numbers) -> float:
        left, right = self.left.of(numbers), self.right.of(numbers)
        if self.op == "×":
            return left * right
        if self.op == "+":
            return left + right
        if right == 0:
            raise Unknown(f"{self.text} divides by zero")
        return left / right


@dataclass(frozen=True, slots=True)
class ByLabel:
    """One number for each value of a label."""

    metric: Metric
    parts: tuple[tuple[str, Part], ...]

    def of(self, numbers: Numbers) -> Mapping[str, float]:
        return {
            entry: combined(numbers[part.start : part.end], self.metric)
            for entry, part in self.parts
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe says, by (id, kind, layer): 1 fires, 0 does not, NaN cannot be evaluated.

    Of several engines behind the page one that fires is told.
    """

    metric: Metric
    parts: tuple[tuple[tuple[str, str, str], Part], ...]

    def of(self, numbers: Numbers) -> tuple[ProbeFinding, ...]:
        return tuple(
            ProbeFinding(*place, self._state(numbers[part.start : part.end]))
            for place, part in self.parts
        )

    def _state(self, values: Numbers) -> Literal["fired", "clear", "not_evaluable"]:
        strange = next((v for v in values if v == v and v not in (0.0, 1.0)), None)
        if strange is not None:
            raise Unknown(f"{self.metric} is {strange:g}, neither 0 nor 1")
        if 1.0 in values:
            return "fired"
        return "clear" if all(value == value for value in values) else "not_evaluable"


@dataclass(frozen=True, slots=True)
class Buckets:
    """The histograms of a metric's series as one. `sums` None: not every series has its sum."""

    metric: Metric
    bounds: tuple[float, ...]
    parts: tuple[Part, ...]
    sums: Part | None

    def of(self, numbers: Numbers) -> Histogram:
        counts = numbers[self.parts[0].start : self.parts[0].end]
        if len(self.parts) > 1:
            columns = zip(*(numbers[part.start : part.end] for part in self.parts), strict=True)
            counts = [sum(column) for column in columns]
        if not (math.isfinite(sum(counts)) and counts[0] >= 0 and counts == sorted(counts)):
            raise Unknown(f"the buckets of {self.metric.name} do not add up")
        total = math.nan
        if self.sums is not None:
            total = sum(numbers[self.sums.start : self.sums.end]) * self.metric.scale
        return Histogram(self.bounds, tuple(counts), total if math.isfinite(total) else None)


def combined(numbers: Numbers, metric: Metric) -> float:
    """The series' numbers as one. Raises Unknown for what no field can be."""
    if metric.nan:
        numbers = [number for number in numbers if number == number]
        if not numbers:
            raise Unknown(f"{metric} is NaN: {metric.nan}")
    if len(numbers) == 1 or metric.combine == "copies":
        value = numbers[0]
        if any(number != value for number in numbers[1:]):
            raise Unknown(f"the series of {metric} differ, where each should say the same")
    elif metric.combine == "max":
        value = max(numbers)
    else:
        value = sum(numbers)
        if metric.combine == "mean":
            value /= len(numbers)
    if not (math.isfinite(value) and min(numbers) >= 0):
        raise Unknown(f"{metric} is {_spoilt(numbers)}")
    return value * metric.scale


def _spoilt(numbers: Numbers) -> str:
    wrong = next((n for n in numbers if not (math.isfinite(n) and n >= 0)), math.nan)
    return "NaN" if wrong != wrong else f"{wrong:g}"
