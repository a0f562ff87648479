"""A GGUF file tells the same model as the config.json that it was converted from.

Each case lays out the tensors of a tiny model under GGUF names (by the reference name map), writes
the metadata as llama.cpp's converter does, and expects the spec of the original configuration.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from checkpoint_files import GgufBuilder, Value, llama_gguf

from ullage.anatomy import load, read_config
from ullage.anatomy.compare import compare
from ullage.anatomy.gguf import read_gguf
from ullage.anatomy.gguf_config import config_from_gguf, weight_scheme
from ullage.anatomy.gguf_rope import llama3_table
from ullage.anatomy.gguf_types import GGML_BLOCKS
from ullage.anatomy.spec import LatentAttention, ModelSpec
from ullage.anatomy.tensor_spec import TensorSpec
from ullage.anatomy.tensors import expected_tensors
from ullage.costs.weights import stored_bytes
from ullage.errors import BadInput, MalformedCheckpoint, UnsupportedModel

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
    for tensor in expected_tensors(spec):
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


@pytest.mark.parametrize("name", CASES)
def test_the_file_tells_the_model_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    case, architecture = CASES[name], name.partition(":")[0].partition(",")[0]
    original = read_config(case.config, file="config.json").spec
    file = tmp_path / "m.gguf"
    tensors = gguf_tensors(architecture, original)
    file.write_bytes(GgufBuilder().file(written_metadata(architecture, case), tensors))
    model = load(file)
    found = model.anatomy.spec
    assert not found.unknowns
    assert model.anatomy.low is model.anatomy.spec is model.anatomy.high
    assert found.layers == original.layers
    assert replace(found, layers=(), quantization=None) == replace(original, layers=())
    assert model.checkpoint is not None
    comparison = compare(found, model.checkpoint)
    assert comparison.agrees, comparison
    assert comparison.num_parameters == sum(t.num_elements for t in model.checkpoint.tensors)


# --- sources, scaling, quantisation --------------------------------------------------------------


def test_every_key_says_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf())
    found = config_from_gguf([read_gguf(file)])
    assert set(found.sources) == set(found.config)
    assert found.sources["num_hidden_layers"] == "header: llama.block_count"
    assert found.sources["vocab_size"] == "header: rows of token_embd.weight"
    assert found.sources["tie_word_embeddings"] == "header: no output.weight is stored"
    sources = {s.field: s.source for s in load(file).anatomy.sources}
    assert sources["hidden_size"] == "header: llama.embedding_length"


def factors(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_llama3_scaling_is_recognised_by_its_table(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    table = llama3_table(16, 500000.0, 8.0)
    file.write_bytes(
        llama_gguf(
            extra={"llama.rope.freq_base": ("float32", 500000.0)},
            extra_tensors={"rope_freqs.weight": ("F32", (8,))},
            data={"rope_freqs.weight": factors(table)},
        )
    )
    scaling = config_from_gguf([read_gguf(file)]).config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_llama3_s_table_is_the_one_that_transformers_divides_by() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    table = torch.tensor(llama3_table(128, 500000.0, 8.0), dtype=torch.float64)
    torch.testing.assert_close(plain / table, scaled.double(), rtol=1e-5, atol=0)


def test_a_table_that_no_rule_gives_is_not_guessed_at(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(
        llama_gguf(
            extra_tensors={"rope_freqs.weight": ("F32", (8,))},
            data={"rope_freqs.weight": factors([1, 1, 1, 2, 3, 5, 7, 11])},
        )
    )
    scaling = config_from_gguf([read_gguf(file)]).config["rope_scaling"]
    assert scaling == {"rope_type": "gguf_table"}


@pytest.mark.parametrize("ggml_type", sorted(GGML_BLOCKS))
def test_a_scheme_adds_up_to_the_block(ggml_type: str) -> None:
    elements, num_bytes = GGML_BLOCKS[ggml_type]
    scheme = weight_scheme(ggml_type)
    blocks = 1 if scheme.group < 0 else elements
    assert scheme.bits * blocks + scheme.scale_bits == num_bytes * 8
    assert 0 < scheme.bits <= 64


@pytest.mark.parametrize("name", ["llama", "llama: Mixtral", "qwen3", "qwen3moe", "gemma3"])
def test_a_quantised_file_weighs_what_it_stores(tmp_path: Path, name: str) -> None:
    case, architecture = CASES[name], name.partition(":")[0]
    spec = read_config(case.config, file="config.json").spec
    tensors = {
        key: ("Q8_0" if len(shape) > 1 and shape[-1] % 32 == 0 else "F32", shape)
        for key, (_, shape) in gguf_tensors(architecture, spec).items()
    }
    file = tmp_path / "m.gguf"
    file.write_bytes(GgufBuilder().file(written_metadata(architecture, case), tensors))
    model = load(file)
    assert model.checkpoint is not None
    assert stored_bytes(model.anatomy.spec).total == model.checkpoint.num_bytes


def test_the_real_model_is_smollm2() -> None:
    from test_gguf import smollm2

    model = load(smollm2())
    spec = model.anatomy.spec
    assert (spec.model_type, spec.num_layers, spec.hidden_size) == ("llama", 30, 576)
    assert model.checkpoint is not None
    comparison = compare(spec, model.checkpoint)
    assert comparison.agrees
    assert comparison.num_parameters == 134_515_008  # SmolLM2-135M, tied
    assert stored_bytes(spec).total == model.checkpoint.num_bytes


def test_transformers_reads_the_same_configuration() -> None:
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    from test_gguf import smollm2

    reference = module.load_gguf_checkpoint(str(smollm2()))["config"]
    ours = config_from_gguf([read_gguf(smollm2())]).config
    assert {key: ours[key] for key in reference if key != "_model_name_or_path"} == {
        key: value for key, value in reference.items() if key != "_model_name_or_path"
    }


# --- contradictions ------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Value], type[BadInput], str]] = {
    "another architecture": (
        {"general.architecture": ("string", "rwkv7")},
        UnsupportedModel,
        'architecture "rwkv7" is not known',
    ),
    "no architecture": ({"general.architecture": ("uint32", 3)}, MalformedCheckpoint, "a name"),
    "a billion layers": (
        {"llama.block_count": ("uint32", 10**9)},
        MalformedCheckpoint,
        "block_count: 1000000000; expected 2",
    ),
    "too few layers": ({"llama.block_count": ("uint32", 1)}, MalformedCheckpoint, "expected 2"),
    "another width": (
        {"llama.embedding_length": ("uint32", 32)},
        MalformedCheckpoint,
        "expected 64, the width of token_embd.weight",
    ),
    "a width in words": (
        {"llama.embedding_length": ("string", "64")},
        MalformedCheckpoint,
        "a number",
    ),
    "a fraction of a layer": (
        {"llama.block_count": ("float32", 1.5)},
        MalformedCheckpoint,
        "a whole number",
    ),
    "not a number": (
        {"llama.rope.freq_base": ("float32", float("nan"))},
        MalformedCheckpoint,
        "a number from 0",
    ),
    "layers that differ": (
        {"llama.attention.head_count_kv": ("[uint32]", [2, 4])},
        UnsupportedModel,
        "differ from layer to layer",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_contradict_the_tensors_are_named(tmp_path: Path, case: str) -> None:
    extra, error, fragment = WRONG[case]
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf(extra=extra))
    with pytest.raises(error) as caught:
        load(file)
    assert fragment in str(caught.value)
    assert str(file) in str(caught.value)


def test_layers_that_agree_are_one_value(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf(extra={"llama.attention.head_count_kv": ("[uint32]", [2, 2])}))
    assert config_from_gguf([read_gguf(file)]).config["num_key_value_heads"] == 2


def test_a_directory_of_several_models_needs_a_choice(tmp_path: Path) -> None:
    for name in ("m-Q4.gguf", "m-Q8.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(llama_gguf())
    with pytest.raises(MalformedCheckpoint, match="holds 2 GGUF models"):
        load(tmp_path)
    (tmp_path / "m-Q8.gguf").unlink()
    assert load(tmp_path).anatomy.spec.num_layers == 2


def test_a_model_without_all_its_parts_is_not_sized(tmp_path: Path) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    file.write_bytes(llama_gguf(extra={"split.no": ("uint16", 0), "split.count": ("uint16", 2)}))
    with pytest.raises(MalformedCheckpoint, match="1 parts of this model are not there"):
        load(file)
