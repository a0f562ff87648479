"""Sends requests in phases, cancels and swaps adapters meanwhile, and tells how all of it ended.

Holds the order of events; one request is `soak_client.py`, what is watched `soak_watch.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from soak_client import Outcome, Target, send
from soak_plan import Ask
from soak_watch import MemoryLog, post

SAMPLE_EVERY_S = 0.25
SAMPLE_EVERY_REQUESTS = 10
"""On a fast machine a small soak is over before the clock has been read a few times."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a soak: `load` times the capacity that was measured, in requests per second.

    `load` None: closed loop, `concurrency` requests at a time; this is what measures capacity.
    """

    name: str
    num_requests: int
    load: float | None = None
    concurrency: int = 0


@dataclass(slots=True)
class PhaseResult:
    """What became of a phase's requests, how long it took, and how long until all were sent."""

    phase: Phase
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    sending_s: float = 0.0

    @property
    def kinds(self) -> Counter[str]:
        return Counter(outcome.kind for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What happens beside the requests, every so many seconds; 0 is never.

    `adapter` is a name and a folder that is loaded and unloaded again and again.
    """

    cancel_every_s: float = 0.0
    cancel_percent: int = 10
    swap_every_s: float = 0.0
    adapter: tuple[str, str] | None = None


@dataclass(slots=True)
class Disturbed:
    """How often each disturbance happened, and the statuses other than 200 that it met."""

    cancels: int = 0
    swaps: int = 0
    faults: list[str] = field(default_factory=list)


One = Callable[[Ask, PhaseResult], Awaitable[None]]


async def run_phases(
    target: Target,
    asks: Iterable[Ask],
    phases: Sequence[Phase],
    disturbances: Disturbances,
    memory: MemoryLog,
) -> tuple[list[PhaseResult], Disturbed]:
    """All phases in turn; each ends when its last request has. The first must be closed."""
    stream = iter(asks)
    ended = 0
    disturbed = Disturbed()
    results: list[PhaseResult] = []
    capacity_per_s = 0.0

    async def watch() -> None:
        while True:
            memory.sample(ended)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def one(ask: Ask, into: PhaseResult) -> None:
        nonlocal ended
        into.outcomes.append(await send(target, ask))
        ended += 1
        if ended % SAMPLE_EVERY_REQUESTS == 0:
            memory.sample(ended)

    beside = [
        asyncio.ensure_future(watch()),
        asyncio.ensure_future(_cancel_now_and_then(target, disturbances, disturbed)),
        asyncio.ensure_future(_swap_adapters(target, disturbances, disturbed)),
    ]
    try:
        for phase in phases:
            result = PhaseResult(phase)
            started = time.monotonic()
            if phase.load is None:
                await _closed(stream, phase, result, one)
            else:
                await _open(stream, phase, phase.load * capacity_per_s, result, one)
            result.seconds = time.monotonic() - started
            result.sending_s = result.sending_s or result.seconds
            if phase.load is None:
                capacity_per_s = len(result.outcomes) / result.seconds
            results.append(result)
        for task in beside:
            if task.done():
                task.result()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return results, disturbed


async def _closed(stream: Iterator[Ask], phase: Phase, result: PhaseResult, one: One) -> None:
    """`concurrency` clients, each of which asks again as soon as it has its answer."""
    left = phase.num_requests

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one(next(stream), result)

    await asyncio.gather(*(client() for _ in range(phase.concurrency)))


async def _open(
    stream: Iterator[Ask], phase: Phase, per_s: float, result: PhaseResult, one: One
) -> None:
    """Arrivals at `per_s` in random gaps, whether or not the server keeps up."""
    draw = random.Random(phase.num_requests)  # noqa: S311 - repeatable
    at = started = time.monotonic()
    tasks = []
    for _ in range(phase.num_requests):
        at += draw.expovariate(per_s)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(next(stream), result)))
    result.sending_s = time.monotonic() - started
    await asyncio.gather(*tasks)


async def _cancel_now_and_then(target: Target, plan: Disturbances, seen: Disturbed) -> None:
    while plan.cancel_every_s > 0:
        await asyncio.sleep(plan.cancel_every_s)
        path = f"/ullage/cancel_oldest?percent={plan.cancel_percent}"
        status, text = await asyncio.to_thread(post, target, path)
        seen.cancels += 1
        if status != 200:
            seen.faults.append(f"cancel_oldest: {status} {text[:200]}")


async def _swap_adapters(target: Target, plan: Disturbances, seen: Disturbed) -> None:
    while plan.swap_every_s > 0 and plan.adapter is not None:
        await asyncio.sleep(plan.swap_every_s)
        name, path = plan.adapter
        for route, body in (
            ("load_lora_adapter", {"lora_name": name, "lora_path": path}),
            ("unload_lora_adapter", {"lora_name": name}),
        ):
            status, text = await asyncio.to_thread(post, target, f"/v1/{route}", body)
            if status != 200:
                seen.faults.append(f"{route}: {status} {text[:200]}")
        seen.swaps += 1
