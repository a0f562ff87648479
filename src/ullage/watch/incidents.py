"""Findings over time → incidents: when one begins, when it is over, and what had changed before.

Holds the hysteresis. What a round finds is the rules'; what had changed is `reasons.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ullage.findings.finding import Finding, Severity
from ullage.watch.reasons import Fleets, changes_before
from ullage.watch.rule import Judged
from ullage.watch.sight import Incident
from ullage.watch.view import Change, View

LEAST_ROUNDS = 2
"""One scrape may catch a burst or a blink."""
OPENS_S: Mapping[Severity, float] = {Severity.error: 0.0, Severity.warning: 15.0, Severity.info: 30}
"""How long a rule must have fired, so that graver ones are told sooner. Most rules look at minutes
already."""
CLOSES_S = 60.0
"""How long a rule must have been clear; what comes back sooner is the same incident."""
KEPT_S = 86_400.0
MOST_KEPT = 2_000
"""Ended incidents that are kept: a flapping fleet of thousands must not grow without bound."""


@dataclass(slots=True)
class _Course:
    """A rule that fires on a replica: since when, how often; `incident` once it is one."""

    first_s: float
    last_s: float
    num_rounds: int
    incident: Incident | None = None
    clear_since_s: float | None = None


Key = tuple[str, str]
"""Replica and rule."""


class Incidents:
    """Takes every round's findings, in time order, and tells the incidents so far."""

    def __init__(self) -> None:
        self._courses: dict[Key, _Course] = {}
        self._ended: list[Incident] = []
        self._fleets = Fleets()
        self._before_s: float | None = None
        self._forgets_s = CLOSES_S

    def take(
        self, judged: Iterable[Judged], views: Iterable[View], time_s: float
    ) -> tuple[Incident, ...]:
        """The incidents after this round, newest first.

        What cannot be evaluated neither begins nor ends one: it is not known to be over.
        """
        by_url = {view.url: view for view in views}
        self._fleets.take(by_url.values(), time_s)
        if self._before_s is not None:  # rounds may be further apart than CLOSES_S
            self._forgets_s = max(CLOSES_S, 1.5 * (time_s - self._before_s))
        self._before_s = time_s
        for one in judged:
            key = (one.url, one.finding.id)
            if one.finding.state == "fired" and not one.finding.accepted:
                self._fired(key, one.finding, by_url, time_s)
            elif one.finding.state == "clear" or one.finding.accepted:
                self._clear(key, time_s)
        self._end_vanished(by_url, time_s)
        self._ended = [i for i in self._ended if (i.until_s or 0.0) >= time_s - KEPT_S][-MOST_KEPT:]
        ongoing = [course.incident for course in self._courses.values() if course.incident]
        return tuple(
            sorted((*ongoing, *self._ended), key=lambda i: (-i.since_s, i.url, i.finding.id))
        )

    def _fired(self, key: Key, finding: Finding, by_url: Mapping[str, View], time_s: float) -> None:
        course = self._courses.get(key)
        pending = course is not None and course.incident is None
        if course is None or (pending and time_s - course.last_s > self._forgets_s):
            # The first of it, or not known for too long to be one with what fired before.
            course = self._courses[key] = _Course(time_s, time_s, 0)
        course.last_s, course.clear_since_s = time_s, None
        course.num_rounds += 1
        if course.incident is not None:
            course.incident = replace(course.incident, finding=finding)
            return
        lasted_s = time_s - course.first_s
        if course.num_rounds >= LEAST_ROUNDS and lasted_s >= OPENS_S[finding.severity]:
            views = [by_url[key[0]]] if key[0] in by_url else list(by_url.values())
            changed = changes_before(course.first_s, views, self._fleets)
            course.incident = Incident(key[0], finding, course.first_s, None, changed)

    def _clear(self, key: Key, time_s: float) -> None:
        course = self._courses.get(key)
        if course is None:
            return
        if course.incident is None:
            del self._courses[key]
            return
        if course.clear_since_s is None:
            course.clear_since_s = time_s
        if time_s - course.clear_since_s >= CLOSES_S:
            self._end(key, course.incident, course.clear_since_s)

    def _end(self, key: Key, incident: Incident, until_s: float) -> None:
        self._ended.append(replace(incident, until_s=until_s))
        del self._courses[key]

    def _end_vanished(self, by_url: Mapping[str, View], time_s: float) -> None:
        """End those of replicas that are no longer watched, and say so."""
        for key, course in list(self._courses.items()):
            if not key[0] or key[0] in by_url:
                continue
            if course.incident is None:
                del self._courses[key]
                continue
            gone = Change(time_s, "replica", "watched", "no longer there")
            incident = replace(course.incident, changed=(*course.incident.changed, gone))
            self._end(key, incident, time_s)


def _newest_first(incident: Incident) -> tuple[float, str, str]:
    return -incident.since_s, incident.url, incident.finding.id
