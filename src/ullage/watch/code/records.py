"""Recording rules: every field of the vocabulary that an engine exports, one series per replica.

Holds which are recorded and under what names; the PromQL of each is `expressions`'. Alerts are
written on these names, so that one text serves every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from string import Template

from ullage.telemetry.dialects.source import Dialect
from ullage.telemetry.dialects.vllm import CACHE_INFO
from ullage.telemetry.promql_text import quoted
from ullage.telemetry.snapshot import Counter, Gauge, Histograms, Labelled
from ullage.watch.code.alert import keys_in
from ullage.watch.code.expressions import (
    CannotBeSaid,
    Scope,
    bucket_scale,
    buckets,
    counts,
    gauge,
    guarded,
    labelled,
    labelled_rate,
    probe_findings,
    process,
    rate,
    resets,
    several_models,
    several_settings,
    spoken,
    sums,
    up,
)
from ullage.watch.rules.leaving import UNCOUNTED
from ullage.watch.rules.probe import WARNING

ENGINE = "ullage_engine"
"""The label of every record and alert that says which dialect it was written for."""

GAUGES: tuple[Gauge, ...] = (
    "kv_used_ratio",
    "kv_used_bytes",
    "kv_total_bytes",
    "kv_used_tokens",
    "kv_total_tokens",
    "page_utilization_ratio",
    "running",
    "waiting",
    "oldest_request_age_s",
)
RATES: tuple[Counter, ...] = (
    "preemptions",
    "recomputed_tokens",
    "prompt_tokens",
    "generation_tokens",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "rejected_requests",
)
TOKENS: tuple[Counter, ...] = ("prompt_tokens", "generation_tokens")
PREFIX: tuple[Counter, ...] = ("prefix_queries_tokens", "prefix_hits_tokens")
PEER_GAUGES: tuple[Gauge, ...] = ("running", "waiting", "kv_used_ratio")
EVERYDAY = ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
"""Labels of settings that differ a little from start to start."""
PARTS: Mapping[str, tuple[Labelled, tuple[str, ...]]] = {
    "waiting_capacity": ("waiting_by_reason", ("capacity",)),
    "waiting_deferred": ("waiting_by_reason", ("deferred",)),
    "asleep": ("sleep_state", ("weights_offloaded", "discard_all")),
}
PART_RATES: Mapping[str, tuple[Labelled, tuple[str, ...]]] = {
    "finished": ("finished_by_reason", ()),
    "finished_length": ("finished_by_reason", ("length",)),
    "finished_error": ("finished_by_reason", ("error",)),
    "finished_abort": ("finished_by_reason", ("abort",)),
}
LATENCIES: tuple[Histograms, ...] = ("ttft_s", "itl_s", "e2e_s", "queue_s")
LENGTHS: tuple[Histograms, ...] = ("request_prompt_tokens", "request_generation_tokens")
ENDINGS = (
    "finished_rate",
    "e2e_s_count_rate",
    "request_generation_tokens_count_rate",
    "ttft_s_count_rate",
)
"""Counted once per request; as `watch.rules` counts requests."""
BELOW_ONE = "0([.].*)?|.*e-.*"
"""How Python writes a number below one."""
SPOKEN = "ullage:spoken"
ENDED_PAST, ABORTED_PAST, BEGUN_PAST = (
    f"$scrape_s * sum_over_time(${rate}[$past] offset $settled)"
    for rate in ("finished_rate", "finished_abort_rate", "ttft_s_count_rate")
)
GIVEN_UP: tuple[tuple[str, str, str], ...] = (
    ("given_up_rate", "given_up:rate$recent", "$finished_abort_rate"),
    ("parted_rate", "parted:rate$recent", "$finished_rate"),
    ("given_up_past_ratio", "given_up_past_ratio", f"{ABORTED_PAST} / ({ENDED_PAST} > 0)"),
)
"""(key, name, template) of those who gave up, of all who ended or left, and the past's share."""
GIVEN_UP_UNCOUNTED: tuple[tuple[str, str, str], ...] = (
    # The rates at the past's beginning look back that far: so do those in flight before them.
    (
        "in_flight_most",
        "in_flight_most:max$recent",
        "max_over_time($running[$recent]) + max_over_time($waiting[$recent])",
    ),
    (
        "left_least_rate",
        "left_least:rate$recent",
        "clamp_min($ttft_s_count_rate - $finished_rate - ($running + $waiting) / $recent_s, 0)"
        " unless $resets > 0",  # a restart ends requests too
    ),
    (
        "left_past_most",
        "left_past_most",
        f"clamp_min({BEGUN_PAST} - {ENDED_PAST}"
        " + max_over_time($in_flight_most[$past] offset $settled), 0)",
    ),
    ("given_up_rate", "given_up:rate$recent", "$left_least_rate + $finished_abort_rate"),
    ("parted_rate", "parted:rate$recent", "$left_least_rate + $finished_rate"),
    (
        "given_up_past_ratio",
        "given_up_past_ratio",
        f"($left_past_most + {ABORTED_PAST}) / ($left_past_most + {ENDED_PAST} > 0)",
    ),
)
"""The same where those who left are not counted, as W024 tells them: now the fewest, in the past
the most, of those who left after their first token."""
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Spans:
    """How long rules look back, counted in scrapes: a rate over fewer says little.

    At Prometheus' scrapes every 15 s: 2 min, 5 min, 1 h, and the past ends 20 min ago. Nearer, what
    is wrong would soon be part of it, and the alert over while the fault goes on.
    """

    scrape_s: float = 15.0

    @property
    def short_s(self) -> float:
        return 8 * self.scrape_s

    @property
    def recent_s(self) -> float:
        return 20 * self.scrape_s

    @property
    def settled_s(self) -> float:
        return 80 * self.scrape_s

    @property
    def past_s(self) -> float:
        return 240 * self.scrape_s


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded series: `key` is what alerts call it, `name` what Prometheus does."""

    key: str
    name: str
    promql: str


@dataclass(frozen=True, slots=True)
class Records:
    """What an engine's rules record, and why not the rest (by key)."""

    records: tuple[Record, ...]
    unsaid: Mapping[str, str]

    def names(self) -> dict[str, str]:
        return {record.key: record.name for record in self.records}


def duration(seconds: float) -> str:
    """A PromQL duration: `90s` is `1m30s`; to the millisecond."""
    rest, text = round(1000 * seconds), ""
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def records_of(dialect: Dialect, scope: Scope, spans: Spans) -> Records:
    """Every record that the dialect has something for, those that others read first."""
    writer = _Writer(dialect, replace(scope, known=of_engine(SPOKEN, dialect)), spans)
    writer.records.append(Record("spoken", SPOKEN, spoken(dialect, scope)))
    writer.add_process()
    writer.add_gauges()
    writer.add_rates()
    for histogram in (*LATENCIES, *LENGTHS):
        writer.add_histogram(histogram)
    writer.add_through()
    writer.add_given_up()
    writer.add_identity()
    writer.add_probe()
    writer.add_peers()
    return Records(tuple(writer.records), writer.unsaid)


class _Writer:
    """Records so far, and what could not be said."""

    def __init__(self, dialect: Dialect, scope: Scope, spans: Spans) -> None:
        self.records: list[Record] = []
        self.unsaid: dict[str, str] = {}
        self._dialect = dialect
        self._scope = scope
        self._spans = spans
        self._window = duration(spans.recent_s)

    def add_process(self) -> None:
        dialect, scope = self._dialect, self._scope
        past = duration(self._spans.past_s)
        self._add("up", "up", lambda: up(dialect, scope, past))
        started = "process_start_time_seconds"
        self._add("started", started, lambda: process(dialect, started, scope))
        self._add(
            "resets",
            f"counter_resets:{self._window}",
            lambda: resets(dialect, "generation_tokens", scope, self._window),
        )

    def add_gauges(self) -> None:
        for field in GAUGES:
            self._add(field, _based(field), partial(gauge, self._dialect, field, self._scope))
        for key, (label, values) in PARTS.items():
            self._add(key, key, partial(labelled, self._dialect, label, self._scope, values))

    def add_rates(self) -> None:
        for counter in RATES:
            self._add_rate(f"{counter}_rate", counter, self._window)
        for counter in TOKENS:
            # What a stuck engine stops counting has to be seen soon.
            self._add_rate(f"{counter}_soon", counter, duration(self._spans.short_s))
        for key, (label, values) in PART_RATES.items():
            self._add(
                f"{key}_rate",
                f"{key}:rate{self._window}",
                partial(labelled_rate, self._dialect, label, self._scope, self._window, values),
            )

    def _add_rate(self, key: str, counter: Counter, window: str) -> None:
        write = partial(rate, self._dialect, counter, self._scope, window)
        self._add(key, f"{counter}:rate{window}", write)

    def add_histogram(self, name: Histograms) -> None:
        """Rates of its parts, and quantiles of the buckets'."""
        base = _based(name)
        for part, write in (("count", counts), ("sum", sums), ("bucket", buckets)):
            self._add(
                f"{name}_{part}_rate",
                f"{base}_{part}:rate{self._window}",
                partial(write, self._dialect, name, self._scope, self._window),
            )
        for quantile, q in QUANTILES.items():
            key = f"{name}_{quantile}"
            why = self.unsaid.get(f"{name}_bucket_rate")
            if why is not None:
                self.unsaid[key] = why
                continue
            scale = bucket_scale(self._dialect, name)
            bucket = of_engine(f"ullage:{base}_bucket:rate{self._window}", self._dialect)
            text = f"histogram_quantile({q}, {bucket})"
            text = text if scale == 1.0 else f"{scale!r} * {text}"
            self.records.append(Record(key, f"ullage:{base}:{quantile}_{self._window}", text))

    def add_through(self) -> None:
        """Requests that got through, by the first of ENDINGS that the engine counts."""
        names = {record.key: record.name for record in self.records}
        for key in ENDINGS:
            if key in names:
                text = of_engine(names[key], self._dialect)
                name = f"ullage:through:rate{self._window}"
                self.records.append(Record("through_rate", name, text))
                return
        self.unsaid["through_rate"] = f"{self._dialect.title} counts no requests that end"

    def add_given_up(self) -> None:
        """Who left before the end: by their counter, or by what began and did not end."""
        uncounted, spans = self._dialect.engine in UNCOUNTED, self._spans
        words = {
            "recent": self._window,
            "past": duration(spans.past_s),
            "settled": duration(spans.settled_s),
            "recent_s": f"{spans.recent_s:g}",
            "scrape_s": f"{spans.scrape_s:g}",
        }
        for key, name, template in GIVEN_UP_UNCOUNTED if uncounted else GIVEN_UP:
            known = {one.key: of_engine(one.name, self._dialect) for one in self.records}
            lacking = sorted(keys_in(template) - known.keys())
            if lacking:
                self.unsaid[key] = "; ".join(dict.fromkeys(self.unsaid[one] for one in lacking))
                continue
            said = Template(template).substitute(known, **words)
            name = Template(name).substitute(words)
            self.records.append(Record(key, f"ullage:{name}", said))

    def add_identity(self) -> None:
        dialect, scope, window = self._dialect, self._scope, self._window
        self._add(
            "models_gone",
            f"models_gone:{window}",
            lambda: several_models(dialect, scope, window),
        )
        self._add(
            "settings_gone",
            f"settings_gone:{window}",
            lambda: several_settings(dialect, scope, window, EVERYDAY),
        )
        self._add("pool_below_a_request", "pool_below_a_request", self._small_pool)

    def add_probe(self) -> None:
        """What the server's own probe says: of the model itself, and of what is only usual."""
        for key, others in (("probe_errors", True), ("probe_warnings", False)):
            write = partial(probe_findings, self._dialect, self._scope, WARNING, others=others)
            self._add(key, key, write)

    def _small_pool(self) -> str:
        if CACHE_INFO not in self._dialect.info.settings:
            raise CannotBeSaid(f"{self._dialect.title} does not export how many requests fit")
        small = self._scope.select(CACHE_INFO, f"kv_cache_max_concurrency=~{quoted(BELOW_ONE)}")
        text = f"group by ({self._scope.labels()}) ({small})"
        return guarded(text, self._dialect, self._scope, CACHE_INFO)

    def add_peers(self) -> None:
        """What replicas of one model are compared by: the same once more, with the model."""
        label = self._dialect.info.model_label
        scope = replace(self._scope, more=(label,))
        for field in PEER_GAUGES:
            write = partial(gauge, self._dialect, field, scope)
            self._add(f"peer_{field}", f"peer_{field}", self._of_model(write))
        for counter in PREFIX:
            write = partial(rate, self._dialect, counter, scope, self._window)
            name = f"peer_{counter}:rate{self._window}"
            self._add(f"peer_{counter}_rate", name, self._of_model(write))
        write = partial(labelled_rate, self._dialect, "finished_by_reason", scope, self._window, ())
        name = f"peer_finished:rate{self._window}"
        self._add("peer_finished_rate", name, self._of_model(write))

    def _of_model(self, write: Callable[[], str]) -> Callable[[], str]:
        def written() -> str:
            if not self._dialect.info.model_label:
                raise CannotBeSaid(f"{self._dialect.title} does not say which model it serves")
            return write()

        return written

    def _add(self, key: str, name: str, write: Callable[[], str]) -> None:
        try:
            self.records.append(Record(key, f"ullage:{name}", write()))
        except CannotBeSaid as error:
            self.unsaid[key] = str(error)


def of_engine(name: str, dialect: Dialect) -> str:
    """A selector of the dialect's own series of that record."""
    return f'{name}{{{ENGINE}="{dialect.engine}"}}'


def _based(name: str) -> str:
    """The field's name with Prometheus' base unit."""
    return f"{name[:-2]}_seconds" if name.endswith("_s") else name
