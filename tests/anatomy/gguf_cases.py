"""Tiny models of every kind that GGUF carries, and what llama.cpp's converter makes of each.

Data and the layout of tensors only; the names come from the reference map of `gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from checkpoint_files import Value

from ullage.anatomy.spec import LatentAttention, ModelSpec
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.anatomy.tensors.tensor import TensorSpec

# The keys that every converter writes, by the configuration's key.
WRITTEN = {
    "num_hidden_layers": ("block_count", "uint32"),
    "max_position_embeddings": ("context_length", "uint32"),
    "hidden_size": ("embedding_length", "uint32"),
    "intermediate_size": ("feed_forward_length", "uint32"),
    "num_attention_heads": ("attention.head_count", "uint32"),
    "num_key_value_heads": ("attention.head_count_kv", "uint32"),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", "float32"),
    "layer_norm_eps": ("attention.layer_norm_epsilon", "float32"),
    "rope_theta": ("rope.freq_base", "float32"),
}
BASE = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 80,
    "dtype": "float16",
}
RMS = {**BASE, "rms_norm_eps": 2.0**-17, "rope_theta": 10000.0}
LAYER = {**BASE, "layer_norm_eps": 2.0**-17}


@dataclass(frozen=True)
class Case:
    """A configuration, and what its converter writes beyond WRITTEN (prefix left out)."""

    config: Mapping[str, object]
    extra: Mapping[str, Value] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


def rms(model_type: str, architecture: str, **keys: object) -> dict[str, object]:
    return {**RMS, "model_type": model_type, "architectures": [architecture], **keys}


EXPERTS: dict[str, Value] = {"expert_count": ("uint32", 8), "expert_used_count": ("uint32", 2)}

CASES = {
    "llama": Case(rms("llama", "LlamaForCausalLM"), {"rope.dimension_count": ("uint32", 16)}),
    "llama, tied, biased, wide heads": Case(
        rms(
            "llama", "LlamaForCausalLM", head_dim=32, attention_bias=True, tie_word_embeddings=True
        ),
        {
            "rope.dimension_count": ("uint32", 32),
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
        },
    ),
    "llama: Mixtral": Case(
        rms("mixtral", "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2),
        {**EXPERTS, "rope.dimension_count": ("uint32", 16)},
    ),
    "qwen2": Case(rms("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True)),
    "qwen2moe": Case(
        rms(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
        {
            **EXPERTS,
            "expert_feed_forward_length": ("uint32", 32),
            "expert_shared_feed_forward_length": ("uint32", 48),
        },
    ),
    "qwen3": Case(
        rms("qwen3", "Qwen3ForCausalLM", head_dim=32),
        {"attention.key_length": ("uint32", 32), "attention.value_length": ("uint32", 32)},
    ),
    "qwen3moe": Case(
        rms(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            moe_intermediate_size=32,
        ),
        {
            **EXPERTS,
            "expert_feed_forward_length": ("uint32", 32),
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
        },
    ),
    "gemma": Case(
        rms("gemma", "GemmaForCausalLM", head_dim=32, tie_word_embeddings=True),
        {"attention.key_length": ("uint32", 32), "attention.value_length": ("uint32", 32)},
    ),
    "gemma2": Case(
        rms(
            "gemma2",
            "Gemma2ForCausalLM",
            head_dim=32,
            tie_word_embeddings=True,
            sliding_window=128,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            query_pre_attn_scalar=32,
        ),
        {
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
            "attention.sliding_window": ("uint32", 128),
            "attn_logit_softcapping": ("float32", 50.0),
            "final_logit_softcapping": ("float32", 30.0),
        },
    ),
    "gemma3": Case(
        rms(
            "gemma3_text",
            "Gemma3ForCausalLM",
            head_dim=32,
            num_hidden_layers=7,
            tie_word_embeddings=True,
            sliding_window=128,
            sliding_window_pattern=6,
            rope_theta=1e6,
            rope_local_base_freq=10000.0,
            query_pre_attn_scalar=32,
        ),
        {
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
            "attention.sliding_window": ("uint32", 128),
        },
    ),
    "phi3": Case(
        rms("phi3", "Phi3ForCausalLM", sliding_window=None),
        {"rope.dimension_count": ("uint32", 16)},
    ),
    "phi2": Case(
        {
            **LAYER,
            "model_type": "phi",
            "architectures": ["PhiForCausalLM"],
            "num_key_value_heads": 4,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
        {"rope.dimension_count": ("uint32", 8)},
    ),
    "starcoder2": Case(
        {
            **LAYER,
            "model_type": "starcoder2",
            "architectures": ["Starcoder2ForCausalLM"],
            "rope_theta": 10000.0,
            "sliding_window": None,
            "use_bias": True,
            "tie_word_embeddings": True,
        }
    ),
    "stablelm": Case(
        {
            **LAYER,
            "model_type": "stablelm",
            "architectures": ["StableLmForCausalLM"],
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
        },
        {"rope.dimension_count": ("uint32", 4)},
    ),
    "olmo2": Case(rms("olmo2", "Olmo2ForCausalLM")),
    "olmoe": Case(
        rms("olmoe", "OlmoeForCausalLM", num_experts=8, num_experts_per_tok=2), dict(EXPERTS)
    ),
    "granite": Case(
        rms(
            "granite",
            "GraniteForCausalLM",
            attention_multiplier=0.25,
            embedding_multiplier=12.0,
            residual_multiplier=0.5,
            logits_scaling=8.0,
        ),
        {
            "attention.scale": ("float32", 0.25),
            "embedding_scale": ("float32", 12.0),
            "residual_scale": ("float32", 0.5),
            "logit_scale": ("float32", 8.0),
        },
    ),
    "smollm3": Case(rms("smollm3", "SmolLM3ForCausalLM", tie_word_embeddings=True)),
    "exaone4": Case(rms("exaone4", "Exaone4ForCausalLM", sliding_window=None)),
    "glm4": Case(
        rms("glm4", "Glm4ForCausalLM", head_dim=16, partial_rotary_factor=0.5),
        {"rope.dimension_count": ("uint32", 8), "attention.key_length": ("uint32", 16)},
    ),
    "ernie4_5": Case(rms("ernie4_5", "Ernie4_5ForCausalLM", head_dim=16)),
    "seed_oss": Case(
        rms("seed_oss", "SeedOssForCausalLM", head_dim=16, attention_bias=True),
        {"attention.key_length": ("uint32", 16)},
    ),
    "command-r": Case(
        {
            **LAYER,
            "model_type": "cohere",
            "architectures": ["CohereForCausalLM"],
            "rope_theta": 10000.0,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
        },
        {"logit_scale": ("float32", 0.0625)},
    ),
    "nemotron": Case(
        {
            **LAYER,
            "model_type": "nemotron",
            "architectures": ["NemotronForCausalLM"],
            "norm_eps": 2.0**-17,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        {"rope.dimension_count": ("uint32", 8)},
    ),
    "gpt2": Case(
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": 4,
            "n_embd": 64,
            "n_head": 4,
            "n_positions": 512,
            "n_inner": 256,
            "vocab_size": 80,
            "layer_norm_epsilon": 2.0**-17,
            "tie_word_embeddings": True,
            "dtype": "float16",
        },
        {
            "block_count": ("uint32", 4),
            "context_length": ("uint32", 512),
            "embedding_length": ("uint32", 64),
            "feed_forward_length": ("uint32", 256),
            "attention.head_count": ("uint32", 4),
            "attention.layer_norm_epsilon": ("float32", 2.0**-17),
        },
    ),
    "gptneox": Case(
        {
            **LAYER,
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            "num_key_value_heads": 4,
            "rotary_pct": 0.25,
            "rope_theta": 10000.0,
            "use_parallel_residual": True,
        },
        {"rope.dimension_count": ("uint32", 4), "use_parallel_residual": ("bool", True)},
        silent=("num_key_value_heads",),
    ),
    "deepseek2: V3": Case(
        rms(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            num_nextn_predict_layers=0,
        ),
        {
            **EXPERTS,
            "expert_shared_count": ("uint32", 1),
            "expert_feed_forward_length": ("uint32", 32),
            "expert_group_count": ("uint32", 2),
            "expert_group_used_count": ("uint32", 1),
            "leading_dense_block_count": ("uint32", 1),
            "attention.q_lora_rank": ("uint32", 24),
            "attention.kv_lora_rank": ("uint32", 16),
            "attention.head_count_kv": ("uint32", 1),
            "attention.key_length": ("uint32", 24),
            "attention.value_length": ("uint32", 16),
            "attention.key_length_mla": ("uint32", 24),
            "attention.value_length_mla": ("uint32", 12),
            "rope.dimension_count": ("uint32", 8),
        },
    ),
    "gpt-oss": Case(
        rms(
            "gpt_oss",
            "GptOssForCausalLM",
            head_dim=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=128,
            attention_bias=True,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 128,
            },
        ),
        {
            **EXPERTS,
            "expert_feed_forward_length": ("uint32", 96),
            "attention.key_length": ("uint32", 16),
            "attention.value_length": ("uint32", 16),
            "attention.sliding_window": ("uint32", 128),
            "rope.scaling.type": ("string", "yarn"),
            "rope.scaling.factor": ("float32", 32.0),
            "rope.scaling.original_context_length": ("uint32", 128),
        },
    ),
    "minimax-m2": Case(
        rms(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            head_dim=32,
            rotary_dim=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            use_qk_norm=True,
        ),
        {
            **EXPERTS,
            "expert_feed_forward_length": ("uint32", 96),
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
            "rope.dimension_count": ("uint32", 16),
        },
    ),
    "mistral3": Case(rms("mistral", "MistralForCausalLM", head_dim=16, sliding_window=None)),
    "arcee": Case(rms("arcee", "ArceeForCausalLM", head_dim=16)),
    "olmo": Case(
        {
            **BASE,
            "model_type": "olmo",
            "architectures": ["OlmoForCausalLM"],
            "rope_theta": 10000.0,
        }
    ),
    "cohere2": Case(
        {
            **LAYER,
            "model_type": "cohere2",
            "architectures": ["Cohere2ForCausalLM"],
            "rope_theta": 10000.0,
            "logit_scale": 0.0625,
            "sliding_window": 128,
            "tie_word_embeddings": True,
        },
        {
            "logit_scale": ("float32", 0.0625),
            "attention.sliding_window": ("uint32", 128),
            "rope.dimension_count": ("uint32", 16),
        },
    ),
    "bloom": Case(
        {
            "model_type": "bloom",
            "architectures": ["BloomForCausalLM"],
            "n_layer": 4,
            "hidden_size": 64,
            "n_head": 4,
            "vocab_size": 80,
            "seq_length": 512,
            "layer_norm_epsilon": 2.0**-17,
            "tie_word_embeddings": True,
            "dtype": "float16",
        },
        {
            "block_count": ("uint32", 4),
            "context_length": ("uint32", 512),
            "embedding_length": ("uint32", 64),
            "feed_forward_length": ("uint32", 256),
            "attention.head_count": ("uint32", 4),
            "attention.head_count_kv": ("uint32", 4),
            "attention.layer_norm_epsilon": ("float32", 2.0**-17),
        },
    ),
    "falcon": Case(
        {
            "model_type": "falcon",
            "architectures": ["FalconForCausalLM"],
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "bias": False,
            "alibi": False,
            "vocab_size": 80,
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 2.0**-17,
            "tie_word_embeddings": True,
            "dtype": "float16",
        },
        {
            "block_count": ("uint32", 4),
            "context_length": ("uint32", 2048),
            "embedding_length": ("uint32", 64),
            "feed_forward_length": ("uint32", 256),
            "attention.head_count": ("uint32", 4),
            "attention.head_count_kv": ("uint32", 1),
            "attention.layer_norm_epsilon": ("float32", 2.0**-17),
        },
    ),
    "mamba": Case(
        {
            "model_type": "mamba",
            "architectures": ["MambaForCausalLM"],
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "expand": 2,
            "conv_kernel": 4,
            "state_size": 16,
            "time_step_rank": 4,
            "use_conv_bias": True,
            "vocab_size": 80,
            "layer_norm_epsilon": 2.0**-17,
            "tie_word_embeddings": True,
            "dtype": "float16",
        },
        {
            "block_count": ("uint32", 4),
            "context_length": ("uint32", 2**20),
            "embedding_length": ("uint32", 64),
            "feed_forward_length": ("uint32", 0),
            "attention.head_count": ("uint32", 0),
            "attention.layer_norm_rms_epsilon": ("float32", 2.0**-17),
            "ssm.conv_kernel": ("uint32", 4),
            "ssm.inner_size": ("uint32", 128),
            "ssm.state_size": ("uint32", 16),
            "ssm.time_step_rank": ("uint32", 4),
        },
    ),
    "lfm2": Case(
        {
            **BASE,
            "model_type": "lfm2",
            "architectures": ["Lfm2ForCausalLM"],
            "norm_eps": 2.0**-17,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
        {
            "attention.head_count_kv": ("[uint32]", [0, 0, 2, 0]),
            "attention.layer_norm_rms_epsilon": ("float32", 2.0**-17),
            "shortconv.l_cache": ("uint32", 3),
        },
    ),
    "bert": Case(
        {
            "model_type": "bert",
            "architectures": ["BertModel"],
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "vocab_size": 80,
            "type_vocab_size": 2,
            "max_position_embeddings": 512,
            "layer_norm_eps": 2.0**-17,
            "dtype": "float16",
        },
        {},
    ),
    "dots1": Case(
        rms(
            "dots1",
            "Dots1ForCausalLM",
            head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            sliding_window=None,
        ),
        {
            **EXPERTS,
            "expert_shared_count": ("uint32", 1),
            "expert_feed_forward_length": ("uint32", 32),
            "leading_dense_block_count": ("uint32", 1),
        },
    ),
    "glm4moe": Case(
        rms(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            head_dim=32,
            partial_rotary_factor=0.5,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            num_nextn_predict_layers=0,
        ),
        {
            **EXPERTS,
            "expert_shared_count": ("uint32", 1),
            "expert_feed_forward_length": ("uint32", 32),
            "leading_dense_block_count": ("uint32", 1),
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
            "rope.dimension_count": ("uint32", 16),
        },
    ),
    "ernie4_5-moe": Case(
        rms(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_interval=1,
            moe_intermediate_size=32,
            tie_word_embeddings=True,
        ),
        {
            **EXPERTS,
            "expert_shared_count": ("uint32", 2),
            "expert_feed_forward_length": ("uint32", 32),
            "leading_dense_block_count": ("uint32", 1),
            "interleave_moe_layer_step": ("uint32", 1),
        },
    ),
    "qwen3next": Case(
        rms(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            head_dim=32,
            partial_rotary_factor=0.25,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
        {
            **EXPERTS,
            "expert_feed_forward_length": ("uint32", 32),
            "expert_shared_feed_forward_length": ("uint32", 48),
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
            "rope.dimension_count": ("uint32", 8),
            "full_attention_interval": ("uint32", 4),
            "ssm.conv_kernel": ("uint32", 4),
            "ssm.state_size": ("uint32", 16),
            "ssm.group_count": ("uint32", 2),
            "ssm.time_step_rank": ("uint32", 4),
            "ssm.inner_size": ("uint32", 96),
        },
    ),
    "qwen35": Case(
        rms(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            head_dim=32,
            partial_rotary_factor=0.25,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
        {
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
            "rope.dimension_count": ("uint32", 8),
            "full_attention_interval": ("uint32", 4),
            "ssm.conv_kernel": ("uint32", 4),
            "ssm.state_size": ("uint32", 16),
            "ssm.group_count": ("uint32", 2),
            "ssm.time_step_rank": ("uint32", 4),
            "ssm.inner_size": ("uint32", 96),
        },
    ),
    "qwen35moe": Case(
        rms(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            head_dim=32,
            partial_rotary_factor=0.25,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
        {
            **EXPERTS,
            "expert_feed_forward_length": ("uint32", 32),
            "expert_shared_feed_forward_length": ("uint32", 48),
            "attention.key_length": ("uint32", 32),
            "attention.value_length": ("uint32", 32),
            "rope.dimension_count": ("uint32", 8),
            "full_attention_interval": ("uint32", 4),
            "ssm.conv_kernel": ("uint32", 4),
            "ssm.state_size": ("uint32", 16),
            "ssm.group_count": ("uint32", 2),
            "ssm.time_step_rank": ("uint32", 4),
            "ssm.inner_size": ("uint32", 96),
        },
    ),
    "starcoder": Case(
        {
            "model_type": "gpt_bigcode",
            "architectures": ["GPTBigCodeForCausalLM"],
            "n_layer": 4,
            "n_embd": 64,
            "n_head": 4,
            "n_positions": 512,
            "n_inner": 256,
            "multi_query": True,
            "vocab_size": 80,
            "layer_norm_epsilon": 2.0**-17,
            "tie_word_embeddings": True,
            "dtype": "float16",
        },
        {
            "block_count": ("uint32", 4),
            "context_length": ("uint32", 512),
            "embedding_length": ("uint32", 64),
            "feed_forward_length": ("uint32", 256),
            "attention.head_count": ("uint32", 4),
            "attention.head_count_kv": ("uint32", 1),
            "attention.layer_norm_epsilon": ("float32", 2.0**-17),
        },
    ),
    "deepseek2: V2-Lite, as older files": Case(
        rms(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
        ),
        {
            **EXPERTS,
            "expert_shared_count": ("uint32", 1),
            "expert_feed_forward_length": ("uint32", 32),
            "leading_dense_block_count": ("uint32", 1),
            "attention.kv_lora_rank": ("uint32", 16),
            "attention.key_length": ("uint32", 24),
            "attention.value_length": ("uint32", 12),
            "rope.dimension_count": ("uint32", 8),
        },
    ),
    "phimoe": Case(
        {
            **BASE,
            "model_type": "phimoe",
            "architectures": ["PhimoeForCausalLM"],
            "rms_norm_eps": 2.0**-17,
            "rope_theta": 10000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": None,
        },
        dict(EXPERTS),
    ),
    "granitemoe": Case(
        rms(
            "granitemoe",
            "GraniteMoeForCausalLM",
            num_local_experts=8,
            num_experts_per_tok=2,
            attention_multiplier=0.25,
            embedding_multiplier=12.0,
            residual_multiplier=0.5,
            logits_scaling=8.0,
        ),
        {
            **EXPERTS,
            "attention.scale": ("float32", 0.25),
            "embedding_scale": ("float32", 12.0),
            "residual_scale": ("float32", 0.5),
            "logit_scale": ("float32", 8.0),
        },
    ),
}


def written_metadata(architecture: str, case: Case) -> dict[str, Value]:
    held: dict[str, Value] = {"general.architecture": ("string", architecture)}
    for key, (suffix, kind) in WRITTEN.items():
        if key in case.config and key not in case.silent:
            held[f"{architecture}.{suffix}"] = (kind, case.config[key])
    held.update({f"{architecture}.{key}": value for key, value in case.extra.items()})
    return held


def gguf_tensors(architecture: str, spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The spec's tensors under GGUF names, as the reference map and the converter give them."""
    gguf = pytest.importorskip("gguf")
    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, spec.num_layers)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    # The converter splits Qwen3.5's stacked gate and up before it maps names.
    for tensor in expected_tensors(spec, "each" if architecture == "qwen35moe" else None):
        for name, shape in converted(architecture, spec, tensor):
            base, suffix = name, ""
            for ending in (".weight", ".bias"):
                if name.endswith(ending):
                    base, suffix = name.removesuffix(ending), ending
            found = names.get_name(base, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            tensors[found + suffix] = ("F16", shape)
    return tensors


def converted(
    architecture: str, spec: ModelSpec, tensor: TensorSpec
) -> list[tuple[str, tuple[int, ...]]]:
    """What llama.cpp's converter makes of one tensor, before names are mapped."""
    name = tensor.name.replace("experts.{e}.", "experts.")
    shape = (tensor.count, *tensor.shape) if "{e}" in tensor.name else tensor.shape
    if architecture == "bert" and "pooler." in name:  # its converter leaves it out
        return []
    layer = f"model.layers.{tensor.layer}"
    if architecture in ("bloom", "bert"):  # exported from the inner model
        name = name.removeprefix("transformer.").removeprefix("bert.")
    if name.endswith("e_score_correction_bias"):
        name = name.removesuffix("_bias") + ".bias"
    if name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    if name.endswith("sinks"):
        name += ".weight"
    if architecture == "gpt2" and tensor.layer is not None and len(shape) == 2:
        shape = shape[::-1]  # Conv1D's [in, out] is turned
    if name.endswith("self_attn.kv_b_proj.weight"):  # stored as its two halves, K turned
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, LatentAttention)
        heads, rank = mixer.num_heads, mixer.kv_lora_rank
        return [
            (f"{layer}.self_attn.k_b_proj.weight", (heads, rank, mixer.qk_nope_head_dim)),
            (f"{layer}.self_attn.v_b_proj.weight", (heads, mixer.v_head_dim, rank)),
        ]
    if name.endswith("input_linear.weight"):  # GraniteMoE: gate above up
        half = (shape[0], shape[1] // 2, shape[2])
        return [(f"{layer}.mlp.experts.{part}_proj.weight", half) for part in ("gate", "up")]
    if architecture == "gpt-oss" and ".experts." in name:  # gate and up interleaved, all turned
        ending = ".bias" if name.endswith("_bias") else ".weight"
        turned = shape if len(shape) == 2 else (shape[0], shape[2], shape[1])
        if "gate_up_proj" not in name:
            return [(f"{layer}.mlp.experts.down_proj{ending}", turned)]
        half = (turned[0], turned[1] // 2, *turned[2:])
        return [(f"{layer}.mlp.experts.{part}_proj{ending}", half) for part in ("gate", "up")]
    return [(name, shape)]
