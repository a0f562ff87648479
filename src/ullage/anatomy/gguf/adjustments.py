"""What a table of keys cannot say of a GGUF architecture: a small function for each that needs it.

Holds the functions and their table. The ordinary translation is `config.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.gguf.facts import Facts


def _adjust_llama(facts: Facts) -> None:
    """Mixtral is a llama with experts."""
    if not facts.whole("expert_count"):
        facts.drop("num_local_experts")
        facts.drop("num_experts_per_tok")
        return
    facts.put("model_type", "mixtral", "header: llama.expert_count")
    facts.put("architectures", ["MixtralForCausalLM"], "header: llama.expert_count")


def _adjust_olmo2(facts: Facts) -> None:
    """OLMo-3 is an olmo2 with windows."""
    if facts.config["sliding_window"] is not None:
        facts.put("model_type", "olmo3", "header: olmo2.attention.sliding_window")
        facts.put("architectures", ["Olmo3ForCausalLM"], "header: olmo2.attention.sliding_window")


def _adjust_gemma(facts: Facts) -> None:
    """The query scale is not stored: llama.cpp takes hidden / heads for the 27B sizes only."""
    hidden, heads = facts.required("embedding_length"), facts.required("attention.head_count")
    large = facts.num_layers() == {"gemma2": 46, "gemma3": 62}[facts.architecture]
    value = hidden // heads if large else facts.config.get("head_dim")
    facts.put("query_pre_attn_scalar", value, "derived: llama.cpp's rule for this architecture")


def _adjust_stablelm(facts: Facts) -> None:
    parallel = facts.layer_shape("ffn_norm.weight") is None
    facts.put(
        "use_parallel_residual", parallel, f"header: {'no ' if parallel else ''}ffn_norm.weight"
    )
    normed = facts.layer_shape("attn_q_norm.weight") is not None
    facts.put("qk_layernorm", normed, f"header: {'' if normed else 'no '}attn_q_norm.weight")


def _adjust_command_r(facts: Facts) -> None:
    normed = facts.layer_shape("attn_q_norm.weight") is not None
    facts.put("use_qk_norm", normed, f"header: {'' if normed else 'no '}attn_q_norm.weight")


def _adjust_falcon(facts: Facts) -> None:
    new = facts.layer_shape("attn_norm_2.weight") is not None
    facts.put("new_decoder_architecture", new, f"header: {'' if new else 'no '}attn_norm_2.weight")
    facts.put("parallel_attn", True, "default: GGUF architecture falcon")
    facts.put("alibi", False, "default: GGUF architecture falcon")
    facts.put(
        "multi_query",
        facts.config.get("num_key_value_heads") == 1,
        "header: falcon.attention.head_count_kv",
    )
    facts.put(
        "num_kv_heads", facts.config["num_key_value_heads"], facts.sources["num_key_value_heads"]
    )


def _adjust_starcoder(facts: Facts) -> None:
    facts.put(
        "multi_query",
        facts.config.get("num_key_value_heads") == 1,
        "header: starcoder.attention.head_count_kv",
    )


def _adjust_glm4moe(facts: Facts) -> None:
    normed = facts.layer_shape("attn_q_norm.weight") is not None
    facts.put("use_qk_norm", normed, f"header: {'' if normed else 'no '}attn_q_norm.weight")


def _adjust_deepseek2(facts: Facts) -> None:
    """Latent attention: newer files describe it as one shared head, older ones head by head."""
    heads = facts.required("attention.head_count")
    rotary = facts.required("rope.dimension_count")
    newer = facts.raw("attention.key_length_mla") is not None
    key = "attention.key_length_mla" if newer else "attention.key_length"
    value = "attention.value_length_mla" if newer else "attention.value_length"
    head_dim = facts.required(key)
    if head_dim <= rotary:
        raise facts.contradiction(key, f"{head_dim}", f"more than rope.dimension_count, {rotary}")
    facts.drop("head_dim")
    facts.drop(facts.row.rotary_key)
    facts.put("qk_rope_head_dim", rotary, "header: deepseek2.rope.dimension_count")
    facts.put("qk_nope_head_dim", head_dim - rotary, f"header: deepseek2.{key} less rotary part")
    facts.put("v_head_dim", facts.required(value), f"header: deepseek2.{value}")
    facts.put("num_key_value_heads", heads, "header: deepseek2.attention.head_count")
    facts.put("num_nextn_predict_layers", 0, "default: converters leave MTP layers out")
    if "q_lora_rank" not in facts.config:
        facts.put("q_lora_rank", None, "header: no deepseek2.attention.q_lora_rank")
    if facts.layer_shape("exp_probs_b.bias") is not None:
        facts.put("model_type", "deepseek_v3", "header: exp_probs_b.bias")
        facts.put("architectures", ["DeepseekV3ForCausalLM"], "header: exp_probs_b.bias")


def _adjust_delta_net(facts: Facts) -> None:
    inner, heads = facts.required("ssm.inner_size"), facts.required("ssm.time_step_rank")
    source = f"header: {facts.architecture}.ssm.inner_size / ssm.time_step_rank"
    facts.put("linear_value_head_dim", inner // heads, source)


def _adjust_mamba(facts: Facts) -> None:
    inner, hidden = facts.required("ssm.inner_size"), facts.required("embedding_length")
    facts.put(
        "expand",
        inner / hidden if inner % hidden else inner // hidden,
        "header: mamba.ssm.inner_size / mamba.embedding_length",
    )
    biased = facts.layer_shape("ssm_conv1d.bias") is not None
    facts.put("use_conv_bias", biased, f"header: {'' if biased else 'no '}ssm_conv1d.bias")
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ):
        facts.drop(key)


def _adjust_lfm2(facts: Facts) -> None:
    """Layers without KV heads are short convolutions."""
    per_layer = facts.raw("attention.head_count_kv")
    if not isinstance(per_layer, tuple):
        return
    counts = {int(count) for count in per_layer if count}
    if len(counts) != 1 or len(per_layer) != facts.num_layers():
        raise facts.contradiction(
            "attention.head_count_kv",
            f"{list(per_layer)[:8]}",
            "one count per layer, equal where not 0",
        )
    source = "header: lfm2.attention.head_count_kv"
    facts.put("num_key_value_heads", counts.pop(), source)
    facts.put("layer_types", ["full_attention" if n else "conv" for n in per_layer], source)


def _adjust_bert(facts: Facts) -> None:
    kinds = facts.shape("token_types.weight")
    if kinds is not None:
        facts.put("type_vocab_size", kinds[0], "header: rows of token_types.weight")
    rows = facts.shape("position_embd.weight")
    if rows is not None:
        facts.put("max_position_embeddings", rows[0], "header: rows of position_embd.weight")
    facts.put("tie_word_embeddings", True, "default: GGUF architecture bert")


ADJUSTMENTS: dict[str, Callable[[Facts], None]] = {
    "llama": _adjust_llama,
    "olmo2": _adjust_olmo2,
    "gemma2": _adjust_gemma,
    "gemma3": _adjust_gemma,
    "stablelm": _adjust_stablelm,
    "command-r": _adjust_command_r,
    "falcon": _adjust_falcon,
    "starcoder": _adjust_starcoder,
    "glm4moe": _adjust_glm4moe,
    "deepseek2": _adjust_deepseek2,
    "qwen3next": _adjust_delta_net,
    "qwen35": _adjust_delta_net,
    "qwen35moe": _adjust_delta_net,
    "mamba": _adjust_mamba,
    "lfm2": _adjust_lfm2,
    "bert": _adjust_bert,
}
