"""KV storage: every layer's keys and values for every block, allocated once at start.

Holds tensors and their bytes. Which block belongs to whom is `blocks`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ullage.engine.layout import KVLayout

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


def slot_shapes(shapes: Sequence[KVShape], layout: KVLayout) -> tuple[KVShape, ...]:
    """What each slot of a block stores per token."""
    by_slot = dict(zip(layout.slot_of, shapes, strict=True))
    return tuple(by_slot[slot] for slot in range(layout.num_slots))


class KVCache:
    """Two tensors [num_blocks, block_size, num_kv_heads, head_dim] per slot of the layout.

    Layers of several groups share a slot: they never hold the same block. `keys` and `values` are
    by layer, so that a slot's tensor occurs once for each of its layers.

    One anonymous mapping holds all of it. It starts as zeros, so that a row never written weighs
    nothing where a mask hides it (0 × NaN would be NaN), and the system finds memory for a page
    only when it is first used; torch.zeros would touch every page at start.
    """

    def __init__(
        self, shapes: Sequence[KVShape], layout: KVLayout, num_blocks: int, block_size: int
    ) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self._slot_shapes = slot_shapes(shapes, layout)
        self.num_blocks = num_blocks
        self.block_size = block_size
        memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._storages = pieces = self._cut(torch.frombuffer(memory, dtype=KV_DTYPE))
        self.keys = [pieces[2 * slot] for slot in layout.slot_of]
        self.values = [pieces[2 * slot + 1] for slot in layout.slot_of]
        self._key_slots = [k.view(-1, *k.shape[2:]) for k in self.keys]
        self._value_slots = [v.view(-1, *v.shape[2:]) for v in self.values]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * sum(shape.bytes_per_token for shape in self._slot_shapes)

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
        for storage in self._storages:
            storage.index_fill_(0, index, 0.0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, sources[i] to targets[i], of every slot (copy-on-write)."""
        source, target = torch.tensor(sources), torch.tensor(targets)
        for storage in self._storages:
            storage.index_copy_(0, target, storage.index_select(0, source))

    def _cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """K and V of each slot in turn, as views of `memory`."""
        pieces = []
        start = 0
        for shape in self._slot_shapes:
            size = (self.num_blocks, self.block_size, shape.num_kv_heads, shape.head_dim)
            for _ in ("keys", "values"):
                end = start + math.prod(size)
                pieces.append(memory[start:end].view(size))
                start = end
        return pieces
