"""Making a plan: a dialect's sources looked up among the series of one page.

Holds what is found where; what is then done with the numbers is `steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Info, Label, Metric, Source
from ullage.telemetry.exposition import Labels, Series, number_of, select
from ullage.telemetry.plan import Fact, PageIdentity, Plan, Steps
from ullage.telemetry.snapshot import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    PROBED,
    Counter,
    Gauge,
    Histograms,
    Labelled,
    Name,
    Probed,
)
from ullage.telemetry.steps import (
    Buckets,
    ByLabel,
    Combined,
    Constant,
    Findings,
    Joined,
    Number,
    Part,
    Unknown,
    Weighted,
)

Place = tuple[int, Labels]
MOST_DIGITS = 18  # more bytes than that no machine has; a label may say anything
MOST_CHARS = 200
MOST_TEXTS = 1000
"""Texts of labels that are kept of one page: models, adapters, entries of a field."""
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count", "_created")
PLACE = ("id", "kind", "layer")
"""Labels that tell a finding of a probe from the others."""
STARTED = Metric("process_start_time_seconds", combine="max")


def plan_of(
    series: Sequence[Series | None],
    dialect: Dialect,
    damaged: frozenset[str] = frozenset(),
    *,
    malformed: int = 0,
) -> Plan:
    """The dialect laid on these rows. `damaged`: metrics of which some rows could not be read, so
    that sums over the others would be wrong."""
    places = Places(series, dialect, damaged)
    maker = _Maker(places, dialect)
    return Plan(
        dialect,
        maker.steps,
        places.identity(dialect.info),
        tuple(reversed(maker.constants)),
        malformed,
        places.num_repeated,
    )


class Places:
    """Where on a page each metric's series are, one of each copy."""

    def __init__(
        self, series: Sequence[Series | None], dialect: Dialect, damaged: frozenset[str]
    ) -> None:
        self._found = select(series)
        self._damaged = damaged
        self._copies = frozenset(dialect.copies)
        num_series = sum(one is not None for one in series)
        self.num_repeated = num_series - sum(map(len, self._found.values()))

    def of(self, name: str, where: tuple[tuple[str, str], ...] = ()) -> list[Place]:
        """The rows of a metric. Raises Unknown when there are none."""
        if name in self._damaged:
            raise Unknown(f"a line of {name} on the page cannot be read")
        found = self._found.get(name, [])
        if where:
            found = [place for place in found if _has(place[1], where)]
        if not found:
            raise Unknown(f"the page has no {Metric(name, where=where)}")
        return self._first_copies(found) if self._copies else found

    def by_labels(self, name: str, where: tuple[tuple[str, str], ...]) -> dict[Labels, int]:
        """Labels → row, empty when the metric is not there."""
        try:
            return {labels: row for row, labels in self.of(name, where)}
        except Unknown:
            return {}

    def _first_copies(self, found: list[Place]) -> list[Place]:
        chosen: dict[Labels, tuple[Labels, Place]] = {}
        for row, labels in found:
            rest = tuple(pair for pair in labels if pair[0] not in self._copies)
            rank = tuple(pair for pair in labels if pair[0] in self._copies)
            if rest not in chosen or _ranked(rank) < _ranked(chosen[rest][0]):
                chosen[rest] = (rank, (row, rest))
        return [place for _, place in chosen.values()]

    def identity(self, info: Info) -> PageIdentity:
        """Who serves the page, by its labels."""
        settings: dict[str, str] = {}
        for name in info.settings:
            for _, labels in self._found.get(name, ())[:1]:
                settings.update((shown(label), shown(text)) for label, text in labels)
        for label in (info.engine_label, info.model_label):
            settings.pop(label, None)
        version = ""
        if info.version:
            metric, label = info.version
            version = next(iter(self._texts([metric], label)), "")
        return PageIdentity(
            models=self._texts(self._found, info.model_label),
            version=version,
            adapters=self._adapters(info),
            settings=settings,
            num_engines=max(1, len(self._texts(self._found, info.engine_label))),
        )

    def _texts(self, names: Iterable[str], label: str) -> tuple[str, ...]:
        """Every value of a label, sorted."""
        if not label:
            return ()
        texts = {
            shown(text)
            for name in names
            for _, labels in self._found.get(name, ())
            for named, text in labels
            if named == label and text
        }
        return tuple(sorted(texts)[:MOST_TEXTS])

    def _adapters(self, info: Info) -> tuple[str, ...]:
        if not info.adapters:
            return ()
        metric, labels = info.adapters
        found = self._found.get(metric, ())
        return adapter_names([named for _, named in found], labels)


class _Maker:
    def __init__(self, places: Places, dialect: Dialect) -> None:
        self._places = places
        self._rows: list[int] = []
        self._gauges: list[tuple[Gauge, Number]] = []
        self._counters: list[tuple[Counter, Number]] = []
        self._labelled: list[tuple[Labelled, ByLabel]] = []
        self._histograms: list[tuple[Histograms, Buckets]] = []
        self._probed: list[tuple[Probed, Findings]] = []
        self.constants: list[float] = []
        sources: list[tuple[Name, str]] = []
        absent: dict[Name, str] = {}
        approximate: set[Name] = set()
        for name, offered in dialect.fields.items():
            source = self._field(name, offered, dialect.hints.get(name, ""), absent)
            if source is not None:
                sources.append((name, str(source)))
                if not source.exact:
                    approximate.add(name)
        facts = self._facts(dialect.info)
        self.steps = Steps(
            tuple(self._rows),
            tuple(self._gauges),
            tuple(self._counters),
            tuple(self._labelled),
            tuple(self._histograms),
            tuple(self._probed),
            tuple(facts),
            tuple(sources),
            (*absent.items(), *dialect.absent.items()),
            frozenset(approximate),
        )

    def _field(
        self, name: Name, sources: tuple[Source, ...], hint: str, absent: dict[Name, str]
    ) -> Source | None:
        """Add the first of the sources that the page has; which it was."""
        why = []
        for source in sources:
            before = len(self._rows), len(self.constants)
            try:
                self._add(name, source)
            except Unknown as missing:
                del self._rows[before[0] :], self.constants[before[1] :]
                why.append(str(missing))
            else:
                return source
        absent[name] = "; ".join([*dict.fromkeys(why), *([hint] if hint else [])])
        return None

    def _add(self, name: Name, source: Source) -> None:
        if name in _GAUGES:
            self._gauges.append((name, self._number(source)))
        elif name in _COUNTERS:
            self._counters.append((name, self._number(source)))
        elif name in _LABELLED:
            self._labelled.append((name, self._by_label(_metric(source))))
        elif name in _HISTOGRAMS:
            self._histograms.append((name, self._buckets(_metric(source))))
        elif name in _PROBED:
            self._probed.append((name, self._findings(_metric(source))))

    def _facts(self, info: Info) -> list[tuple[Fact, Number]]:
        sources: Mapping[Fact, Source | None] = {
            "started_s": STARTED,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
        }
        facts: list[tuple[Fact, Number]] = []
        for name, source in sources.items():
            before = len(self._rows), len(self.constants)
            try:
                if source is not None:
                    facts.append((name, self._number(source)))
            except Unknown:
                del self._rows[before[0] :], self.constants[before[1] :]
        return facts

    def _number(self, source: Source) -> Number:
        match source:
            case Metric():
                return self._combined(source)
            case Label():
                self.constants.append(float(self._label(source)))
                return Constant(len(self.constants))
            case Arithmetic():
                left, right = self._number(source.left), self._number(source.right)
                return Joined(left, source.op, right, str(source))

    def _combined(self, metric: Metric) -> Number:
        found = self._places.of(metric.name, metric.where)
        part = self._taken(row for row, _ in found)
        if metric.combine != "mean" or len(found) == 1 or not metric.weight:
            return Combined(metric, part)
        weights = self._places.by_labels(metric.weight, ())
        if any(labels not in weights for _, labels in found):
            raise Unknown(
                f"{metric.weight} has not the labels of {metric.name}, so no mean can be weighted"
            )
        return Weighted(metric, part, self._taken(weights[labels] for _, labels in found))

    def _label(self, source: Label) -> int:
        found = self._places.of(source.metric)
        texts = [dict(labels).get(source.label) for _, labels in found]
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

    def _by_label(self, metric: Metric) -> ByLabel:
        found: dict[str, list[int]] = {}
        for row, labels in self._places.of(metric.name, metric.where):
            entry = dict(labels).get(metric.by)
            if entry is not None:
                found.setdefault(shown(entry), []).append(row)
        if not found:
            raise Unknown(f"{metric.name} has no label {metric.by}")
        if len(found) > MOST_TEXTS:
            raise Unknown(f"{metric.name} has {len(found):,} values of {metric.by}")
        return ByLabel(metric, tuple((entry, self._taken(rows)) for entry, rows in found.items()))

    def _findings(self, metric: Metric) -> Findings:
        found: dict[tuple[str, str, str], list[int]] = {}
        for row, labels in self._places.of(metric.name, metric.where):
            rule, kind, layer = (shown(dict(labels).get(label, "")) for label in PLACE)
            if not rule:
                raise Unknown(f"a line of {metric.name} has no {PLACE[0]}")
            found.setdefault((rule, kind, layer), []).append(row)
        if len(found) > MOST_TEXTS:
            raise Unknown(f"{metric.name} has {len(found):,} findings")
        return Findings(metric, tuple((place, self._taken(rows)) for place, rows in found.items()))

    def _buckets(self, metric: Metric) -> Buckets:
        groups = self._groups(metric)
        shapes = {tuple(sorted(group)) for group in groups.values()}
        if len(shapes) > 1:
            raise Unknown(f"the series of {metric.name} have different buckets")
        shape = shapes.pop()
        if shape[-1] != math.inf:
            raise Unknown(f"{metric.name} has no bucket for everything (+Inf)")
        parts = [self._taken(group[bound] for bound in shape) for group in groups.values()]
        sums = self._places.by_labels(f"{metric.name}_sum", metric.where)
        whole = None
        if groups.keys() <= sums.keys():
            whole = self._taken(sums[labels] for labels in groups)
        bounds = tuple(bound * metric.scale for bound in shape)
        return Buckets(metric, bounds, tuple(parts), whole)

    def _groups(self, metric: Metric) -> dict[Labels, dict[float, int]]:
        """Labels but `le` → upper bound → row."""
        groups: dict[Labels, dict[float, int]] = {}
        for row, labels in self._places.of(f"{metric.name}_bucket", metric.where):
            bound = number_of(dict(labels).get("le", "").encode())
            rest = tuple(pair for pair in labels if pair[0] != "le")
            if bound is None or math.isnan(bound) or bound in groups.get(rest, ()):
                raise Unknown(f"{metric.name} has a bucket without a bound of its own")
            groups.setdefault(rest, {})[bound] = row
        for labels, row in self._places.by_labels(f"{metric.name}_count", metric.where).items():
            # The last bucket and the count are one number.
            groups.get(labels, {}).setdefault(math.inf, row)
        return groups

    def _taken(self, rows: Iterable[int]) -> Part:
        """Where the numbers of these rows will stand."""
        start = len(self._rows)
        self._rows.extend(rows)
        return Part(start, len(self._rows))


_GAUGES, _COUNTERS = frozenset(GAUGES), frozenset(COUNTERS)
_LABELLED, _HISTOGRAMS = frozenset(LABELLED), frozenset(HISTOGRAMS)
_PROBED = frozenset(PROBED)


def shown(text: str) -> str:
    """A label's text as anything may show it: short, without what a terminal would act on."""
    text = text[:MOST_CHARS]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def adapter_names(series: Iterable[Labels], labels: tuple[str, ...]) -> tuple[str, ...]:
    """The names that these labels list by commas, sorted."""
    texts = {text for named in series for label, text in named if label in labels}
    names = {shown(name) for text in texts for name in text.split(",") if name}
    return tuple(sorted(names)[:MOST_TEXTS])


def _metric(source: Source) -> Metric:
    assert isinstance(source, Metric), "tables and histograms are read from one metric"
    return source


def _has(labels: Labels, where: tuple[tuple[str, str], ...]) -> bool:
    named = dict(labels)
    return all(named.get(label, "") == text for label, text in where)


def _ranked(rank: Labels) -> list[tuple[str, int, str]]:
    return [(label, int(text) if text.isdecimal() else 0, text) for label, text in rank]


def _count(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > MOST_DIGITS:
        return None
    return int(text)
