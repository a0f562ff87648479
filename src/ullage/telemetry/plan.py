"""A dialect laid on one page's keys: which rows each field is read from, and how.

Holds the plan and what it reads of one scrape; making one is `plan_making.py`. What no row tells is
absent with its reason; a number that cannot be is absent too, never bent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Literal, Protocol, TypeVar

from ullage.telemetry.dialects.source import Dialect
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import (
    Counter,
    Gauge,
    Histograms,
    Labelled,
    Name,
    Probed,
    ProbeFinding,
)
from ullage.telemetry.steps import Buckets, ByLabel, Findings, Number, Numbers, Unknown

Fact = Literal["started_s", "max_model_len", "block_size", "num_blocks"]
ROUNDING = 1e-9
"""By how much a share that an engine computed in floats may pass 1."""
SHARES: frozenset[Gauge] = frozenset({"kv_used_ratio", "page_utilization_ratio"})
# A part and the whole that it cannot exceed.
PARTS: tuple[tuple[Gauge, Gauge], ...] = (
    ("kv_used_tokens", "kv_total_tokens"),
    ("kv_used_bytes", "kv_total_bytes"),
    ("kv_cached_tokens", "kv_total_tokens"),
)


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What the page's labels say of who serves it."""

    models: tuple[str, ...] = ()
    version: str = ""
    adapters: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    num_engines: int = 1


@dataclass(frozen=True, slots=True)
class Read:
    """What one scrape's numbers say, by the plan; `absent` holds only what the numbers spoil."""

    gauges: dict[Gauge, float]
    counters: dict[Counter, float]
    labelled: dict[Labelled, Mapping[str, float]]
    histograms: dict[Histograms, Histogram]
    probed: dict[Probed, tuple[ProbeFinding, ...]]
    absent: dict[Name, str]
    facts: dict[Fact, float]


@dataclass(frozen=True)
class Steps:
    """Which rows are taken and what is made of them: the same for all pages of one shape.

    The items of `source_items` and `absent_items` part the vocabulary; a field that has a source
    can still be spoiled by its numbers.
    """

    rows: tuple[int, ...] = ()
    gauges: tuple[tuple[Gauge, Number], ...] = ()
    counters: tuple[tuple[Counter, Number], ...] = ()
    labelled: tuple[tuple[Labelled, ByLabel], ...] = ()
    histograms: tuple[tuple[Histograms, Buckets], ...] = ()
    probed: tuple[tuple[Probed, Findings], ...] = ()
    facts: tuple[tuple[Fact, Number], ...] = ()
    source_items: tuple[tuple[Name, str], ...] = ()
    absent_items: tuple[tuple[Name, str], ...] = ()
    approximate: frozenset[Name] = frozenset()

    @cached_property
    def sources(self) -> Mapping[Name, str]:
        return dict(self.source_items)

    @cached_property
    def absent(self) -> Mapping[Name, str]:
        return dict(self.absent_items)

    @cached_property
    def pick(self) -> Callable[[Sequence[bytes]], Sequence[bytes]]:
        """From all rows' values those that are taken, in the order of `rows`."""
        if len(self.rows) < 2:
            return lambda values: [values[row] for row in self.rows]
        return itemgetter(*self.rows)

    def read(self, values: Sequence[bytes], constants: Sequence[float]) -> Read:
        """The fields' numbers. Raises ValueError when a row's value is not a number."""
        picked = self.pick(values)
        if b"_" in b"".join(picked):
            raise ValueError("a number with underscores")
        numbers = [*map(float, picked), *constants]
        spoiled: dict[Name, str] = {}
        found = Read(
            _each(self.gauges, numbers, spoiled),
            _each(self.counters, numbers, spoiled),
            _each(self.labelled, numbers, spoiled),
            _each(self.histograms, numbers, spoiled),
            _each(self.probed, numbers, spoiled),
            spoiled,
            _facts(self.facts, numbers),
        )
        _judge(found.gauges, self.sources, spoiled)
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a page's shape, and what this page's keys say themselves.

    `constants` are numbers in labels, the last first. `malformed` and `duplicates` count lines.
    """

    dialect: Dialect | None
    steps: Steps
    identity: PageIdentity = PageIdentity()
    constants: tuple[float, ...] = ()
    malformed: int = 0
    duplicates: int = 0

    def read(self, values: Sequence[bytes]) -> Read:
        """As `Steps.read`."""
        return self.steps.read(values, self.constants)


Kind = TypeVar("Kind", Gauge, Counter, Labelled, Histograms, Probed)
Value = TypeVar("Value", covariant=True)


class Step(Protocol[Value]):
    """What makes a value of numbers. Raises Unknown."""

    def of(self, numbers: Numbers) -> Value: ...


def _each(
    steps: Sequence[tuple[Kind, Step[Value]]], numbers: Numbers, spoiled: dict[Name, str]
) -> dict[Kind, Value]:
    found: dict[Kind, Value] = {}
    for name, step in steps:
        try:
            found[name] = step.of(numbers)
        except Unknown as why:
            spoiled[name] = str(why)
    return found


def _facts(steps: Sequence[tuple[Fact, Number]], numbers: Numbers) -> dict[Fact, float]:
    found: dict[Fact, float] = {}
    for name, step in steps:
        try:
            found[name] = step.of(numbers)
        except Unknown:
            continue
    return found


def _judge(
    gauges: dict[Gauge, float], sources: Mapping[Name, str], spoiled: dict[Name, str]
) -> None:
    """Take out what cannot be: a share above 1, a part above its whole."""
    for name in SHARES & gauges.keys():
        value = gauges[name]
        if value > 1 + ROUNDING:
            spoiled[name] = f"{sources[name]} is {value:g}, which is no share of 1"
            del gauges[name]
    for part, whole in PARTS:
        if part in gauges and whole in gauges and gauges[part] > gauges[whole] * (1 + ROUNDING):
            spoiled[part] = (
                f"{sources[part]} gives {gauges[part]:g}, more than the whole of {gauges[whole]:g}"
            )
            del gauges[part]
