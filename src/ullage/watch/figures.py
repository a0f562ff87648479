"""What is known of one replica now: figures that the terminal, the document and the exporter show.

Holds the arithmetic from a View to gauges, rates, ratios, quantiles and the time to full; each is
known, with its source, or absent, with the reason. Layout and units are those who show them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ullage.telemetry.gpus import NOBODY_ASKED
from ullage.telemetry.histogram import Quantile
from ullage.telemetry.snapshot import GAUGES, Counter, Gauge, Gpu, Histograms, Identity, Snapshot
from ullage.watch.view import Span, View

FREE = {
    "kv_free_bytes": ("kv_used_bytes", "kv_total_bytes"),
    "kv_free_tokens": ("kv_used_tokens", "kv_total_tokens"),
}
RATES: Mapping[str, Counter] = {
    "preemptions_per_s": "preemptions",
    "recomputed_tokens_per_s": "recomputed_tokens",
    "prompt_tokens_per_s": "prompt_tokens",
    "generation_tokens_per_s": "generation_tokens",
    "rejected_requests_per_s": "rejected_requests",
}
PREFIX_HITS = "prefix_hit_ratio"
TIME_TO_FULL = "time_to_full_s"
LABELLED = ("waiting_by_reason", "sleep_state")
FINISHED = "finished_by_reason"
ONE_SCRAPE = "it takes two scrapes, and there was one"
OTHER_SCRAPE = "it takes two scrapes of one process, and another answered before"
SPREADS: tuple[Histograms, ...] = (
    "ttft_s",
    "itl_s",
    "e2e_s",
    "queue_s",
    "prefill_s",
    "decode_s",
    "request_prompt_tokens",
    "request_generation_tokens",
)
NUMBERS: tuple[str, ...] = (*GAUGES, *FREE, *RATES, PREFIX_HITS)
FIELDS: tuple[str, ...] = (
    *NUMBERS,
    TIME_TO_FULL,
    *LABELLED,
    FINISHED,
    *SPREADS,
    "gpus",
    "engine",
    "version",
)
"""Every field that is either known or named in `Figures.absent`."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 99th percentile of `num` observations in the last `over_s` seconds."""

    p50: Quantile
    p99: Quantile
    num: float
    over_s: float


@dataclass(frozen=True, slots=True)
class TimeToFull:
    """The cache is full in `low_s` to `high_s` seconds if it goes on so; `high_s` may be infinite.

    The two ends are the growth since the scrape before and the least-squares growth over the
    recent span; infinite where one of them is not growth.
    """

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One replica, now. A field of FIELDS is in its own place here or in `absent`, never in both.

    `sources` names the metric, or the arithmetic, of each that is known; `approximate` those whose
    derivation is not exact.
    """

    url: str
    error: str
    time_s: float | None
    identity: Identity | None
    numbers: Mapping[str, float]
    labelled: Mapping[str, Mapping[str, float]]
    spreads: Mapping[Histograms, Spread]
    time_to_full: TimeToFull | None
    gpus: tuple[Gpu, ...]
    sources: Mapping[str, str]
    absent: Mapping[str, str]
    approximate: frozenset[str]

    @property
    def used_ratio(self) -> float | None:
        """How full the cache is: what the engine says, else bytes or tokens used over total."""
        if (ratio := self.numbers.get("kv_used_ratio")) is not None:
            return ratio
        for used, total in FREE.values():
            if used in self.numbers and self.numbers.get(total, 0.0) > 0:
                return self.numbers[used] / self.numbers[total]
        return None


def figures_of(view: View) -> Figures:
    """Every figure of one replica. One that did not answer last time has none: old is not now."""
    now = view.now
    if view.error or now is None:
        why = f"the last scrape failed: {view.error}" if view.error else "it was not asked yet"
        return Figures(
            view.url, view.error, None, None, {}, {}, {}, None, (), {},
            dict.fromkeys(FIELDS, why), frozenset(),
        )  # fmt: skip
    gathering = _Gathering(now)
    _gauges(gathering, now)
    alone = OTHER_SCRAPE if view.num_swaps else ONE_SCRAPE
    _rates(gathering, now, view.last, alone)
    _prefix_hits(gathering, now, view.recent, alone)
    _labelled(gathering, now, view.recent, alone)
    _spreads(gathering, now, view.recent, alone)
    _gpus(gathering, now)
    _identity(gathering, now.identity)
    to_full = _time_to_full(gathering, view)
    return Figures(
        view.url,
        "",
        now.time_s,
        now.identity,
        gathering.numbers,
        gathering.labelled,
        gathering.spreads,
        to_full,
        now.gpus,
        gathering.sources,
        gathering.absent,
        frozenset(gathering.approximate),
    )


class _Gathering:
    """What has been worked out so far of one replica."""

    def __init__(self, now: Snapshot) -> None:
        self.numbers: dict[str, float] = {}
        self.labelled: dict[str, Mapping[str, float]] = {}
        self.spreads: dict[Histograms, Spread] = {}
        self.sources: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.approximate: set[str] = {str(name) for name in now.approximate}

    def know(self, name: str, value: float, source: str) -> None:
        """`value` where it is a number; NaN and infinities are none."""
        if math.isfinite(value):
            self.numbers[name] = value
            self.sources[name] = source
        else:
            self.absent[name] = f"{source or name} is {value}"


def _gauges(found: _Gathering, now: Snapshot) -> None:
    for name in GAUGES:
        value = now.gauges.get(name)
        if value is None:
            found.absent[name] = now.why_absent(name)
        else:
            found.know(name, value, now.sources.get(name, ""))
    for free, (used, total) in FREE.items():
        lacking = next((name for name in (used, total) if name not in found.numbers), None)
        if lacking is not None:
            found.absent[free] = found.absent[lacking]
        elif found.numbers[used] > found.numbers[total]:
            found.absent[free] = f"{used} is above {total}"
        else:
            found.know(free, found.numbers[total] - found.numbers[used], f"{total} − {used}")
            found.approximate |= {free} if {used, total} & found.approximate else set()


def _rates(found: _Gathering, now: Snapshot, last: Span | None, alone: str) -> None:
    for name, counter in RATES.items():
        rate = None if last is None else last.rate(counter)
        if rate is not None and last is not None:
            found.know(name, rate, f"{now.sources.get(counter, counter)} over {last.seconds:.3g} s")
        else:
            found.absent[name] = _why_no_span(now, counter, last, alone)


def _why_no_span(now: Snapshot, name: Counter | Histograms, span: Span | None, alone: str) -> str:
    """Why nothing is known of a counter or histogram over a span; `alone`: why there is none."""
    if name not in now.counters and name not in now.histograms:
        return now.why_absent(name)
    if span is None:
        return alone
    return "it was not there in both scrapes"


def _prefix_hits(found: _Gathering, now: Snapshot, recent: Span | None, alone: str) -> None:
    for counter in ("prefix_queries_tokens", "prefix_hits_tokens"):
        if recent is None or counter not in recent.rises:
            found.absent[PREFIX_HITS] = _why_no_span(now, counter, recent, alone)
            return
    assert recent is not None
    queries, hits = recent.rises["prefix_queries_tokens"], recent.rises["prefix_hits_tokens"]
    if queries <= 0:
        found.absent[PREFIX_HITS] = f"no prompt was looked up in {_about(recent.seconds)}"
    elif hits > queries:
        found.absent[PREFIX_HITS] = f"more tokens hit ({hits:.0f}) than looked up ({queries:.0f})"
    else:
        source = " / ".join(
            now.sources.get(name, name) for name in ("prefix_hits_tokens", "prefix_queries_tokens")
        )
        found.know(PREFIX_HITS, hits / queries, f"{source} over {recent.seconds:.3g} s")


def _labelled(found: _Gathering, now: Snapshot, recent: Span | None, alone: str) -> None:
    for name in LABELLED:
        values = now.labelled.get(name)  # type: ignore[call-overload]
        if values is None:
            found.absent[name] = now.why_absent(name)  # type: ignore[arg-type]
        else:
            found.labelled[name] = values
            found.sources[name] = now.sources.get(name, "")  # type: ignore[call-overload]
    if recent is not None and "finished_by_reason" in recent.labelled_rises:
        found.labelled[FINISHED] = recent.labelled_rises["finished_by_reason"]
        source = now.sources.get("finished_by_reason", "")
        found.sources[FINISHED] = f"{source} over {recent.seconds:.3g} s"
    elif "finished_by_reason" in now.labelled:
        found.absent[FINISHED] = alone
    else:
        found.absent[FINISHED] = now.why_absent("finished_by_reason")


def _spreads(found: _Gathering, now: Snapshot, recent: Span | None, alone: str) -> None:
    for name in SPREADS:
        added = None if recent is None else recent.histograms.get(name)
        if added is None or recent is None:
            found.absent[name] = _why_no_span(now, name, recent, alone)
            continue
        p50, p99 = added.quantile(0.5), added.quantile(0.99)
        if p50 is None or p99 is None:
            found.absent[name] = f"nothing was observed in {_about(recent.seconds)}"
        else:
            found.spreads[name] = Spread(p50, p99, added.count, recent.seconds)
            found.sources[name] = f"{now.sources.get(name, name)} over {recent.seconds:.3g} s"


def _gpus(found: _Gathering, now: Snapshot) -> None:
    if now.gpus:
        found.sources["gpus"] = now.sources.get("gpus", "")
    else:
        found.absent["gpus"] = now.absent.get("gpus", NOBODY_ASKED)


def _identity(found: _Gathering, identity: Identity) -> None:
    if not identity.engine:
        found.absent["engine"] = "the page has the names of no engine that is known here"
    if not identity.version:
        found.absent["version"] = identity.why_unsaid


def _time_to_full(found: _Gathering, view: View) -> TimeToFull | None:
    gauge: Gauge = "kv_used_ratio"
    used = found.numbers.get(gauge)
    # Over a restart the cache did not fill, it was another one.
    spans = [span for span in (view.last, view.recent) if span is not None and not span.resets]
    trends = [span.trends[gauge] for span in spans if gauge in span.trends]
    if used is None:
        found.absent[TIME_TO_FULL] = found.absent[gauge]
        return None
    if not trends or all(trend.num < 2 for trend in trends):
        found.absent[TIME_TO_FULL] = OTHER_SCRAPE if view.num_swaps else ONE_SCRAPE
        return None
    free = max(0.0, 1.0 - used)
    if free and found.numbers.get("running") == 0 == found.numbers.get("waiting"):
        found.absent[TIME_TO_FULL] = "it is not filling: nothing runs"
        return None
    ends = [
        free / trend.slope_per_s if trend.slope_per_s > 0 else math.inf
        for trend in trends
        if trend.num >= 2
    ]
    if free and all(math.isinf(end) for end in ends):
        found.absent[TIME_TO_FULL] = f"it is not filling: no growth in {_about(spans[-1].seconds)}"
        return None
    found.sources[TIME_TO_FULL] = "(1 − kv_used_ratio) / its growth, lately and recently"
    return TimeToFull(min(ends), max(ends)) if free else TimeToFull(0.0, 0.0)


def _about(seconds: float) -> str:
    """Rounded, so that replicas that were asked a moment apart give one reason."""
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"
