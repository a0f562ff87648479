"""What a family's forward pass does that no field of its spec tells, for families that are proved.

Data only. A family without a row is refused (`support`): a spec of the right shape may still hide
another order of heads or another meaning of a word, and would give fluent, wrong text. Facts: the
modules of transformers 5.24; each row is held against them by tests/engine/test_greedy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ullage.engine.positions.slopes import bloom_slopes, mpt_slopes

QkNorm = Literal["head", "layer"] | None


@dataclass(frozen=True, slots=True)
class Forward:
    """One row.

    `model_types`: those of the family that run the same code; its own name when empty.
    `fused_heads`: how a matrix of Q, K and V together is ordered: `blocks` (all of Q, then K, then
    V) or `grouped` (for each KV head its query heads, its key, its value). `norm_after_sum`: a norm
    placed after a part normalises the sum of the part and the residual (OPT-350m, as in the first
    Transformer) instead of the part alone (OLMo-2). `scaled` False: scores are not divided by the
    root of head_dim. `activation` is what the code computes where the configuration's word is not
    used. `slopes` gives ALiBi's numbers from the count of heads. `qk_norms` are the kinds of query
    and key norms that were proved. `obeys` names the spec's `numerics` that the decoder follows in
    this family.
    """

    model_types: tuple[str, ...] = ()
    fused_heads: Literal["blocks", "grouped"] = "blocks"
    norm_after_sum: bool = False
    scaled: bool = True
    activation: str | None = None
    slopes: Callable[[int], tuple[float, ...]] | None = None
    qk_norms: tuple[QkNorm, ...] = (None,)
    obeys: frozenset[str] = frozenset()


_PLAIN = Forward()
_GROUPED = Forward(fused_heads="grouped")
_HEAD_NORM = Forward(qk_norms=("head",))
_LAYER_NORM = Forward(qk_norms=("layer",))
_LOGIT_SCALE = Forward(obeys=frozenset({"logit_scale"}))
_GRANITE = frozenset({"residual_multiplier", "logits_scaling"})
_ROUTED = frozenset({"norm_topk_prob"})
_GPT2_SCALES = frozenset({"scale_attn_weights", "scale_attn_by_inverse_layer_idx"})

FORWARDS: Mapping[str, Forward] = {
    # --- a root-mean-square norm before each part, a gated MLP
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "ministral": _PLAIN,
    "cwm": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _HEAD_NORM,
    "smollm3": _PLAIN,
    "phi3": _PLAIN,
    "seed_oss": _PLAIN,
    "ernie4_5": _PLAIN,
    "helium": _PLAIN,
    "glm": _PLAIN,
    "granite": Forward(obeys=_GRANITE),
    "arcee": _PLAIN,
    # --- mixtures of experts
    "mixtral": _PLAIN,
    "qwen2_moe": Forward(obeys=_ROUTED),
    "qwen3_moe": Forward(qk_norms=("head",), obeys=_ROUTED),
    "flex_olmo": Forward(qk_norms=("layer",), obeys=_ROUTED),
    "olmoe": Forward(qk_norms=("layer",), obeys=_ROUTED | {"clip_qkv"}),
    "granitemoe": Forward(obeys=_GRANITE),
    # --- norms elsewhere too
    "gemma": _PLAIN,
    "gemma2": _PLAIN,
    "gemma3": Forward(model_types=("gemma3_text",), qk_norms=("head",)),
    "vaultgemma": _PLAIN,
    "glm4": _PLAIN,
    "olmo2": _LAYER_NORM,
    "olmo3": _LAYER_NORM,
    "exaone4": _HEAD_NORM,
    # --- layer norms with rotation
    "olmo": Forward(obeys=frozenset({"clip_qkv"})),
    "starcoder2": _PLAIN,
    "stablelm": _PLAIN,
    "nemotron": _PLAIN,
    "jais2": _PLAIN,
    "phi": _PLAIN,
    "cohere": _LOGIT_SCALE,
    "cohere2": _LOGIT_SCALE,
    "gptj": _PLAIN,
    "gpt_neox": _GROUPED,
    "persimmon": Forward(fused_heads="grouped", qk_norms=(None, "head")),
    "falcon": _GROUPED,
    # --- layer norms with other positions
    "gpt2": Forward(obeys=_GPT2_SCALES),
    "gpt_bigcode": _GROUPED,
    "gpt_neo": Forward(scaled=False),
    "opt": Forward(norm_after_sum=True),
    "bloom": Forward(fused_heads="grouped", activation="gelu_pytorch_tanh", slopes=bloom_slopes),
    "mpt": Forward(activation="gelu", slopes=mpt_slopes, obeys=frozenset({"softmax_scale"})),
}
