"""What the engine says of its KV pool: who holds it, how fast it fills, what an end would free.

Pure functions over the scheduler's state; nothing is changed here. Metrics are `serving`'s.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.tables import held_blocks
from ullage.engine.request import Request
from ullage.engine.scheduling.scheduler import Scheduler

# Over how long growth is measured: many steps, and yet the load of now.
GROWTH_S = 30.0


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request's part of the pool. `own_bytes` only it holds: what its end would free."""

    request_id: str
    age_s: float
    num_tokens: int
    num_blocks: int
    num_bytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class KVReport:
    """The pool at one instant.

    `free_blocks` can be allocated, `cached_blocks` of them hold prefixes that may be found again.
    `page_utilization_ratio` is tokens held over tokens that the held pages could hold, each page
    counted once; None while none is held. `seconds_to_full` at the growth of the last 30 s; None
    while the pool does not grow.
    """

    block_size: int
    bytes_per_block: int
    num_blocks: int
    used_blocks: int
    free_blocks: int
    cached_blocks: int
    total_bytes: int
    used_bytes: int
    running: int
    waiting: int
    page_utilization_ratio: float | None
    growth_bytes_per_s: float | None
    seconds_to_full: float | None
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class CancelReport:
    """Which requests were (or, `dry_run`, would be) ended, and bytes: promised before, freed."""

    request_ids: tuple[str, ...]
    promised_bytes: int
    freed_bytes: int
    dry_run: bool


class PoolHistory:
    """Used blocks over the last GROWTH_S seconds; times in `time.monotonic()` seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def record(self, now_s: float, num_used: int) -> None:
        self._seen.append((now_s, num_used))
        while self._seen[0][0] < now_s - GROWTH_S:
            self._seen.popleft()

    def blocks_per_s(self, now_s: float, num_used: int) -> float | None:
        """Mean growth, negative while it shrinks; None until there are two instants."""
        if not self._seen or now_s <= self._seen[0][0]:
            return None
        first_s, first = self._seen[0]
        return (num_used - first) / (now_s - first_s)


def kv_report(
    scheduler: Scheduler, bytes_per_block: int, history: PoolHistory, now_s: float
) -> KVReport:
    """Everything at `now_s`."""
    pool, running = scheduler.pool, scheduler.running
    growth = history.blocks_per_s(now_s, pool.num_used)
    growing = growth is not None and growth > 0
    return KVReport(
        pool.block_size,
        bytes_per_block,
        pool.num_blocks,
        pool.num_used,
        pool.num_free,
        pool.num_cached,
        pool.num_blocks * bytes_per_block,
        pool.num_used * bytes_per_block,
        len(running),
        len(scheduler.waiting),
        page_utilization(running, pool),
        None if growth is None else growth * bytes_per_block,
        pool.num_free / growth if growth is not None and growing else None,
        tuple(_holder(request, pool, bytes_per_block, now_s) for request in running),
    )


def page_utilization(running: Iterable[Request], pool: BlockPool) -> float | None:
    """Tokens held over tokens that the held pages could hold; None while none is held.

    A page that several hold counts once, as full as the fullest of them says; what lies before a
    window is not held.
    """
    filled: dict[int, int] = {}
    for request in running:
        for table, freed in zip(request.tables, request.num_freed, strict=True):
            for at in range(freed, len(table)):
                tokens = min(max(request.num_computed - at * pool.block_size, 0), pool.block_size)
                filled[table[at]] = max(tokens, filled.get(table[at], 0))
    return sum(filled.values()) / (len(filled) * pool.block_size) if filled else None


def oldest(running: Sequence[Request], percent: float) -> list[Request]:
    """`percent` of `running` by arrival, rounded up. Raises ValueError unless 0 < percent ≤ 100."""
    if not 0 < percent <= 100:
        raise ValueError(f"{percent} percent of the running requests")
    # 0.28 × 25 is 7.000000000000001: rounding up what is no more than an error of the product
    # would end one request too many.
    count = math.ceil(round(len(running) * percent / 100, 9))
    return sorted(running, key=lambda request: request.arrival)[:count]


def blocks_held_only_by(requests: Iterable[Request], pool: BlockPool) -> int:
    """How many blocks become free when all of `requests` end."""
    uses = Counter(block for request in requests for block in held_blocks(request))
    return sum(pool.references(block) == times for block, times in uses.items())


def _holder(request: Request, pool: BlockPool, bytes_per_block: int, now_s: float) -> Holder:
    blocks = held_blocks(request)
    return Holder(
        request.id,
        now_s - request.arrival_s,
        request.num_computed,
        len(blocks),
        len(blocks) * bytes_per_block,
        blocks_held_only_by([request], pool) * bytes_per_block,
    )
