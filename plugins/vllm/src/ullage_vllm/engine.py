"""What runs in vLLM's engine-core process: methods that its API processes call between two steps.

Holds the check of what vLLM must look like, and the methods. They are added to the class EngineCore
in every process where vLLM loads general plugins; nothing of vLLM's own is replaced there. What
the numbers mean is `pool`'s.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ullage_vllm import pool
from ullage_vllm.recompute import Recomputation

GROWTH_S = 30.0
"""Over how long growth is measured: many steps, and yet the load of now."""
COST_SHARE = 0.001
"""The most of the engine's time that measuring how full its blocks are may take."""


class Ledger:
    """What is remembered in one engine core: growth of the pool, recomputation, page use."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.recomputation = Recomputation()
        self.recomputation.watch(scheduler)
        self._used: deque[tuple[float, int]] = deque()
        self._slots: tuple[int, int] | None = None
        self._slots_due_s = 0.0

    def statistics(self) -> pool.Report:
        """Every second: `pool.counts`, counters, bytes. Also notes how the pool grows."""
        scheduler, now_s = self.scheduler, time.monotonic()
        self.recomputation.forget_all_but(scheduler.requests)
        found = pool.counts(scheduler)
        self._note(now_s, found["used_blocks"])
        if now_s >= self._slots_due_s:
            self._slots = pool.slots(scheduler)
            self._slots_due_s = now_s + (time.monotonic() - now_s) / COST_SHARE
        return {
            **found,
            "bytes_per_block": pool.bytes_per_block(scheduler.kv_cache_config),
            "slots": self._slots,
            "recomputed_tokens": self.recomputation.tokens,
            "recomputed_requests": self.recomputation.requests,
        }

    def report(self) -> pool.Report:
        found = pool.report(self.scheduler)
        found["growth_blocks_per_s"] = self._growth(time.monotonic(), found["used_blocks"])
        return found

    def _note(self, now_s: float, used: int) -> None:
        self._used.append((now_s, used))
        while self._used[0][0] < now_s - GROWTH_S:
            self._used.popleft()

    def _growth(self, now_s: float, used: int) -> float | None:
        """Blocks per second, negative while it shrinks; None until there are two instants."""
        if not self._used or now_s - self._used[0][0] < 0.5:
            return None
        first_s, first = self._used[0]
        return (used - first) / (now_s - first_s)


# --- the methods of EngineCore; `self` is one ---


def ullage_attach(self: Any) -> list[str]:
    """Begin to watch; what is missing for that, in words. Called by every API process."""
    if getattr(self, "_ullage_ledger", None) is None:
        missing = list(lacking(self))
        if missing:
            return missing
        self._ullage_ledger = Ledger(self.scheduler)
    return []


def ullage_statistics(self: Any) -> pool.Report:
    return _ledger(self).statistics()


def ullage_report(self: Any) -> pool.Report:
    return _ledger(self).report()


def ullage_arrivals(self: Any) -> list[float]:
    return pool.arrivals(self.scheduler)


def ullage_cancel_share(self: Any, percent: float, dry_run: bool) -> pool.Report:
    """End the oldest `percent` of who runs at this moment, where this is the only engine core."""
    return ullage_cancel_oldest(self, pool.share(len(self.scheduler.running), percent), dry_run)


def ullage_cancel_oldest(self: Any, count: int, dry_run: bool) -> pool.Report:
    """End the oldest `count` of who runs at this moment: chosen, priced and ended in one go.

    Every API process is told of its own, as when vLLM aborts them.
    """
    from vllm.v1.request import RequestStatus

    found, ended = pool.cancel(self.scheduler, count, RequestStatus.FINISHED_ABORTED, dry_run)
    self._send_abort_outputs(ended)
    return found


METHODS = (
    ullage_attach,
    ullage_statistics,
    ullage_report,
    ullage_arrivals,
    ullage_cancel_share,
    ullage_cancel_oldest,
)


def add_methods(engine_core: type) -> None:
    """Give `METHODS` to vLLM's class EngineCore. May be done again."""
    for method in METHODS:
        setattr(engine_core, method.__name__, method)


def _ledger(engine_core: Any) -> Ledger:
    ledger: Ledger | None = getattr(engine_core, "_ullage_ledger", None)
    if ledger is None:
        raise RuntimeError("ullage does not watch this engine")
    return ledger


# --- what vLLM must look like ---

ATTRIBUTES = (
    "scheduler.requests",
    "scheduler.running",
    "scheduler.cache_config.block_size",
    "scheduler.kv_cache_config.kv_cache_tensors",
    "scheduler.kv_cache_config.num_blocks",
    "scheduler.kv_cache_manager.coordinator.single_type_managers",
    "scheduler.kv_cache_manager.block_pool.blocks",
    "scheduler.kv_cache_manager.block_pool.num_gpu_blocks",
)
"""Reached from an EngineCore."""
OF_GROUPS = ("block_pool", "block_size", "kv_cache_spec", "req_to_blocks")
"""Of each of single_type_managers."""
OF_BLOCKS = ("block_id", "ref_cnt", "block_hash", "is_null")
SIGNATURES = (
    ("_send_abort_outputs", ("aborted_reqs",)),
    ("scheduler.finish_requests", ("request_ids", "finished_status")),
    ("scheduler.get_request_counts", ()),
    ("scheduler._preempt_request", ("request",)),
    ("scheduler._update_after_schedule", ("scheduler_output",)),
    ("scheduler._request_blocks_can_be_freed", ("request",)),
    ("scheduler.kv_cache_manager.block_pool.get_num_free_blocks", ()),
)
"""Bound methods and the parameters with which they begin."""


def lacking(engine_core: Any) -> Iterator[str]:
    """What this vLLM does not have, or has otherwise than it was read."""
    yield from (path for path in ATTRIBUTES if _reach(engine_core, path) is None)
    for path, wanted in SIGNATURES:
        method = _reach(engine_core, path)
        if not callable(method):
            yield path
            continue
        found = tuple(inspect.signature(method).parameters)
        if found[: len(wanted)] != wanted:
            yield f"{path}({', '.join(wanted)}), which takes ({', '.join(found)})"
    yield from _lacking_of_pool(_reach(engine_core, "scheduler.kv_cache_manager"))


def _lacking_of_pool(manager: Any) -> Iterator[str]:
    groups = _reach(manager, "coordinator.single_type_managers") or ()
    for group in groups:
        yield from (
            f"{type(group).__name__}.{name}" for name in OF_GROUPS if not hasattr(group, name)
        )
    blocks = _reach(manager, "block_pool.blocks")
    if blocks:
        yield from (f"KVCacheBlock.{name}" for name in OF_BLOCKS if not hasattr(blocks[0], name))


def _reach(start: Any, path: str) -> Any:
    for name in path.split("."):
        start = getattr(start, name, None)
        if start is None:
            return None
    return start
