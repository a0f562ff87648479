"""One expected tensor and the words that describe it: `TensorSpec`, roles, how it is cut.

Holds data only. Which tensors a model has is `expected.py` and the modules beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "embed", "position", "lm_head",
    "q", "k", "v", "qkv", "o", "attn_gate", "sinks", "attn_bias_table",
    "q_a", "q_b", "kv_a", "kv_b", "indexer", "compressor",
    "mamba_in", "mamba_out", "mamba", "linear_in", "linear_out", "linear", "conv",
    "gate", "up", "down", "gate_up", "router", "hash_table",
    "expert_gate", "expert_up", "expert_down", "expert_gate_up",
    "shared_gate", "shared_up", "shared_down", "shared_gate_up", "shared_router", "latent",
    "norm", "bias", "expert_bias", "scale", "hyper", "per_layer", "mtp", "tower",
]  # fmt: skip
"""What a tensor does; a bias has the role `bias` (`expert_bias` when it lies with the experts)."""

Shard = Literal["vocab", "column", "row", "kv", "qkv", "expert", "tower", "replicated"]
"""How tensor parallelism cuts a tensor, along `TensorSpec.cut`.

`vocab`: rows of a padded vocabulary. `column`, `row`: output or input dimension in equal parts.
`kv`: as column, but a rank holds at least one of `groups` heads. `qkv`: a fused matrix whose last
`grouped` rows are cut as `kv`, the rest as column. `expert`: expert parallelism deals experts out,
otherwise each expert is cut along `cut` (not at all when it is None). `tower`: `grouped` of its
elements are cut as column when tensor parallelism divides its `groups` heads. `replicated`: on
every rank.
"""

StackName = Literal["decoder", "encoder", "mtp", "tower"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor, or `count` equal ones whose names differ by the expert index {e}.

    `shape` is of one tensor, as stored. `module` is the name without `.weight` or `.bias`.
    `named` is False when the family's names are not known: shapes and counts then hold, but the
    name is only Llama's way of saying it and must not be looked for in a file.
    `quantizable`: a Linear's matrix, which a quantiser may have packed; `in_dim` is its input
    dimension. `dtype` is what the family stores whatever the model's dtype is, or None.
    `held_dtype` is the same for what vLLM 0.32 holds in memory. `sequence_whole`: vLLM does not cut
    it when mixtures run sequence-parallel (expert, tensor and data parallelism together).
    `num_experts` counts the experts along the first dimension of a stacked tensor, or is `count`.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    module: str
    role: Role
    shard: Shard
    layer: int | None
    stack: StackName
    quantizable: bool
    named: bool
    cut: int | None = None
    groups: int = 0
    grouped: int = 0
    in_dim: int = -1
    dtype: str | None = None
    held_dtype: str | None = None
    sequence_whole: bool = False
    num_experts: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of all `count` tensors together."""
        total = self.count
        for size in self.shape:
            total *= size
        return total
