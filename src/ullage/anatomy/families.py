"""The family table: what no configuration key says, one row per family, and who belongs to which.

Data only; `family.py` explains the columns. Absent keys are answered by the config class of the
model type (`config_defaults.jsonl`), or of `base` where transformers has no class of that name.
"""

from __future__ import annotations

from ullage.anatomy.family import GENERIC, Family

# Qwen-2's code fixes biases on Q, K and V and none on O, whatever the configuration says.
_QWEN2_BIAS = {"q_bias": True, "kv_bias": True, "o_bias": False}
_NO_BIAS = {"q_bias": False, "kv_bias": False, "o_bias": False}
_QWEN_WINDOW = {"windows": "top", "window_if": "use_sliding_window"}

ROWS: tuple[Family, ...] = (
    Family("llama"),
    Family("mistral", windows="all", **_NO_BIAS),
    Family("mixtral", windows="all", **_NO_BIAS),
    Family("qwen2", **_QWEN2_BIAS, **_QWEN_WINDOW),
    Family("qwen2_moe", **_QWEN2_BIAS, **_QWEN_WINDOW, shared_gate=True),
    Family("qwen3", **_QWEN_WINDOW, qk_norm="head"),
    Family("qwen3_moe", qk_norm="head", windows="all", window_if="use_sliding_window"),
    Family("qwen3_vl_moe", qk_norm="head"),
    Family(
        "qwen3_5",
        qk_norm="head",
        unit_offset=True,
        linear="gated_delta_net",
        output_gate="element",
        plan="interval",
        shared_gate=True,
        extra={"attention_output_gate": True},
    ),
    Family(
        "mimo",
        base="qwen2",
        **_QWEN2_BIAS,
        **_QWEN_WINDOW,
    ),
    Family("deepseek_v3", mixer="latent", mlp_bias=False, score_bias=True),
    Family("deepseek_v32", mixer="latent", mlp_bias=False, score_bias=True),
    Family("glm_moe_dsa", mixer="latent", mlp_bias=False, score_bias=True),
    Family(
        "deepseek_v4",
        mixer="compressed",
        plan="compress_ratios",
        score_bias=True,
        extra={"num_hash_layers": 3, "qk_rope_head_dim": 64},
    ),
    Family(
        "gpt_oss",
        sinks=True,
        windows="even",
        expert_bias=True,
        router_bias=True,
    ),
    Family(
        "gemma4",
        qk_norm="head",
        v_norm=True,
        place="sandwich",
        windows="every",
        pattern=6,
        embedding_scale="sqrt",
    ),
    Family(
        "llama4",
        plan="llama4",
        nope="keys",
        qk_norm=None,
        rope_interleaved=True,
        dense_width="intermediate_size_mlp",
        mlp_bias=False,
    ),
    Family(
        "minimax_m2",
        **_NO_BIAS,
        qk_norm="layer",
        qk_norm_if="use_qk_norm",
        score_bias="use_routing_bias",
        dtype="bfloat16",
        extra={"use_qk_norm": True, "use_routing_bias": True},
    ),
    Family(
        "minimax_m3",
        base="minimax_m3_vl_text",
        **_NO_BIAS,
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        score_bias="use_routing_bias",
        unit_offset="use_gemma_norm",
        dense_width="dense_intermediate_size",
        output_gate="element",
        output_gate_if="attention_output_gate",
    ),
    Family(
        "step3p7",
        qk_norm="head",
        unit_offset=True,
        output_gate="head",
        output_gate_if="use_head_wise_attn_gate",
        score_bias="use_moe_router_bias",
    ),
    Family(
        "nemotron_h",
        plan="nemotron_h",
        nope="all",
        positions="none",
        gated=False,
        activation="relu2",
        score_bias=True,
    ),
)

FAMILIES: dict[str, Family] = {row.name: row for row in (*ROWS, GENERIC)}

# Model types whose family has another name.
MEMBERS: dict[str, str] = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "step3p5": "step3p7",
    "minimax_m3_vl_text": "minimax_m3",
}

# Where model_type says nothing known, the class that the checkpoint asks for may.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GptOssForCausalLM": "gpt_oss",
}


def family_of(model_type: str, architecture: str) -> Family:
    """The row for a model type, else for an architecture's class, else `GENERIC`."""
    name = MEMBERS.get(model_type, model_type)
    row = FAMILIES.get(name) if name != "generic" else None
    return row or FAMILIES[ARCHITECTURES.get(architecture, "generic")]
