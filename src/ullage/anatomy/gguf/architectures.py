"""What a GGUF architecture is called elsewhere, and how its metadata keys are spelled there.

Holds one row per architecture, as data. Reading the rows is `config.py`. Sources: the keys of
`gguf` 0.19 and the converters of llama.cpp; the spellings are those of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One row: `model_type` and `architecture` as in a config.json.

    `keys` maps metadata keys (without the architecture's prefix) to configuration keys, beyond the
    common ones. `layer_norm_key` names the epsilon of a LayerNorm. `rotary_key` says how a rotary
    part narrower than the head is told: as a fraction, unless it ends in `_dim`.
    `bias_key` is the switch of the attention's biases, whose presence the header proves (None: the
    family fixes them). `constants` are facts of the architecture that no key holds.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    layer_norm_key: str = "layer_norm_eps"
    rotary_key: str = "partial_rotary_factor"
    bias_key: str | None = "attention_bias"
    mlp_bias_key: str | None = None
    constants: Mapping[str, object] = field(default_factory=dict)


# Every architecture's keys. Widths, head counts and epsilons.
COMMON_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}

_EXPERT_KEYS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_QWEN_EXPERTS = {
    **_EXPERT_KEYS,
    "expert_count": "num_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_DEEPSEEK_EXPERTS = {
    **_EXPERT_KEYS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_LATENT = {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"}
_SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_DELTA_NET = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_LOGIT_SCALE = {"logit_scale": "logit_scale"}

GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "llama", "LlamaForCausalLM", keys=_LOCAL_EXPERTS, mlp_bias_key="mlp_bias"
    ),
    "mistral3": GgufArchitecture("mistral", "MistralForCausalLM", bias_key=None),
    "arcee": GgufArchitecture("arcee", "ArceeForCausalLM", mlp_bias_key="mlp_bias"),
    "smollm3": GgufArchitecture("smollm3", "SmolLM3ForCausalLM", mlp_bias_key="mlp_bias"),
    "olmo": GgufArchitecture("olmo", "OlmoForCausalLM"),
    "olmo2": GgufArchitecture("olmo2", "Olmo2ForCausalLM"),
    "olmoe": GgufArchitecture("olmoe", "OlmoeForCausalLM", keys=_QWEN_EXPERTS),
    "qwen2": GgufArchitecture(
        "qwen2", "Qwen2ForCausalLM", bias_key=None, constants={"use_sliding_window": False}
    ),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", keys=_QWEN_EXPERTS, bias_key=None
    ),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys=_QWEN_EXPERTS,
        # llama.cpp's build_moe_ffn is called with norm_w (models/qwen3moe.cpp).
        constants={"norm_topk_prob": True},
    ),
    "qwen3next": GgufArchitecture(
        "qwen3_next", "Qwen3NextForCausalLM", keys={**_QWEN_EXPERTS, **_DELTA_NET}
    ),
    "qwen35": GgufArchitecture("qwen3_5_text", "Qwen3_5ForCausalLM", keys=_DELTA_NET),
    "qwen35moe": GgufArchitecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", keys={**_QWEN_EXPERTS, **_DELTA_NET}
    ),
    "gemma": GgufArchitecture("gemma", "GemmaForCausalLM"),
    "gemma2": GgufArchitecture(
        "gemma2",
        "Gemma2ForCausalLM",
        keys=_SOFT_CAPS,
        # llama.cpp's own value for files that are silent.
        constants={"sliding_window": 4096},
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys={**_SOFT_CAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        # llama.cpp's own values when the file is silent (models/gemma3: pattern 6, base 10000).
        constants={"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    ),
    "phi2": GgufArchitecture(
        "phi", "PhiForCausalLM", layer_norm_key="layer_norm_eps", bias_key=None
    ),
    "phi3": GgufArchitecture("phi3", "Phi3ForCausalLM", bias_key=None),
    "phimoe": GgufArchitecture(
        "phimoe",
        "PhimoeForCausalLM",
        keys=_LOCAL_EXPERTS,
        layer_norm_key="rms_norm_eps",
        constants={"lm_head_bias": True},
    ),
    "gpt2": GgufArchitecture(
        "gpt2", "GPT2LMHeadModel", layer_norm_key="layer_norm_epsilon", bias_key=None
    ),
    "starcoder": GgufArchitecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        layer_norm_key="layer_norm_epsilon",
        bias_key=None,
    ),
    "starcoder2": GgufArchitecture(
        "starcoder2", "Starcoder2ForCausalLM", layer_norm_key="norm_epsilon", bias_key="use_bias"
    ),
    "gptneox": GgufArchitecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        keys={"use_parallel_residual": "use_parallel_residual"},
        rotary_key="rotary_pct",
    ),
    "falcon": GgufArchitecture(
        "falcon", "FalconForCausalLM", layer_norm_key="layer_norm_epsilon", bias_key="bias"
    ),
    "bloom": GgufArchitecture(
        "bloom", "BloomForCausalLM", layer_norm_key="layer_norm_epsilon", bias_key=None
    ),
    "stablelm": GgufArchitecture("stablelm", "StableLmForCausalLM", bias_key="use_qkv_bias"),
    "command-r": GgufArchitecture("cohere", "CohereForCausalLM", keys=_LOGIT_SCALE),
    "cohere2": GgufArchitecture("cohere2", "Cohere2ForCausalLM", keys=_LOGIT_SCALE),
    "granite": GgufArchitecture(
        "granite", "GraniteForCausalLM", keys=_GRANITE, mlp_bias_key="mlp_bias"
    ),
    "granitemoe": GgufArchitecture(
        "granitemoe", "GraniteMoeForCausalLM", keys={**_GRANITE, **_LOCAL_EXPERTS}
    ),
    "nemotron": GgufArchitecture(
        "nemotron",
        "NemotronForCausalLM",
        layer_norm_key="norm_eps",
        mlp_bias_key="mlp_bias",
    ),
    "ernie4_5": GgufArchitecture("ernie4_5", "Ernie4_5ForCausalLM", bias_key="use_bias"),
    "ernie4_5-moe": GgufArchitecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        bias_key="use_bias",
    ),
    "seed_oss": GgufArchitecture(
        "seed_oss", "SeedOssForCausalLM", constants={"attention_out_bias": False}
    ),
    "exaone4": GgufArchitecture("exaone4", "Exaone4ForCausalLM", bias_key=None),
    "glm4": GgufArchitecture("glm4", "Glm4ForCausalLM"),
    "glm4moe": GgufArchitecture("glm4_moe", "Glm4MoeForCausalLM", keys=_DEEPSEEK_EXPERTS),
    "dots1": GgufArchitecture("dots1", "Dots1ForCausalLM", keys=_DEEPSEEK_EXPERTS),
    "deepseek2": GgufArchitecture(
        "deepseek_v2", "DeepseekV2ForCausalLM", keys={**_DEEPSEEK_EXPERTS, **_LATENT}
    ),
    "minimax-m2": GgufArchitecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        keys={**_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        rotary_key="rotary_dim",
        bias_key=None,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        keys={**_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
    ),
    "mamba": GgufArchitecture(
        "mamba",
        "MambaForCausalLM",
        keys={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
            "ssm.inner_size": "intermediate_size",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        },
        bias_key=None,
    ),
    "lfm2": GgufArchitecture(
        "lfm2",
        "Lfm2ForCausalLM",
        keys={
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
        },
        bias_key=None,
        # The width in the file is the final one; the original rule must not round it again.
        constants={"block_auto_adjust_ff_dim": False},
    ),
    "bert": GgufArchitecture("bert", "BertModel", layer_norm_key="layer_norm_eps", bias_key=None),
}
