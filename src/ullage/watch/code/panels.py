"""What a dashboard of an engine shows: rows of panels, each with its PromQL, and what is left out.

Holds titles, units and queries, as data. How Grafana writes them down is `dashboard`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ullage.telemetry.dialects.source import Dialect
from ullage.telemetry.snapshot import Counter, Gauge, Histograms, Labelled
from ullage.watch.code.expressions import (
    CannotBeSaid,
    Scope,
    bucket_scale,
    buckets,
    gauge,
    rate,
    split,
    split_rate,
)

WINDOW = "$__rate_interval"
CHOSEN = 'job=~"$job",instance=~"$instance"'
Kind = Literal["series", "stacked", "stat"]
WHO = "{{pod}} {{instance}}"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what its lines are called."""

    promql: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's; `width` of 24; a `most` bounds the axis."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""
    kind: Kind = "series"
    width: int = 8
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """`absent`: (what is not shown, why). `chosen_by`: a metric whose labels fill the menus."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    absent: tuple[tuple[str, str], ...]
    chosen_by: str
    menus: tuple[str, ...]
    alerts: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A panel as it is wanted: each part is left out where the engine cannot say it."""

    title: str
    unit: str
    parts: tuple[tuple[Callable[[Dialect, Scope], str], str], ...]
    description: str = ""
    kind: Kind = "series"
    width: int = 8
    most: float | None = None


def _gauge(name: Gauge) -> Callable[[Dialect, Scope], str]:
    return lambda dialect, scope: gauge(dialect, name, scope)


def _all(name: Gauge, how: str) -> Callable[[Dialect, Scope], str]:
    return lambda dialect, scope: f"{how} ({gauge(dialect, name, scope)})"


def _rate(name: Counter) -> Callable[[Dialect, Scope], str]:
    return lambda dialect, scope: rate(dialect, name, scope, WINDOW)


def _sum_rate(name: Counter) -> Callable[[Dialect, Scope], str]:
    return lambda dialect, scope: f"sum ({rate(dialect, name, scope, WINDOW)})"


def _quantile(name: Histograms, q: float) -> Callable[[Dialect, Scope], str]:
    def written(dialect: Dialect, scope: Scope) -> str:
        text = f"histogram_quantile({q}, {buckets(dialect, name, scope, WINDOW)})"
        scale = bucket_scale(dialect, name)
        return text if scale == 1.0 else f"{scale!r} * {text}"

    return written


def _hit_ratio(dialect: Dialect, scope: Scope) -> str:
    hits = rate(dialect, "prefix_hits_tokens", scope, WINDOW)
    return f"({hits}) / ({rate(dialect, 'prefix_queries_tokens', scope, WINDOW)} > 0)"


def _by(name: Labelled, *, counts: bool) -> Callable[[Dialect, Scope], str]:
    """Of all replicas together, by the label."""

    def written(dialect: Dialect, scope: Scope) -> str:
        write = partial(split_rate, window=WINDOW) if counts else split
        text, label = write(dialect, name, scope)
        return f'sum by (kind) (label_replace({text}, "kind", "$1", "{label}", "(.*)"))'

    return written


def _up(_: Dialect, scope: Scope) -> str:
    return f"sum ({scope.select('up')})"


def _quantiles(name: Histograms) -> tuple[tuple[Callable[[Dialect, Scope], str], str], ...]:
    return tuple((_quantile(name, q), f"p{100 * q:g} {WHO}") for q in (0.5, 0.99))


BUCKETS = "Within its bucket a quantile is an estimate, as Prometheus makes it."
WANTED: tuple[tuple[str, tuple[Wanted, ...]], ...] = (
    (
        "Fleet",
        (
            Wanted("Replicas that answer", "short", ((_up, ""),), kind="stat", width=4),
            Wanted(
                "Fullest KV cache",
                "percentunit",
                ((_all("kv_used_ratio", "max"), ""),),
                kind="stat",
                width=4,
            ),
            Wanted("Running", "short", ((_all("running", "sum"), ""),), kind="stat", width=4),
            Wanted("Waiting", "short", ((_all("waiting", "sum"), ""),), kind="stat", width=4),
            Wanted(
                "Preemptions per second",
                "short",
                ((_sum_rate("preemptions"), ""),),
                kind="stat",
                width=4,
            ),
            Wanted(
                "Tokens generated per second",
                "short",
                ((_sum_rate("generation_tokens"), ""),),
                kind="stat",
                width=4,
            ),
        ),
    ),
    (
        "KV cache",
        (
            Wanted(
                "KV held",
                "percentunit",
                ((_gauge("kv_used_ratio"), WHO),),
                "Of what requests hold now. Above 95% growth takes blocks from others (W001).",
                most=1.0,
            ),
            Wanted(
                "KV bytes",
                "bytes",
                (
                    (_gauge("kv_used_bytes"), f"held {WHO}"),
                    (_gauge("kv_total_bytes"), f"all {WHO}"),
                ),
            ),
            Wanted(
                "KV tokens",
                "short",
                (
                    (_gauge("kv_used_tokens"), f"held {WHO}"),
                    (_gauge("kv_total_tokens"), f"all {WHO}"),
                    (_gauge("kv_cached_tokens"), f"kept for prefixes {WHO}"),
                ),
            ),
            Wanted(
                "Room used in held pages",
                "percentunit",
                ((_gauge("page_utilization_ratio"), WHO),),
                "Low: the block is large for the requests (W002).",
                most=1.0,
            ),
            Wanted(
                "Prefix hits",
                "percentunit",
                ((_hit_ratio, WHO),),
                "Prompt tokens that were found in the cache, of those looked up (W004).",
                most=1.0,
            ),
        ),
    ),
    (
        "Requests",
        (
            Wanted("Running", "short", ((_gauge("running"), WHO),)),
            Wanted("Waiting", "short", ((_gauge("waiting"), WHO),)),
            Wanted(
                "Waiting, by reason",
                "short",
                ((_by("waiting_by_reason", counts=False), "{{kind}}"),),
                "Capacity: for KV or a seat. Deferred: for an adapter, a transfer, a grammar "
                "(W007).",
                "stacked",
            ),
            Wanted(
                "Preemptions per second",
                "short",
                (
                    (_rate("preemptions"), WHO),
                    (_rate("recomputed_tokens"), f"tokens computed again {WHO}"),
                ),
                "Each loses its KV and is computed again (W003).",
            ),
            Wanted(
                "Ended per second, by reason",
                "short",
                ((_by("finished_by_reason", counts=True), "{{kind}}"),),
                "A rise of length: answers are cut short (W013). Of error or abort: W023, W024. "
                "vLLM counts nobody who left.",
                "stacked",
            ),
            Wanted("Turned away per second", "short", ((_rate("rejected_requests"), WHO),)),
            Wanted("Oldest request", "s", ((_gauge("oldest_request_age_s"), WHO),)),
        ),
    ),
    (
        "Latency",
        (
            Wanted("Time to first token", "s", _quantiles("ttft_s"), BUCKETS),
            Wanted("Time between tokens", "s", _quantiles("itl_s"), BUCKETS),
            Wanted("Whole request", "s", _quantiles("e2e_s"), BUCKETS),
            Wanted("In the queue", "s", _quantiles("queue_s"), BUCKETS),
        ),
    ),
    (
        "Traffic",
        (
            Wanted("Prompt tokens per second", "short", ((_rate("prompt_tokens"), WHO),)),
            Wanted("Tokens generated per second", "short", ((_rate("generation_tokens"), WHO),)),
            Wanted("Prompt lengths", "short", _quantiles("request_prompt_tokens"), BUCKETS),
            Wanted("Answer lengths", "short", _quantiles("request_generation_tokens"), BUCKETS),
            Wanted("max_tokens asked", "short", _quantiles("request_max_tokens"), BUCKETS),
        ),
    ),
)


def board_of(dialect: Dialect, scope: Scope = Scope()) -> Board:  # noqa: B008 (frozen)
    """Everything that the dialect has something for. Who looks chooses the replicas."""
    matchers = ",".join(part for part in (CHOSEN, scope.matchers) if part)
    chosen = replace(scope, matchers=matchers)
    # Whose series they are is chosen in the menu, so nothing guards against other engines.
    plain = replace(dialect, marks=("",), unless=())
    absent: dict[str, str] = {}
    rows = []
    for title, wanted in WANTED:
        panels = [panel for one in wanted if (panel := _panel(one, plain, chosen, absent))]
        rows.append(Row(title, tuple(panels)))
    proof = "" if dialect.proof == "recorded" else " Names are published ones."
    return Board(
        uid=f"ullage-{dialect.engine}",
        title=f"ullage: {dialect.title}",
        description=f"{dialect.title} {dialect.versions}, by its own metrics.{proof}",
        rows=tuple(row for row in rows if row.panels),
        absent=tuple(absent.items()),
        chosen_by=scope.select(_menu_metric(dialect)),
        menus=("job", "instance"),
        alerts=f'ALERTS{{alertstate="firing",ullage_engine="{dialect.engine}"}}',
    )


def _panel(wanted: Wanted, dialect: Dialect, scope: Scope, absent: dict[str, str]) -> Panel | None:
    queries = []
    for write, legend in wanted.parts:
        try:
            queries.append(Query(write(dialect, scope), legend))
        except CannotBeSaid as error:
            absent.setdefault(wanted.title, str(error))
    if not queries:
        return None
    absent.pop(wanted.title, None)
    return Panel(
        wanted.title,
        wanted.unit,
        tuple(queries),
        wanted.description,
        wanted.kind,
        wanted.width,
        wanted.most,
    )


def _menu_metric(dialect: Dialect) -> str:
    own = next((mark for mark in dialect.marks if mark.endswith("_info")), None)
    if own is not None:
        return own
    from ullage.telemetry.promql_text import metrics_in

    return next(metric for source in dialect.fields["running"] for metric in metrics_in(source))
