"""KV storage: every layer's keys and values for every block, allocated once at start.

Holds tensors and their bytes. Which block belongs to whom is `blocks`, how numbers are coded is
`codecs`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch

from ullage.engine.kernels.compiling import available
from ullage.engine.kv.codecs import STORAGE, decode, encode
from ullage.engine.kv_formats import FLOAT32, KVFormat, KVShape
from ullage.engine.paging.layout import KVLayout
from ullage.errors import BadUsage

_CACHE_LINE = 64


def slot_shapes(shapes: Sequence[KVShape], layout: KVLayout) -> tuple[KVShape, ...]:
    """What each slot of a block stores per token."""
    by_slot = dict(zip(layout.slot_of, shapes, strict=True))
    return tuple(by_slot[slot] for slot in range(layout.num_slots))


class KVCache:
    """Tensors by layer, one allocation for all.

    `keys` and `values` are [num_blocks, block_size, num_kv_heads, the format's width]; `key_scales`
    and `value_scales` bfloat16 [num_blocks, block_size, num_kv_heads], or of size 0 where there are
    none. Layers of several groups share a slot's tensors: they never hold the same block.

    One anonymous mapping holds all of it. It starts as zeros, so that a row never written weighs
    nothing where a mask hides it (0 × NaN would be NaN), and the system finds memory for a page
    only when it is first used; torch.zeros would touch every page at start.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        stored: KVFormat = FLOAT32,
    ) -> None:
        self.shapes = tuple(shapes)
        self.layout = layout
        self.format = stored
        self._slot_shapes = slot_shapes(shapes, layout)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Some bytes more than are stored, so that the numbers may begin at a cache line.
        try:
            room = mmap.mmap(
                -1, self.num_bytes + _CACHE_LINE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise BadUsage(
                f"{self.num_bytes} bytes cannot be had from this machine: {error}",
                field="--kv-cache-memory-bytes",
                expected="less than its memory",
            ) from error
        numbers, scales = self._cut(torch.frombuffer(room, dtype=torch.uint8))
        self._tensors = [*numbers, *(s for s in scales if s.numel())]
        self.keys = [numbers[2 * slot] for slot in layout.slot_of]
        self.values = [numbers[2 * slot + 1] for slot in layout.slot_of]
        self.key_scales = [scales[2 * slot] for slot in layout.slot_of]
        self.value_scales = [scales[2 * slot + 1] for slot in layout.slot_of]
        self._store_rows = _compiled_store() if stored.scale_bytes else None

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * sum(s.bytes_per_token(self.format) for s in self._slot_shapes)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def write(
        self, layer: int, slots_T: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> None:
        """Store one key and value per token; slot = block × block_size + offset, int64."""
        for numbers, scales, x_TKD in (
            (self.keys[layer], self.key_scales[layer], k_TKD),
            (self.values[layer], self.value_scales[layer], v_TKD),
        ):
            if self._store_rows is not None:
                self._store_rows(
                    x_TKD.contiguous().numpy(),
                    slots_T.numpy(),
                    numbers.numpy(),
                    scales.view(torch.uint16).numpy(),
                )
                continue
            numbers_TKW, scales_TK = encode(x_TKD, self.format)
            numbers.flatten(0, 1).index_copy_(0, slots_T, numbers_TKW)
            if scales_TK is not None:
                scales.flatten(0, 1).index_copy_(0, slots_T, scales_TK)

    def gather(
        self, layer: int, blocks: torch.Tensor, k_NBKD: torch.Tensor, v_NBKD: torch.Tensor
    ) -> None:
        """Float32 keys and values of `blocks` (int64 [N]) into [N, block_size, kv_heads, dim]."""
        for numbers, scales, out in (
            (self.keys[layer], self.key_scales[layer], k_NBKD),
            (self.values[layer], self.value_scales[layer], v_NBKD),
        ):
            self._gather_one(numbers, scales, blocks, out)

    def _gather_one(
        self, numbers: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor
    ) -> None:
        if self.format.is_exact:
            torch.index_select(numbers, 0, blocks, out=out)
            return
        those = scales.index_select(0, blocks) if self.format.scale_bytes else None
        decode(numbers.index_select(0, blocks), those, self.format, out)

    def read(
        self, layer: int, blocks: torch.Tensor | Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 keys and values of `blocks` side by side: [positions, kv_heads, head_dim]."""
        index = torch.as_tensor(blocks, dtype=torch.int64)
        k_NBKD, v_NBKD = self._room(layer, index), self._room(layer, index)
        self.gather(layer, index, k_NBKD, v_NBKD)
        return k_NBKD.flatten(0, 1), v_NBKD.flatten(0, 1)

    def read_keys(self, layer: int, blocks: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """As `read`, the keys alone."""
        index = torch.as_tensor(blocks, dtype=torch.int64)
        k_NBKD = self._room(layer, index)
        self._gather_one(self.keys[layer], self.key_scales[layer], index, k_NBKD)
        return k_NBKD.flatten(0, 1)

    def _room(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        shape = self.shapes[layer]
        return torch.empty((len(index), self.block_size, shape.num_kv_heads, shape.head_dim))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks` in every layer (after a request whose numbers were not finite)."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for tensor in self._tensors:
            tensor.index_fill_(0, index, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, sources[i] to targets[i], of every slot (copy-on-write)."""
        source = torch.tensor(sources, dtype=torch.int64)
        target = torch.tensor(targets, dtype=torch.int64)
        for tensor in self._tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def _cut(self, memory: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Numbers and scales of K and V of each slot in turn, as views of `memory`.

        All scales lie before all numbers, so that both are aligned whatever the sizes.
        """
        stored, dtype = self.format, STORAGE[self.format.name]
        sizes = [(self.num_blocks, self.block_size, s.num_kv_heads) for s in self._slot_shapes]
        scales_at, numbers_at = 0, 2 * stored.scale_bytes * sum(map(math.prod, sizes))
        numbers_at += -numbers_at % _CACHE_LINE
        numbers, scales = [], []
        for size, shape in zip(sizes, self._slot_shapes, strict=True):
            width = stored.width(shape.head_dim)
            for _ in ("keys", "values"):
                end = numbers_at + math.prod(size) * width * dtype.itemsize
                numbers.append(memory[numbers_at:end].view(dtype).view(*size, width))
                numbers_at = end
                if stored.scale_bytes == 0:
                    scales.append(torch.empty((0, 0, 0), dtype=torch.bfloat16))
                    continue
                end = scales_at + math.prod(size) * stored.scale_bytes
                scales.append(memory[scales_at:end].view(torch.bfloat16).view(size))
                scales_at = end
        return numbers, scales


def _compiled_store() -> Callable[..., None] | None:
    """Quantising in one pass, bit for bit as `codecs`; None where there is no machine code.

    In torch it is a dozen calls for each layer, 3 ms of a decode step of 30 layers.
    """
    if not available():
        return None
    from ullage.engine.kernels.storing import store_rows

    return store_rows
