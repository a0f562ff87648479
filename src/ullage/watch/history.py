"""One replica over time, kept small: looks go in one by one, a View comes out.

Holds the marks that spans begin and end at. Counters between marks are `cumulative.py`'s, gauges
`trends.py`'s, identity `changes.py`'s. Of an hour of full vLLM pages some tens of kilobytes stay.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ullage.telemetry.scrape import SAME_START_S, Look
from ullage.telemetry.snapshot import Counter, Snapshot
from ullage.watch.changes import Known
from ullage.watch.cumulative import (
    HistogramRises,
    Running,
    TooManyPlaces,
    Vector,
    labelled_rises,
    packed,
    rises,
    unpacked,
)
from ullage.watch.trends import Series, TooManySeries, Trends, joined, sums_of_point
from ullage.watch.view import PAST_S, RECENT_S, Span, View

FINE_S = 30.0
"""Marks within RECENT_S are this far apart, so `recent` is up to this much shorter."""
COARSE_S = 600.0
"""The same for marks within PAST_S, and `past`."""
RAN_S = 120.0
"""A process that says it started so long before the last answer did not restart since: it ran
beside the one that gave it. Clocks of two machines differ by less."""
MOST_STARTS = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """An answer that spans may begin or end at, and what happened since the mark before it.

    `totals` is `cumulative`'s vector, packed once the mark is closed, `point` every gauge's value
    then; `sums` are `trends`' over the samples after the mark before, up to and including this
    one, with times since that mark.
    """

    time_s: float
    totals: Vector | bytes
    point: array[float]
    sums: array[float]
    num_answers: int
    num_failed: int
    num_resets: int


class History:
    """Looks at one replica, in time order. `view()` is what rules see of it now."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._error = ""
        self._asked = True
        self._pod: Mapping[str, str] | None = None
        self._known = Known()
        self._failed_s: float | None = None
        self._num_failed = 0  # since the last answer
        self._now: Snapshot | None = None
        self._moved_s = 0.0  # when any number last was another
        self._view: View | None = None
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)  # of the processes that answered
        self._engine = ""  # the last that was known
        self._swaps_s: deque[float] = deque(maxlen=MOST_STARTS)
        self._forget()

    def push(self, look: Look) -> None:
        """Take one look. The same look again is ignored; an answer of before the last one begins
        the history anew. The times of failures are compared with nothing: another clock may have
        told them."""
        if look.pod is not None and look.pod != self._pod:
            self._known.take_pod(look.pod, look.time_s)
        if (look.pod, look.error, look.asked) != (self._pod, self._error, self._asked):
            self._pod, self._error, self._view = look.pod, look.error, None
            self._asked = look.asked
        if look.snapshot is None:
            self._fail(look.time_s)
        elif self._now is None or look.snapshot.time_s != self._now.time_s:
            if self._now is not None and look.snapshot.time_s < self._now.time_s:
                self._forget()
            self._take(look.snapshot)
            self._view = None

    def _fail(self, time_s: float) -> None:
        if time_s != self._failed_s:
            self._failed_s = time_s
            self._num_failed += 1

    def view(self) -> View:
        """What is known now. It does not change when more looks are pushed."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    # --- marks ------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._running = Running()
        self._series = Series()
        self._started_s: float | None = None
        self._old: deque[Mark] = deque()  # before RECENT_S, COARSE_S apart
        self._new: deque[Mark] = deque()  # within RECENT_S, FINE_S apart
        self._open: Mark | None = None  # since the last of these, up to now
        self._before: Mark | None = None
        self._step: Mark | None = None
        self._now = None
        self._rose_s: dict[Counter, float] = {}  # when each counter last was another
        self._busy_since_s: float | None = None

    def _take(self, snapshot: Snapshot) -> None:
        self._known.take(snapshot.identity, snapshot.time_s)
        if self._now is None or not _same_numbers(snapshot, self._now):
            self._moved_s = snapshot.time_s
        if self._is_swapped(snapshot):
            self._swaps_s.append(snapshot.time_s)
            self._forget()  # what one process counts is no rise over what another did
        self._note_rises(snapshot)
        try:
            step = self._step_to(snapshot)
        except (TooManyPlaces, TooManySeries):
            self._forget()
            step = self._step_to(snapshot)
        self._now = snapshot
        self._num_failed = 0
        self._before, self._step = self._step, step
        self._keep(step)

    def _is_swapped(self, snapshot: Snapshot) -> bool:
        """Whether another process answers than before: one that had run all the while, or is of
        another engine."""
        started_s, before_s, before = snapshot.identity.started_s, self._started_s, self._now
        engine, self._engine = self._engine, snapshot.identity.engine or self._engine
        if engine and engine != self._engine:
            return True  # nothing that one engine counts is what the other does
        if started_s is None:
            return False
        known = any(abs(started_s - one) <= SAME_START_S for one in self._starts)
        if not known:
            self._starts.append(started_s)
        if before_s is None or before is None or abs(started_s - before_s) <= SAME_START_S:
            return False
        return known or started_s < before.time_s - RAN_S

    def _note_rises(self, snapshot: Snapshot) -> None:
        before = self._now.counters if self._now is not None else {}
        for name, value in snapshot.counters.items():
            if before.get(name) != value:
                self._rose_s[name] = snapshot.time_s
        gauges = snapshot.gauges
        if gauges.get("running", 0.0) + gauges.get("waiting", 0.0) < 1:
            self._busy_since_s = None
        elif self._busy_since_s is None:
            self._busy_since_s = snapshot.time_s

    def _step_to(self, snapshot: Snapshot) -> Mark:
        started_s = snapshot.identity.started_s
        before_s = self._started_s
        known = started_s is not None and before_s is not None
        restarted = known and abs((started_s or 0.0) - (before_s or 0.0)) > SAME_START_S
        totals, num_resets = self._running.take(snapshot, restarted=restarted)
        point = self._series.flatten(snapshot)
        self._started_s = before_s if started_s is None else started_s
        since_s = snapshot.time_s - (self._step.time_s if self._step else snapshot.time_s)
        sums = sums_of_point(point, since_s)
        return Mark(snapshot.time_s, totals, point, sums, 1, self._num_failed, num_resets)

    def _keep(self, step: Mark) -> None:
        """Join the step to the open mark, or close that one where they would be too long."""
        if not self._new:
            self._new.append(step)
            return
        if self._open is None:
            self._open = step
        elif step.time_s - self._new[-1].time_s > FINE_S:
            self._new.append(_closed(self._open))
            self._open = step
        else:
            self._open = _join(self._open, step, self._open.time_s - self._new[-1].time_s)
        while self._new and self._new[0].time_s < step.time_s - RECENT_S:
            self._age(self._new.popleft())
        if not self._new:
            self._new.append(self._open)
            self._open = None
        while self._old and self._old[0].time_s < self._new[0].time_s - PAST_S:
            self._old.popleft()

    def _age(self, mark: Mark) -> None:
        """Keep a mark that is no longer recent, in place of the last one where that is near."""
        if len(self._old) >= 2 and mark.time_s - self._old[-2].time_s <= COARSE_S:
            last = self._old.pop()
            mark = _join(last, mark, last.time_s - self._old[-1].time_s)
        self._old.append(mark)

    # --- what is shown ----------------------------------------------------------------------------

    def _make_view(self) -> View:
        recent = self._span([*self._new, *([self._open] if self._open else [])])
        past = self._span([*self._old, *islice(self._new, 1)])
        last = self._span([mark for mark in (self._before, self._step) if mark])
        now = self._now
        return View(
            self._url,
            self._now,
            self._error,
            last,
            recent,
            past,
            changes=self._known.changes,
            unchanged_s=now.time_s - self._moved_s if now else 0.0,
            still_s={name: now.time_s - self._rose_s[name] for name in now.counters} if now else {},
            busy_s=now.time_s - self._busy_since_s if now and self._busy_since_s else 0.0,
            asked=self._asked,
            num_swaps=sum(1 for at in self._swaps_s if now and at > now.time_s - RECENT_S),
            pod=self._pod,
        )

    def _span(self, marks: Sequence[Mark]) -> Span | None:
        """From the first of the marks to the last; None of fewer than two."""
        if len(marks) < 2:
            return None
        start, *parts = marks
        places, end = self._running.places, parts[-1]
        before, after = _totals(start), _totals(end)
        return Span(
            seconds=end.time_s - start.time_s,
            rises=rises(places, before, after),
            labelled_rises=labelled_rises(places, before, after),
            histograms=HistogramRises(places, before, after),
            trends=Trends(self._series.gauges, start, parts),
            waiting_by_reason=Trends(self._series.waiting, start, parts),
            num_scrapes=1 + sum(part.num_answers for part in parts),
            num_failed=sum(part.num_failed for part in parts),
            resets=sum(part.num_resets for part in parts),
        )


def _closed(mark: Mark) -> Mark:
    return replace(mark, totals=packed(_totals(mark)))


def _totals(mark: Mark) -> Vector:
    return unpacked(mark.totals) if isinstance(mark.totals, bytes) else mark.totals


def _join(one: Mark, two: Mark, later_s: float) -> Mark:
    """Two marks as one, at the second; its sums count from `later_s` after those of the first."""
    return Mark(
        two.time_s,
        two.totals,
        two.point,
        joined(one.sums, two.sums, later_s),
        one.num_answers + two.num_answers,
        one.num_failed + two.num_failed,
        one.num_resets + two.num_resets,
    )


def _same_numbers(one: Snapshot, two: Snapshot) -> bool:
    """Whether all that an engine says has stood still; the CPU time of the process never does."""
    if one.gauges != two.gauges or one.labelled != two.labelled:
        return False
    if one.histograms != two.histograms:
        return False
    return _without_cpu(one.counters) == _without_cpu(two.counters)


def _without_cpu(counters: Mapping[Counter, float]) -> dict[Counter, float]:
    return {name: value for name, value in counters.items() if name != "process_cpu_s"}
