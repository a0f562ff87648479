"""The plugin's series in vLLM's own /metrics, and the loop that asks for them once a second.

Names are the embedded engine's, labels vLLM's. A number that cannot be known is NaN, or its
series is not there; never 0. Prometheus' classes are those that vLLM's own metrics are made of.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from ullage_vllm.draining import Draining
from ullage_vllm.engines import Engines, NoAnswer, in_bytes, page_utilization

EVERY_S = 1.0
STALE_S = 30.0
"""An engine core that has not answered for so long leaves NaN behind."""
REFUSED_S = 10.0
"""When one that refused is asked again."""

GAUGES = {
    "ullage_kv_cache_used_bytes": (
        "Bytes of the KV blocks that requests hold, on one rank of this engine."
    ),
    "ullage_kv_cache_total_bytes": "Bytes of all KV blocks, on one rank of this engine.",
    "ullage_kv_page_utilization_ratio": (
        "Tokens held over tokens that the held blocks could hold; NaN while none is held."
    ),
    "ullage_oldest_request_age_seconds": "Age of the oldest request; NaN while there is none.",
}
COUNTERS = {
    "ullage_recomputed_tokens": "Tokens computed again after a preemption.",
    "ullage_recomputed_requests": "Times that a preempted request ran again and recomputed.",
}
CANCELLED = "ullage_requests_cancelled"
LABELS = ["model_name", "engine"]

_made: dict[str, Any] = {}
"""By name: a registry takes each only once, however many servers a process has had."""


class Metrics:
    """The series of every engine core of one server. `gauge`, `counter` make a metric."""

    def __init__(
        self,
        model_name: str,
        engines: list[int],
        gauge: Callable[..., Any],
        counter: Callable[..., Any],
    ) -> None:
        self._labels = [(model_name, str(engine)) for engine in engines]
        self._gauges = {
            name: _once(
                gauge, name, documentation=text, labelnames=LABELS, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: _once(counter, name, documentation=text, labelnames=LABELS)
            for name, text in COUNTERS.items()
        }
        self._counted: dict[tuple[int, str], int] = {}
        for at in range(len(self._labels)):
            # From the start on: counters at 0, which is true, and gauges that do not know yet.
            for name in COUNTERS:
                self._counters[name].labels(*self._labels[at])
            for name in GAUGES:
                self._set(at, name, None)

    def record(self, at: int, statistics: dict[str, Any]) -> None:
        """What engine number `at` of the list answered, but for the age."""
        values = {
            "ullage_kv_cache_used_bytes": in_bytes(statistics, "used_blocks"),
            "ullage_kv_cache_total_bytes": in_bytes(statistics, "num_blocks"),
            "ullage_kv_page_utilization_ratio": page_utilization([statistics["slots"]]),
        }
        for name, value in values.items():
            self._set(at, name, value)
        for name in COUNTERS:
            told = statistics[name.removeprefix("ullage_")]
            before = self._counted.get((at, name), 0)
            self._counters[name].labels(*self._labels[at]).inc(max(told - before, 0))
            self._counted[at, name] = told

    def record_age(self, at: int, age_s: float | None) -> None:
        self._set(at, "ullage_oldest_request_age_seconds", age_s)

    def forget(self, at: int) -> None:
        """The engine core says nothing any more: what it said of now is not known."""
        for name in GAUGES:
            if name != "ullage_oldest_request_age_seconds":
                self._set(at, name, None)

    def _set(self, at: int, name: str, value: float | None) -> None:
        self._gauges[name].labels(*self._labels[at]).set(math.nan if value is None else value)


def cancelled_counter(counter: Callable[..., Any]) -> Any:
    """Requests that were ended from outside, by whom, as the embedded engine counts them."""
    return _once(
        counter,
        CANCELLED,
        documentation="Requests that were ended from outside, by whom.",
        labelnames=["model_name", "by"],
    )


def _once(make: Callable[..., Any], name: str, **details: Any) -> Any:
    if name not in _made:
        _made[name] = make(name=name, **details)
    return _made[name]


class Watching:
    """Asks the engine cores once a second, in an API process, until the server ends."""

    def __init__(self, engines: Engines, draining: Draining, metrics: Metrics | None) -> None:
        self._engines, self._draining, self._metrics = engines, draining, metrics
        count = len(engines.indexes)
        self._arrivals: list[float | None] = [None] * count
        self._answered_s = time.monotonic()
        self._asked: asyncio.Future[Any] | None = None
        self._refused_until_s = 0.0

    async def run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(EVERY_S)

    async def round(self) -> None:
        """One second's work. An answer that is late is waited for in the rounds to come."""
        self._draining.tell()
        if self._metrics is None:
            return
        if self._asked is None and time.monotonic() >= self._refused_until_s:
            self._asked = asyncio.ensure_future(
                self._engines.ask("ullage_statistics", patience_s=None)
            )
        if self._asked is not None:
            await asyncio.wait([self._asked], timeout=EVERY_S / 2)
            if self._asked.done():
                self._take(self._asked)
                self._asked = None
        if time.monotonic() - self._answered_s > STALE_S:
            self.forget()
        self._ages()

    def forget(self) -> None:
        """Whatever was said of now is not known any more."""
        for at in range(len(self._arrivals)):
            if self._metrics is not None:
                self._metrics.forget(at)

    def _take(self, asked: asyncio.Future[Any]) -> None:
        assert self._metrics is not None
        try:
            answers = asked.result()
        except NoAnswer:
            # In a shutdown vLLM logs every question that it refuses.
            self._refused_until_s = time.monotonic() + REFUSED_S
            return
        self._answered_s = time.monotonic()
        # Elastic expert parallelism adds and removes engines; the labels are those of the start.
        for at in range(len(answers), len(self._arrivals)):
            self._metrics.forget(at)
            self._arrivals[at] = None
        for at, statistics in enumerate(answers[: len(self._arrivals)]):
            self._arrivals[at] = statistics["oldest_arrival_s"]
            self._metrics.record(at, statistics)

    def _ages(self) -> None:
        """Ages grow on while an engine core hangs in a step: that is when they matter."""
        assert self._metrics is not None
        now_s = time.time()
        arrivals = list(self._arrivals)
        silent = time.monotonic() - self._answered_s > 2 * EVERY_S
        if silent and len(arrivals) == 1 and arrivals[0] is None:
            # It hangs in the first step of all requests: what this process knows of them.
            arrivals[0] = self._draining.oldest_s
        for at, arrival_s in enumerate(arrivals):
            self._metrics.record_age(at, None if arrival_s is None else max(now_s - arrival_s, 0.0))
