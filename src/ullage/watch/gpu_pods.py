"""DCGM exporters that Kubernetes runs: their pods are found by labels, and asked for their pages.

Holds which of them are asked: those on the nodes of the replicas. The pages are
`telemetry.gpu_pages`'.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from ullage.errors import Unreachable
from ullage.telemetry.gpu_pages import GpuPages, Told
from ullage.telemetry.pods import Pod, Selection
from ullage.telemetry.scrape import Look
from ullage.watch.pods import LIST_EVERY_S, Pods

PORT_NAMES = ("metrics", "http-metrics")
PORT = 9400
"""The exporter's own, where its pod names none of these."""


class GpuPods:
    """Every pod that is selected, as a page of GPUs on its node."""

    def __init__(self, cluster: Pods, selection: Selection, *, interval_s: float = 5.0) -> None:
        self._cluster = cluster
        self._selection = selection
        self._pages = GpuPages(interval_s=interval_s)
        self._pods: tuple[Pod, ...] = ()
        self._error = ""
        self._list_again_s = -math.inf
        self._listing: asyncio.Task[tuple[Pod, ...]] | None = None

    def begin(self) -> None:
        """Ask which pods there are, and those that were known last."""
        if self._listing is None and time.monotonic() >= self._list_again_s:
            self._list_again_s = time.monotonic() + LIST_EVERY_S
            self._listing = asyncio.create_task(self._cluster.pods(self._selection))
        self._pages.begin()

    async def told(self, looks: Sequence[Look], wait_s: float) -> tuple[Told, ...]:
        """What each tells; one that says why where there is none to ask."""
        end_s = time.monotonic() + wait_s
        await self._take(wait_s)
        nodes = {look.pod.get("node", "") for look in looks if look.pod is not None} - {""}
        here = [pod for pod in self._pods if pod.runs and pod.node in nodes]
        self._pages.aim({url_of(pod): pod.node for pod in here})
        told = await self._pages.told(looks, end_s - time.monotonic())
        lacking = nodes - {pod.node for pod in here}
        if not lacking:
            return told
        why = self._error or (
            f"no pod in namespace {self._selection.namespace} that matches "
            f"{self._selection.text} runs there"
        )
        return (*told, Told("Kubernetes", hosts=frozenset(lacking), error=why))

    async def close(self) -> None:
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.gather(self._listing, return_exceptions=True)
        await self._pages.close()

    async def _take(self, wait_s: float) -> None:
        """What the API tells of pods. Only while none is known is it waited for."""
        if self._listing is None:
            return
        if not self._pods:
            await asyncio.wait({self._listing}, timeout=wait_s)
        if self._listing.done():
            listing, self._listing = self._listing, None
            try:
                self._pods, self._error = listing.result(), ""
            except Unreachable as error:
                self._error = str(error)


def url_of(pod: Pod) -> str:
    """Where the exporter in the pod is asked."""
    named = dict(pod.ports)
    port = next((named[name] for name in PORT_NAMES if name in named), PORT)
    return f"http://{f'[{pod.ip}]' if ':' in pod.ip else pod.ip}:{port}"
