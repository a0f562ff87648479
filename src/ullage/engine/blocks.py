"""The block pool: which KV blocks are free, and how many tables hold each of the others.

Pure accounting, no storage (that is `kv`) and no torch. A block is free or has references, never
both; `check()` says so against the block tables in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, allocated once, handed out by number."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks of tokens: {num_blocks} × {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is taken first, its memory may still be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

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
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`, all of which must be in use."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of `blocks`; those without any left become free."""
        for block, times in Counter(blocks).items():
            if self._references[block] < times:
                raise ValueError(
                    f"block {block} has {self._references[block]} references, {times} given back"
                )
        # Last block first, so that the next sequence takes them in the order of this one.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables that are in use."""
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, references in enumerate(self._references):
            assert references == held[block], (
                f"block {block}: {references} references, {held[block]} uses in tables"
            )
            assert (block in free) == (references == 0), (
                f"block {block}: free and used, or neither ({references} references)"
            )
