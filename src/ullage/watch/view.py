"""What is known of one replica over time: the value that rules, pages and exporters read.

Holds the values only; `history.py` makes them from snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import Counter, Gauge, Histograms, Labelled, Snapshot

RECENT_S = 300.0
"""What rules mean by recently."""
PAST_S = 3600.0
"""This replica's own past, which ends where `recent` begins."""


GONE = "its source no longer names it"
"""The error of a replica that is no more: its pod was deleted, it is no target any longer."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A gauge over a span: of the samples that had it. `slope_per_s` is least squares' or 0."""

    first: float
    last: float
    least: float
    most: float
    mean: float
    num: int
    slope_per_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """What happened to one replica between two scrapes that answered, `seconds` apart.

    `rises` are of counters, those lost in a restart counted from zero; a counter that was not
    there at both ends is left out. `histograms` hold what was observed in the span. `resets` is
    how often the server started anew or its counters went back. `num_scrapes` counts answers,
    both ends included; `num_failed` those that failed.
    """

    seconds: float
    rises: Mapping[Counter, float]
    labelled_rises: Mapping[Labelled, Mapping[str, float]]
    histograms: Mapping[Histograms, Histogram]
    trends: Mapping[Gauge, Trend]
    waiting_by_reason: Mapping[str, Trend]
    num_scrapes: int
    num_failed: int
    resets: int

    def rate(self, name: Counter) -> float | None:
        """Per second; None where the counter is not known."""
        rise = self.rises.get(name)
        return None if rise is None or self.seconds <= 0 else rise / self.seconds


@dataclass(frozen=True, slots=True)
class Change:
    """Something about a replica that is not load was different from `time_s` (Unix) on.

    `what` is a name of Identity or of one of its settings.
    """

    time_s: float
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class View:
    """One replica, now.

    `url` names it (what was given, or what Prometheus or Kubernetes calls it). `now` is the last
    answer, None when there never was one; `error` says why the last scrape failed, "" when it did
    not. `last` is since the scrape before, `recent` the last RECENT_S, `past` up to PAST_S before
    that; None until two scrapes lie in them. `unchanged_s`: for how long every number of the page
    has stood still (process and Python metrics aside). `still_s`: for how long each
    counter that is known has not risen (0 where it did since the scrape before). `busy_s`: for how
    long every answer has told of requests that run or wait. `num_swaps`: how often in RECENT_S
    another process than before answered that had run all the while, as behind a balancer; spans
    begin anew then. `asked` is False where the source of replicas
    failed, and nothing is known of this one. `pod` is what Kubernetes says of it.
    """

    url: str
    now: Snapshot | None
    error: str
    last: Span | None
    recent: Span | None
    past: Span | None
    changes: tuple[Change, ...] = ()
    unchanged_s: float = 0.0
    still_s: Mapping[Counter, float] = field(default_factory=dict)
    busy_s: float = 0.0
    num_swaps: int = 0
    asked: bool = True
    pod: Mapping[str, str] | None = None
