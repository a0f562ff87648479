"""What vLLM 0.32 accepts, as tables of data: head sizes, RoPE kinds, quantisation methods.

Holds facts read from vLLM 0.32's sources, each with its file. What follows from them for one model
is the rules' business.
"""

from __future__ import annotations

CPU_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""vllm/v1/attention/backends/cpu_attn.py, the only attention of the CPU platform."""

CPU_LATENT_SIZES = frozenset({576})
"""vllm/v1/attention/backends/mla/cpu_mla.py: kv_lora_rank + qk_rope_head_dim."""

FLASHINFER_HEAD_SIZES = frozenset({64, 128, 256, 512})
"""vllm/v1/attention/backends/flashinfer.py."""

FLASH_ATTENTION_MULTIPLE = 8
FLASH_ATTENTION_LARGEST = 256
"""vllm/v1/attention/backends/flash_attn.py; up to 512 only where FlashAttention 4 runs."""

TRITON_SMALLEST = 32
"""vllm/v1/attention/backends/triton_attn.py."""


def cuda_backends(head_dim: int) -> tuple[str, ...]:
    """The CUDA attention backends that take heads of this size, FlashAttention 4 not counted."""
    fits = {
        "FLASH_ATTN": head_dim % FLASH_ATTENTION_MULTIPLE == 0
        and head_dim <= FLASH_ATTENTION_LARGEST,
        "FLASHINFER": head_dim in FLASHINFER_HEAD_SIZES,
        "TRITON_ATTN": head_dim >= TRITON_SMALLEST,
        "FLEX_ATTENTION": True,
    }
    return tuple(name for name, fit in fits.items() if fit)


ROPE_KINDS = frozenset(
    [
        "default",
        "linear",
        "ntk",
        "dynamic",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "llama3",
        "mllama4",
        "longrope",
        "proportional",
        "mrope",
        "openpangu",
        "bailing_mrope",
        "su",
    ]
)
"""vllm/model_executor/layers/rotary_embedding/__init__.py, with the older names that
transformers_utils/config.py rewrites (su → longrope, mrope → default)."""

ROPE_KINDS_WITH_SCALED_LIMIT = frozenset(
    ["su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"]
)
"""Kinds whose max_position_embeddings is already the stretched length; for the others vLLM
multiplies it by `factor` (vllm/config/model.py, _get_and_verify_max_len)."""

FAMILIES_WITH_SCALED_LIMIT = ("gemma3",)
"""model_type words for which vLLM does not multiply, whatever the kind (same function)."""

QUANTIZATION_METHODS = frozenset(
    [
        "awq",
        "auto_awq",
        "fp8",
        "fbgemm_fp8",
        "fp_quant",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mxfp8",
        "modelopt_mixed",
        "auto_gptq",
        "gptq",
        "gptq_marlin",
        "awq_marlin",
        "humming",
        "compressed-tensors",
        "experts_int8",
        "quark",
        "moe_wna16",
        "torchao",
        "inc",
        "mxfp4",
        "gpt_oss_mxfp4",
        "deepseek_v4_fp8",
        "online",
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
        "mxfp8",
        "auto-round",
    ]
)
"""vllm/model_executor/layers/quantization/__init__.py; auto-round is read by inc.py."""

FLOAT16_REFUSED = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""vllm/config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS (by model_type)."""

DEPRECATED_QUANTIZATION_METHODS = frozenset({"fbgemm_fp8", "fp_quant"})
"""Refused without --allow-deprecated-quantization (same file)."""

VOCABULARY_PADDING = 64
"""vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE."""

KV_CACHE_DTYPES = frozenset(
    [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_ds_mla",
        "nvfp4_ds_mla",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
        "ultraquant_4bit",
        "int4_per_token_head",
        "int8_per_token_head",
        "fp8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
    ]
)
"""vllm/config/cache.py, CacheDType."""

CPU_KV_CACHE_DTYPES = frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""vllm/v1/attention/backends/cpu_attn.py."""

MARLIN_MULTIPLE_OUT = 64
MARLIN_MULTIPLE_IN = 128
"""vllm/model_executor/layers/quantization/utils/marlin_utils.py, min_thread_n and min_thread_k."""

NVFP4_MULTIPLE_IN = 16
"""vllm/model_executor/layers/quantization/modelopt.py."""


def stage_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage (vllm/distributed/utils.py, get_pp_indices).

    The remainder goes one layer each to the stages before the last, from the back.
    """
    layers = [num_layers // stages] * stages
    for i in range(2, num_layers % stages + 2):
        layers[-i] += 1
    return tuple(layers)
