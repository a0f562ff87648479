"""What the page shows: the latest Sight, an index of it, and the past, kept within bounds.

`Feed.take` is called once per round by whoever watches; the routes only read. No HTTP here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from ullage.findings.finding import Finding, Severity
from ullage.watch.figures import Figures, figures_of
from ullage.watch.sight import Sight
from ullage.watch.totals import Totals, totals_of
from ullage.watch.view import View
from ullage.watch.web.series import NAMES, Past, fleet_row, row_of

# Worst first. "unknown": no rule could be evaluated, so nothing can be said to be clear.
STATES = ("unreachable", "error", "warning", "info", "unknown", "clear")


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a round: its figures, its row of the series, the rules' answers, its state."""

    id: str
    view: View
    figures: Figures
    row: tuple[float, ...]
    findings: tuple[Finding, ...]
    state: str

    def at(self, column: str) -> float | None:
        """A number of its row; None where it is not known."""
        number = self.row[_AT[column]]
        return None if number != number else number


_AT: Mapping[str, int] = {name: i for i, name in enumerate(NAMES)}


@dataclass(frozen=True, slots=True)
class Round:
    """A Sight that was taken: the `num`-th. `fleet_findings` are of no single replica."""

    num: int
    sight: Sight
    totals: Totals
    fleet_findings: tuple[Finding, ...]
    replicas: tuple[Replica, ...]
    by_id: Mapping[str, Replica] = field(default_factory=dict)


class Feed:
    """The rounds so far. `round` is the latest, None before the first.

    `take` and `close` may be called from any thread; `next_round` is awaited in the server's loop.
    """

    def __init__(self, past: Past | None = None) -> None:
        self.past = Past() if past is None else past
        self.round: Round | None = None
        self.closed = False
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    def take(self, sight: Sight) -> None:
        """Show this round from now on, and keep its numbers for the charts."""
        findings: dict[str, list[Finding]] = {}
        for judged in sight.judged:
            findings.setdefault(judged.url, []).append(judged.finding)
        replicas = []
        for view in sight.views:
            figures = figures_of(view)
            row = row_of(figures)
            self.past.add(view.url, sight.time_s, row)
            said = tuple(findings.get(view.url, ()))
            state = _state(figures, said)
            replicas.append(Replica(id_of(view.url), view, figures, tuple(row), said, state))
        totals = totals_of(sight.views, [replica.figures for replica in replicas])
        self.past.fleet.add(sight.time_s, fleet_row(totals))
        num = 1 if self.round is None else self.round.num + 1
        self.round = Round(
            num,
            sight,
            totals,
            tuple(findings.get("", ())),
            tuple(replicas),
            {replica.id: replica for replica in replicas},
        )
        self._wake()

    def close(self) -> None:
        """No round will come; ends every stream."""
        self.closed = True
        self._wake()

    async def next_round(self, after: int, within_s: float) -> Round | None:
        """The latest round once there is one after number `after`; None if there is none in time
        or the feed was closed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (loop, future)
        with self._lock:
            self._waiting.add(entry)
        try:
            if not self.closed and (self.round is None or self.round.num <= after):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await future
        finally:
            with self._lock:
                self._waiting.discard(entry)
        latest = self.round
        return None if self.closed or latest is None or latest.num <= after else latest

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_finish, future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def id_of(url: str) -> str:
    """A short name of a replica that any URL, JSON and attribute can carry."""
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _state(figures: Figures, findings: tuple[Finding, ...]) -> str:
    if figures.time_s is None:
        return "unreachable"
    fired = [f.severity for f in findings if f.state == "fired" and not f.accepted]
    if fired:
        return Severity(max(fired)).name
    return "clear" if any(f.state == "clear" for f in findings) else "unknown"
