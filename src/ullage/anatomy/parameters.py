"""How many parameters a model has: `count_parameters` and its parts.

Counts the elements of the tensors that a checkpoint stores, unpacked; bytes are `costs/weights.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.anatomy.spec import Experts, ModelSpec
from ullage.anatomy.tensors.expected import TensorSpec, expected_tensors

_EMBEDDING = {"embed", "position", "lm_head", "per_layer"}
_FFN = {
    "gate", "up", "down", "gate_up", "shared_gate", "shared_up", "shared_down", "shared_gate_up",
    "shared_router",
}  # fmt: skip
_EXPERTS = {"expert_gate", "expert_up", "expert_down", "expert_gate_up", "expert_bias"}
_ROUTING = {"router", "hash_table", "latent"}
_SMALL = {"norm", "scale", "hyper"}


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Elements by part. `total` is what model cards state: without prediction layers, with towers
    whose size is known. `active` is what one token uses: everything but the routed experts that
    were not chosen (embedding and output head included, towers not)."""

    total: int
    embedding: int
    attention: int
    ffn: int
    experts: int
    small: int
    towers: int
    mtp: int
    active: int


def count_parameters(spec: ModelSpec) -> int:
    """Stored elements, prediction layers left out, tied embeddings once."""
    return sum(t.num_elements for t in expected_tensors(spec) if t.stack != "mtp")


def parameter_counts(spec: ModelSpec) -> ParameterCounts:
    """The counts by part; `attention` is every token mixer, `experts` includes the routing."""
    sums = dict.fromkeys(("embedding", "attention", "ffn", "experts", "small", "towers", "mtp"), 0)
    idle = 0
    part = "small"
    for tensor in expected_tensors(spec):
        if tensor.role != "bias":  # a bias goes with the matrix before it
            part = _part(tensor)
        sums["mtp" if tensor.stack == "mtp" else part] += tensor.num_elements
        if tensor.shard == "expert" and tensor.stack != "mtp" and tensor.layer is not None:
            experts = spec.layers[tensor.layer].feed_forward
            assert isinstance(experts, Experts), "expert tensors lie in layers with experts"
            unused = experts.num_experts - experts.top_k
            idle += tensor.num_elements // experts.num_experts * unused
    total = sum(sums.values()) - sums["mtp"]
    return ParameterCounts(total=total, active=total - idle - sums["towers"], **sums)


def _part(tensor: TensorSpec) -> str:
    if tensor.role == "tower":
        return "towers"
    if tensor.role in _EMBEDDING:
        return "embedding"
    if tensor.role in _FFN:
        return "ffn"
    if tensor.role in _EXPERTS or tensor.role in _ROUTING:
        return "experts"
    return "small" if tensor.role in _SMALL else "attention"
