"""Block tables of requests: how they grow, what windows give back, what forks and prefixes share.

Holds what happens to `Request.tables`, one table per group of the KV layout. Which blocks there
are is `blocks`, who runs is `scheduler`. No torch: copies are planned here and made by the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.layout import FREED, KVGroup
from ullage.engine.paging.prefix import Hit, extend_names, first_block_seen, longest_hit
from ullage.engine.request import Request

Copy = tuple[int, int]


class Tables:
    """All requests' tables over one pool. `chunk` is the most tokens that one step computes."""

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[KVGroup] = (KVGroup((0,), None),),
        chunk: int = 1 << 30,
        *,
        caching: bool = True,
    ) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.caching = caching
        self._windowed = [(i, group) for i, group in enumerate(groups) if group.window is not None]
        self._chunk = chunk

    # --- how much is needed ---

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` holds at any time, over all groups."""
        return sum(
            blocks_of_group(num_tokens, group.window, self._chunk, self.pool.block_size)
            for group in self.groups
        )

    def to_come(self, request: Request) -> int:
        """The most blocks that `request` will need beyond its own until its known tokens ran."""
        needed = self.pool.blocks_for(request.num_tokens)
        missing = 0
        for index, group in enumerate(self.groups):
            freed, held = 0, 0
            if request.tables:
                freed = request.num_freed[index]
                held = len(request.tables[index]) - freed
            most = blocks_of_group(
                request.num_tokens, group.window, self._chunk, self.pool.block_size
            )
            missing += max(min(needed - freed, most) - held, 0)
        return missing

    def has_room(self, request: Request, count: int) -> bool:
        """Whether `count` more tokens need neither a block nor a copy, as most decodes do not."""
        size = self.pool.block_size
        at, offset = divmod(request.num_computed, size)
        for table in request.tables:
            if len(table) * size < request.num_computed + count:
                return False
            if offset and self.pool.references(table[at]) > 1:
                return False
        return bool(request.tables)

    def missing(self, request: Request, count: int) -> int:
        """Blocks to allocate before `count` more tokens can be computed, copies among them."""
        if not request.tables:
            return len(self.groups) * self.pool.blocks_for(request.num_computed + count)
        needed = self.pool.blocks_for(request.num_computed + count)
        grown = sum(max(needed - len(table), 0) for table in request.tables)
        return grown + sum(1 for _ in self._shared_tails(request))

    # --- what happens to a request ---

    def hit(self, request: Request) -> Hit:
        """What of `request` lies in the pool already."""
        if not self.caching:
            return Hit(0, tuple(() for _ in self.groups))
        return longest_hit(self.pool, self.groups, request)

    def begin(self, request: Request, hit: Hit) -> None:
        """Let `request`, which holds nothing, start behind `hit`, found since the last change."""
        for table in hit.tables:
            self.pool.share([block for block in table if block != FREED])
        request.tables = [list(table) for table in hit.tables]
        request.num_freed = [table.count(FREED) for table in hit.tables]
        request.num_computed = hit.num_blocks * self.pool.block_size
        request.num_published = hit.num_blocks

    def slide(self, request: Request) -> None:
        """Give back the blocks that no row from num_computed on will see."""
        if not request.tables:
            return
        for index, group in self._windowed:
            table = request.tables[index]
            size = self.pool.block_size
            start = min(first_block_seen(request.num_computed, group.window, size), len(table))
            old = request.num_freed[index]
            if start > old:
                self.pool.release(table[old:start])
                table[old:start] = [FREED] * (start - old)
                request.num_freed[index] = start

    def extend(self, request: Request, count: int) -> list[Copy]:
        """Blocks for `count` more tokens. Returns the copies to make first: (source, target).

        A block that another sequence holds too is not written: it is copied, and the copy written.
        Raises OutOfBlocks, changing nothing, when fewer than missing() are free.
        """
        fresh = iter(self.pool.allocate(self.missing(request, count)))
        if not request.tables:
            request.tables = [[] for _ in self.groups]
            request.num_freed = [0] * len(self.groups)
        copies: list[Copy] = []
        for table, tail in list(self._shared_tails(request)):
            source, table[tail] = table[tail], next(fresh)
            self.pool.release([source])
            copies.append((source, table[tail]))
        needed = self.pool.blocks_for(request.num_computed + count)
        for table in request.tables:
            table += [next(fresh) for _ in range(needed - len(table))]
        return copies

    def fork(self, leader: Request, follower: Request) -> None:
        """Let `follower`, of the same prompt, share all that `leader` holds and has computed."""
        for table in leader.tables:
            self.pool.share([block for block in table if block != FREED])
        follower.tables = [list(table) for table in leader.tables]
        follower.num_freed = list(leader.num_freed)
        follower.num_computed = leader.num_computed
        follower.num_published = leader.num_published
        follower.block_names = list(leader.block_names)

    def publish(self, request: Request) -> None:
        """Let others find the full blocks that `request` has computed; its numbers must be good."""
        num_full = request.num_computed // self.pool.block_size
        if not self.caching or num_full <= request.num_published:
            return
        extend_names(request, num_full, self.pool.block_size)
        for index, table in enumerate(request.tables):
            for at in range(request.num_published, num_full):
                if table[at] != FREED:
                    self.pool.publish(table[at], (index, request.block_names[at]))
        request.num_published = num_full

    def discard(self, request: Request) -> list[int]:
        """Let nobody find what `request` holds; returns the blocks that nobody else holds."""
        blocks = held_blocks(request)
        self.pool.forget(blocks)
        return [block for block in blocks if self.pool.references(block) == 1]

    def release(self, request: Request) -> None:
        """Give everything back; what was published can be found until it is needed."""
        for table, freed in zip(request.tables, request.num_freed, strict=True):
            self.pool.release(table[freed:])
        request.tables, request.num_freed = [], []
        request.num_published = 0

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless tables, pool and progress agree."""
        requests = list(requests)
        self.pool.check(table for request in requests for table in request.tables)
        size = self.pool.block_size
        for request in requests:
            for table, freed, group in zip(
                request.tables, request.num_freed, self.groups, strict=True
            ):
                seen = first_block_seen(request.num_computed, group.window, size)
                assert request.num_computed <= len(table) * size, (
                    f"{request.id}: tokens without a block"
                )
                assert freed <= seen, f"{request.id}: a block was given back that is still seen"
                assert [block == FREED for block in table] == [
                    at < freed for at in range(len(table))
                ], f"{request.id}: freed blocks amid others"

    def _shared_tails(self, request: Request) -> Iterable[tuple[list[int], int]]:
        """Tables whose next token goes into a begun block that others hold too, and its place."""
        at, offset = divmod(request.num_computed, self.pool.block_size)
        if offset:
            for table in request.tables:
                if self.pool.references(table[at]) > 1:
                    yield table, at


def held_blocks(request: Request) -> list[int]:
    """The blocks of all its tables."""
    return [block for table in request.tables for block in table if block != FREED]


def blocks_of_group(num_tokens: int, window: int | None, chunk: int, block_size: int) -> int:
    """The most blocks of one group that a sequence of `num_tokens` holds at any time.

    A window group holds what the first row of a chunk sees and the chunk itself, wherever that
    begins within a block.
    """
    most = -(-num_tokens // block_size)
    if window is None:
        return most
    return min(most, (window - 1 + chunk + block_size - 2) // block_size + 1)
