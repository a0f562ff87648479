"""What a family's forward pass does that no field of its spec tells, for families that are proved.

Data only. A family without a row is refused (`support`): a spec of the right shape may still hide
another order of heads or another meaning of a word, and would give fluent, wrong text. Facts: the
modules of transformers 5.24; each row is held against them by tests/engine/test_greedy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ullage.engine.slopes import bloom_slopes, mpt_slopes

QkNorm = Literal["head", "layer"] | None


@dataclass(frozen=True, slots=True)
class Forward:
    """One row.

    `fused_heads`: how a matrix of Q, K and V together is ordered: `blocks` (all of Q, then K, then
    V) or `grouped` (for each KV head its query heads, its key, its value). `norm_after_sum`: a norm
    placed after a part normalises the sum of the part and the residual (OPT-350m, as in the first
    Transformer) instead of the part alone (OLMo-2). `activation` is what the code computes where
    the configuration's word is not used. `slopes` gives ALiBi's numbers from the count of heads.
    `qk_norms` are the kinds of query and key norms that were proved. `obeys` names the spec's
    `numerics` that the decoder follows in this family.
    """

    fused_heads: Literal["blocks", "grouped"] = "blocks"
    norm_after_sum: bool = False
    activation: str | None = None
    slopes: Callable[[int], tuple[float, ...]] | None = None
    qk_norms: tuple[QkNorm, ...] = (None,)
    obeys: frozenset[str] = frozenset()


_PLAIN = Forward()
_HEAD_NORM = Forward(qk_norms=("head",))
_ROUTED = frozenset({"norm_topk_prob"})

FORWARDS: Mapping[str, Forward] = {
    # --- one norm before each part, rotation by halves, a gated MLP
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "ministral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _HEAD_NORM,
    "smollm3": _PLAIN,
    "phi3": _PLAIN,
    "gemma": _PLAIN,
    "gemma2": _PLAIN,
    "gemma3": _HEAD_NORM,
    # --- layer norms, biases, other positions
    "gpt2": Forward(obeys=frozenset({"scale_attn_weights", "scale_attn_by_inverse_layer_idx"})),
    "opt": Forward(norm_after_sum=True),
    "bloom": Forward(fused_heads="grouped", activation="gelu_pytorch_tanh", slopes=bloom_slopes),
    "mpt": Forward(activation="gelu", slopes=mpt_slopes, obeys=frozenset({"softmax_scale"})),
}
