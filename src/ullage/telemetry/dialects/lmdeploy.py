"""LMDeploy's metrics. Data only.

Names were read in LMDeploy 0.18 (metrics/loggers.py); no server of it runs here.
"""

from __future__ import annotations

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Info, Metric

NOT_TOLD = "LMDeploy does not export it"

LMDEPLOY = Dialect(
    engine="lmdeploy",
    title="LMDeploy",
    proof="published",
    versions="read in 0.18",
    marks=("lmdeploy:",),
    fields={
        "kv_used_ratio": (Metric("lmdeploy:gpu_cache_usage_perc", combine="mean"),),
        "running": (Metric("lmdeploy:num_requests_running"),),
        "waiting": (
            # Those that wait for a handle have not come to the scheduler yet.
            Arithmetic(
                Metric("lmdeploy:num_requests_waiting"),
                "+",
                Metric("lmdeploy:num_api_requests_waiting"),
            ),
            Metric("lmdeploy:num_requests_waiting"),
        ),
        "prompt_tokens": (Metric("lmdeploy:prompt_tokens_total"),),
        "generation_tokens": (Metric("lmdeploy:generation_tokens_total"),),
        "prefix_queries_tokens": (
            Metric("lmdeploy:prompt_tokens_total", note="every prompt is looked up"),
        ),
        "prefix_hits_tokens": (Metric("lmdeploy:cached_tokens_total"),),
        "process_cpu_s": (Metric("process_cpu_seconds_total"),),
        "ttft_s": (Metric("lmdeploy:time_to_first_token_seconds"),),
        "itl_s": (
            Metric("lmdeploy:iter_token_latency", note="from one step to the next"),
            Metric("lmdeploy:time_per_output_token_seconds"),
        ),
        "e2e_s": (Metric("lmdeploy:e2e_request_latency_seconds"),),
        "queue_s": (Metric("lmdeploy:request_queue_time_seconds"),),
        "prefill_s": (Metric("lmdeploy:request_prefill_time_seconds"),),
        "decode_s": (Metric("lmdeploy:request_decode_time_seconds"),),
        "request_prompt_tokens": (Metric("lmdeploy:request_prompt_tokens"),),
        "request_generation_tokens": (Metric("lmdeploy:request_generation_tokens"),),
    },
    absent={
        "probe_findings": "LMDeploy does not judge its model",
        "kv_used_bytes": "LMDeploy exports a share, not bytes, and not of how many",
        "kv_total_bytes": "LMDeploy exports a share, not bytes, and not of how many",
        "kv_used_tokens": "LMDeploy exports a share, and not of how many tokens",
        "kv_total_tokens": "LMDeploy does not say how many tokens its cache holds",
        "kv_cached_tokens": NOT_TOLD,
        "page_utilization_ratio": NOT_TOLD,
        "oldest_request_age_s": NOT_TOLD,
        "preemptions": NOT_TOLD,
        "recomputed_tokens": NOT_TOLD,
        "rejected_requests": NOT_TOLD,
        "finished_by_reason": "LMDeploy counts endings, and does not tell stop from length",
        "waiting_by_reason": NOT_TOLD,
        "sleep_state": NOT_TOLD,
        "request_max_tokens": NOT_TOLD,
        "request_preemptions": NOT_TOLD,
    },
    info=Info(
        settings=("lmdeploy:backend_config_info",),
        model_label="model_name",
        engine_label="engine",
    ),
)
