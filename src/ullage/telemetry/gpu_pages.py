"""DCGM exporters that are scraped from here: each page once per round, whoever its GPUs belong to.

Holds the asking and what a page that does not answer is said to be. What the pages mean is
`gpus.py`'s, whose the GPUs are `watch.gpu_places`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ullage.telemetry.gpus import NO_METRIC, Device, at, devices_on, hosts_on
from ullage.telemetry.scrape import MAX_TIMEOUT_S, Look, why_not_a_page
from ullage.telemetry.wire import Connection, NoAnswer, origin_and_path

PATH = "/metrics"
MAX_REASON_CHARS = 200
AT_ONCE = 64
KEPT_OUT = (401, 403)
NO_KEY = "it wants a key, and an exporter is sent none"


@dataclass(frozen=True, slots=True)
class Told:
    """What one exporter tells: its GPUs, or why none (`error`). `called` names it; `hosts` are
    names of the machines that it tells of, or told of when it last answered."""

    called: str
    devices: tuple[Device, ...] = ()
    hosts: frozenset[str] = frozenset()
    error: str = ""


class GpuPage:
    """One exporter. `host`: a name of its machine, where that is known from elsewhere.

    The host of the URL is taken to be that of the GPUs too, unless the page tells of several: an
    exporter may collect what others say.
    """

    def __init__(self, url: str, *, host: str = "") -> None:
        origin, path = origin_and_path(url)
        self.url = url
        self._path = path or PATH
        self._own = tuple(name for name in (origin.host, host) if name)
        self._connection = Connection(origin)  # an engine's key is none of its business
        self._told = Told(url, hosts=frozenset(self._own), error="it has not answered yet")
        self._asking: asyncio.Task[Told] | None = None

    def begin(self, within_s: float, turn: asyncio.Semaphore) -> asyncio.Task[Told]:
        """Ask, unless the last question is not answered yet."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(within_s, turn))
        return self._asking

    def take(self) -> Told:
        """What it tells; while it is being asked, what it told last."""
        if self._asking is not None and self._asking.done():
            self._told, self._asking = self._asking.result(), None
        return self._told

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        self._connection.close()

    async def _ask(self, within_s: float, turn: asyncio.Semaphore) -> Told:
        try:
            async with turn, asyncio.timeout(within_s):
                answer = await self._connection.get(self._path)
            why = why_not_a_page(answer) if answer.status not in KEPT_OUT else NO_KEY
            refusal = f"{self._path}: {why}" if why else ""
            devices = () if refusal else self._placed(devices_on(answer.body))
        except TimeoutError:
            return self._failed(f"no whole answer within {within_s:g} s")
        except NoAnswer as error:
            return self._failed(str(error))
        except Exception as error:  # what its page does to a reader is not the replicas' fault
            return self._failed(f"it cannot be read: {type(error).__name__}: {error}")
        if refusal or not devices:
            return self._failed(refusal or NO_METRIC)
        return Told(self.url, devices, hosts_on(devices))

    def _placed(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        told = {device.place.hosts for device in devices}
        return tuple(at(device, *self._own) for device in devices) if len(told) == 1 else devices

    def _failed(self, reason: str) -> Told:
        """Its GPUs are not known now: old numbers are not their numbers."""
        return Told(self.url, hosts=self._told.hosts, error=reason[:MAX_REASON_CHARS])


class GpuPages:
    """Several exporters. `begin` a round, then `told` within what is left of it."""

    def __init__(self, urls: Sequence[str] = (), *, interval_s: float = 5.0) -> None:
        self._within_s = min(MAX_TIMEOUT_S, max(1.0, 2 * interval_s))
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._pages: dict[str, GpuPage] = {}
        self._gone: list[GpuPage] = []
        self.aim(dict.fromkeys(urls, ""))

    def aim(self, hosts: Mapping[str, str]) -> None:
        """From now on these are asked: URL → a name of its machine, "" where none is known.
        Raises BadUsage for what cannot be asked."""
        before = self._pages
        self._pages = {
            url: before.get(url) or GpuPage(url, host=host) for url, host in hosts.items()
        }
        self._gone += [page for url, page in before.items() if url not in hosts]

    def begin(self) -> None:
        for page in self._pages.values():
            page.begin(self._within_s, self._turn)

    async def told(self, _looks: Sequence[Look], wait_s: float) -> tuple[Told, ...]:
        """What each tells now; of one that takes longer, what it told last."""
        while self._gone:
            await self._gone.pop().close()
        asking = [page.begin(self._within_s, self._turn) for page in self._pages.values()]
        if asking:
            await asyncio.wait(asking, timeout=max(0.0, wait_s))
        return tuple(page.take() for page in self._pages.values())

    async def close(self) -> None:
        for page in (*self._pages.values(), *self._gone):
            await page.close()
