"""SGLang's metrics (--enable-metrics). Data only.

Names and labels were read in SGLang 0.5.23 (srt/observability/metrics_collector.py); no server of
it runs here, so nothing is recorded.
"""

from __future__ import annotations

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Info, Metric

CAPACITY = "sglang:max_total_num_tokens"
# With priorities, the series without one is the total, and one more per priority is its part.
ALL = (("priority", ""),)
TOKEN_USAGE = Metric("sglang:token_usage", combine="mean", weight=CAPACITY)
# GiB, by get_available_gpu_memory; each rank has a pool of its own and one of them reports.
ONE_POOL = Metric(
    "sglang:kv_cache_memory_usage_gb", "0.5.23", scale=2.0**30, note="of one tensor-parallel rank"
)
BORN_LATE = "SGLang writes it from the first one on"

SGLANG = Dialect(
    engine="sglang",
    title="SGLang",
    proof="published",
    versions="read in 0.5.23",
    marks=("sglang:",),
    copies=("tp_rank", "pp_rank", "moe_ep_rank"),
    fields={
        "kv_used_ratio": (TOKEN_USAGE,),
        "kv_used_bytes": (Arithmetic(TOKEN_USAGE, "×", ONE_POOL, near=True),),
        "kv_total_bytes": (ONE_POOL,),
        "kv_used_tokens": (
            Metric("sglang:kv_used_tokens", "0.5.23"),
            Metric("sglang:num_used_tokens"),
        ),
        "kv_total_tokens": (Metric(CAPACITY),),
        "kv_cached_tokens": (Metric("sglang:kv_evictable_tokens", "0.5.23"),),
        "running": (Metric("sglang:num_running_reqs", where=ALL),),
        "waiting": (Metric("sglang:num_queue_reqs", where=ALL),),
        "preemptions": (Metric("sglang:num_retracted_requests_total"),),
        "recomputed_tokens": (
            # Of a retracted request all that it held; what the radix cache still has is spared.
            Arithmetic(
                Metric("sglang:num_retracted_input_tokens_total"),
                "+",
                Metric("sglang:num_retracted_output_tokens_total"),
                near=True,
            ),
        ),
        "prompt_tokens": (Metric("sglang:prompt_tokens_total"),),
        "generation_tokens": (Metric("sglang:generation_tokens_total"),),
        "prefix_queries_tokens": (
            Metric("sglang:prompt_tokens_total", note="every prompt is looked up"),
        ),
        "prefix_hits_tokens": (Metric("sglang:cached_tokens_total"),),
        "process_cpu_s": (
            Metric("sglang:scheduler_process_cpu_seconds_total", "0.5.23"),
            Metric("process_cpu_seconds_total"),
        ),
        "ttft_s": (Metric("sglang:time_to_first_token_seconds"),),
        "itl_s": (
            Metric("sglang:inter_token_latency_seconds"),
            Metric("sglang:time_per_output_token_seconds", "before"),
        ),
        "e2e_s": (Metric("sglang:e2e_request_latency_seconds"),),
        "queue_s": (Metric("sglang:queue_time_seconds"),),
        "request_prompt_tokens": (Metric("sglang:prompt_tokens_histogram"),),
        "request_generation_tokens": (Metric("sglang:generation_tokens_histogram"),),
    },
    absent={
        "probe_findings": "SGLang does not judge its model",
        "page_utilization_ratio": "SGLang does not say how full its pages are",
        "oldest_request_age_s": "SGLang does not say how old its requests are",
        "rejected_requests": "SGLang does not count refusals apart from other aborts",
        "waiting_by_reason": "SGLang does not say why requests wait",
        "finished_by_reason": "SGLang does not count requests by how they ended",
        "sleep_state": "SGLang has no sleep state",
        "prefill_s": "SGLang times stages of its own, none of which is the whole prefill",
        "decode_s": "SGLang times stages of its own, none of which is the whole decode",
        "request_max_tokens": "SGLang does not export max_tokens",
        "request_preemptions": "SGLang does not count retractions by request",
    },
    info=Info(
        model_label="model_name",
        engine_label="dp_rank",
        max_model_len=Metric("sglang:context_len", combine="copies"),
        block_size=Metric("sglang:page_size", combine="copies"),
        num_blocks=Metric("sglang:num_pages"),
    ),
    hints={
        "preemptions": BORN_LATE,
        "recomputed_tokens": BORN_LATE,
        "prefix_hits_tokens": BORN_LATE,
    },
)
