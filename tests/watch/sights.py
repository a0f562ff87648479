"""Hand-made snapshots, views and sights for tests of what shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ullage.findings.finding import Evidence, Finding, Severity
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    Gpu,
    Identity,
    Snapshot,
)
from ullage.watch.rule import Judged
from ullage.watch.sight import Incident, Sight
from ullage.watch.view import Change, Span, Trend, View

NOW_S = 1_796_000_000.0
URL = "http://127.0.0.1:8000"
GB = 10**9
GAUGE_VALUES = {
    "kv_used_ratio": 0.75,
    "kv_used_bytes": 60.0 * GB,
    "kv_total_bytes": 80.0 * GB,
    "kv_used_tokens": 750_000.0,
    "kv_total_tokens": 1_000_000.0,
    "page_utilization_ratio": 0.9375,
    "running": 12.0,
    "waiting": 5.0,
}
COUNTER_VALUES = {
    "preemptions": 40.0,
    "prompt_tokens": 1e6,
    "generation_tokens": 2e5,
    "prefix_queries_tokens": 1e6,
    "prefix_hits_tokens": 4e5,
}
LABELLED_VALUES: dict[str, dict[str, float]] = {
    "waiting_by_reason": {"capacity": 4.0, "deferred": 1.0},
    "finished_by_reason": {"stop": 90.0, "length": 10.0},
}
TTFT = Histogram((0.1, 0.25, 0.5, 1.0, float("inf")), (1.0, 20.0, 90.0, 98.0, 100.0), 40.0)
ITL = Histogram((0.01, 0.025, 0.05, float("inf")), (10.0, 900.0, 1000.0, 1000.0), 20.0)
WHY = "vllm 0.32 does not export it"


def snapshot(
    time_s: float = NOW_S,
    *,
    gauges: Mapping[str, float] = GAUGE_VALUES,
    counters: Mapping[str, float] = COUNTER_VALUES,
    labelled: Mapping[str, Mapping[str, float]] = LABELLED_VALUES,
    histograms: Mapping[str, Histogram] | None = None,
    engine: str = "vllm",
    version: str = "0.32.0",
    gpus: tuple[Gpu, ...] = (),
    **identity: Any,
) -> Snapshot:
    """A snapshot that knows what is given; the rest is absent because of WHY."""
    histograms = {"ttft_s": TTFT, "itl_s": ITL} if histograms is None else histograms
    known = {**gauges, **counters, **labelled, **histograms}
    names = (*GAUGES, *COUNTERS, *LABELLED, *HISTOGRAMS)
    who = Identity(engine, version, **{"models": ("acme/seven-b",), **identity})
    return Snapshot(
        time_s, who, gauges, counters, labelled, histograms,
        sources={name: f"engine:{name}" for name in known},
        absent={name: WHY for name in names if name not in known},
        gpus=gpus,
    )  # fmt: skip


def trend(first: float, last: float, seconds: float, num: int = 2) -> Trend:
    low, high = sorted((first, last))
    return Trend(first, last, low, high, (first + last) / 2, num, (last - first) / seconds)


def span(
    seconds: float = 5.0,
    *,
    rises: Mapping[str, float] | None = None,
    histograms: Mapping[str, Histogram] | None = None,
    trends: Mapping[str, Trend] | None = None,
    **other: Any,
) -> Span:
    """Two scrapes `seconds` apart, in which the cache filled by one per cent each five seconds."""
    usual = {"preemptions": 2.0, "prompt_tokens": 5000.0, "generation_tokens": 1000.0}
    looked_up = {"prefix_queries_tokens": 1000.0, "prefix_hits_tokens": 410.0}
    return Span(
        seconds,
        {**usual, **looked_up} if rises is None else rises,
        {"finished_by_reason": {"stop": 9.0, "length": 1.0}},
        {"ttft_s": TTFT, "itl_s": ITL} if histograms is None else histograms,
        {"kv_used_ratio": trend(0.75 - seconds * 0.002, 0.75, seconds)}
        if trends is None
        else trends,
        **{"waiting_by_reason": {}, "num_scrapes": 2, "num_failed": 0, "resets": 0, **other},
    )


def view(
    url: str = URL,
    *,
    now: Snapshot | None = None,
    error: str = "",
    last: Span | None = None,
    recent: Span | None = None,
    **other: Any,
) -> View:
    """A replica that has answered twice or more; only once with `once=True`."""
    if other.pop("once", False):
        return View(url, now or snapshot(), error, None, None, None, **other)
    last = span() if last is None else last
    return View(url, now or snapshot(), error, last, recent or span(100.0), None, **other)


def down(url: str = "http://127.0.0.1:8001", error: str = "connection refused") -> View:
    return View(url, None, error, None, None, None)


def fired(
    rule: str = "W001",
    title: str = "how full the KV cache is",
    severity: Severity = Severity.warning,
    cause: str = "The cache is 96% full and fills in 20 s.",
    remedy: str = "Lower --max-num-seqs or add a replica.",
) -> Finding:
    facts = (Evidence("used", 0.96, "ratio", "vllm:kv_cache_usage_perc"),)
    return Finding(rule, title, severity, "fired", facts, cause, remedy)


def clear(rule: str = "W003", title: str = "how often requests are preempted") -> Finding:
    facts = (Evidence("preemptions", 0.0, "1/s", "vllm:num_preemptions_total"),)
    return Finding(rule, title, Severity.error, "clear", facts)


def lacking(rule: str = "W002", missing: str = "page_utilization_ratio") -> Finding:
    return Finding(rule, "what the pages hold", Severity.info, "not_evaluable", missing=(missing,))


def sight(
    *views: View,
    judged: tuple[Judged, ...] = (),
    incidents: tuple[Incident, ...] = (),
    time_s: float = NOW_S,
    interval_s: float = 5.0,
) -> Sight:
    return Sight(time_s, interval_s, views or (view(),), judged, incidents)


def incident(url: str = URL, finding: Finding | None = None) -> Incident:
    changed = (Change(NOW_S - 90, "version", "0.31.0", "0.32.0"),)
    return Incident(url, finding or fired(), NOW_S - 60, None, changed)
