"""trtllm-serve's metrics, at /prometheus/metrics with return_perf_metrics. Data only.

Names were read in TensorRT-LLM's tensorrt_llm/metrics/collector.py (2026); no server of it runs
here. Older releases have five of them: requests that succeeded, e2e, TTFT, TPOT, queue time.
"""

from __future__ import annotations

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Info, Metric

USED, MOST = Metric("trtllm_kv_cache_used_blocks"), Metric("trtllm_kv_cache_max_blocks")
EACH = Metric("trtllm_kv_cache_tokens_per_block", combine="copies")
ITERATION = "it needs enable_iter_perf_stats"

TRTLLM = Dialect(
    engine="trtllm",
    title="trtllm-serve",
    proof="published",
    versions="read in its sources of 2026",
    marks=("trtllm_",),
    fields={
        "kv_used_ratio": (
            Arithmetic(USED, "÷", MOST),
            Metric("trtllm_kv_cache_utilization", combine="copies"),
        ),
        # Blocks, not tokens in them; with windows, blocks of pools that cover less of a text.
        "kv_used_tokens": (Arithmetic(USED, "×", EACH, near=True),),
        "kv_total_tokens": (Arithmetic(MOST, "×", EACH, near=True),),
        "running": (Metric("trtllm_num_requests_running"),),
        "waiting": (Metric("trtllm_num_requests_waiting"),),
        "prompt_tokens": (Metric("trtllm_prompt_tokens_total"),),
        "generation_tokens": (Metric("trtllm_generation_tokens_total"),),
        "prefix_queries_tokens": (
            Metric("trtllm_prompt_tokens_total", note="every prompt is looked up"),
        ),
        "prefix_hits_tokens": (Metric("trtllm_prompt_cached_tokens_total"),),
        "process_cpu_s": (Metric("process_cpu_seconds_total"),),
        "finished_by_reason": (Metric("trtllm_request_success_total", by="finished_reason"),),
        "ttft_s": (Metric("trtllm_time_to_first_token_seconds"),),
        "itl_s": (
            Metric("trtllm_time_per_output_token_seconds", note="one mean for each request"),
        ),
        "e2e_s": (Metric("trtllm_e2e_request_latency_seconds"),),
        "queue_s": (Metric("trtllm_request_queue_time_seconds"),),
        "prefill_s": (Metric("trtllm_request_prefill_time_seconds"),),
        "decode_s": (Metric("trtllm_request_decode_time_seconds"),),
    },
    absent={
        "probe_findings": "TensorRT-LLM does not judge its model",
        "kv_used_bytes": "TensorRT-LLM exports blocks, not their bytes; --model derives them",
        "kv_total_bytes": "TensorRT-LLM exports blocks, not their bytes; --model derives them",
        "kv_cached_tokens": "TensorRT-LLM does not say how many free blocks hold known prefixes",
        "page_utilization_ratio": "TensorRT-LLM does not say how full its blocks are",
        "oldest_request_age_s": "TensorRT-LLM does not say how old its requests are",
        "preemptions": "TensorRT-LLM says how many requests are paused now, and counts no pauses",
        "recomputed_tokens": "TensorRT-LLM does not count tokens computed again",
        "rejected_requests": "TensorRT-LLM counts errors by HTTP status, refusals not apart",
        "waiting_by_reason": "TensorRT-LLM does not say why requests wait",
        "sleep_state": "TensorRT-LLM exports no sleep state",
        "request_prompt_tokens": "TensorRT-LLM exports no histogram of prompt lengths",
        "request_generation_tokens": "TensorRT-LLM exports no histogram of output lengths",
        "request_max_tokens": "TensorRT-LLM does not export max_tokens",
        "request_preemptions": "TensorRT-LLM does not count pauses by request",
    },
    info=Info(
        settings=(
            "trtllm_model_config_info",
            "trtllm_parallel_config_info",
            "trtllm_kv_cache_config_info",
            "trtllm_speculative_config_info",
        ),
        model_label="model_name",
        block_size=EACH,
        num_blocks=MOST,
    ),
    hints={
        "kv_used_ratio": ITERATION,
        "kv_used_tokens": ITERATION,
        "kv_total_tokens": ITERATION,
        "running": ITERATION,
        "waiting": ITERATION,
    },
)
