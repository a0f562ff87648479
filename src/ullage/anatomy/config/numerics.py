"""Keys that change what a model computes and the size of nothing: `read_numerics`.

Holds the table of such keys and the value at which each of them changes nothing. What is priced
does not depend on them; what runs must obey them or refuse (`engine/model/support.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.config.keys import Section, show

Numeric = float | bool | str

# Key → the values that change nothing. A key without one is always kept. Read from the modules of
# transformers 5.24.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "alibi_bias_max": (8,),
    "apply_residual_connection_post_layernorm": (False,),
    "attn_uses_sequence_id": (False,),
    "clip_qkv": (None,),
    "dim_model_base": (None,),
    "dual_chunk_attention_config": (None,),
    "embedding_fraction": (1,),
    "is_causal": (True, None),
    "logit_scale": (None, 1),
    "logits_scaling": (1,),
    "norm_topk_prob": (),
    "prefix_lm": (False,),
    "qk_gn": (False,),
    "remove_final_layer_norm": (False,),
    "residual_multiplier": (1,),
    "routed_scaling_factor": (None, 1),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "scale_depth": (None,),
    "softmax_scale": (None,),
    "use_bidirectional_attention": (False, None),
    "use_dynamic_ntk": (False,),
    "use_logn_attn": (False,),
}
# Keys that only mean something in one family. MPT's own code can do without slopes and with shared
# keys, that of transformers cannot.
_OF_FAMILY: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "mpt": {"alibi": (True,), "attn_type": ("multihead_attention",), "rope": (False, None)},
}
# What the class of a family takes for an absent key, where that is not neutral.
_DEFAULTS: Mapping[str, Mapping[str, Numeric]] = {
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625},
    "flex_olmo": {"norm_topk_prob": False},
    "olmoe": {"norm_topk_prob": False},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": False},
}
# Stored under another name in older files.
_SPELLINGS: Mapping[str, str] = {"remove_final_layer_norm": "_remove_final_layer_norm"}


def read_numerics(section: Section, family: str) -> tuple[tuple[str, Numeric], ...]:
    """The (key, value) pairs of `section` and its class's defaults that are not neutral, sorted.

    A value that is neither number, truth value nor word is kept as the words that show it.
    """
    found: list[tuple[str, Numeric]] = []
    defaults = {**section.defaults, **_DEFAULTS.get(family, {})}
    for key, neutral in {**_NEUTRAL, **_OF_FAMILY.get(family, {})}.items():
        name = _SPELLINGS.get(key, key)
        if name not in section.values and name not in defaults:
            continue
        value = section.values.get(name, defaults.get(name))
        if neutral and any(value is usual or value == usual for usual in neutral):
            continue
        found.append((key, value if isinstance(value, bool | int | float | str) else show(value)))
    return tuple(found)
