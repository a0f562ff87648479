"""A field of the vocabulary, as a dialect's table has it → PromQL that reads it per replica.

Holds the translation only. Of several names of one thing (an engine's releases) each is asked for,
newest first, as when a page is read. What a label says in figures PromQL cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Label, Metric, Source
from ullage.telemetry.plan_making import PLACE
from ullage.telemetry.promql_text import MARKERS, any_of, metrics_in, quoted
from ullage.telemetry.snapshot import Counter, Gauge, Histograms, Labelled, Name

OPERATORS = {"×": "*", "÷": "/", "−": "-", "+": "+"}
AGGREGATORS = {"sum": "sum", "mean": "avg", "max": "max", "copies": "max"}
BY = ("cluster", "namespace", "job", "pod", "instance")
"""What tells replicas apart. A label that a server does not have is no label in PromQL."""
OF_ONE = ("pod", "instance")
"""Those of them that differ within a fleet."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series are read (`matchers`, as in PromQL's braces) and what tells replicas apart.

    `known` is a recorded series of every replica of the dialect, where there is one: it stands for
    the engine's own marks. `more` are labels of the engine's own that are kept as well.
    """

    matchers: str = ""
    by: tuple[str, ...] = BY
    known: str = ""
    more: tuple[str, ...] = ()

    def select(self, name: str, *matchers: str) -> str:
        inner = ",".join(part for part in (*matchers, self.matchers) if part)
        return f"{name}{{{inner}}}" if inner else name

    def labels(self, *more: str) -> str:
        return ", ".join((*self.by, *self.more, *more))

    def replica(self) -> str:
        """The labels that every series of a replica has."""
        return ", ".join(self.by)


class CannotBeSaid(Exception):
    """PromQL has no way to say it of this engine; `str()` is the reason."""


Inner = Callable[[str], str]
"""A selector → what is aggregated of it: itself, or its rate."""


def gauge(dialect: Dialect, name: Gauge, scope: Scope) -> str:
    """One series per replica. Raises CannotBeSaid."""
    return _first(dialect, name, lambda source: _value(source, dialect, scope, _itself))


def rate(dialect: Dialect, name: Counter, scope: Scope, window: str) -> str:
    """Per second over the window, one series per replica. Raises CannotBeSaid."""
    return _first(dialect, name, lambda source: _value(source, dialect, scope, _rate(window)))


def labelled(dialect: Dialect, name: Labelled, scope: Scope, values: Sequence[str] = ()) -> str:
    """A gauge's series with one of the label's values, or all, added up. Raises CannotBeSaid."""
    return _labelled(dialect, name, scope, _itself, values)


def labelled_rate(
    dialect: Dialect, name: Labelled, scope: Scope, window: str, values: Sequence[str] = ()
) -> str:
    """Per second over the window, of the label's values or of all. Raises CannotBeSaid."""
    return _labelled(dialect, name, scope, _rate(window), values)


def split_rate(dialect: Dialect, name: Labelled, scope: Scope, window: str) -> tuple[str, str]:
    """(PromQL, label): one series per replica and value of the label. Raises CannotBeSaid."""
    metric = _labelled_metric(dialect, name)
    text = _aggregate(metric, metric.name, dialect, scope, _rate(window), (metric.by,))
    return text, metric.by


def split(dialect: Dialect, name: Labelled, scope: Scope) -> tuple[str, str]:
    """(PromQL, label): a gauge, one series per replica and value of the label. Raises
    CannotBeSaid."""
    metric = _labelled_metric(dialect, name)
    text = _aggregate(metric, metric.name, dialect, scope, _itself, (metric.by,))
    return text, metric.by


def probe_findings(dialect: Dialect, scope: Scope, ids: Sequence[str], *, others: bool) -> str:
    """1 where the server's own probe fires, one series per replica, rule and place: of the rules
    `ids`, or of all `others`. Raises CannotBeSaid."""
    sources = dialect.fields.get("probe_findings")
    if not sources:
        raise CannotBeSaid(_why(dialect, "probe_findings"))
    matcher = f"id{'!~' if others else '=~'}{any_of(ids)}"
    metric = _own(sources[0])
    return _aggregate(metric, metric.name, dialect, scope, _itself, PLACE, matcher=matcher)


def buckets(dialect: Dialect, name: Histograms, scope: Scope, window: str) -> str:
    """Rate of a histogram's buckets, one series per replica and `le`. Raises CannotBeSaid."""
    return _histogram(dialect, name, scope, window, "_bucket", "le")


def sums(dialect: Dialect, name: Histograms, scope: Scope, window: str) -> str:
    """Rate of a histogram's sum, one series per replica. Raises CannotBeSaid."""
    return _histogram(dialect, name, scope, window, "_sum")


def counts(dialect: Dialect, name: Histograms, scope: Scope, window: str) -> str:
    """Rate of a histogram's count, one series per replica. Raises CannotBeSaid."""
    return _histogram(dialect, name, scope, window, "_count")


def resets(dialect: Dialect, name: Counter, scope: Scope, window: str) -> str:
    """How often the counter went back in the window, per replica. Raises CannotBeSaid."""
    sources = [s for s in dialect.fields.get(name, ()) if isinstance(s, Metric)]
    if not sources:
        raise CannotBeSaid(_why(dialect, name))
    each = []
    for source in sources:
        inner = f"resets({scope.select(source.name)}[{window}])"
        each.append(guarded(f"max by ({scope.labels()}) ({inner})", dialect, scope, source.name))
    return _alternatives(each)


def several_models(dialect: Dialect, scope: Scope, window: str) -> str:
    """By how many models more than now the replica spoke of in the window. Raises CannotBeSaid."""
    label = dialect.info.model_label
    if not label:
        raise CannotBeSaid(f"{dialect.title} does not say which model it serves")
    metric = _running(dialect)
    each = f"{scope.replica()}, {label}"
    select = scope.select(metric.name)
    seen = f"count by ({scope.replica()}) (group by ({each}) (last_over_time({select}[{window}])))"
    now = f"count by ({scope.replica()}) (group by ({each}) ({select}))"
    return guarded(f"{seen} - {now}", dialect, scope, metric.name)


def several_settings(dialect: Dialect, scope: Scope, window: str, everyday: Sequence[str]) -> str:
    """By how many sets of flags more than now it spoke of in the window. Raises CannotBeSaid."""
    if not dialect.info.settings:
        raise CannotBeSaid(f"{dialect.title} does not say its flags in its metrics")
    each = []
    for name in dialect.info.settings:
        select = scope.select(name)
        sets = f"group without ({', '.join(everyday)})"
        seen = f"count by ({scope.replica()}) ({sets} (last_over_time({select}[{window}])))"
        now = f"count by ({scope.replica()}) ({sets} ({select}))"
        each.append(guarded(f"({seen} - {now} > 0)", dialect, scope, name))
    return _alternatives(each)


def _running(dialect: Dialect) -> Metric:
    for source in dialect.fields.get("running", ()):
        if isinstance(source, Metric):
            return source
    raise CannotBeSaid(_why(dialect, "running"))


def process(dialect: Dialect, metric: str, scope: Scope) -> str:
    """A metric of the process that serves, such as its start, per replica."""
    text = f"max by ({scope.labels()}) ({scope.select(metric)})"
    return guarded(text, dialect, scope, metric)


def spoken(dialect: Dialect, scope: Scope) -> str:
    """One series per replica that says anything of the engine."""
    return _unless(f"group by ({scope.labels()}) ({_present(dialect, scope)})", dialect, scope)


def up(dialect: Dialect, scope: Scope, within: str) -> str:
    """1 or 0 per replica that is scraped and said anything of the engine in that time."""
    text = (
        f"min by ({scope.labels()}) ({scope.select('up')}) and on ({scope.replica()}) "
        f"last_over_time({_present(dialect, scope)}[{within}])"
    )
    if not dialect.unless:
        return text
    others = f"last_over_time({_marked(dialect.unless, scope)}[{within}])"
    return f"{text} unless on ({scope.replica()}) {others}"


def guarded(promql: str, dialect: Dialect, scope: Scope, *names: str) -> str:
    """`promql`, of replicas of this dialect only, where `names` alone do not tell that."""
    foreign = any(not name.startswith(dialect.marks) for name in names)
    if scope.known and (foreign or dialect.unless):
        return f"{promql} and on ({scope.replica()}) {scope.known}"
    text = promql
    if foreign:
        text = f"{text} and on ({scope.replica()}) {_present(dialect, scope)}"
    return _unless(text, dialect, scope)


# --- one field -----------------------------------------------------------------------------------


def _first(dialect: Dialect, name: Name, write: Callable[[Source], str]) -> str:
    """Every source of the field that can be said, joined by `or`."""
    sources = dialect.fields.get(name)
    if not sources:
        raise CannotBeSaid(_why(dialect, name))
    said: list[str] = []
    refused = ""
    for source in sources:
        try:
            said.append(write(source))
        except CannotBeSaid as error:
            refused = str(error)
    if not said:
        raise CannotBeSaid(refused)
    return _alternatives(said)


def _alternatives(said: Sequence[str]) -> str:
    return said[0] if len(said) == 1 else " or ".join(f"({text})" for text in said)


def _why(dialect: Dialect, name: Name) -> str:
    return dialect.absent.get(name, f"{dialect.title} does not export it")


def _labelled_metric(dialect: Dialect, name: Labelled) -> Metric:
    for source in dialect.fields.get(name, ()):
        if isinstance(source, Metric) and source.by:
            return source
    raise CannotBeSaid(_why(dialect, name))


def _labelled(
    dialect: Dialect, name: Labelled, scope: Scope, inner: Inner, values: Sequence[str]
) -> str:
    metric = _labelled_metric(dialect, name)
    one = len(values) == 1
    matcher = f"{metric.by}{'=' if one else '=~'}{quoted('|'.join(values))}" if values else ""
    return _aggregate(metric, metric.name, dialect, scope, inner, matcher=matcher)


def _histogram(
    dialect: Dialect, name: Histograms, scope: Scope, window: str, end: str, *more: str
) -> str:
    """A part's rate. Only the sum is in the vocabulary's unit: buckets keep the engine's `le`."""

    def write(source: Source) -> str:
        metric = _own(source)
        text = _aggregate(metric, metric.name + end, dialect, scope, _rate(window), more)
        return _scaled(text, metric.scale if end == "_sum" else 1.0)

    return _first(dialect, name, write)


def bucket_scale(dialect: Dialect, name: Histograms) -> float:
    """What takes a quantile of the engine's own buckets to the vocabulary's unit."""
    scales = {_own(source).scale for source in dialect.fields[name]}
    assert len(scales) == 1, f"{dialect.engine}: {name} changed its unit between releases"
    return scales.pop()


def _own(source: Source) -> Metric:
    assert isinstance(source, Metric), "histograms and findings are read from one metric"
    return source


# --- one source ----------------------------------------------------------------------------------


def _value(source: Source, dialect: Dialect, scope: Scope, inner: Inner) -> str:
    if isinstance(source, Label):
        raise CannotBeSaid(f"it is text in a label of {source.metric}, which PromQL cannot count")
    if isinstance(source, Arithmetic):
        left = _value(source.left, dialect, scope, inner)
        right = _value(source.right, dialect, scope, inner)
        return f"({left}) {OPERATORS[source.op]} ({right})"
    return _scaled(_aggregate(source, source.name, dialect, scope, inner), source.scale)


def _scaled(promql: str, scale: float) -> str:
    return promql if scale == 1.0 else f"{scale!r} * ({promql})"


def _aggregate(
    metric: Metric,
    name: str,
    dialect: Dialect,
    scope: Scope,
    inner: Inner,
    more: Sequence[str] = (),
    *,
    matcher: str = "",
) -> str:
    """The metric's series of one replica as one, of copies only one each."""
    where = [f"{label}={quoted(value)}" for label, value in metric.where]
    one = _once(inner(scope.select(name, *where, matcher)), dialect)
    if metric.nan:
        one = f"({one} >= 0)"  # NaN says that there is nothing to measure
    labels = scope.labels(*more)
    if metric.combine == "mean" and metric.weight:
        weight = _once(inner(scope.select(metric.weight)), dialect)
        text = f"sum by ({labels}) ({one} * {weight}) / (sum by ({labels}) ({weight}) > 0)"
    else:
        text = f"{AGGREGATORS[metric.combine]} by ({labels}) ({one})"
    return guarded(text, dialect, scope, name)


def _once(promql: str, dialect: Dialect) -> str:
    """Of series that repeat one number (ranks) one."""
    return f"max without ({', '.join(dialect.copies)}) ({promql})" if dialect.copies else promql


def _itself(selector: str) -> str:
    return selector


def _rate(window: str) -> Inner:
    return lambda selector: f"rate({selector}[{window}])"


# --- whose series --------------------------------------------------------------------------------


def _unless(promql: str, dialect: Dialect, scope: Scope) -> str:
    if not dialect.unless:
        return promql
    return f"{promql} unless on ({scope.replica()}) {_marked(dialect.unless, scope)}"


def _present(dialect: Dialect, scope: Scope) -> str:
    """A few series that every replica of the dialect has: its marks where these are whole names,
    else what it says of its load. All of its series would be a thousand of each replica."""
    known = {
        metric
        for name in MARKERS
        for source in dialect.fields.get(name, ())
        for metric in metrics_in(source)
        if metric.startswith(dialect.marks)
    }
    if not known:
        return _marked(dialect.marks, scope)
    return _select_names("|".join(map(re.escape, sorted(known))), scope)


def _marked(marks: Sequence[str], scope: Scope) -> str:
    """Every series whose name begins with one of the marks."""
    return _select_names("|".join(f"{re.escape(mark)}.*" for mark in marks), scope)


def _select_names(pattern: str, scope: Scope) -> str:
    return "{" + ",".join(p for p in (f"__name__=~{quoted(pattern)}", scope.matchers) if p) + "}"
