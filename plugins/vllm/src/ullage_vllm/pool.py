"""The KV pool of one vLLM engine core, as numbers: what is held, by whom, what an end would free.

Functions over vLLM's scheduler as it stands between two steps; only `cancel` changes anything.
Names are those of vLLM 0.30 to 0.33: v1/core/sched/scheduler.py, block_pool.py, kv_cache_manager.py
and single_type_kv_cache_manager.py. Answers are plain dicts: they cross a process boundary.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

Report = dict[str, Any]


def bytes_per_block(kv_cache_config: Any) -> int | None:
    """Bytes of one block of the pool on one rank, all layers together; None if it cannot be told.

    All device tensors are views of one backing allocation, whatever the groups, and `size` is that
    allocation's (vLLM 0.32, v1/worker/utils.py, allocate_kv_cache): so it is not a sum.
    """
    sizes = {
        tensor.size
        for tensor in kv_cache_config.kv_cache_tensors
        if not getattr(tensor, "host_resident", False)
    }
    if len(sizes) != 1:
        return None
    size, num_blocks = sizes.pop(), kv_cache_config.num_blocks
    return int(size // num_blocks) if num_blocks and size % num_blocks == 0 else None


def counts(scheduler: Any) -> Report:
    """What costs next to nothing to tell; asked for every second."""
    pool = scheduler.kv_cache_manager.block_pool
    # Block 0 is the null block: it belongs to the pool and can never hold anything.
    num_blocks = pool.num_gpu_blocks - 1
    running, waiting = scheduler.get_request_counts()
    return {
        "num_blocks": num_blocks,
        "used_blocks": num_blocks - pool.get_num_free_blocks(),
        "running": running,
        "waiting": waiting,
        "unfinished": len(scheduler.requests),
        "oldest_arrival_s": min(
            (request.arrival_time for request in scheduler.requests.values()), default=None
        ),
    }


# --- how full the held blocks are ---


def is_paged(manager: Any, pool: Any) -> bool:
    """Whether a group's blocks hold tokens of the device's pool: neither states nor host blocks."""
    return manager.block_pool is pool and not _holds_states(manager.kv_cache_spec)


def _holds_states(spec: Any) -> bool:
    # Mamba and delta-net groups keep one state where attention keeps a block's tokens, and cross
    # attention keeps the encoder's: their blocks do not fill as tokens are computed.
    names = {kind.__name__ for kind in type(spec).__mro__}
    return bool(names & {"MambaSpec", "CrossAttentionSpec"})


def slots(scheduler: Any) -> tuple[int, int] | None:
    """(Tokens held, tokens that the held blocks could hold), each block once; None: none is held.

    What lies before a window is not held. A block of several requests is as full as the fullest of
    them says.
    """
    manager = scheduler.kv_cache_manager
    paged = [g for g in manager.coordinator.single_type_managers if is_paged(g, manager.block_pool)]
    if not paged:
        return None
    if _all_held_by_running(scheduler, paged):
        held, room = _slots_of_one_group(scheduler, paged[0])
    else:
        held, room = _slots_block_by_block(scheduler, paged)
    return (held, room) if room else None


def _all_held_by_running(scheduler: Any, paged: list[Any]) -> bool:
    """Whether every used block is a running request's and of one full-attention group."""
    manager = scheduler.kv_cache_manager
    return (
        len(manager.coordinator.single_type_managers) == 1
        and type(paged[0]).__name__ == "FullAttentionManager"
        and getattr(scheduler, "connector", None) is None
        and not getattr(scheduler, "deferred_frees", ())
        and len(paged[0].req_to_blocks) <= len(scheduler.running)
    )


def _slots_of_one_group(scheduler: Any, group: Any) -> tuple[int, int]:
    """Only a request's last blocks are not full, and no one else holds those: no walk is needed."""
    size = group.block_size
    empty = 0
    for request in scheduler.running:
        blocks = group.req_to_blocks.get(request.request_id, ())
        empty += max(len(blocks) * size - request.num_computed_tokens, 0)
    pool = scheduler.kv_cache_manager.block_pool
    room = (pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * size
    return max(room - empty, 0), room


def _slots_block_by_block(scheduler: Any, paged: list[Any]) -> tuple[int, int]:
    held = room = 0
    for group in paged:
        size = group.block_size
        filled: dict[int, int] = {}
        for request_id, blocks in group.req_to_blocks.items():
            request = scheduler.requests.get(request_id)
            computed = 0 if request is None else request.num_computed_tokens
            for at, block in enumerate(blocks):
                if not block.is_null:
                    tokens = min(max(computed - at * size, 0), size)
                    filled[block.block_id] = max(tokens, filled.get(block.block_id, 0))
        held += sum(filled.values())
        room += len(filled) * size
    return held, room


# --- who holds what ---


def blocks_of(scheduler: Any, request: Any) -> list[Any]:
    """Every device block that the request holds, over all groups; the null block is nobody's."""
    manager = scheduler.kv_cache_manager
    return [
        block
        for group in manager.coordinator.single_type_managers
        if group.block_pool is manager.block_pool
        for block in group.req_to_blocks.get(request.request_id, ())
        if not block.is_null
    ]


def held_only_by(scheduler: Any, requests: Iterable[Any]) -> int:
    """How many blocks become free when all of `requests` end: those that no one else holds."""
    uses: Counter[int] = Counter()
    blocks = {}
    for request in requests:
        for block in blocks_of(scheduler, request):
            uses[block.block_id] += 1
            blocks[block.block_id] = block
    return sum(blocks[number].ref_cnt == times for number, times in uses.items())


def report(scheduler: Any, now_s: float | None = None) -> Report:
    """The whole pool: `counts`, and every running request. Walks the pool; not for every second."""
    now_s = time.time() if now_s is None else now_s
    pool = scheduler.kv_cache_manager.block_pool
    size = bytes_per_block(scheduler.kv_cache_config)
    return {
        **counts(scheduler),
        "block_size": scheduler.cache_config.block_size,
        "bytes_per_block": size,
        "cached_blocks": sum(
            block.ref_cnt == 0 and block.block_hash is not None and not block.is_null
            for block in pool.blocks
        ),
        "slots": slots(scheduler),
        "holders": [_holder(scheduler, request, size, now_s) for request in scheduler.running],
    }


def _holder(scheduler: Any, request: Any, size: int | None, now_s: float) -> Report:
    held = len(blocks_of(scheduler, request))
    own = held_only_by(scheduler, [request])
    return {
        "request_id": request.request_id,
        "age_s": max(now_s - request.arrival_time, 0.0),
        "num_tokens": request.num_computed_tokens,
        "num_blocks": held,
        "num_bytes": None if size is None else held * size,
        "own_bytes": None if size is None else own * size,
    }


# --- ending requests ---


def arrivals(scheduler: Any) -> list[float]:
    """When each running request came, in Unix time."""
    return [request.arrival_time for request in scheduler.running]


def share(num: int, percent: float) -> int:
    """`percent` of `num` requests, rounded up."""
    # 0.28 × 25 is 7.000000000000001: an error of the product must not end one request too many.
    return math.ceil(round(num * percent / 100, 9))


def oldest(scheduler: Any, count: int) -> list[Any]:
    """The `count` running requests that came first; all where fewer run."""
    by_age = sorted(scheduler.running, key=lambda one: (one.arrival_time, one.request_id))
    return by_age[:count]


def promise(scheduler: Any, requests: list[Any]) -> int | None:
    """Blocks that the pool gets back at once when `requests` end; None if that cannot be told.

    A connector may go on reading a request's blocks after its end, and says so only then.
    """
    if getattr(scheduler, "connector", None) is not None:
        return None
    at_once = [request for request in requests if scheduler._request_blocks_can_be_freed(request)]
    return held_only_by(scheduler, at_once)


def cancel(scheduler: Any, count: int, aborted: Any, dry_run: bool) -> tuple[Report, list[Any]]:
    """End the oldest `count` that run; what that promised, what it freed, and the ended.

    `aborted` is vLLM's RequestStatus.FINISHED_ABORTED. Nothing happens between choice, promise and
    end: a request that was chosen a step earlier may have been preempted, and hold nothing more.
    """
    chosen = oldest(scheduler, count)
    pool = scheduler.kv_cache_manager.block_pool
    promised, before = promise(scheduler, chosen), pool.get_num_free_blocks()
    ended: list[Any] = []
    if chosen and not dry_run:
        ended = scheduler.finish_requests([one.request_id for one in chosen], aborted)
    return {
        "request_ids": [request.request_id for request in chosen],
        "promised_blocks": promised,
        "freed_blocks": pool.get_num_free_blocks() - before,
        "bytes_per_block": bytes_per_block(scheduler.kv_cache_config),
    }, ended
