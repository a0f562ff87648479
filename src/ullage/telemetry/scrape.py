"""Asking many engines for their metrics, over and over: URL → Look.

Holds the schedule (when whom), the path that answers, and back-off from the dead. HTTP is
`wire.py`'s, the meaning of a page `reading.py`'s, what happened over time `watch.history`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ullage.telemetry.reading import Told, snapshot_of
from ullage.telemetry.snapshot import Identity, Snapshot
from ullage.telemetry.told import MODELS, joined, routes_of, told_by
from ullage.telemetry.wire import (
    UNAUTHORIZED,
    Answer,
    Connection,
    NoAnswer,
    Origin,
    origin_and_path,
)

# Where engines keep their page, in the order in which they are tried. trtllm-serve answers
# /metrics with JSON of its iterations and keeps Prometheus' page at the other.
PATHS = ("/metrics", "/prometheus/metrics")
MAX_TIMEOUT_S = 10.0
"""As Prometheus' scrape_timeout: an engine that is busy may take seconds to answer."""
GAP_S = 0.02
"""Between the starts of two endpoints' scrapes, where the interval has room for it."""
SPREAD = 0.5
"""The share of an interval over which scrapes are spread; the rest is for the last answers."""
TICK_S = 0.05
"""Scrapes begin at multiples of this: a few at a time cost less than each by itself."""
ROUND = 0.7
"""The share of an interval after which a round takes what there is."""
FIRST_ROUND_S = 3.0
"""The first round waits longer where need be: connections open, and who answers is asked."""
MAX_BACKOFF_S = 30.0
MAX_REASON_CHARS = 200
TELL_AGAIN_S = 60.0
"""How often the models are asked for again: adapters come and go while a server runs."""
TELL_WITHIN_S = 2.0
SAME_START_S = 2.0
"""Start times nearer than this are one process: some are worked out from a clock that is set."""


@dataclass(frozen=True, slots=True)
class Look:
    """One scrape of one endpoint: its snapshot, or None and why not.

    `url` names the endpoint as it was given, `time_s` (Unix) is when it answered or failed. A look
    with the time of the one before is that one again: it was not asked since. `asked` is False
    where its source failed, and nothing is known of the endpoint. `pod` is what
    Kubernetes says of it, where it was asked; `labels` are what Prometheus calls it, likewise.
    """

    url: str
    time_s: float
    snapshot: Snapshot | None
    error: str = ""
    pod: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None
    asked: bool = True


class Clock:
    """Unix time that never goes back nor jumps, whatever is done to the machine's clock."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - _steady_s()

    def now(self) -> float:
        return _steady_s() + self._ahead_s


def _steady_s() -> float:
    """Seconds since some instant; where the system tells them, those that it slept too."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class Endpoint:
    """One URL: where its page is, who answers there, and when it may be asked again."""

    def __init__(self, url: str, *, api_key: str | None, clock: Clock) -> None:
        origin, self._base, given = place_of(url)
        self.url = url
        self._clock = clock
        self._connection = Connection(origin, api_key=api_key)
        self._has_key = api_key is not None
        self._paths = tuple(self._base + known for known in ((given,) if given else PATHS))
        self._path: str | None = None
        self._tellings: dict[str, Told] = {}  # by the route that told
        self._told: Told | None = None
        self._told_again_s = 0.0
        self._started_s: float | None = None
        self._num_failed = 0
        self._not_before_s = 0.0
        self.last: Look | None = None  # what came of the last scrape

    async def look(self, within_s: float) -> Look:
        """A scrape whose page comes within `within_s`; the last look again while it backs off."""
        if self.last is not None and self._clock.now() < self._not_before_s:
            return self.last
        try:
            async with asyncio.timeout(within_s):
                body = await self._page()
            snapshot = await self._snapshot(body)
        except TimeoutError:
            return self._failed(f"no whole answer within {within_s:g} s", within_s)
        except NoAnswer as error:
            return self._failed(str(error), within_s)
        except Exception as error:  # what its page does to a reader is not the others' fault
            return self._failed(f"it cannot be read: {type(error).__name__}: {error}", within_s)
        self._num_failed = 0
        self.last = Look(self.url, snapshot.time_s, snapshot)
        return self.last

    def close(self) -> None:
        self._connection.close()

    def _failed(self, reason: str, within_s: float) -> Look:
        now_s = self._clock.now()
        self._num_failed += 1
        self._forget()  # whoever answers next may be another process
        pause_s = min(MAX_BACKOFF_S, within_s * 2 ** min(self._num_failed - 2, 10))
        self._not_before_s = now_s + (pause_s if self._num_failed > 1 else 0.0)
        self.last = Look(self.url, now_s, None, reason[:MAX_REASON_CHARS])
        return self.last

    async def _snapshot(self, body: bytes) -> Snapshot:
        time_s = self._clock.now()
        snapshot = snapshot_of(body, time_s=time_s, told=self._told or Told())
        if self._is_another(snapshot.identity):
            self._forget()
        if self._told is not None and time_s < self._told_again_s:
            return snapshot
        await self._ask_who(snapshot.identity.engine)
        return snapshot_of(body, time_s=time_s, told=self._told or Told())

    def _is_another(self, identity: Identity) -> bool:
        """Whether the page says that another process answers than did before."""
        before_s, self._started_s = self._started_s, identity.started_s or self._started_s
        if before_s is None or identity.started_s is None:
            return False
        return abs(identity.started_s - before_s) > SAME_START_S

    def _forget(self) -> None:
        self._tellings.clear()
        self._told = None

    async def _ask_who(self, engine: str) -> None:
        """Ask what tells who answers: all of it once, the models again every TELL_AGAIN_S."""
        for route in routes_of(engine):
            if route not in self._tellings or route == MODELS:
                telling = await self._telling(route)
                if telling is not None:
                    self._tellings[route] = telling
        # Some replicas a little earlier, so that not all are asked in one round.
        early_s = TELL_AGAIN_S / 2 * (hash(self.url) % 1000) / 1000 if self._told is None else 0.0
        self._told = joined(self._tellings.values())
        self._told_again_s = self._clock.now() + TELL_AGAIN_S - early_s

    async def _telling(self, route: str) -> Told | None:
        """What the route tells, None where it is not there. A page is not lost for it."""
        try:
            async with asyncio.timeout(TELL_WITHIN_S):
                answer = await self._connection.get(self._base + route)
        except (NoAnswer, TimeoutError):
            return None
        if answer.status in UNAUTHORIZED:
            return Told(refused=f"{route}: {why_not_a_page(answer, has_key=self._has_key)}")
        return told_by(route, answer.body) if answer.status == 200 else None

    async def _page(self) -> bytes:
        """The page's body. Raises NoAnswer that says what every path answered."""
        refusals: dict[str, list[str]] = {}
        for path in (self._path,) if self._path else self._paths:
            answer = await self._connection.get(path)
            if _is_sent_to(answer, path + "/"):
                path += "/"
                answer = await self._connection.get(path)
            refusal = why_not_a_page(answer, has_key=self._has_key)
            if not refusal:
                self._path = path
                return answer.body
            refusals.setdefault(refusal, []).append(path)
        self._path = None
        said = (f"{' and '.join(paths)}: {refusal}" for refusal, paths in refusals.items())
        raise NoAnswer("; ".join(said))


def _is_sent_to(answer: Answer, path: str) -> bool:
    """Whether it says that what was asked for is at `path`, on whatever host: as applications do
    that are mounted under a path, of the path without its slash."""
    if answer.status not in (301, 302, 307, 308):
        return False
    to = answer.headers.get("location", "")
    return to == path or ("://" in to and "/" + to.partition("://")[2].partition("/")[2] == path)


def why_not_a_page(answer: Answer, *, has_key: bool = True) -> str:
    """ "" for what may be a page of metrics: what it means is for its reader to say."""
    if answer.status in UNAUTHORIZED:
        wanted = "another key" if has_key else "a key (--api-key)"
        return f"HTTP {answer.status}: it wants {wanted}"
    if 300 <= answer.status < 400:
        return f"it sends elsewhere, to {answer.headers.get('location', '')[:80]!r}"
    if answer.status != 200:
        return f"HTTP {answer.status}"
    start = answer.body[:64].lstrip()
    if start.startswith((b'{"', b"[", b"{}", b"{ ", b"{\n")):
        return "JSON instead of metrics"
    if start.startswith(b"<"):
        return "a web page instead of metrics"
    return ""


def place_of(url: str) -> tuple[Origin, str, str]:
    """(where the server listens, what its paths begin with, the path of its page where one is
    given). Raises BadUsage."""
    origin, path = origin_and_path(url)
    given = next((known for known in reversed(PATHS) if path.endswith(known)), "")
    # What OpenAI's clients call the base URL ends with /v1.
    return origin, path.removesuffix(given or "/v1"), given


def twice_named(urls: Sequence[str]) -> dict[str, str]:
    """URLs of a server that one before them names already → that one. Raises BadUsage."""
    first: dict[tuple[Origin, str], str] = {}
    return {
        url: before for url in urls if (before := first.setdefault(place_of(url)[:2], url)) != url
    }


class DirectSource:
    """Endpoints that are scraped from here: at most one question at a time to each.

    Scrapes are spread over the interval in the order of the URLs, always the same, so that each
    endpoint is asked at a steady pace. One that has not answered when the round is over goes on
    until its own time is up; until then its look stays the last one.
    """

    def __init__(
        self, urls: Sequence[str] = (), *, interval_s: float = 5.0, api_key: str | None = None
    ) -> None:
        self._clock = Clock()
        self._interval_s = interval_s
        self._within_s = min(MAX_TIMEOUT_S, max(1.0, 2 * interval_s))
        self._wait_s = max(FIRST_ROUND_S, ROUND * interval_s)
        self._api_key = api_key
        self._endpoints: dict[str, Endpoint] = {}
        self._running: dict[str, asyncio.Task[Look]] = {}
        self.aim(urls)

    def aim(self, urls: Sequence[str]) -> None:
        """From the next look on, these are looked at; who was before keeps its connection.

        Raises BadUsage for what cannot be asked; then all stays as it was.
        """
        before = self._endpoints
        self._endpoints = {
            url: before.get(url) or Endpoint(url, api_key=self._api_key, clock=self._clock)
            for url in urls
        }
        for url in before.keys() - self._endpoints.keys():
            if url in self._running:
                self._running.pop(url).cancel()
            before[url].close()
        _open_files_for(len(self._endpoints))

    async def look(self) -> tuple[Look, ...]:
        """One look at each endpoint, in the order of the URLs, within one interval."""
        gap_s = min(GAP_S, SPREAD * self._interval_s / max(1, len(self._endpoints)))
        for place, (url, endpoint) in enumerate(self._endpoints.items()):
            if url not in self._running:
                asked = self._ask(endpoint, place * gap_s // TICK_S * TICK_S)
                self._running[url] = asyncio.create_task(asked)
        if self._running:
            await asyncio.wait(self._running.values(), timeout=self._wait_s)
            self._wait_s = ROUND * self._interval_s
        return tuple(map(self._taken, self._endpoints.values()))

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()
        for endpoint in self._endpoints.values():
            endpoint.close()
        await asyncio.sleep(0)  # for the transports to see that they are closed

    async def _ask(self, endpoint: Endpoint, delay_s: float) -> Look:
        await asyncio.sleep(delay_s)
        return await endpoint.look(self._within_s)

    def _taken(self, endpoint: Endpoint) -> Look:
        task = self._running[endpoint.url]
        if not task.done():
            never = Look(endpoint.url, self._clock.now(), None, "it has not answered yet")
            return endpoint.last or never
        del self._running[endpoint.url]
        return task.result()


def _open_files_for(num: int) -> None:
    """Let the process have a connection to each, where the system lets it have more files: many
    start programs with 1,024. What it then still lacks is said by the looks that fail."""
    try:
        import resource
    except ImportError:  # not on Windows, where there is no such limit
        return
    wanted = 2 * num + 256  # an endpoint may be asked anew while its old connection closes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
