"""Whose a GPU is: exporters' GPUs joined to replicas by pod or by host, or why they are not.

Holds the join; it guesses nothing. Where nothing says which of a host's GPUs is whose, none of its
replicas has any, and the reason says so.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ullage.errors import BadUsage
from ullage.telemetry.gpu_pages import Told
from ullage.telemetry.gpus import Device
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import Gpu
from ullage.telemetry.wire import origin_and_path

LOOPBACK = "localhost"
MOST_NAMED = 3
BY_PROCESS = "NVML, by process"
NO_EXPORTER = "no exporter of GPUs was found"
MOST_KEPT = 16_384


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a replica runs. Empty: nothing tells."""

    hosts: tuple[str, ...] = ()
    namespace: str = ""
    pod: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The GPUs of a replica and who told of them, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    source: str = ""
    absent: str = ""


def whereabouts_of(look: Look) -> Whereabouts:
    """By what Kubernetes or Prometheus says of it, else by its URL."""
    if look.pod is not None:
        address = look.pod.get("address", "")
        hosts = (look.pod.get("node", ""), _url_host(address) if address else "")
        return Whereabouts(_named(hosts), look.pod.get("namespace", ""), look.pod.get("name", ""))
    if look.labels is not None:
        of = look.labels.get
        hosts = (of("node", ""), _url_host(of("instance", "")))
        return Whereabouts(
            _named(hosts),
            of("namespace", "") if of("pod") else "",
            of("pod", ""),
            of("cluster", ""),
        )
    return Whereabouts(_named((_url_host(look.url),)))


@lru_cache(MOST_KEPT)
def _url_host(url: str) -> str:
    try:
        return origin_and_path(url)[0].host
    except BadUsage:  # a name that is no address is no host
        return ""


def _named(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(plain_host(host) for host in hosts if host))


@lru_cache(MOST_KEPT)
def plain_host(host: str) -> str:
    """One spelling of a host's name or address; all of loopback is this machine."""
    name = host.strip().strip("[]").rstrip(".").lower()
    address = _address(name)
    if address is None:
        return LOOPBACK if name == LOOPBACK else name
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return LOOPBACK if address.is_loopback else str(address)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def joined(
    replicas: Mapping[str, Whereabouts],
    exporters: Sequence[Told],
    own: Mapping[str, tuple[Gpu, ...]],
) -> dict[str, Found]:
    """Replica's url → its GPUs. `own`: those that the driver on this machine says are its."""
    places = _Places(exporters, replicas)
    return {
        url: places.own(where, own[url]) if own.get(url) else places.found(where)
        for url, where in replicas.items()
    }


@dataclass(frozen=True, slots=True)
class _Told:
    """A GPU and the exporter that told of it."""

    device: Device
    exporter: str


class _Places:
    """Exporters' GPUs by pod and by host, and how many replicas are on a host."""

    def __init__(self, exporters: Sequence[Told], replicas: Mapping[str, Whereabouts]) -> None:
        self._exporters = exporters
        self._by_pod: dict[tuple[str, str], list[_Told]] = {}
        self._by_host: dict[str, list[_Told]] = {}
        for exporter in exporters:
            for device in exporter.devices:
                told = _Told(device, exporter.called)
                place = device.place
                if place.pod:
                    self._by_pod.setdefault((place.namespace, place.pod), []).append(told)
                for host in _named(place.hosts):
                    self._by_host.setdefault(host, []).append(told)
        self._pods = {f"{one.namespace}/{one.pod}" for one in replicas.values() if one.pod}
        self._full_names = _by_short_name(self._by_host)
        self._clusters: dict[str, list[str]] = {}  # by host, one for each replica that is there
        for where in replicas.values():
            for host in {name for own in where.hosts for name in self._names_of(own)}:
                self._clusters.setdefault(host, []).append(where.cluster)

    def own(self, where: Whereabouts, gpus: tuple[Gpu, ...]) -> Found:
        """What exporters tell of these GPUs, which say more; else they themselves."""
        wanted = {gpu.key for gpu in gpus}
        there = {one.device.gpu.key: one for host in where.hosts for one in self._on(host)}
        if all(key in there and there[key].device.gpu.uuid for key in wanted):
            return _of([there[key] for key in sorted(wanted)], "by process")
        return Found(gpus, BY_PROCESS)

    def found(self, where: Whereabouts) -> Found:
        if where.pod:
            of_pod = self._by_pod.get((where.namespace, where.pod), ())
            told = [one for one in of_pod if _may_be_one(one.device.place.cluster, where.cluster)]
            if told:
                return _of(told, "by pod")
        for host in where.hosts:
            told = [o for o in self._on(host) if _may_be_one(o.device.place.cluster, where.cluster)]
            if told:
                return self._of_host(host, told, where)
        return Found(absent=self._why_none(where))

    def _of_host(self, host: str, told: list[_Told], where: Whereabouts) -> Found:
        full = self._names_of(host)
        if len(full) > 1:
            return Found(absent=f"exporters tell of GPUs on {_some(full)}, and {host} may be any")
        of_pods = [one for one in told if one.device.place.pod]
        pods = sorted({f"{o.device.place.namespace}/{o.device.place.pod}" for o in of_pods})
        if where.pod and not pods:
            return Found(absent=f"no pod is named for the GPUs of {host}: no pod has them, or the "
                         "exporter does not ask Kubernetes (DCGM_EXPORTER_KUBERNETES)")  # fmt: skip
        if pods and (where.pod or self._pods.intersection(pods)):
            me = f"{where.namespace}/{where.pod}" if where.pod else "what is no pod"
            return Found(absent=f"the GPUs of {host} belong to {_some(pods)}, none to {me}")
        there = [self._clusters.get(name, ()) for name in full]
        num = max(sum(_may_be_one(one, where.cluster) for one in each) for each in there)
        if len(pods) > 1 or num > 1:
            who = f"{len(pods)} pods have GPUs" if len(pods) > 1 else f"{num} replicas are watched"
            return Found(absent=f"{who} on {host}, and nothing says which GPU is whose")
        return _of(of_pods or told, "by host")

    def _on(self, host: str) -> list[_Told]:
        return [one for name in self._names_of(host) for one in self._by_host.get(name, ())]

    def _names_of(self, host: str) -> tuple[str, ...]:
        """The exporters' names for the host: its own, else the one that is a longer or shorter
        form of it (gpu-1, gpu-1.example.com)."""
        if host in self._by_host or _address(host) is not None:
            return (host,)
        short, dot, _ = host.partition(".")
        if dot:
            return (short,) if short in self._by_host else (host,)
        return self._full_names.get(host) or (host,)

    def _why_none(self, where: Whereabouts) -> str:
        failed = [exporter for exporter in self._exporters if exporter.error]
        of_host = [e for e in failed if set(_named(e.hosts)) & set(where.hosts)]
        if of_host or failed:
            first = (of_host or failed)[0]
            more = f", and {len(failed) - 1} more" if len(failed) > 1 and not of_host else ""
            others = "" if len(failed) == len(self._exporters) else "no other tells of its GPUs; "
            return f"{others}{first.called}: {first.error}{more}"
        if not self._exporters:
            return NO_EXPORTER
        pod = [f"{where.namespace}/{where.pod}"] if where.pod else []
        if not pod and not where.hosts:
            return "nothing tells on which host it runs"
        told_of = _some(sorted(self._by_host)) or "no host"
        return f"no exporter tells of GPUs of {_some([*pod, *where.hosts])}; told of: {told_of}"


def _by_short_name(hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for host in sorted(hosts):
        short, dot, _ = host.partition(".")
        if dot and _address(host) is None:
            found[short] = (*found.get(short, ()), host)
    return found


def _may_be_one(one: str, other: str) -> bool:
    return not one or not other or one == other


def _of(told: Sequence[_Told], how: str) -> Found:
    """Each GPU once: exporters can be scraped twice, and pods have several containers."""
    gpus = {one.device.gpu.key: one.device.gpu for one in reversed(told)}
    exporters = list(dict.fromkeys(one.exporter for one in told))
    ordered = tuple(sorted(gpus.values(), key=_order))
    return Found(ordered, f"{_some(exporters)}, {how}")


def _order(gpu: Gpu) -> tuple[tuple[int, str], ...]:
    """Numbers as numbers: 2 before 10."""
    return tuple((int(p) if p.isdecimal() else 1 << 62, p) for p in gpu.index.split("/"))


def _some(names: Iterable[str]) -> str:
    """The first few of them, and how many more there are."""
    known = list(names)
    more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    return ", ".join(known[:MOST_NAMED]) + more
