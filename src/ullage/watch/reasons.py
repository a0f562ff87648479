"""What was different shortly before an incident began: a replica's identity, fleet, traffic.

Holds the comparison and its order, most telling first. Changes of identity come with the view.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from ullage.watch.peers import Key, finished_in, hit_ratio_in, key_of
from ullage.watch.view import Change, Span, View

BEFORE_S = 600.0
"""What changed longer ago than this is not told as a reason."""
LEAST_PAST_S = 120.0
LEAST_REQUESTS = 20.0
"""Fewer requests on either side tell nothing of traffic."""
TIMES = 1.5
POINTS = 0.15
"""How far a quantity must have moved to be told: by this factor, or a ratio by these points."""


class Fleets:
    """How many replicas of each model answered, over the last BEFORE_S and a little."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, dict[Key, int]]] = deque()

    def take(self, views: Iterable[View], time_s: float) -> None:
        counts: dict[Key, int] = {}
        for view in views:
            if view.now is not None and not view.error:
                key = key_of(view.now.identity)
                counts[key] = counts.get(key, 0) + 1
        self._rounds.append((time_s, counts))
        while self._rounds[0][0] < time_s - 2 * BEFORE_S:
            self._rounds.popleft()

    def change(self, key: Key, since_s: float) -> Change | None:
        """The number of the model's replicas, where another one answered before than do now."""
        after = self._rounds[-1][1].get(key, 0)
        began_s = self._rounds[-1][0]
        for time_s, counts in reversed(self._rounds):
            if time_s < since_s - BEFORE_S:
                return None
            if counts.get(key, 0) > after:
                return Change(began_s, "replicas", str(counts[key]), str(after))
            began_s = time_s
        return None


def changes_before(since_s: float, views: Sequence[View], fleets: Fleets) -> tuple[Change, ...]:
    """What was different about the replicas in the time before `since_s`, most telling first:
    what they are, how many there are, what they are asked."""
    told: dict[tuple[str, str, str], Change] = {}
    for view in views:
        for change in (*_identity(view, since_s), *_fleet(view, since_s, fleets)):
            told.setdefault((change.what, change.before, change.after), change)
    traffic = [pair for view in views for pair in _traffic(view)] if len(views) == 1 else []
    traffic.sort(key=lambda pair: -pair[0])
    return (*told.values(), *(change for _, change in traffic))


LAST_TOLD = ("adapters", "num_blocks")
"""Adapters come and go, and blocks differ a little from start to start: true, but told last."""


def _identity(view: View, since_s: float) -> list[Change]:
    """Its changes, from BEFORE_S before until now: what is seen a scrape later was so before."""
    near = [change for change in view.changes if change.time_s >= since_s - BEFORE_S]
    return sorted(near, key=lambda change: (change.what in LAST_TOLD, -change.time_s))


def _fleet(view: View, since_s: float, fleets: Fleets) -> Iterator[Change]:
    if view.now is not None:
        change = fleets.change(key_of(view.now.identity), since_s)
        if change is not None:
            yield change


def _per_second(span: Span) -> float | None:
    finished = finished_in(span)
    return None if finished is None or span.seconds <= 0 else finished / span.seconds


def _prompt(span: Span) -> float | None:
    observed = span.histograms.get("request_prompt_tokens")
    return None if observed is None else observed.mean


def _answer(span: Span) -> float | None:
    observed = span.histograms.get("request_generation_tokens")
    return None if observed is None else observed.mean


def _asked(span: Span) -> float | None:
    observed = span.histograms.get("request_max_tokens")
    return None if observed is None else observed.mean


def _cut_short(span: Span) -> float | None:
    reasons, finished = span.labelled_rises.get("finished_by_reason"), finished_in(span)
    return None if reasons is None or not finished else reasons.get("length", 0.0) / finished


QUANTITIES: tuple[tuple[str, Callable[[Span], float | None]], ...] = (
    ("requests per second", _per_second),
    ("prompt tokens per request", _prompt),
    ("answer tokens per request", _answer),
    ("max_tokens asked for", _asked),
)
SHARES: tuple[tuple[str, Callable[[Span], float | None]], ...] = (
    ("prefix cache hits", hit_ratio_in),
    ("answers cut by length", _cut_short),
)


def _traffic(view: View) -> Iterator[tuple[float, Change]]:
    """(how much it moved, the change) of what it is asked, recently against its past."""
    recent, past = view.recent, view.past
    if recent is None or past is None or view.now is None or past.seconds < LEAST_PAST_S:
        return
    if min(finished_in(recent) or 0.0, finished_in(past) or 0.0) < LEAST_REQUESTS:
        return
    began_s = view.now.time_s - recent.seconds
    for what, of in QUANTITIES:
        before, after = of(past), of(recent)
        if before and after and abs(math.log(after / before)) >= math.log(TIMES):
            told = Change(began_s, what, f"{before:.3g}", f"{after:.3g}")
            yield abs(math.log(after / before)), told
    for what, of in SHARES:
        before, after = of(past), of(recent)
        if before is not None and after is not None and abs(after - before) >= POINTS:
            yield abs(after - before), Change(began_s, what, f"{before:.0%}", f"{after:.0%}")
