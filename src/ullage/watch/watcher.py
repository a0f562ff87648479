"""The rounds of watching: source → histories → rules → incidents → Sight, at a steady pace.

Holds the loop. Asking is the source's (`telemetry.scrape`, `telemetry.promql`), judging the
rules', showing is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from ullage.errors import UllageError
from ullage.telemetry.scrape import Clock, Look
from ullage.watch.history import History
from ullage.watch.incidents import Incidents
from ullage.watch.rules.table import judge_all
from ullage.watch.sight import Sight
from ullage.watch.view import GONE

FORGET_S = 900.0
"""How long a replica that its source no longer names stays in sight, as one that is gone."""
STUCK_S = 60.0
"""How much longer than an interval a source may take; after that, it has failed this time."""


class PartlyKnown(Exception):
    """A source could not learn which replicas there are: `looks` are of those known last."""

    def __init__(self, why: str, looks: tuple[Look, ...]) -> None:
        super().__init__(why)
        self.looks = looks


def _in_words(error: Exception, within_s: float) -> str:
    """What is foreseen in its own words, anything else with the name that a report of it needs."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {within_s:g} s"
    if isinstance(error, UllageError | OSError) and str(error):
        return str(error)
    return f"a fault of ullage's own: {type(error).__name__}: {error}".removesuffix(": ")


class Source(Protocol):
    """Where looks come from: one for each replica that is known, whatever became of it.

    Raises PartlyKnown where there are looks all the same.
    """

    async def look(self) -> tuple[Look, ...]: ...


class Watcher:
    """Watches what a source names, every `interval_s` seconds."""

    def __init__(self, source: Source, interval_s: float = 5.0) -> None:
        assert interval_s > 0
        self._source = source
        self._interval_s = interval_s
        self._histories: dict[str, History] = {}
        self._named_s: dict[str, float] = {}
        self._incidents = Incidents()
        self._clock = Clock()

    async def rounds(self) -> AsyncIterator[Sight]:
        """A Sight per round, without end. Rounds begin at whole intervals after the first; those
        that a slow round ran over are left out, not made up for."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while True:
            yield await self.round()
            gone_s = loop.time() - begin_s
            await asyncio.sleep(self._interval_s - gone_s % self._interval_s)

    async def round(self) -> Sight:
        """One round, now. A source that fails is said in the Sight, and in every replica's view."""
        error = ""
        try:
            async with asyncio.timeout(STUCK_S + self._interval_s):
                looks = await self._source.look()
        except PartlyKnown as raised:
            error, looks = str(raised), raised.looks
        except Exception as raised:  # whatever a source runs into, watching goes on and says so
            error = _in_words(raised, STUCK_S + self._interval_s)
            now_s = self._clock.now()
            looks = tuple(Look(url, now_s, None, error, asked=False) for url in self._histories)
        time_s = self._clock.now()
        self._push(looks, time_s)
        views = tuple(history.view() for history in self._histories.values())
        judged = judge_all(views, time_s)
        incidents = self._incidents.take(judged, views, time_s)
        return Sight(time_s, self._interval_s, views, judged, incidents, error=error)

    def _push(self, looks: tuple[Look, ...], time_s: float) -> None:
        for look in looks:
            history = self._histories.get(look.url)
            if history is None:
                history = self._histories[look.url] = History(look.url)
            history.push(look)
            self._named_s[look.url] = time_s
        for url, named_s in list(self._named_s.items()):
            if named_s == time_s:
                continue
            if time_s - named_s > FORGET_S:
                del self._named_s[url], self._histories[url]
            else:
                self._histories[url].push(Look(url, time_s, None, GONE))
