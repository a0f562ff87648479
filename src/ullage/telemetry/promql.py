"""Fleet mode: replicas that a Prometheus server already scrapes, read through its HTTP API.

Holds which targets are replicas, which of them were scraped anew, and the way from their series to
the page that they came from, which `reading` reads as if it had been scraped here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ullage.telemetry.prometheus_api import (
    Access,
    PrometheusApi,
    QueryFailed,
    Series,
    TooLarge,
)
from ullage.telemetry.promql_text import any_of, marker_names, page_names, quoted, selector_of
from ullage.telemetry.reading import snapshot_of
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import Snapshot

DISCOVER_EVERY_S = 60.0
SEEN_WITHIN = "1h"
"""A target that said something of an engine so long ago is a replica, though it be down."""
STALE_S = 120.0
"""Prometheus itself goes on answering with a sample for 300 s where nothing follows it."""
LATE_FACTOR = 2.5
SKEW_S = 2.0
"""By which the server's clock may differ from this one before its times are moved to it."""
TARGETS_PER_QUERY = 32
QUERIES_AT_ONCE = 2
MOST_WARNINGS = 100
NAMING = ("cluster", "namespace", "pod", "job", "instance")
Key = tuple[tuple[str, str], ...]
"""The labels of a target, sorted: what Prometheus adds to all that it scrapes there."""


@dataclass(slots=True)
class _Replica:
    labels: Mapping[str, str]
    name: str
    scraped_s: float = -math.inf
    up: bool = True
    every_s: float = 0.0
    read_s: float = -math.inf  # of which scrape the look is
    look: Look | None = None

    def said(self, time_s: float, snapshot: Snapshot | None, error: str = "") -> Look:
        return Look(self.name, time_s, snapshot, error, labels=self.labels)


class PrometheusSource:
    """What `watch` looks at: every replica that the server scrapes and the selector matches.

    With a selector every target is a replica; without one, those that say something of an engine
    or did within the last hour. `on_warning` is given each warning of the server's once: answers
    that are only a part of what there is come with one. Inside one event loop; `close()` when done.
    """

    def __init__(
        self,
        url: str,
        *,
        selector: str = "",
        access: Access = Access(),  # noqa: B008 (frozen)
        within_s: float = 10.0,
        on_warning: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._api = PrometheusApi(url, access, within_s=within_s)
        self._selector = selector_of(selector)
        self._names, self._markers = page_names(), marker_names()
        self._replicas: dict[Key, _Replica] = {}
        self._discovered_s = -math.inf
        self._now_s: float | None = None
        self._skew_s = 0.0
        self._on_warning = on_warning
        self._warned: set[str] = set()

    async def close(self) -> None:
        await self._api.aclose()

    async def look(self) -> tuple[Look, ...]:
        """One Look per replica, by name.

        `time_s` is when Prometheus scraped it; a replica that was not scraped since the last call
        has the same Look again. One that is no target any more is not named.

        Raises:
            QueryFailed: the server does not answer, or has no replica at all.
        """
        try:
            now_s = self._now_s = await self._now()
            await self._find_replicas(now_s)
            fresh = await self._see_targets(now_s)
            await self._read(fresh, now_s)
        except QueryFailed as error:
            raise QueryFailed(f"{self._api.base}: {error}") from error
        if not self._replicas:
            raise QueryFailed(f"{self._api.base} {self._why_none()}")
        replicas = sorted(self._replicas.values(), key=lambda replica: replica.name)
        return tuple(self._look_of(replica, now_s) for replica in replicas)

    @property
    def base(self) -> str:
        """The server's URL."""
        return self._api.base

    async def ask(self, promql: str) -> tuple[Series, ...]:
        """Anything else, at the instant of the last look. Raises QueryFailed."""
        return await self._ask(promql, self._now_s)

    async def _now(self) -> float:
        """The server's time. All questions of one look are asked of it."""
        series, _ = await self._api.query("vector(time())", None)
        now_s = float(series[0][1]) if series else time.time()
        skew_s = time.time() - now_s
        if abs(skew_s - self._skew_s) > SKEW_S:  # else a scrape's time would differ at each look
            self._skew_s = skew_s
        return now_s

    # --- which targets ---

    async def _find_replicas(self, now_s: float) -> None:
        if now_s - self._discovered_s < DISCOVER_EVERY_S and self._replicas:
            return
        said = await self._ask(
            f"group by (job, instance) (last_over_time("
            f"{self._select(f'__name__=~{any_of(self._markers)}')}[{SEEN_WITHIN}]))",
            now_s,
        )
        speaking = {(s.get("job", ""), s.get("instance", "")) for s, _ in said}
        targets = await self._ask(self._select('__name__="up"'), now_s)
        labels = [_without_name(series) for series, _ in targets]
        known = {(one.get("job", ""), one.get("instance", "")) for one in labels}
        # What reaches the server by remote write may come without `up`.
        labels += [{"job": job, "instance": instance} for job, instance in sorted(speaking - known)]
        for one in labels:
            if self._selector or (one.get("job", ""), one.get("instance", "")) in speaking:
                self._replicas.setdefault(_key(one), _Replica(one, name_of(one)))
        self._discovered_s = now_s

    async def _see_targets(self, now_s: float) -> list[_Replica]:
        """Note who was scraped when; those that were scraped since the last look and answered."""
        jobs = sorted({r.labels.get("job", "") for r in self._replicas.values()})
        if not jobs:
            return []
        of_jobs = f"job=~{any_of(jobs)}"
        up = self._select(f'__name__="up",{of_jobs}')
        states = {_key(_without_name(s)): float(v) for s, v in await self._ask(up, now_s)}
        times = {_key(s): float(v) for s, v in await self._ask(f"timestamp({up})", now_s)}
        spoke = {}
        if not states.keys() >= self._replicas.keys():
            spoke = await self._spoke(of_jobs, now_s)
        fresh, gone = [], []
        for key, replica in self._replicas.items():
            pair = (replica.labels.get("job", ""), replica.labels.get("instance", ""))
            scraped_s = times.get(key, spoke.get(pair))
            if scraped_s is None:
                gone.append(key)
                continue
            replica.up = states.get(key, 1.0) > 0
            if scraped_s > replica.scraped_s > -math.inf:
                replica.every_s = scraped_s - replica.scraped_s
            replica.scraped_s = scraped_s
            if scraped_s != replica.read_s:
                fresh.append(replica)
        for key in gone:
            del self._replicas[key]
        if gone:
            self._discovered_s = -math.inf  # others may have come in their place
        return [replica for replica in fresh if replica.up]

    async def _spoke(self, matchers: str, now_s: float) -> dict[tuple[str, str], float]:
        """When each (job, instance) last said anything of an engine, for those without `up`."""
        each = (
            # Not by one pattern: timestamp() drops names, and then two series would be the same.
            f"max by (job, instance) (timestamp("
            f"{self._select(f'__name__={quoted(marker)},{matchers}')}))"
            for marker in self._markers
        )
        said = await self._ask(" or ".join(each), now_s)
        return {(s.get("job", ""), s.get("instance", "")): float(v) for s, v in said}

    # --- what they say ---

    async def _read(self, replicas: Sequence[_Replica], now_s: float) -> None:
        """Give every replica the Look of its latest scrape."""
        by_job: dict[str, list[_Replica]] = {}
        for replica in replicas:
            by_job.setdefault(replica.labels.get("job", ""), []).append(replica)
        shards = [
            group[at : at + TARGETS_PER_QUERY]
            for group in by_job.values()
            for at in range(0, len(group), TARGETS_PER_QUERY)
        ]
        turn = asyncio.Semaphore(QUERIES_AT_ONCE)
        await asyncio.gather(*(self._read_shard(shard, now_s, turn) for shard in shards))

    async def _read_shard(
        self, shard: Sequence[_Replica], now_s: float, turn: asyncio.Semaphore
    ) -> None:
        job = quoted(shard[0].labels.get("job", ""))
        instances = any_of(sorted({r.labels.get("instance", "") for r in shard}))
        promql = self._select(f"__name__=~{self._names},job={job},instance=~{instances}")
        try:
            async with turn:
                series = await self._ask(promql, now_s)
        except TooLarge:
            if len(shard) > 1:
                half = len(shard) // 2
                await self._read_shard(shard[:half], now_s, turn)
                await self._read_shard(shard[half:], now_s, turn)
                return
            self._failed(shard, now_s, "its series are more than are read at once")
            return
        except QueryFailed as error:
            # The others' answers stand.
            self._failed(shard, now_s, f"{self._api.base}: {error}")
            return
        for replica, page in pages_of(series, shard):
            time_s = replica.scraped_s + self._skew_s
            snapshot = snapshot_of(page, time_s=time_s)
            replica.look = replica.said(time_s, snapshot)
            replica.read_s = replica.scraped_s

    def _failed(self, shard: Sequence[_Replica], now_s: float, why: str) -> None:
        for replica in shard:
            look = replica.said(now_s + self._skew_s, None, why)
            replica.look = replace(look, asked=False)

    def _look_of(self, replica: _Replica, now_s: float) -> Look:
        scraped_s = replica.scraped_s + self._skew_s
        if not replica.up:
            return replica.said(scraped_s, None, "Prometheus could not scrape it (up is 0)")
        age_s = now_s - replica.scraped_s
        if age_s > max(STALE_S, LATE_FACTOR * replica.every_s):
            why = f"Prometheus last scraped it {age_s:,.0f} s ago"
            return replica.said(now_s + self._skew_s, None, why)
        return replica.look or replica.said(scraped_s, None, "not read yet")

    # --- asking ---

    def _select(self, matchers: str) -> str:
        return f"{{{matchers}{',' if self._selector else ''}{self._selector}}}"

    async def _ask(self, promql: str, time_s: float | None) -> tuple[Series, ...]:
        series, warnings = await self._api.query(promql, time_s)
        for warning in warnings:
            if warning not in self._warned and len(self._warned) < MOST_WARNINGS:
                self._warned.add(warning)
                self._on_warning(warning)
        return series

    def _why_none(self) -> str:
        what = f" that matches {{{self._selector}}}" if self._selector else " of a known engine"
        return f"answers, and has no target{what}"


def name_of(labels: Mapping[str, str]) -> str:
    """What a target is called: its cluster, its namespace and pod or its job, and its instance."""
    skip = "job" if labels.get("pod") else "pod"
    return "/".join(labels[n] for n in NAMING if n != skip and labels.get(n))


def pages_of(
    series: Iterable[Series], replicas: Sequence[_Replica]
) -> list[tuple[_Replica, bytes]]:
    """The text exposition that each replica's series came from, without the targets' labels.

    Where two targets share job and instance, a series is of the one whose every label it has.
    """
    lines: dict[str, list[str]] = {replica.name: [] for replica in replicas}
    of_instance: dict[str, list[_Replica]] = {}
    for replica in replicas:
        of_instance.setdefault(replica.labels.get("instance", ""), []).append(replica)
    for labels, value in series:
        for replica in of_instance.get(labels.get("instance", ""), ()):
            if all(labels.get(name) == text for name, text in replica.labels.items()):
                lines[replica.name].append(_line(labels, value, replica.labels))
                break
    # In one order, whatever the server's, so that pages with the same keys are read by one plan.
    return [
        (r, "\n".join((*sorted(lines[r.name]), "")).encode("utf-8", "replace")) for r in replicas
    ]


def _line(labels: Mapping[str, str], value: str, target: Mapping[str, str]) -> str:
    inner = [
        f'{name if name[:9] != "exported_" else _own(name, target)}="{text}"'
        if '"' not in text and "\\" not in text and "\n" not in text
        else f"{_own(name, target)}={quoted(text)}"
        for name, text in labels.items()
        if name not in target and name != "__name__"
    ]
    return f"{labels['__name__']}{{{','.join(inner)}}} {value}"


def _own(name: str, target: Mapping[str, str]) -> str:
    """What the engine called a label whose name the target has, too."""
    own = name.removeprefix("exported_")
    return own if own in target else name


def _without_name(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in labels.items() if name != "__name__"}


def _key(labels: Mapping[str, str]) -> Key:
    return tuple(sorted(labels.items()))
