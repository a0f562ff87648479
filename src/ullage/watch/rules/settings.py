"""What the engines call the settings that remedies name. Data, by engine and purpose.

Holds names only. Which setting helps is the rules' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Purpose = Literal[
    "kv_memory",
    "kv_dtype",
    "max_requests",
    "max_length",
    "block_size",
    "step_tokens",
    "adapter_slots",
    "reserve",
]

# vLLM 0.32 and 0.33: engine/arg_utils.py; SGLang 0.5.23: server_args.py; TensorRT-LLM:
# llmapi/llm_args.py and Triton's config.pbtxt; TGI 3: launcher; LMDeploy: cli/utils.py;
# llama.cpp: common/arg.cpp. "ullage" is `ullage serve`.
NAMES: Mapping[str, Mapping[Purpose, str]] = {
    "vllm": {
        "kv_memory": "--gpu-memory-utilization (or --kv-cache-memory-bytes)",
        "kv_dtype": "--kv-cache-dtype fp8",
        "max_requests": "--max-num-seqs",
        "max_length": "--max-model-len",
        "block_size": "--block-size",
        "step_tokens": "--max-num-batched-tokens",
        "adapter_slots": "--max-loras",
        "reserve": "--watermark",
    },
    "sglang": {
        "kv_memory": "--mem-fraction-static",
        "kv_dtype": "--kv-cache-dtype fp8_e5m2",
        "max_requests": "--max-running-requests",
        "max_length": "--context-length",
        "block_size": "--page-size",
        "step_tokens": "--chunked-prefill-size",
        "adapter_slots": "--max-loras-per-batch",
        "reserve": "--schedule-conservativeness",
    },
    "trtllm": {
        "kv_memory": "kv_cache_config.free_gpu_memory_fraction",
        "kv_dtype": "kv_cache_config.dtype: fp8",
        "max_requests": "--max_batch_size",
        "max_length": "--max_seq_len",
        "block_size": "kv_cache_config.tokens_per_block",
        "step_tokens": "--max_num_tokens",
    },
    "triton": {
        "kv_memory": "kv_cache_free_gpu_mem_fraction",
        "max_requests": "max_batch_size",
        "max_length": "max_tokens_in_paged_kv_cache",
    },
    "tgi": {
        "kv_memory": "--cuda-memory-fraction",
        "kv_dtype": "--kv-cache-dtype fp8_e4m3fn",
        "max_requests": "--max-batch-size",
        "max_length": "--max-total-tokens",
        "step_tokens": "--max-batch-prefill-tokens",
    },
    "lmdeploy": {
        "kv_memory": "--cache-max-entry-count",
        "kv_dtype": "--quant-policy 8",
        "max_requests": "--max-batch-size",
        "max_length": "--session-len",
        "block_size": "--cache-block-seq-len",
        "step_tokens": "--max-prefill-token-num",
    },
    "llamacpp": {
        "kv_memory": "--ctx-size",
        "kv_dtype": "--cache-type-k q8_0 --cache-type-v q8_0",
        "max_requests": "--parallel",
        "max_length": "--ctx-size",
        "step_tokens": "--ubatch-size",
    },
    "ullage": {
        "kv_memory": "--kv-cache-memory-bytes",
        "kv_dtype": "--kv-cache-dtype int8_per_token_head",
        "max_requests": "--max-num-seqs",
        "max_length": "--max-model-len",
        "block_size": "--block-size",
        "step_tokens": "--max-num-batched-tokens",
        "adapter_slots": "--max-loras",
    },
}

PLAIN: Mapping[Purpose, str] = {
    "kv_memory": "the engine's share of memory for KV",
    "kv_dtype": "a narrower KV dtype",
    "max_requests": "the limit on requests that run together",
    "max_length": "the limit on a request's length",
    "block_size": "the size of a KV block",
    "step_tokens": "the limit on tokens in one step",
    "adapter_slots": "the number of adapter slots",
    "reserve": "the share of KV that admission leaves free",
}


def setting(engine: str, purpose: Purpose) -> str:
    """What `engine` calls it; in plain words where it has no such setting or is not known."""
    return NAMES.get(engine, {}).get(purpose) or PLAIN[purpose]
