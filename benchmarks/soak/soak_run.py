"""One soak from start to SIGTERM under load, and the list of what did not hold.

Holds the phases and what is demanded; models and RESULTS.md are `soak.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from soak_client import Outcome, send
from soak_load import Disturbances, Disturbed, Phase, PhaseResult, run_phases
from soak_plan import Ask, Limits, Row, make_asks
from soak_server import Served, serve
from soak_watch import MemoryLog, come_to_rest, get

# Bytes that a request may add to the resident memory for good, and all of them together.
SLOPE_LIMIT_BYTES = 1024
GROWTH_LIMIT_BYTES = 8 << 20
LEAST_FOR_SLOPE = 1000


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to soak: how it is served, and how the trace is cut for it."""

    name: str
    path: str
    flags: tuple[str, ...]
    limits: Limits
    concurrency: int
    adapters: dict[str, str]
    threads: int


@dataclass(frozen=True, slots=True)
class Soaked:
    """What one soak found. `problems` is empty when all held."""

    subject: Subject
    phases: tuple[PhaseResult, ...]
    disturbed: Disturbed
    kv: dict[str, float]
    slope_bytes: float
    growth_bytes: int
    last_bytes: int
    drained: Counter[str]
    exit_code: int
    problems: tuple[str, ...]


def phases_of(num_requests: int, concurrency: int, overload: float) -> list[Phase]:
    """A tenth to measure capacity, four tenths at `overload` times it, the rest at 0.9 of it."""
    tenth = num_requests // 10
    return [
        Phase("closed loop", tenth, concurrency=concurrency),
        Phase("overload", 4 * tenth, load=overload),
        Phase("steady", num_requests - 5 * tenth, load=0.9),
    ]


def soak(
    subject: Subject,
    rows: Sequence[Row],
    num_requests: int,
    disturbances: Disturbances,
    overload: float = 4.0,
) -> Soaked:
    """All phases, the rest, then SIGTERM while requests run."""
    served_adapters = [name for name in subject.adapters if name != "swapped"]
    asks = make_asks(rows, num_requests, subject.limits, served_adapters)
    last = list(make_asks(rows, 40, subject.limits, served_adapters, seed=1))
    with started(subject) as served:
        memory = MemoryLog(served.pid)
        phases = phases_of(num_requests, subject.concurrency, overload)
        results, disturbed = asyncio.run(
            run_phases(served.target, asks, phases, disturbances, memory)
        )
        problems = [
            f"{result.phase.name}: {outcome.kind} {outcome.note} (request {outcome.ask.number})"
            for result in results
            for outcome in result.outcomes
            if outcome.kind in ("fault", "unconnected")
        ]
        problems += disturbed.faults
        num_answered = sum(len(result.outcomes) for result in results)
        if num_answered != num_requests:
            problems.append(f"{num_requests} requests sent, {num_answered} outcomes")
        try:
            asyncio.run(come_to_rest(served.target))
        except TimeoutError as error:
            problems.append(str(error))
        kv = json.loads(get(served.target, "/ullage/kv")[1])
        problems += leaks(kv)
        warm_after = num_requests // 2
        slope_bytes = memory.slope_bytes_per_request(warm_after)
        growth_bytes = memory.growth_bytes(warm_after)
        problems += memory_grows(slope_bytes, growth_bytes, num_requests - warm_after)
        drained, exit_code, log = asyncio.run(end_under_load(served, last))
        problems += [
            f"SIGTERM: {outcome.kind} {outcome.note}"
            for outcome in drained
            if outcome.kind not in ("complete", "refused", "rejected", "unconnected", "expired")
        ]
        if exit_code != 0 or log:
            problems.append(f"exit code {exit_code}, stderr {log[-500:]!r}")
        return Soaked(
            subject,
            tuple(results),
            disturbed,
            kv,
            slope_bytes,
            growth_bytes,
            memory.samples[-1][1],
            Counter(outcome.kind for outcome in drained),
            exit_code,
            tuple(problems),
        )


def memory_grows(slope_bytes: float, growth_bytes: int, num_requests: int) -> list[str]:
    """Whether resident memory rose over the last `num_requests`; few tell no slope."""
    rises = slope_bytes > SLOPE_LIMIT_BYTES and num_requests >= LEAST_FOR_SLOPE
    if rises or growth_bytes > GROWTH_LIMIT_BYTES:
        return [f"memory grows: {slope_bytes:.0f} bytes a request, {growth_bytes} in all"]
    return []


@contextmanager
def started(subject: Subject) -> Iterator[Served]:
    flags = [*subject.flags, "--enable-control-routes"]
    if subject.adapters:
        flags += ["--enable-lora", "--lora-modules"]
        flags += [f"{name}={path}" for name, path in subject.adapters.items() if name != "swapped"]
    with serve([subject.path, *flags], subject.threads) as served:
        yield served


def leaks(kv: dict[str, float]) -> list[str]:
    """What /ullage/kv says is still held; every block must be free or cached, and free counts."""
    found = []
    if kv["used_blocks"] != 0 or kv["free_blocks"] != kv["num_blocks"]:
        found.append(f"{kv['used_blocks']} of {kv['num_blocks']} blocks are still held")
    if kv["holders"] or kv["running"] or kv["waiting"]:
        found.append(f"{kv['running']} run, {kv['waiting']} wait, holders {kv['holders']}")
    return found


async def end_under_load(served: Served, asks: Sequence[Ask]) -> tuple[list[Outcome], int, str]:
    """Send `asks` from clients that stay, SIGTERM when the first have begun, wait for all."""
    staying = [ask for ask in asks if ask.leaves is None]
    sent = [asyncio.ensure_future(send(served.target, ask)) for ask in staying]
    while (await running(served)) == 0 and not all(task.done() for task in sent):
        await asyncio.sleep(0.01)
    code, log = await asyncio.to_thread(served.terminate)
    return list(await asyncio.gather(*sent)), code, log


async def running(served: Served) -> int:
    return int(
        json.loads((await asyncio.to_thread(get, served.target, "/ullage/kv"))[1])["running"]
    )
