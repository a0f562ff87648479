"""A source whose snapshots also tell the GPUs under each replica, from whoever was asked for them.

Holds the pace: exporters are asked once per round, beside the engines, and no round waits longer
for them than for those. Whose a GPU is, is `gpu_places`'.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ullage.telemetry.gpu_pages import Told
from ullage.telemetry.scrape import FIRST_ROUND_S, ROUND, Look
from ullage.telemetry.snapshot import Gpu, Snapshot
from ullage.watch.gpu_places import (
    BY_PROCESS,
    LOOPBACK,
    NO_EXPORTER,
    Found,
    Whereabouts,
    joined,
    whereabouts_of,
)
from ullage.watch.watcher import PartlyKnown, Source

MOST_XIDS = 16_384
"""GPUs whose last Xid error is remembered; beyond that, only those of replicas that are there."""


class Exporters(Protocol):
    """Who tells of GPUs and the places they are in. It raises nothing."""

    def begin(self) -> None:
        """A round begins: what can be asked before the replicas are known is asked now."""

    async def told(self, looks: Sequence[Look], wait_s: float, /) -> Sequence[Told]:
        """What each exporter tells, within about `wait_s`."""
        ...

    async def close(self) -> None: ...


class Driver(Protocol):
    """What the driver on this machine tells. It raises nothing."""

    async def owned(self, urls: Sequence[str], wait_s: float) -> Mapping[str, Sequence[Gpu] | str]:
        """url → the GPUs that its processes run on, or why they are not known."""
        ...

    async def close(self) -> None: ...


class GpuSource:
    """`source`, with the GPUs of its replicas where something says whose they are."""

    def __init__(
        self,
        source: Source,
        *,
        exporters: Sequence[Exporters] = (),
        driver: Driver | None = None,
        none_at_all: str = NO_EXPORTER,
        interval_s: float = 5.0,
    ) -> None:
        """`none_at_all`: the reason where no exporter there is tells of any GPU."""
        self._source = source
        self._exporters = exporters
        self._driver = driver
        self._none_at_all = none_at_all
        self._interval_s = interval_s
        self._wait_s = max(FIRST_ROUND_S, ROUND * interval_s)
        self._xids: dict[tuple[str, str], _Xid] = {}  # by url and GPU

    async def look(self) -> tuple[Look, ...]:
        """The source's looks."""
        begin_s = time.monotonic()
        for exporters in self._exporters:
            exporters.begin()
        try:
            looks = await self._source.look()
        except PartlyKnown as raised:
            raise PartlyKnown(str(raised), await self._told(raised.looks, begin_s)) from raised
        return await self._told(looks, begin_s)

    async def close(self) -> None:
        for exporters in self._exporters:
            await exporters.close()
        if self._driver is not None:
            await self._driver.close()

    async def _told(self, looks: tuple[Look, ...], begin_s: float) -> tuple[Look, ...]:
        wait_s = max(0.0, self._wait_s - (time.monotonic() - begin_s))
        self._wait_s = ROUND * self._interval_s
        places = {look.url: whereabouts_of(look) for look in looks}
        each = [exporters.told(looks, wait_s) for exporters in self._exporters]
        told, owned = await asyncio.gather(asyncio.gather(*each), self._owned(places, wait_s))
        exporters = [one for some in told for one in some]
        found = {url: _by_driver(gpus) for url, gpus in owned.items()}
        if exporters:
            found = joined(places, exporters, {url: one.gpus for url, one in found.items()})
        elif self._exporters:
            found = {url: found.get(url) or Found(absent=self._none_at_all) for url in places}
        if len(self._xids) > MOST_XIDS:
            self._xids = {key: xid for key, xid in self._xids.items() if key[0] in places}
        return tuple(self._with(look, found.get(look.url, Found())) for look in looks)

    def _with(self, look: Look, found: Found) -> Look:
        if look.snapshot is None:
            return look
        gpus = tuple(self._dated(look.url, gpu, look.snapshot.time_s) for gpu in found.gpus)
        return replace(look, snapshot=_told_of(look.snapshot, replace(found, gpus=gpus)))

    def _dated(self, url: str, gpu: Gpu, time_s: float) -> Gpu:
        """The GPU with when its Xid error came, where that was seen."""
        before = self._xids.get((url, gpu.key))
        now = _Xid(gpu.xid_errors or 0.0) if before is None else before.then(gpu, time_s)
        self._xids[url, gpu.key] = now
        return gpu if now.since_s is None else replace(gpu, xid_s=now.since_s)

    async def _owned(
        self, places: Mapping[str, Whereabouts], wait_s: float
    ) -> Mapping[str, Sequence[Gpu] | str]:
        here = [url for url, where in places.items() if where.hosts == (LOOPBACK,)]
        if self._driver is None or not here:
            return {}
        return await self._driver.owned(here, wait_s)


def _by_driver(gpus: Sequence[Gpu] | str) -> Found:
    return Found(absent=gpus) if isinstance(gpus, str) else Found(tuple(gpus), BY_PROCESS)


@dataclass(frozen=True, slots=True)
class _Xid:
    """The last code that is known of a GPU, 0 for none, and when it came; None: it was there."""

    code: float
    since_s: float | None = None

    def then(self, gpu: Gpu, time_s: float) -> _Xid:
        """After another look. Exporters have no series for a GPU without an error (4.8) or say 0
        (before); one that says nothing now has had none since the last that is known."""
        if gpu.xid_errors is None or gpu.xid_errors == self.code:
            return self
        return _Xid(gpu.xid_errors, time_s if gpu.xid_errors else None)


def _told_of(snapshot: Snapshot, found: Found) -> Snapshot:
    if found.gpus:
        sources = {**snapshot.sources, "gpus": found.source}
        return replace(snapshot, gpus=found.gpus, sources=sources)
    if not found.absent:
        return snapshot
    return replace(snapshot, absent={**snapshot.absent, "gpus": found.absent})
