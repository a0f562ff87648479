"""KV storage: every layer's keys and values for every block, allocated once at start.

Holds tensors and their bytes. Which block belongs to whom is `blocks`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Keys and values are kept in the dtype of the computation.
KV_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores per token: num_kv_heads × head_dim, once for K and once for V."""

    num_kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * KV_DTYPE.itemsize


class KVCache:
    """Per layer two tensors [num_blocks, block_size, num_kv_heads, head_dim].

    One anonymous mapping holds all of it. It starts as zeros, so that a row never written weighs
    nothing where a mask hides it (0 × NaN would be NaN), and the system finds memory for a page
    only when it is first used; torch.zeros would touch every page at start.
    """

    def __init__(self, shapes: Sequence[KVShape], num_blocks: int, block_size: int) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pieces = self._cut(torch.frombuffer(memory, dtype=KV_DTYPE))
        self.keys, self.values = pieces[0::2], pieces[1::2]
        self._key_slots = [k.view(-1, *k.shape[2:]) for k in self.keys]
        self._value_slots = [v.view(-1, *v.shape[2:]) for v in self.values]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * sum(shape.bytes_per_token for shape in self.shapes)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def write(
        self, layer: int, slots_T: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> None:
        """Store one key and value per token; slot = block × block_size + offset, int64."""
        self._key_slots[layer].index_copy_(0, slots_T, k_THD)
        self._value_slots[layer].index_copy_(0, slots_T, v_THD)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks` in every layer (after a request whose numbers were not finite)."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for storage in (*self.keys, *self.values):
            storage.index_fill_(0, index, 0.0)

    def _cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """K and V of each layer in turn, as views of `memory`."""
        pieces = []
        start = 0
        for shape in self.shapes:
            size = (self.num_blocks, self.block_size, shape.num_kv_heads, shape.head_dim)
            for _ in ("keys", "values"):
                end = start + math.prod(size)
                pieces.append(memory[start:end].view(size))
                start = end
        return pieces
