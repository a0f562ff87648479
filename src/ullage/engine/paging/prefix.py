"""The prefix cache: what names a block's content, and how much of a prompt lies in the pool.

Pure functions over the pool's keys; no torch. A block's name is a hash of its tokens and of all
before it, so that equal names mean equal keys and values. The chain starts from a salt: what the
base model computed is not what an adapter would have.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.layout import FREED, KVGroup
from ullage.engine.request import Request

# 128 bits: two contents with one name are not met by chance, and cannot be made on purpose while
# the function stands. A request that got another's keys would answer from another's prompt.
HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Hit:
    """The first `num_blocks` blocks of a sequence: one table per group, FREED before its window."""

    num_blocks: int
    tables: tuple[tuple[int, ...], ...]

    @property
    def blocks(self) -> list[int]:
        return [block for table in self.tables for block in table if block != FREED]


def chain(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a block of `token_ids` after the blocks that `previous` names."""
    return blake2b(previous + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def salt_of(adapter: object, cache_salt: str) -> bytes:
    """What a chain starts from: the adapter as it was loaded, and whom the caller sets apart.

    `adapter` is anything whose repr names its content for as long as the process lives.
    """
    return blake2b(repr((adapter, cache_salt)).encode(), digest_size=HASH_BYTES).digest()


def extend_names(request: Request, num_blocks: int, block_size: int) -> None:
    """Name the request's first `num_blocks` blocks, whose tokens must be known."""
    names = request.block_names
    for index in range(len(names), num_blocks):
        previous = names[-1] if names else request.salt
        names.append(chain(previous, request.tokens(index * block_size, block_size)))


def first_block_seen(position: int, window: int | None, block_size: int) -> int:
    """The first block of which the row at `position`, or any after it, may see a token."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


def longest_hit(pool: BlockPool, groups: Sequence[KVGroup], request: Request) -> Hit:
    """The longest beginning of the request that need not be computed.

    At least one token is left to compute, since its logits are wanted. A full group needs every
    block, a window group only those that the first row to compute still sees (so vLLM 0.32,
    v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py).
    """
    size = pool.block_size
    limit = (request.num_tokens - 1) // size
    extend_names(request, limit, size)
    found = [
        [pool.find((index, name)) for name in request.block_names[:limit]]
        for index in range(len(groups))
    ]
    longest = limit
    for blocks, group in zip(found, groups, strict=True):
        if group.window is None and None in blocks:
            longest = min(longest, blocks.index(None))
    runs = [_run_lengths(blocks) for blocks in found]
    for length in range(longest, 0, -1):
        starts = [first_block_seen(length * size, group.window, size) for group in groups]
        if all(run[length] >= length - start for run, start in zip(runs, starts, strict=True)):
            return Hit(length, tuple(map(_table, found, starts, [length] * len(groups))))
    return Hit(0, tuple(() for _ in groups))


def _run_lengths(blocks: Sequence[int | None]) -> list[int]:
    """For each length, how many blocks in a row are there just before it."""
    runs = [0]
    for block in blocks:
        runs.append(0 if block is None else runs[-1] + 1)
    return runs


def _table(blocks: Sequence[int | None], start: int, length: int) -> tuple[int, ...]:
    seen = tuple(block for block in blocks[start:length] if block is not None)
    return (FREED,) * start + seen
