"""A source of the replicas that Kubernetes runs: its pods are found, asked, and their state joined.

Holds which pods are replicas, at which port each answers, and the pace of listing. The API is
`telemetry.kubernetes`', scraping `telemetry.scrape`'s.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from ullage.errors import Unreachable
from ullage.telemetry.pods import Pod, Selection, candidates, facts_of, iso, state_in_words
from ullage.telemetry.scrape import Clock, DirectSource, Endpoint, Look
from ullage.watch.watcher import PartlyKnown

LIST_EVERY_S = 10.0
PROBE_S = 2.0
"""In which a port answers that is tried; a firewall that drops what it forbids takes all of it."""
PROBES_AT_ONCE = 64
FIRST_PROBES_S = 3.0
"""How long the first round waits for ports to be found; later ones do not wait."""
SHOWN_ENDED_S = 900.0
"""How long a pod that will not run again is shown, as one that does not answer."""
MOST_ERROR_CHARS = 300


class Pods(Protocol):
    """What tells of pods: `telemetry.kubernetes.Cluster`."""

    async def pods(self, selection: Selection) -> tuple[Pod, ...]: ...


class PodSource:
    """Every pod that is selected, as a replica that is called `namespace/name`.

    `port` is a number or the name of a container port; without it the pod's own ports are tried,
    then the engines' usual ones. Pods are listed anew every LIST_EVERY_S at most.
    """

    def __init__(
        self,
        cluster: Pods,
        selection: Selection,
        *,
        interval_s: float = 5.0,
        api_key: str | None = None,
        port: str = "",
    ) -> None:
        self._cluster = cluster
        self._selection = selection
        self._api_key = api_key
        self._port = port
        self._clock = Clock()
        self._scraping = DirectSource(interval_s=interval_s, api_key=api_key)
        self._listing: asyncio.Task[tuple[Pod, ...]] | None = None
        self._list_again_s = -math.inf
        self._pods: dict[str, Pod] = {}  # by what they are called
        self._error = ""
        self._told_s = 0.0
        self._probing = asyncio.Semaphore(PROBES_AT_ONCE)
        self._seeking: dict[str, asyncio.Task[tuple[str, bool]]] = {}  # by uid
        self._urls: dict[str, str] = {}  # by uid
        self._settled: set[str] = set()

    async def look(self) -> tuple[Look, ...]:
        """A Look for each pod, by name.

        Raises:
            Unreachable: the API has never told of a pod.
            PartlyKnown: it does not tell now; the pods that were known last are in it.
        """
        first = await self._list()
        if not self._pods:
            raise Unreachable(self._error or self._why_none())
        await self._seek(first)
        self._scraping.aim([self._urls[pod.uid] for pod in self._pods.values() if self._asked(pod)])
        looks = {look.url: look for look in await self._scraping.look()}
        found = tuple(
            self._look_of(pod, looks.get(self._urls.get(pod.uid, "")))
            for pod in self._pods.values()
        )
        if self._error:
            raise PartlyKnown(self._error, found)
        return found

    async def close(self) -> None:
        tasks = [*self._seeking.values(), *([self._listing] if self._listing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._scraping.close()

    # --- which pods ---

    async def _list(self) -> bool:
        """Take what the API tells; True where it is the first time that it told of any pod.

        Only while no pod is known is it waited for: scraping goes on beside it.
        """
        if self._listing is None and self._clock.now() >= self._list_again_s:
            self._list_again_s = self._clock.now() + LIST_EVERY_S
            self._listing = asyncio.create_task(self._cluster.pods(self._selection))
        if self._listing is None:
            return False
        first = not self._pods
        if first:
            await asyncio.wait({self._listing})
        if not self._listing.done():
            return False
        listing, self._listing = self._listing, None
        try:
            pods = listing.result()
        except Unreachable as error:
            self._error = str(error)
            return False
        self._error = ""
        self._told_s = self._clock.now()
        self._take(pods)
        return first

    def _take(self, pods: Iterable[Pod]) -> None:
        since_s = self._clock.now() - SHOWN_ENDED_S
        self._pods = {pod.called: pod for pod in pods if _is_replica(pod, since_s)}
        uids = {pod.uid for pod in self._pods.values()}
        for uid in self._urls.keys() - uids:
            del self._urls[uid]
            self._settled.discard(uid)
        for uid in self._seeking.keys() - uids:
            self._seeking.pop(uid).cancel()
        for pod in self._pods.values():
            if pod.runs and pod.uid not in self._settled and pod.uid not in self._seeking:
                self._seeking[pod.uid] = asyncio.create_task(self._found(pod))

    def _why_none(self) -> str:
        return (
            f"Kubernetes has no pod in namespace {self._selection.namespace} that matches "
            f"{self._selection.text}"
        )

    # --- at which port ---

    async def _seek(self, first: bool) -> None:
        if self._seeking:
            await asyncio.wait(self._seeking.values(), timeout=FIRST_PROBES_S if first else 0)
        for uid, task in list(self._seeking.items()):
            if task.done():
                del self._seeking[uid]
                url, settled = task.result()
                if url:
                    self._urls[uid] = url
                if settled:
                    self._settled.add(uid)

    async def _found(self, pod: Pod) -> tuple[str, bool]:
        """(where its engine answers, or may; whether that is sure). "" where there is no port."""
        declared, usual = candidates(pod, self._port)
        if len(declared) == 1 and not usual:
            return declared[0], True
        pages: list[str] = []
        for urls in (declared, usual):
            looks = await asyncio.gather(*(self._probe(url) for url in urls))
            for look in looks:
                if look.snapshot is not None and look.snapshot.identity.engine:
                    return look.url, True
            pages += [look.url for look in looks if look.snapshot is not None]
        # Nobody yet: an engine that loads its weights does not listen. It is sought again.
        return next(iter([*pages, *declared, *usual]), ""), False

    async def _probe(self, url: str) -> Look:
        endpoint = Endpoint(url, api_key=self._api_key, clock=self._clock)
        try:
            async with self._probing:
                return await endpoint.look(PROBE_S)
        finally:
            endpoint.close()

    # --- what is told ---

    def _asked(self, pod: Pod) -> bool:
        return pod.runs and pod.uid in self._urls

    def _look_of(self, pod: Pod, look: Look | None) -> Look:
        url = self._urls.get(pod.uid, "")
        facts = facts_of(pod, url)
        if self._error:
            facts["as_of"] = iso(self._told_s)
        state = state_in_words(pod)
        if not self._asked(pod) or look is None:
            why = state if not pod.runs else self._why_not_asked(pod)
            return Look(pod.called, self._clock.now(), None, why[:MOST_ERROR_CHARS], facts)
        if look.snapshot is not None:
            return replace(look, url=pod.called, pod=facts)
        error = f"{state}; " if state else ""
        return Look(
            pod.called, look.time_s, None, f"{error}{url}: {look.error}"[:MOST_ERROR_CHARS], facts
        )

    def _why_not_asked(self, pod: Pod) -> str:
        if pod.uid in self._seeking:
            return "the port of its engine is being sought"
        if self._port and not self._port.isdigit():
            return f"no container of the pod has a port named {self._port}"
        return "it has not been asked yet"


def _is_replica(pod: Pod, since_s: float) -> bool:
    """Whether it serves, will, or did until just now. What ended long ago was replaced."""
    if pod.phase == "Succeeded":
        return False
    return pod.phase != "Failed" or pod.ended_s is None or pod.ended_s >= since_s
