"""DCGM's series in a Prometheus server, for the replicas that are read from it.

Holds which of them are asked for: where there are none, one question a minute; where there are,
those of the replicas' pods and hosts. What they mean is `gpus.py`'s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from ullage.telemetry.exposition import Labels
from ullage.telemetry.gpu_pages import Told
from ullage.telemetry.gpus import LABELS, METRICS, devices_of, host_of, hosts_on
from ullage.telemetry.prometheus_api import QueryFailed, Series, TooLarge
from ullage.telemetry.promql import PrometheusSource
from ullage.telemetry.promql_text import any_of, quoted
from ullage.telemetry.scrape import Look

SEEK_EVERY_S = 60.0
REPLICAS_PER_QUERY = 64
"""With eight GPUs each, some 5,000 series."""
NAMES = quoted("|".join(METRICS))
EXPORTERS = f"group by (job, instance) ({{__name__=~{NAMES}}})"
OWN_PODS = f"group by (job, instance, namespace, pod) (up and on (job, instance) {EXPORTERS})"
"""Prometheus' own labels of the exporters: where the exporter names no workload, its own pod
stands where the workload's would."""
OF_A_POD = frozenset({"namespace", "pod", "container"})


class GpuSeries:
    """What the server of `source` has of the exporters beside its replicas."""

    def __init__(self, source: PrometheusSource) -> None:
        self._source = source
        self._there = False
        self._own_pods: frozenset[tuple[str, ...]] = frozenset()
        self._seek_again_s = 0.0

    def begin(self) -> None:
        """Nothing: replicas come first."""

    async def told(self, looks: Sequence[Look], _wait_s: float) -> tuple[Told, ...]:
        """One answer for all its exporters; none where it has no such series. It is asked at most
        once per question, each of which has its own limit of time."""
        called = f"DCGM by {self._source.base}"
        try:
            if not await self._are_there():
                return ()
            series = [
                one
                for at in range(0, len(looks), REPLICAS_PER_QUERY)
                for one in await self._of(looks[at : at + REPLICAS_PER_QUERY])
            ]
        except QueryFailed as error:
            return (Told(called, error=str(error)),)
        devices = devices_of(samples_of(series, self._own_pods))
        return (Told(called, devices, hosts_on(devices)),)

    async def close(self) -> None:
        """The source is its owner's."""

    async def _are_there(self) -> bool:
        if time.monotonic() >= self._seek_again_s:
            self._there = bool(await self._source.ask(f"group({{__name__=~{NAMES}}})"))
            if self._there:
                own = await self._source.ask(OWN_PODS)
                self._own_pods = frozenset(_target(labels) for labels, _ in own)
            self._seek_again_s = time.monotonic() + SEEK_EVERY_S
        return self._there

    async def _of(self, looks: Sequence[Look]) -> tuple[Series, ...]:
        """The series that may be of these; halves of them where that is too much at once."""
        selectors = list(selectors_of(look.labels or {} for look in looks))
        if not selectors:
            return ()
        try:
            return await self._source.ask(" or ".join(selectors))
        except TooLarge:
            if len(looks) < 2:
                raise
            half = len(looks) // 2
            return (*await self._of(looks[:half]), *await self._of(looks[half:]))


def selectors_of(replicas: Iterable[Mapping[str, str]]) -> Iterable[str]:
    """PromQL for the GPUs of these targets' pods, and of the machines that they are on.

    `or` between two of them drops a series whose labels one on its left has, whatever its name: a
    selector by labels alone has all the names of such a GPU, so nothing is lost.
    """
    pods, hosts = set[str](), set[str]()
    for labels in replicas:
        pods |= {labels["pod"]} if labels.get("pod") else set()
        hosts |= {labels.get("node", ""), host_of(labels.get("instance", ""))} - {""}
    if pods:
        for label in LABELS["pod"]:
            yield f"{{__name__=~{NAMES},{label}=~{any_of(sorted(pods))}}}"
    if hosts:
        for label in (*LABELS["hostname"], *LABELS["node"]):
            yield f"{{__name__=~{NAMES},{label}=~{_named(hosts)}}}"
        instance = "|".join(_bracketed(host) for host in sorted(hosts))
        yield f"{{__name__=~{NAMES},instance=~{quoted(f'(?:{instance})(?::[0-9]+)?')}}}"


def _named(hosts: Iterable[str]) -> str:
    """A pattern of the hosts' names, with a domain or without."""
    names = (re.escape(host) for host in sorted(hosts))
    short = {re.escape(host.partition(".")[0]) for host in hosts if not _is_address(host)}
    more = (f"{name}(?:[.].*)?" for name in sorted(short))
    return quoted("|".join((*names, *more)))


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdecimal()


def _bracketed(host: str) -> str:
    return re.escape(f"[{host}]" if ":" in host else host)


def samples_of(
    series: Iterable[Series], own_pods: Collection[tuple[str, ...]] = ()
) -> dict[str, dict[Labels, float]]:
    """Series of one instant as a page has them, without the pods of the exporters themselves."""
    found: dict[str, dict[Labels, float]] = {}
    for labels, value in series:
        leave = {"__name__"}
        if "exported_pod" not in labels and _target(labels) in own_pods:
            leave |= OF_A_POD
        own = tuple(sorted((name, text) for name, text in labels.items() if name not in leave))
        found.setdefault(labels.get("__name__", ""), {})[own] = float(value)
    return found


def _target(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in ("job", "instance", "namespace", "pod"))
