"""Which layers share a block table: layers that see alike, in groups of one size over one pool.

Pure data and no torch. A block holds block_size tokens of every layer of one group; since all
groups have as many layers, any group may take any block, and a window layer's old blocks go back
to the pool while a full layer keeps its own (as vLLM's hybrid KV cache manager does it).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# A table's entry for a block that its window has passed: nobody may read or write there.
FREED = -1


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers (model indices, in order) with one block table per sequence; `window` None: full."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`group_of[layer]` and `slot_of[layer]`: a layer's table, and its storage within a block.

    `num_slots` layers lie in a block; a group with fewer leaves the rest of its blocks unused.
    """

    groups: tuple[KVGroup, ...]
    num_slots: int
    group_of: tuple[int, ...]
    slot_of: tuple[int, ...]


def kv_layout(windows: Sequence[int | None], shapes: Sequence[Hashable]) -> KVLayout:
    """Group layers by window. Layers of unlike shapes stay in one group, which then frees nothing.

    The size of a group is the smallest number of layers of a kind, so that little is left unused.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    if len(set(shapes)) > 1 and len(by_window) > 1:
        by_window = {None: list(range(len(windows)))}
    num_slots = min(len(layers) for layers in by_window.values())
    groups = tuple(
        KVGroup(tuple(layers[first : first + num_slots]), window)
        for window, layers in by_window.items()
        for first in range(0, len(layers), num_slots)
    )
    group_of, slot_of = [0] * len(windows), [0] * len(windows)
    for index, group in enumerate(groups):
        for slot, layer in enumerate(group.layers):
            group_of[layer], slot_of[layer] = index, slot
    return KVLayout(groups, num_slots, tuple(group_of), tuple(slot_of))
