"""What one adapter slot of vLLM takes on one rank: `slot_bytes`.

Holds the sizes of the buffers that vLLM 0.32 allocates for every wrapped module, whatever the
adapter adapts. Which modules are wrapped is `vllm_slots.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.adapters.base import BaseModule
from ullage.adapters.engines.served import ServedModule, ServedTree
from ullage.adapters.verdict import ServeOptions
from ullage.anatomy.spec import ModelSpec

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def slot_bytes(
    served: ServedTree,
    spec: ModelSpec,
    options: ServeOptions,
    rank: int,
    wrapped: Callable[[ServedModule], bool],
) -> int | None:
    """Bytes of one slot on one rank, None where a wrapped module's size is not known.

    lora/layers/*: A is [max_lora_rank, in], B is [out, max_lora_rank] per slice; tensor parallelism
    cuts B of column-parallel modules and A of row-parallel ones (and, with --fully-sharded-loras,
    the other half too). Embeddings are whole on every rank.
    """
    # config/model.py, _resolve_auto_dtype: float32 checkpoints are served in 16 bits.
    dtype = options.lora_dtype or {"float32": "bfloat16"}.get(spec.dtype, spec.dtype)
    width = _BYTES.get(dtype)
    if width is None:
        return None
    tensor = options.tensor_parallel_size
    total = 0
    for module in served.modules.values():
        if not wrapped(module):
            continue
        elements = _elements(
            module, served, rank, tensor,
            sharded=options.fully_sharded_loras, mixed=options.enable_mixed_moe_lora_format,
        )  # fmt: skip
        if elements is None:
            return None
        total += elements
    return total * width


def _elements(
    module: ServedModule,
    served: ServedTree,
    rank: int,
    tensor: int,
    *,
    sharded: bool,
    mixed: bool,
) -> int | None:
    kind = module.kind.kind
    bases = [part.base for part in module.parts if part.base is not None]
    if not bases:
        return None
    first = bases[0]
    if kind in ("VocabParallelEmbedding", "ParallelLMHead"):
        return rank * (first.in_features + first.out_features)
    if kind == "MoERunner":
        return _experts(module, served, rank, tensor, sharded=sharded, mixed=mixed)
    # Latent attention's way down is whole on every rank, whatever the kind of its module.
    cut = 1 if first.whole or kind in ("ReplicatedLinear", "LinearBase") else tensor
    if kind == "RowParallelLinear":
        out = -(-first.out_features // cut) if sharded else first.out_features
        return rank * (-(-first.in_features // cut) + out)
    a_rank = -(-rank // cut) if sharded else rank
    # One A for each slice of the output; an undivided LoRA has one (column_parallel_linear.py).
    slices = max(module.kind.slices, 1) if (module.kind.wrapper or "").startswith("Merged") else 1
    outs = sum(_out(base, cut) for base in bases)
    return slices * a_rank * first.in_features + rank * outs


def _out(base: BaseModule, cut: int) -> int:
    """Rows of B on one rank: keys and values are held by at least one head's width."""
    if base.role in ("k", "v") and base.groups:
        return base.out_features // base.groups * max(1, base.groups // cut)
    return -(-base.out_features // cut)


def _experts(
    module: ServedModule,
    served: ServedTree,
    rank: int,
    tensor: int,
    *,
    sharded: bool,
    mixed: bool,
) -> int | None:
    by_role = {part.base.role: part.base for part in module.parts if part.base is not None}
    down = by_role.get("expert_down")
    if down is None:
        return None
    inner = -(-down.in_features // tensor)
    hidden = down.out_features
    a_rank = -(-rank // tensor) if sharded else rank
    out = -(-hidden // tensor) if sharded else hidden
    gated = not served.architecture.non_gated
    stacked = served.architecture.is_3d and not mixed
    slices = 1 if stacked or not gated else 2
    ups = slices * a_rank * hidden + (2 if gated else 1) * inner * rank
    return down.num_experts * (ups + inner * rank + out * rank)
