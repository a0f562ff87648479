"""How a rule gets what it needs of a replica, and how it shows it: values, or what was lacking.

Holds the getters, which raise `Lacking`, and the makers of evidence. Thresholds are the rules'.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from ullage.findings.answer import Answer, NotEvaluable
from ullage.findings.finding import Evidence
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import Counter, Gauge, Histograms, Labelled, Name, Snapshot
from ullage.watch.peers import finished_in
from ullage.watch.rule import Subject
from ullage.watch.view import Span, Trend

REQUESTS = frozenset({"running", "waiting", "rejected_requests", "finished_by_reason"})


class Lacking(Exception):
    """A rule cannot be evaluated; `missing` names each thing that was lacking."""

    def __init__(self, *missing: str) -> None:
        super().__init__("; ".join(missing))
        self.missing = missing


def answering(check: Callable[[Subject], Answer]) -> Callable[[Subject], Answer]:
    """The check with `Lacking` turned into the answer that it stands for."""

    @wraps(check)
    def answer(subject: Subject) -> Answer:
        try:
            return check(subject)
        except Lacking as lacking:
            return NotEvaluable(lacking.missing)

    return answer


def answer_of(subject: Subject) -> Snapshot:
    """What the replica says now. Raises Lacking when the last scrape failed."""
    view = subject.view
    if view.error:
        raise Lacking(f"an answer ({view.error})")
    if view.now is None:
        raise Lacking("an answer (none has come yet)")
    return view.now


def require(now: Snapshot, *names: Name) -> None:
    """Raises Lacking that names each of `names` which the page does not tell, and why."""
    missing = tuple(f"{name} ({now.why_absent(name)})" for name in names if not knows(now, name))
    if missing:
        raise Lacking(*missing)


def knows(now: Snapshot, name: Name) -> bool:
    """Whether the field is known."""
    return (
        name in now.gauges or name in now.counters or name in now.histograms or name in now.labelled
    )


def recent_of(subject: Subject, least_s: float = 0.0) -> Span:
    """The recent span. Raises Lacking where it is shorter than `least_s`."""
    return _long_enough(subject.view.recent, least_s, "watching")


def past_of(subject: Subject, least_s: float) -> Span:
    """The replica's own past. Raises Lacking where it is shorter than `least_s`."""
    return _long_enough(subject.view.past, least_s, "this replica's own past")


def _long_enough(span: Span | None, least_s: float, of_what: str) -> Span:
    if span is None or span.seconds < least_s:
        so_far = 0.0 if span is None else span.seconds
        if span is None and not least_s:
            raise Lacking("two scrapes that answered")
        raise Lacking(f"{least_s:g} s of {of_what} ({so_far:.0f} s so far)")
    return span


def trend_of(now: Snapshot, span: Span, name: Gauge) -> Trend:
    """How a gauge went. Raises Lacking where no scrape of the span had it."""
    require(now, name)
    trend = span.trends.get(name)
    if trend is None:
        raise Lacking(f"{name} over the span")
    return trend


def rise_of(now: Snapshot, span: Span, name: Counter) -> float:
    """What a counter gained. Raises Lacking where it was not there at both ends."""
    require(now, name)
    rise = span.rises.get(name)
    if rise is None:
        raise Lacking(f"{name} at both ends of the span")
    return rise


def rises_of(now: Snapshot, span: Span, name: Labelled) -> dict[str, float]:
    """What a labelled counter gained. Raises Lacking where it was not there at both ends."""
    require(now, name)
    rises = span.labelled_rises.get(name)
    if rises is None:
        raise Lacking(f"{name} at both ends of the span")
    return dict(rises)


def histogram_of(now: Snapshot, span: Span, name: Histograms, of_what: str = "") -> Histogram:
    """What was observed in the span. Raises Lacking where that is not known."""
    require(now, name)
    observed = span.histograms.get(name)
    if observed is None:
        raise Lacking(f"{name} over {of_what or 'the span'}")
    return observed


ENDINGS: tuple[Histograms, ...] = ("e2e_s", "request_generation_tokens", "ttft_s")
"""Observed once per request: they count requests where no counter of endings does."""


def requests_in(now: Snapshot, span: Span) -> tuple[float, str]:
    """(requests that got through in the span, the source). Raises Lacking where nothing counts."""
    finished = finished_in(span)
    if finished is not None:
        return finished, source_of(now, "finished_by_reason")
    for name in ENDINGS:
        observed = span.histograms.get(name)
        if observed is not None:
            return observed.count, source_of(now, name)
    raise Lacking(f"finished_by_reason ({now.why_absent('finished_by_reason')})")


TOKENS: tuple[Counter, ...] = ("generation_tokens", "prompt_tokens")


def tokenless_s_of(subject: Subject) -> float | None:
    """For how long there were requests and no token was counted, 0 where there were none; None
    where no counter of tokens is known over time."""
    still_s = subject.view.still_s
    known = [still_s[name] for name in TOKENS if name in still_s]
    return min(*known, subject.view.busy_s) if known else None


def stands_still(subject: Subject, least_s: float) -> bool:
    """Whether it is known that no token was counted for so long."""
    tokenless_s = tokenless_s_of(subject)
    return tokenless_s is not None and tokenless_s >= least_s


def source_of(now: Snapshot, name: Name) -> str:
    """The metric that a field was read from; the field's own name where the page does not say."""
    return now.sources.get(name, name)


def unit_of(name: str) -> str:
    """The unit of a field of the vocabulary, told by its name."""
    for ending, unit in (("_ratio", "ratio"), ("_bytes", "bytes"), ("_tokens", "tokens")):
        if name.endswith(ending):
            return unit
    if name == "preemptions":
        return "preemptions"
    return "requests" if name in REQUESTS else "s"


def tidy(value: float) -> int | float:
    """A whole number as an int, so that it is shown as one; others to six digits."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


def gauge_fact(now: Snapshot, name: Gauge) -> Evidence:
    """A gauge, now."""
    return Evidence(name, tidy(now.gauges[name]), unit_of(name), source_of(now, name))


def trend_fact(now: Snapshot, span: Span, name: Gauge, which: str = "mean") -> Evidence:
    """One number of a gauge's trend: first, last, least, most or mean."""
    trend = span.trends[name]
    source = f"{source_of(now, name)}, {trend.num} scrapes in {span.seconds:.0f} s"
    return Evidence(f"{name} {which}", tidy(getattr(trend, which)), unit_of(name), source)


def rise_fact(now: Snapshot, span: Span, name: Counter) -> Evidence:
    """What a counter gained."""
    source = f"{source_of(now, name)}, over {span.seconds:.0f} s"
    return Evidence(f"{name} gained", tidy(span.rises[name]), unit_of(name), source)


def span_fact(span: Span) -> Evidence:
    """How long it was looked at."""
    return Evidence("looked at", tidy(round(span.seconds, 1)), "s", f"{span.num_scrapes} scrapes")


def percent(ratio: float) -> str:
    """`97%`; one digit more below ten."""
    return f"{100 * ratio:.1f}%" if abs(ratio) < 0.0995 else f"{100 * ratio:.0f}%"


def seconds(value: float) -> str:
    """A duration in words that are short: `40 ms`, `6.3 s`, `4 min`, `2.5 h`."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.3g} h"
