"""GGUF tensor names ↔ Hugging Face tensor names, per GGUF architecture, as data.

Holds the name tables and what a converter rewrites besides the names (row order of Q and K for
interleaved rotary, shifted norms, transposed matrices). Sources: the name map of `gguf` 0.19;
llama.cpp's `llama_model_rope_type` and its converters.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# `{i}` is the layer, `{e}` the expert: GGUF stacks all experts of a layer in one tensor
# [experts, out, in]. A key without `.weight`/`.bias` stands for both, a key with one is exact.


def _stack(prefix: str, **names: str) -> dict[str, str]:
    return {f"blk.{{i}}.{gguf}": prefix + name for gguf, name in names.items()}


def _layers(**names: str) -> dict[str, str]:
    return _stack("model.layers.{i}.", **names)


_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_ATTENTION = _layers(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
    attn_q_norm="self_attn.q_norm",
    attn_k_norm="self_attn.k_norm",
)

_GATED_MLP = _layers(
    ffn_gate="mlp.gate_proj",
    ffn_up="mlp.up_proj",
    ffn_down="mlp.down_proj",
)

_LLAMA = {**_ENDS, **_ATTENTION, **_GATED_MLP, **_layers(ffn_norm="post_attention_layernorm")}

_MIXTRAL_EXPERTS = _layers(
    ffn_gate_inp="block_sparse_moe.gate",
    ffn_gate_exps="block_sparse_moe.experts.{e}.w1",
    ffn_up_exps="block_sparse_moe.experts.{e}.w3",
    ffn_down_exps="block_sparse_moe.experts.{e}.w2",
)

_EXPERTS = _layers(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{e}.gate_proj",
    ffn_up_exps="mlp.experts.{e}.up_proj",
    ffn_down_exps="mlp.experts.{e}.down_proj",
)

# Qwen: one shared expert behind a gate of its own.
_SHARED_EXPERT = _layers(
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)

# DeepSeek and its relatives: shared experts as one wide MLP, a correction of the router's scores.
_SHARED_EXPERTS = {
    **_layers(
        ffn_gate_shexp="mlp.shared_experts.gate_proj",
        ffn_up_shexp="mlp.shared_experts.up_proj",
        ffn_down_shexp="mlp.shared_experts.down_proj",
    ),
    "blk.{i}.exp_probs_b.bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
}

_SANDWICH = _layers(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)

_POST_NORMS = _layers(
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)

# The second norm of a plain pre-norm layer goes by this name in some architectures.
_LATE_NAMED_NORM = _layers(post_attention_norm="post_attention_layernorm")

_LATENT_ATTENTION = _layers(
    attn_q_a="self_attn.q_a_proj",
    attn_q_a_norm="self_attn.q_a_layernorm",
    attn_q_b="self_attn.q_b_proj",
    attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
    attn_kv_a_norm="self_attn.kv_a_layernorm",
    attn_kv_b="self_attn.kv_b_proj",
    # Newer files store kv_b_proj as its two halves, K transposed.
    attn_k_b="self_attn.kv_b_proj",
    attn_v_b="self_attn.kv_b_proj",
)

# Multi-token-prediction layers, stored behind the ordinary ones.
_NEXTN = _layers(
    **{
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.shared_head_head": "shared_head.head",
        "nextn.shared_head_norm": "shared_head.norm",
    }
)

_DELTA_NET = {
    **_layers(
        attn_qkv="linear_attn.in_proj_qkv",
        attn_gate="linear_attn.in_proj_z",
        ssm_in="linear_attn.in_proj_qkvz",
        ssm_ba="linear_attn.in_proj_ba",
        ssm_alpha="linear_attn.in_proj_a",
        ssm_beta="linear_attn.in_proj_b",
        ssm_conv1d="linear_attn.conv1d",
        ssm_norm="linear_attn.norm",
        ssm_out="linear_attn.out_proj",
    ),
    "blk.{i}.ssm_a": "model.layers.{i}.linear_attn.A_log",
    "blk.{i}.ssm_dt.bias": "model.layers.{i}.linear_attn.dt_bias",
}

_GPT2_LAYERS = _stack(
    "transformer.h.{i}.",
    attn_norm="ln_1",
    attn_qkv="attn.c_attn",
    attn_output="attn.c_proj",
    ffn_norm="ln_2",
    ffn_up="mlp.c_fc",
    ffn_down="mlp.c_proj",
)

_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    **_GPT2_LAYERS,
}

_BLOOM_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

_NAMES: dict[str, dict[str, str]] = {
    "llama": {**_LLAMA, **_MIXTRAL_EXPERTS},
    "mistral3": _LLAMA,
    "arcee": _LLAMA,
    "smollm3": _LLAMA,
    "deci": _LLAMA,
    "xverse": _LLAMA,
    "olmo": _LLAMA,
    "gemma": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2vl": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3vl": _LLAMA,
    "granite": _LLAMA,
    "stablelm": _LLAMA,
    "nemotron": _LLAMA,
    "ernie4_5": _LLAMA,
    "command-r": _LLAMA,
    "cohere2": _LLAMA,
    "seed_oss": {**_LLAMA, **_LATE_NAMED_NORM},
    "qwen2moe": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERT},
    "qwen3moe": {**_LLAMA, **_EXPERTS},
    "qwen3vlmoe": {**_LLAMA, **_EXPERTS},
    "olmoe": {**_LLAMA, **_EXPERTS},
    "dots1": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS},
    "deepseek": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS},
    "deepseek2": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS, **_LATENT_ATTENTION},
    "glm4moe": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS, **_LATE_NAMED_NORM, **_NEXTN},
    "ernie4_5-moe": {
        **_LLAMA,
        **_EXPERTS,
        **_SHARED_EXPERTS,
        "blk.{i}.exp_probs_b.bias": "model.layers.{i}.mlp.moe_statics.e_score_correction_bias",
    },
    "minimax-m2": {
        **_LLAMA,
        **_MIXTRAL_EXPERTS,
        "blk.{i}.exp_probs_b.bias": "model.layers.{i}.block_sparse_moe.e_score_correction_bias",
    },
    "phimoe": {**_LLAMA, **_MIXTRAL_EXPERTS},
    "granitemoe": {
        **_LLAMA,
        **_layers(
            ffn_gate_inp="block_sparse_moe.router.layer",
            ffn_gate_exps="block_sparse_moe.input_linear",
            ffn_up_exps="block_sparse_moe.input_linear",
            ffn_down_exps="block_sparse_moe.output_linear",
            ffn_gate_shexp="shared_mlp.input_linear",
            ffn_up_shexp="shared_mlp.input_linear",
            ffn_down_shexp="shared_mlp.output_linear",
        ),
    },
    "gpt-oss": {
        **_LLAMA,
        **_LATE_NAMED_NORM,
        **_layers(
            **{
                "ffn_gate_inp": "mlp.router",
                # Gate and up lie interleaved in one tensor there, all three transposed.
                "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_down_exps.weight": "mlp.experts.down_proj",
                "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
                "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
                "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
            }
        ),
        "blk.{i}.attn_sinks.weight": "model.layers.{i}.self_attn.sinks",
        "blk.{i}.attn_sinks": "model.layers.{i}.self_attn.sinks",
    },
    "qwen3next": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERT, **_LATE_NAMED_NORM, **_DELTA_NET},
    "qwen35": {**_LLAMA, **_LATE_NAMED_NORM, **_DELTA_NET},
    "qwen35moe": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERT, **_LATE_NAMED_NORM, **_DELTA_NET},
    "gemma2": {**_LLAMA, **_SANDWICH},
    "gemma3": {**_LLAMA, **_SANDWICH},
    "olmo2": {**_LLAMA, **_POST_NORMS},
    "exaone4": {**_LLAMA, **_POST_NORMS},
    "glm4": {
        **_LLAMA,
        **_layers(
            ffn_up="mlp.gate_up_proj",
            post_attention_norm="post_self_attn_layernorm",
            post_ffw_norm="post_mlp_layernorm",
        ),
        **_NEXTN,
    },
    "phi3": {
        **_LLAMA,
        **_layers(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj"),
    },
    "phi2": {
        **_LLAMA,
        "output_norm": "model.final_layernorm",
        **_layers(attn_output="self_attn.dense", ffn_up="mlp.fc1", ffn_down="mlp.fc2"),
    },
    "starcoder2": {**_LLAMA, **_layers(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")},
    "gpt2": _GPT2,
    "starcoder": _GPT2,
    "gptneox": {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        **_stack(
            "gpt_neox.layers.{i}.",
            attn_norm="input_layernorm",
            attn_qkv="attention.query_key_value",
            attn_output="attention.dense",
            ffn_norm="post_attention_layernorm",
            ffn_up="mlp.dense_h_to_4h",
            ffn_down="mlp.dense_4h_to_h",
        ),
    },
    "falcon": {
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        **_stack("transformer.h.{i}.", **_BLOOM_LAYERS),
        # Falcon-40B keeps two norms; Falcon-7B only the first, as input_layernorm.
        **_stack("transformer.h.{i}.", attn_norm_2="ln_attn"),
    },
    "bloom": {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        **_stack("transformer.h.{i}.", **_BLOOM_LAYERS),
    },
    "mpt": {
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
        **_stack(
            "transformer.blocks.{i}.",
            attn_norm="norm_1",
            attn_qkv="attn.Wqkv",
            attn_output="attn.out_proj",
            ffn_norm="norm_2",
            ffn_up="ffn.up_proj",
            ffn_down="ffn.down_proj",
        ),
    },
    "mamba": {
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        **_stack(
            "backbone.layers.{i}.",
            attn_norm="norm",
            ssm_in="mixer.in_proj",
            ssm_conv1d="mixer.conv1d",
            ssm_x="mixer.x_proj",
            ssm_dt="mixer.dt_proj",
            ssm_a="mixer.A_log",
            ssm_d="mixer.D",
            ssm_out="mixer.out_proj",
        ),
    },
    "bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        **_stack(
            "encoder.layer.{i}.",
            attn_q="attention.self.query",
            attn_k="attention.self.key",
            attn_v="attention.self.value",
            attn_output="attention.output.dense",
            attn_output_norm="attention.output.LayerNorm",
            ffn_up="intermediate.dense",
            ffn_down="output.dense",
            layer_output_norm="output.LayerNorm",
        ),
    },
    "lfm2": {
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output_norm": "model.embedding_norm",
        "output": "lm_head",
        **_ATTENTION,
        **_layers(
            attn_norm="operator_norm",
            attn_output="self_attn.out_proj",
            attn_q_norm="self_attn.q_layernorm",
            attn_k_norm="self_attn.k_layernorm",
            ffn_norm="ffn_norm",
            ffn_gate="feed_forward.w1",
            ffn_up="feed_forward.w3",
            ffn_down="feed_forward.w2",
        ),
        "blk.{i}.shortconv.in_proj": "model.layers.{i}.conv.in_proj",
        "blk.{i}.shortconv.conv": "model.layers.{i}.conv.conv",
        "blk.{i}.shortconv.out_proj": "model.layers.{i}.conv.out_proj",
    },
}

ARCHITECTURES = frozenset(_NAMES)

# Tensors that only GGUF stores: tables that the others compute from the configuration.
GGUF_ONLY = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})

# Architectures whose Q and K rows (weights and biases) GGUF stores for rotary embedding on
# neighbouring pairs, where the Hugging Face model rotates the two halves of a head. Undo it with
# `half_split_rows`. (llama.cpp: rope type NORM and a converter that permutes.)
INTERLEAVED_ROTARY = frozenset(
    {
        "llama",
        "mistral3",
        "arcee",
        "smollm3",
        "deci",
        "xverse",
        "olmo",
        "granite",
        "granitemoe",
        "deepseek",
    }
)

# Architectures whose RMS norms compute x·(1 + weight) and whose GGUF files store 1 + weight:
# subtract 1 to get the Hugging Face tensor. The gated norm inside a delta-net is not shifted.
SHIFTED_NORMS = frozenset(
    {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
)

# Matrices that GGUF stores transposed against the Hugging Face tensor (Conv1D of GPT-2).
TRANSPOSED: Mapping[str, frozenset[str]] = MappingProxyType(
    {"gpt2": frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})}
)


def gguf_tensor_names(architecture: str) -> Mapping[str, str] | None:
    """GGUF name pattern → Hugging Face name pattern, or None for an unknown architecture.

    `{i}` stands for the layer, `{e}` for every expert of a stacked tensor. Keys without a suffix
    stand for `.weight` and `.bias` alike; keys with one are exact.
    """
    names = _NAMES.get(architecture)
    return None if names is None else MappingProxyType(names)


def hf_tensor_name(architecture: str, gguf_name: str) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; None when not known.

    `{e}` is left in the name of a stack of experts. GGUF_ONLY tensors have no counterpart: None.
    """
    names = _NAMES.get(architecture)
    if names is None:
        return None
    layer, pattern = "", gguf_name
    if gguf_name.startswith("blk."):
        layer, dot, rest = gguf_name[4:].partition(".")
        if not dot or not layer.isdecimal():
            return None
        pattern = "blk.{i}." + rest
    suffix = ""
    found = names.get(pattern)
    if found is None:
        base, _, ending = pattern.rpartition(".")
        if ending not in ("weight", "bias"):
            return None
        found, suffix = names.get(base), "." + ending
    return None if found is None else found.replace("{i}", layer) + suffix


def half_split_rows(num_heads: int, head_dim: int) -> list[int]:
    """Row order that undoes the interleaving: `hf_rows = gguf_rows[half_split_rows(…)]`.

    For a Q or K matrix [num_heads · head_dim, in] (or its bias) of an INTERLEAVED_ROTARY
    architecture; num_heads is the number of KV heads for K. GGUF's rows 2d and 2d + 1 of a head are
    Hugging Face's rows d and head_dim/2 + d.
    """
    half = head_dim // 2
    return [
        head * head_dim + 2 * pair + side
        for head in range(num_heads)
        for side in (0, 1)
        for pair in range(half)
    ]
