"""The block pool: which KV blocks are free, cached or held, by how many tables, under which key.

Pure accounting, no storage (that is `kv`) and no torch. Whose blocks they are is `tables`, what a
key says is `prefix`. A block is free, cached (no references, but a key by which it can be found
again) or used, never two of these; `check()` says so against the block tables in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, allocated once, handed out by number.

    Cached blocks count as free: they are given away when no other is left, those first that were
    released longest ago.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks of tokens: {num_blocks} × {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is taken first, its memory may still be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        # In the order of their release; a dict because any of them may be found and taken.
        self._cached: dict[int, None] = {}
        self._references = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}
        self.num_freed = 0
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content can be found by its key."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. Raises OutOfBlocks, taking none."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`, which must be used or cached."""
        for block in blocks:
            if self._references[block] == 0 and block not in self._cached:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of `blocks`; those without any left become free."""
        for block, times in Counter(blocks).items():
            if self._references[block] < times:
                raise ValueError(
                    f"block {block} has {self._references[block]} references, {times} given back"
                )
        # Last block first: the next sequence takes them in the order of this one, and of a chain
        # the tail is evicted before the head without which it could not be found.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self.num_freed += 1
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    # --- content that can be found again ---

    def publish(self, block: int, key: Hashable) -> None:
        """Let a used block be found by `key`. Another block's key, or a second one, is left."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and has nothing to publish")
        if key not in self._by_key and self._keys[block] is None:
            self._keys[block] = key
            self._by_key[key] = block

    def find(self, key: Hashable) -> int | None:
        """The block with this content, used or cached; `share` it before anything is allocated."""
        return self._by_key.get(key)

    def is_published(self, block: int) -> bool:
        return self._keys[block] is not None

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody shall find these any more; cached ones become plainly free."""
        for block in blocks:
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self._by_key[key]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def forget_all(self) -> None:
        self.forget(list(self._by_key.values()))

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        key, self._keys[block] = self._keys[block], None
        del self._by_key[key]
        self.num_evicted += 1
        return block

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables that are in use.

        Negative entries of tables are no blocks (layout.FREED).
        """
        held = Counter(block for table in tables for block in table if block >= 0)
        free, cached = set(self._free), self._cached.keys()
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, references in enumerate(self._references):
            assert references == held[block], (
                f"block {block}: {references} references, {held[block]} uses in tables"
            )
            places = (block in free) + (block in cached) + (references > 0)
            assert places == 1, (
                f"block {block}: free and used, or neither ({references} references)"
            )
            key = self._keys[block]
            assert key is None or self._by_key.get(key) == block, f"block {block}: a lost key"
            assert key is not None or block not in cached, f"block {block}: cached without a key"
            assert key is None or block not in free, f"block {block}: free, but can be found"
        named = sum(key is not None for key in self._keys)
        assert named == len(self._by_key), "a key without its block"
