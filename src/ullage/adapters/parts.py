"""What the last name of a module stands for in a layer, as writers of adapters call it.

Holds names, and which layer of a language model a path is in. Where such a module belongs in a base
is `adapters/rewriting/placing.py`.
"""

from __future__ import annotations

import re

# Hugging Face's Llama names, Megatron-Core's (transformer/attention.py, mlp.py) and those of its
# canonical LoRA.
ROLES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": "gate", "up_proj": "up",
    "linear_q": "q", "linear_k": "k", "linear_v": "v", "linear_proj": "o",
    "linear_fc1_gate": "gate", "linear_fc1_up": "up", "linear_fc2": "down",
}  # fmt: skip
# Fused leaves whose rows are known: the roles of their parts, one after another.
FUSED = {
    "qkv_proj": ("q", "k", "v"),
    "gate_up_proj": ("gate", "up"),
    "linear_fc1": ("gate", "up"),
    "linear_qkv": ("q", "k", "v"),
}

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]{1,6})\.")
# What stands before the layers of a language model, in any order; a tower has a name of its own.
_LANGUAGE = frozenset(
    ("model", "language_model", "text_model", "decoder", "transformer", "backbone", "module")
)


def layer_and_leaf(path: str) -> tuple[int | None, str]:
    """The layer of a language model that the path is in, None for others, and its last name.

    `vision_tower.encoder.layers.0.self_attn.q_proj` is in no such layer: where sizes agree, its
    role and its number would lead to the language model's own q_proj.
    """
    leaf = path.rpartition(".")[2]
    match = _LAYER.search(path)
    if match is None:
        return None, leaf
    before = path[: match.start()]
    if before and not _LANGUAGE.issuperset(before.split(".")):
        return None, leaf
    return int(match[1]), leaf
