"""A dialect laid on one page's keys: which rows each field is read from, and how.

Made once for all pages with the same keys, then used for each scrape: `Plan.read`. What no row
tells is absent with its reason; a number that cannot be is absent too, never bent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, TypeVar

from ullage.telemetry.dialects.source import Dialect, Info, Label, Metric, Source
from ullage.telemetry.exposition import Labels, Series, number_of, select
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    Counter,
    Gauge,
    Histograms,
    Labelled,
    Name,
)

Numbers = Sequence[float]
Place = tuple[int, Labels]
MOST_DIGITS = 18  # more bytes than that no machine has; a label may say anything
ROUNDING = 1e-9
"""By how much a share that an engine computed in floats may pass 1."""
SHARES: frozenset[Gauge] = frozenset({"kv_used_ratio", "page_utilization_ratio"})
# A part and the whole that it cannot exceed.
PARTS: tuple[tuple[Gauge, Gauge], ...] = (
    ("kv_used_tokens", "kv_total_tokens"),
    ("kv_used_bytes", "kv_total_bytes"),
    ("kv_cached_tokens", "kv_total_tokens"),
)
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count", "_created")
STARTED = Metric("process_start_time_seconds", combine="max")
Fact = Literal["started_s", "max_model_len", "block_size", "num_blocks"]


class Unknown(Exception):
    """Why a number cannot be had from this page, in words."""


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
    absent: dict[Name, str]
    facts: dict[Fact, float]


Number = Callable[[Numbers], float]
Table = Callable[[Numbers], Mapping[str, float]]
Buckets = Callable[[Numbers], Histogram]
Value = TypeVar("Value")
Kind = TypeVar("Kind", Gauge, Counter, Labelled, Histograms)


@dataclass(slots=True, eq=False)
class Plan:
    """`sources` and `absent` part the vocabulary; a field of `sources` can still be spoiled."""

    dialect: Dialect | None
    identity: PageIdentity = field(default_factory=PageIdentity)
    rows: list[int] = field(default_factory=list)
    gauges: list[tuple[Gauge, Number]] = field(default_factory=list)
    counters: list[tuple[Counter, Number]] = field(default_factory=list)
    labelled: list[tuple[Labelled, Table]] = field(default_factory=list)
    histograms: list[tuple[Histograms, Buckets]] = field(default_factory=list)
    sources: dict[Name, str] = field(default_factory=dict)
    absent: dict[Name, str] = field(default_factory=dict)
    approximate: frozenset[Name] = frozenset()
    facts: list[tuple[Fact, Number]] = field(default_factory=list)
    malformed: int = 0
    duplicates: int = 0

    def read(self, values: Sequence[bytes]) -> Read:
        """The fields' numbers. Raises ValueError when a row's value is not a number."""
        numbers = self._numbers(values)
        spoiled: dict[Name, str] = {}
        found = Read(
            _each(self.gauges, numbers, spoiled),
            _each(self.counters, numbers, spoiled),
            _each(self.labelled, numbers, spoiled),
            _each(self.histograms, numbers, spoiled),
            spoiled,
            _facts(self.facts, numbers),
        )
        _judge(found.gauges, self.sources, spoiled)
        return found

    def _numbers(self, values: Sequence[bytes]) -> Numbers:
        if len(self.rows) < 2:
            picked: Sequence[bytes] = [values[row] for row in self.rows]
        else:
            picked = itemgetter(*self.rows)(values)
        if b"_" in b"".join(picked):
            raise ValueError("a number with underscores")
        return list(map(float, picked))


def _each(
    steps: Sequence[tuple[Kind, Callable[[Numbers], Value]]],
    numbers: Numbers,
    spoiled: dict[Name, str],
) -> dict[Kind, Value]:
    found: dict[Kind, Value] = {}
    for name, value_of in steps:
        try:
            found[name] = value_of(numbers)
        except Unknown as why:
            spoiled[name] = str(why)
    return found


def _facts(steps: Sequence[tuple[Fact, Number]], numbers: Numbers) -> dict[Fact, float]:
    found: dict[Fact, float] = {}
    for name, value_of in steps:
        try:
            found[name] = value_of(numbers)
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


# --- making a plan --------------------------------------------------------------------------------


def plan_of(
    series: Sequence[Series | None], dialect: Dialect, damaged: frozenset[str] = frozenset()
) -> Plan:
    """The dialect laid on these rows. `damaged`: metrics of which some rows could not be read, so
    that sums over the others would be wrong."""
    return _Maker(series, dialect, damaged).plan


class _Maker:
    def __init__(
        self, series: Sequence[Series | None], dialect: Dialect, damaged: frozenset[str]
    ) -> None:
        self._places = select(series)
        self._damaged = damaged
        self._copies = frozenset(dialect.copies)
        self.plan = plan = Plan(dialect)
        plan.identity = self._identity(dialect.info)
        approximate: set[Name] = set()
        for name, sources in dialect.fields.items():
            source = self._field(name, sources, dialect.hints.get(name, ""))
            if source is not None and not source.exact:
                approximate.add(name)
        plan.absent.update(dialect.absent)
        plan.approximate = frozenset(approximate)
        facts: dict[Fact, Source | None] = {
            "started_s": STARTED,
            "max_model_len": dialect.info.max_model_len,
            "block_size": dialect.info.block_size,
            "num_blocks": dialect.info.num_blocks,
        }
        for fact, source in facts.items():
            if source is not None:
                self._add_fact(fact, source)

    def _field(self, name: Name, sources: tuple[Source, ...], hint: str) -> Source | None:
        """Add the first of the sources that the page has; which it was."""
        why = []
        for source in sources:
            before = len(self.plan.rows)
            try:
                self._add(name, source)
            except Unknown as missing:
                del self.plan.rows[before:]
                why.append(str(missing))
                continue
            self.plan.sources[name] = str(source)
            return source
        self.plan.absent[name] = "; ".join([*dict.fromkeys(why), *([hint] if hint else [])])
        return None

    def _add(self, name: Name, source: Source) -> None:
        plan = self.plan
        if name in _GAUGES:
            plan.gauges.append((name, self._number(source)))
        elif name in _COUNTERS:
            plan.counters.append((name, self._number(source)))
        elif name in _LABELLED:
            plan.labelled.append((name, self._table(_metric(source))))
        elif name in _HISTOGRAMS:
            plan.histograms.append((name, self._buckets(_metric(source))))

    def _add_fact(self, name: Fact, source: Source) -> None:
        before = len(self.plan.rows)
        try:
            self.plan.facts.append((name, self._number(source)))
        except Unknown:
            del self.plan.rows[before:]

    def _number(self, source: Source) -> Number:
        if isinstance(source, Metric):
            return self._metric(source)
        if isinstance(source, Label):
            value = float(self._label(source))
            return lambda _: value
        left, right = self._number(source.left), self._number(source.right)
        if source.op == "×":
            return lambda numbers: left(numbers) * right(numbers)
        if source.op == "+":
            return lambda numbers: left(numbers) + right(numbers)
        return lambda numbers: _quotient(left(numbers), right(numbers), source)

    def _metric(self, metric: Metric) -> Number:
        found = self._located(metric.name, metric.where)
        part = self._taken(found)
        if metric.combine == "mean" and len(found) > 1 and metric.weight:
            return self._weighted(metric, found, part)
        return lambda numbers: _combined(numbers[part], metric)

    def _weighted(self, metric: Metric, found: list[Place], part: slice) -> Number:
        weights = dict(zip(*_columns(self._located(metric.weight, ())), strict=True))
        try:
            same = [(weights[labels], labels) for _, labels in found]
        except KeyError as error:
            raise Unknown(
                f"{metric.weight} has not the labels of {metric.name}, so no mean can be weighted"
            ) from error
        by = self._taken(same)
        return lambda numbers: _weighted_mean(numbers[part], numbers[by], metric)

    def _label(self, source: Label) -> int:
        texts = [dict(labels).get(source.label) for _, labels in self._located(source.metric, ())]
        counts = [_count(text) for text in texts]
        if any(count is None for count in counts):
            shown = "/".join(sorted({repr(text) for text in texts if text is not None}))
            raise Unknown(f"{source} is {shown}" if shown else f"the page has no {source}")
        known = [count for count in counts if count is not None]
        if source.combine == "sum":
            return sum(known)
        if len(set(known)) > 1:
            raise Unknown(f"{source} differs between the series of one page")
        return known[0]

    def _table(self, metric: Metric) -> Table:
        found: dict[str, list[Place]] = {}
        for row, labels in self._located(metric.name, metric.where):
            entry = dict(labels).get(metric.by)
            if entry is not None:
                found.setdefault(entry, []).append((row, labels))
        if not found:
            raise Unknown(f"{metric.name} has no label {metric.by}")
        parts = [(entry, self._taken(places)) for entry, places in found.items()]
        return lambda numbers: {entry: _combined(numbers[part], metric) for entry, part in parts}

    def _buckets(self, metric: Metric) -> Buckets:
        groups: dict[Labels, dict[float, int]] = {}
        for row, labels in self._located(f"{metric.name}_bucket", metric.where):
            bound = number_of(dict(labels).get("le", "").encode())
            rest = tuple(pair for pair in labels if pair[0] != "le")
            if bound is None or math.isnan(bound) or bound in groups.get(rest, ()):
                raise Unknown(f"{metric.name} has a bucket without a bound of its own")
            groups.setdefault(rest, {})[bound] = row
        for labels, row in self._sums(metric, "_count").items():
            # The last bucket and the count are one number.
            groups.get(labels, {}).setdefault(math.inf, row)
        bounds = {tuple(sorted(group)) for group in groups.values()}
        if len(bounds) > 1:
            raise Unknown(f"the series of {metric.name} have different buckets")
        shape = bounds.pop()
        if shape[-1] != math.inf:
            raise Unknown(f"{metric.name} has no bucket for everything (+Inf)")
        parts = [self._taken([(group[bound], ()) for bound in shape]) for group in groups.values()]
        sums = self._sums(metric, "_sum")
        whole = None
        if groups.keys() <= sums.keys():
            whole = self._taken([(sums[labels], labels) for labels in groups])
        return lambda numbers: _histogram(numbers, shape, parts, whole, metric)

    def _sums(self, metric: Metric, ending: str) -> dict[Labels, int]:
        name = metric.name + ending
        if name in self._damaged or name not in self._places:
            return {}
        return {labels: row for row, labels in self._located(name, metric.where)}

    def _taken(self, places: Sequence[Place]) -> slice:
        """Where the numbers of these rows will stand."""
        start = len(self.plan.rows)
        self.plan.rows.extend(row for row, _ in places)
        return slice(start, len(self.plan.rows))

    def _located(self, name: str, where: tuple[tuple[str, str], ...]) -> list[Place]:
        """The rows of a metric, one of each copy. Raises Unknown when there are none."""
        if name in self._damaged:
            raise Unknown(f"a line of {name} on the page cannot be read")
        found = self._places.get(name, [])
        if where:
            found = [place for place in found if _has(place[1], where)]
        if not found:
            raise Unknown(f"the page has no {Metric(name, where=where)}")
        return self._first_copies(found) if self._copies else found

    def _first_copies(self, found: list[Place]) -> list[Place]:
        chosen: dict[Labels, tuple[Labels, Place]] = {}
        for row, labels in found:
            rest = tuple(pair for pair in labels if pair[0] not in self._copies)
            rank = tuple(pair for pair in labels if pair[0] in self._copies)
            if rest not in chosen or _ranked(rank) < _ranked(chosen[rest][0]):
                chosen[rest] = (rank, (row, rest))
        return [place for _, place in chosen.values()]

    # --- who it is ---

    def _identity(self, info: Info) -> PageIdentity:
        settings: dict[str, str] = {}
        for name in info.settings:
            for _, labels in self._places.get(name, ())[:1]:
                settings.update(labels)
        for label in (info.engine_label, info.model_label):
            settings.pop(label, None)
        version = ""
        if info.version:
            metric, label = info.version
            version = next(iter(self._texts([metric], label)), "")
        return PageIdentity(
            models=self._texts(self._places, info.model_label),
            version=version,
            adapters=self._adapters(info),
            settings=settings,
            num_engines=max(1, len(self._texts(self._places, info.engine_label))),
        )

    def _texts(self, names: Mapping[str, object] | Sequence[str], label: str) -> tuple[str, ...]:
        """Every value of a label, sorted."""
        if not label:
            return ()
        return tuple(
            sorted(
                {
                    text
                    for name in names
                    for _, labels in self._places.get(name, ())
                    for named, text in labels
                    if named == label and text
                }
            )
        )

    def _adapters(self, info: Info) -> tuple[str, ...]:
        if not info.adapters:
            return ()
        metric, labels = info.adapters
        texts = [text for label in labels for text in self._texts([metric], label)]
        return tuple(sorted({name for text in texts for name in text.split(",") if name}))


_GAUGES, _COUNTERS = frozenset(GAUGES), frozenset(COUNTERS)
_LABELLED, _HISTOGRAMS = frozenset(LABELLED), frozenset(HISTOGRAMS)


def _metric(source: Source) -> Metric:
    assert isinstance(source, Metric), "tables and histograms are read from one metric"
    return source


def _columns(places: list[Place]) -> tuple[list[Labels], list[int]]:
    return [labels for _, labels in places], [row for row, _ in places]


def _has(labels: Labels, where: tuple[tuple[str, str], ...]) -> bool:
    named = dict(labels)
    return all(named.get(label, "") == text for label, text in where)


def _ranked(rank: Labels) -> list[tuple[str, int, str]]:
    return [(label, int(text) if text.isdecimal() else 0, text) for label, text in rank]


def _count(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > MOST_DIGITS:
        return None
    return int(text)


# --- arithmetic of one scrape ---------------------------------------------------------------------


def _combined(numbers: Numbers, metric: Metric) -> float:
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


def _weighted_mean(numbers: Numbers, weights: Numbers, metric: Metric) -> float:
    pairs = [
        (number, weight)
        for number, weight in zip(numbers, weights, strict=True)
        if number == number or not metric.nan
    ]
    if not pairs:
        raise Unknown(f"{metric} is NaN: {metric.nan}")
    total = sum(weight for _, weight in pairs)
    value = sum(number * weight for number, weight in pairs)
    if not (math.isfinite(value) and min(min(pair) for pair in pairs) >= 0 and total > 0):
        raise Unknown(f"{metric}, weighted by {metric.weight}, is no number")
    return value / total * metric.scale


def _histogram(
    numbers: Numbers,
    bounds: tuple[float, ...],
    parts: Sequence[slice],
    whole: slice | None,
    metric: Metric,
) -> Histogram:
    if len(parts) == 1:
        counts = list(numbers[parts[0]])
    else:
        counts = [sum(column) for column in zip(*(numbers[part] for part in parts), strict=True)]
    if not (math.isfinite(sum(counts)) and counts[0] >= 0 and counts == sorted(counts)):
        raise Unknown(f"the buckets of {metric.name} do not add up")
    total = sum(numbers[whole]) if whole else math.nan
    if metric.scale != 1.0:
        bounds = tuple(bound * metric.scale for bound in bounds)
        total *= metric.scale
    return Histogram(bounds, tuple(counts), total if math.isfinite(total) else None)


def _quotient(value: float, by: float, source: Source) -> float:
    if by == 0:
        raise Unknown(f"{source} divides by zero")
    return value / by


def _spoilt(numbers: Numbers) -> str:
    wrong = next((n for n in numbers if not (math.isfinite(n) and n >= 0)), math.nan)
    return "NaN" if wrong != wrong else f"{wrong:g}"
