"""All engine cores of one server, asked from an API process, and their answers made one.

Holds the calls and the arithmetic; what an engine core answers is `engine`'s and `pool`'s, what
becomes of it over HTTP is `routes`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from ullage_vllm import pool

PATIENCE_S = 30.0
"""How long an answer is waited for: engine cores answer between two steps."""


class NoAnswer(Exception):
    """An engine core refused, is gone, or has not answered in time; the message says which."""


class Engines:
    """The engine cores behind `client`, vLLM's AsyncLLM."""

    def __init__(self, client: Any) -> None:
        self._core = client.engine_core

    @property
    def indexes(self) -> list[int]:
        """vLLM's numbers of the engine cores, as in its label `engine`."""
        return list(self._core.engine_ranks_managed)

    @property
    def several(self) -> bool:
        return len(self._core.core_engines) > 1

    async def ask(
        self, method: str, *arguments: Any, patience_s: float | None = PATIENCE_S
    ) -> list[Any]:
        """One answer of each engine core, in their order. Raises NoAnswer."""
        return await self._gathered(
            [(engine, method, arguments) for engine in self._core.core_engines], patience_s
        )

    async def ask_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `ask`, each engine core with its own arguments."""
        engines = self._core.core_engines
        if len(engines) != len(arguments):
            # Elastic expert parallelism adds and removes them.
            raise NoAnswer(f"vLLM has {len(engines)} engine cores now, and had {len(arguments)}")
        calls = [(one, method, own) for one, own in zip(engines, arguments, strict=True)]
        return await self._gathered(calls, PATIENCE_S)

    async def _gathered(
        self, calls: list[tuple[bytes, str, tuple[Any, ...]]], patience_s: float | None
    ) -> list[Any]:
        if not calls:
            return []
        tasks = [
            asyncio.ensure_future(self._core._call_utility_async(method, *own, engine=engine))
            for engine, method, own in calls
        ]
        done, late = await asyncio.wait(tasks, timeout=patience_s)
        for task in late:
            task.cancel()
        failed = [task.exception() for task in done if task.exception() is not None]
        if failed:
            raise NoAnswer(f"vLLM's engine core refused: {failed[0]}")
        if late:
            raise NoAnswer(f"vLLM's engine core has not answered for {patience_s:g} s")
        return [task.result() for task in tasks]


def lacking(client: Any) -> list[str]:
    """What this vLLM's client of engine cores does not have."""
    core = getattr(client, "engine_core", None)
    wanted = ("engine_ranks_managed", "core_engines", "client_index", "client_count")
    missing = [f"engine_core.{name}" for name in wanted if not hasattr(core, name)]
    if not callable(getattr(core, "_call_utility_async", None)):
        missing.append("engine_core._call_utility_async")
    return missing


# --- many answers made one ---


def together(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`Ledger.report` of each engine core as the one object that GET /ullage/kv answers.

    The embedded engine's fields. Sums over the engines; what any of them cannot tell is None.
    Bytes are those of one rank of each engine: its first.
    """
    blocks = {
        name: sum(report[name] for report in reports)
        for name in ("num_blocks", "used_blocks", "cached_blocks", "running", "waiting")
    }
    free = blocks["num_blocks"] - blocks["used_blocks"]
    growth_blocks = added(report["growth_blocks_per_s"] for report in reports)
    return {
        "block_size": same(report["block_size"] for report in reports),
        "bytes_per_block": same(report["bytes_per_block"] for report in reports),
        "num_blocks": blocks["num_blocks"],
        "used_blocks": blocks["used_blocks"],
        "free_blocks": free,
        "cached_blocks": blocks["cached_blocks"],
        "total_bytes": added(in_bytes(report, "num_blocks") for report in reports),
        "used_bytes": added(in_bytes(report, "used_blocks") for report in reports),
        "running": blocks["running"],
        "waiting": blocks["waiting"],
        "page_utilization_ratio": page_utilization(report["slots"] for report in reports),
        "growth_bytes_per_s": added(in_bytes(report, "growth_blocks_per_s") for report in reports),
        "seconds_to_full": free / growth_blocks if growth_blocks and growth_blocks > 0 else None,
        "holders": [
            {**holder, **({"engine": number} if len(reports) > 1 else {})}
            for number, report in enumerate(reports)
            for holder in report["holders"]
        ],
    }


def in_bytes(report: dict[str, Any], blocks: str) -> Any:
    """A number of blocks in bytes; None where either is not known."""
    size, count = report["bytes_per_block"], report[blocks]
    return None if size is None or count is None else size * count


def added(values: Iterable[Any]) -> Any:
    """The sum; None if one is, or if there is none."""
    listed = list(values)
    return None if not listed or any(value is None for value in listed) else sum(listed)


def same(values: Iterable[Any]) -> Any:
    """What all agree on; None if they do not."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def page_utilization(slots: Iterable[Sequence[int] | None]) -> float | None:
    """Tokens held over tokens that the held blocks could hold; None while none is held."""
    known = [one for one in slots if one is not None]
    room = sum(one[1] for one in known)
    return sum(one[0] for one in known) / room if room else None


def oldest(arrivals: Sequence[Sequence[float]], percent: float) -> list[int]:
    """How many of each engine core's requests are of the oldest `percent` of all that run."""
    everyone = [(arrival_s, engine) for engine, came in enumerate(arrivals) for arrival_s in came]
    counts = [0] * len(arrivals)
    for _, engine in sorted(everyone)[: pool.share(len(everyone), percent)]:
        counts[engine] += 1
    return counts


def cancelled(reports: Sequence[dict[str, Any]], dry_run: bool) -> dict[str, Any]:
    """`pool.cancel` of each engine core as what POST /ullage/cancel_oldest answers."""
    return {
        "request_ids": [one for report in reports for one in report["request_ids"]],
        "promised_bytes": added(in_bytes(report, "promised_blocks") for report in reports),
        "freed_bytes": added(in_bytes(report, "freed_blocks") for report in reports),
        "dry_run": dry_run,
    }
