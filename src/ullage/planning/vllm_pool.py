"""vLLM 0.32's pool of blocks over the ranks of a pipeline: what fits in it, what it holds.

Holds get_kv_cache_configs and the capacity that vLLM exports (vllm/v1/core/kv_cache_utils.py) as
functions of groups. Which groups there are is `vllm_groups.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ullage.planning.vllm_groups import Group, Slot, bytes_per_block, group_slots


@dataclass(frozen=True, slots=True)
class Pool:
    """Groups that draw blocks from one pool, and what shapes a request's share of it.

    `rank_block_bytes` are the bytes of one block on each pipeline rank that caches anything.
    `in_flight_tokens` are scheduled but not settled at most; `aligned_states`: states are cached
    at block ends.
    """

    groups: tuple[Group, ...]
    rank_block_bytes: tuple[int, ...]
    in_flight_tokens: int
    aligned_states: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the fullest rank."""
        return max(self.rank_block_bytes)

    def group_blocks(self, group: Group, length: int) -> int:
        """Blocks of one group that a request of `length` tokens takes."""
        return group.blocks_per_request(length, self.in_flight_tokens, aligned=self.aligned_states)

    def request_blocks(self, length: int) -> int:
        """Blocks that one request of `length` tokens takes: every group draws its own."""
        return sum(self.group_blocks(group, length) for group in self.groups)

    def fits(self, length: int, kv_bytes: int) -> bool:
        """Whether a request of `length` tokens fits on every rank.

        One block is never handed out (the null block), so the request must fit beside it.
        """
        return (self.request_blocks(length) + 1) * self.block_bytes <= kv_bytes

    def longest_that_fits(self, kv_bytes: int, most: int) -> int:
        """The longest request up to `most` tokens that fits; 0 when none does."""
        low, high = 0, most
        while low < high:  # blocks never fall with the length
            middle = (low + high + 1) // 2
            if self.fits(middle, kv_bytes):
                low = middle
            else:
                high = middle - 1
        return low

    def num_blocks(self, kv_bytes: int) -> int:
        """Blocks that the budget of every rank buys: the fullest rank decides for all."""
        return kv_bytes // self.block_bytes


def pool_of(
    slots: Sequence[Slot],
    ranks: int,
    *,
    block_outermost: bool,
    in_flight_tokens: int,
    aligned_states: bool,
    hybrid_manager: bool = True,
) -> Pool | None:
    """The pool of a model's caches, None when it has none. Raises Ungroupable.

    `hybrid_manager` is off only where it is asked to be (--disable-hybrid-kv-cache-manager, or
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=0 for chunks, whose default is 1).
    """
    groups = group_slots(slots, hybrid_manager=hybrid_manager, block_outermost=block_outermost)
    if not groups:
        return None
    sizes = (
        bytes_per_block([g.on_rank(rank) for g in groups], block_outermost=block_outermost)
        for rank in range(ranks)
    )
    return Pool(groups, tuple(size for size in sizes if size), in_flight_tokens, aligned_states)
