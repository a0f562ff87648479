"""The four matrices of a layer, and which of the checkpoint's tensors each is made of.

Holds the mapping only; a base's weights (`model/loading.py`) and an adapter's (`lora.py`) are put
together by it.
"""

from __future__ import annotations

from typing import Literal

import torch

from ullage.anatomy.spec import Attention
from ullage.anatomy.tensors.slots import Slots
from ullage.engine.model.families import Forward

Site = Literal["qkv", "output", "gate_up", "down"]

# The first of these sets of slots that the spec has, one below the other, is the site's matrix.
_SLOTS: dict[Site, tuple[tuple[str, ...], ...]] = {
    "qkv": (("qkv",), ("q", "k", "v")),
    "output": (("o",),),
    "gate_up": (("gate_up",), ("gate", "up"), ("up_plain",), ("up",)),
    "down": (("down",),),
}


def site_slots(slots: Slots, site: Site, layer: int) -> tuple[str, ...]:
    """The slots whose tensors make up a site, in order; empty where the layer has none."""
    for names in _SLOTS[site]:
        if all(slots.find(name, layer) is not None for name in names):
            return names
    return ()


def block_rows(forward: Forward, mixer: Attention) -> torch.Tensor | None:
    """Row order that turns a stored matrix of Q, K and V into blocks; None where it is that.

    Grouped rows are, for each KV head, those of its query heads, then its key's, then its value's.
    """
    if forward.fused_heads == "blocks":
        return None
    group, size = mixer.num_heads // mixer.num_kv_heads, mixer.head_dim
    stored = torch.arange(mixer.num_kv_heads * (group + 2) * size)
    stored = stored.view(mixer.num_kv_heads, group + 2, size)
    parts = (stored[:, :group], stored[:, group], stored[:, group + 1])
    return torch.cat([part.flatten() for part in parts])
