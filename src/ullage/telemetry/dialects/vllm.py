"""vLLM's metrics, 0.6 to 0.33, the ones of its plugin for ullage included. Data only.

Names were read in vLLM 0.32 and 0.30 (v1/metrics/loggers.py), whose pages are recorded; older
ones are published, and when they went follows from vLLM's rule (deprecated in X.Y, hidden in the
next minor version, gone in the one after): pull requests 18354 and 29330 (gpu_ prefixes), 24110
(time per output token), 42206 (kv_cache_size_tokens), 14136 and 15458.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Info, Label, Metric, Source
from ullage.telemetry.snapshot import Name

CACHE_INFO = "vllm:cache_config_info"
USAGE = (
    # A data-parallel engine's share of its own blocks; all engines have equally many.
    Metric("vllm:kv_cache_usage_perc", "0.10 …", combine="mean"),
    Metric("vllm:gpu_cache_usage_perc", "… 0.10", combine="mean"),
)
# Of one engine, in every engine's series (vLLM 0.32, v1/engine/core_client.py).
CAPACITY = Label(CACHE_INFO, "kv_cache_size_tokens", "2026-05 …", combine="sum")
PLUGIN = "with the plugin"
PROCESS_CPU = Metric("process_cpu_seconds_total", "one API process")

# Shared with the embedded engine, which uses vLLM's names.
COMMON: Mapping[Name, tuple[Source, ...]] = {
    "kv_used_ratio": USAGE,
    "kv_used_bytes": (Metric("ullage_kv_cache_used_bytes", PLUGIN),),
    "kv_total_bytes": (Metric("ullage_kv_cache_total_bytes", PLUGIN),),
    "kv_used_tokens": tuple(
        # Blocks that are held, not tokens in them.
        Arithmetic(usage, "×", CAPACITY, near=True, versions=usage.versions)
        for usage in USAGE
    ),
    "kv_total_tokens": (CAPACITY,),
    "page_utilization_ratio": (
        Metric(
            "ullage_kv_page_utilization_ratio",
            PLUGIN,
            combine="mean",
            weight="ullage_kv_cache_used_bytes",
            nan="no request holds a page",
        ),
    ),
    "running": (Metric("vllm:num_requests_running"),),
    "waiting": (Metric("vllm:num_requests_waiting"),),
    "oldest_request_age_s": (
        Metric(
            "ullage_oldest_request_age_seconds", PLUGIN, combine="max", nan="there is no request"
        ),
    ),
    "preemptions": (Metric("vllm:num_preemptions_total"),),
    "recomputed_tokens": (Metric("ullage_recomputed_tokens_total", PLUGIN),),
    "prompt_tokens": (Metric("vllm:prompt_tokens_total"),),
    "generation_tokens": (Metric("vllm:generation_tokens_total"),),
    "prefix_queries_tokens": (
        Metric("vllm:prefix_cache_queries_total", "0.10 …"),
        Metric("vllm:gpu_prefix_cache_queries_total", "0.8 … 0.10"),
    ),
    "prefix_hits_tokens": (
        Metric("vllm:prefix_cache_hits_total", "0.10 …"),
        Metric("vllm:gpu_prefix_cache_hits_total", "0.8 … 0.10"),
    ),
    "rejected_requests": (Metric("vllm:admission_rejections_total", "0.31 or 0.32 …"),),
    "process_cpu_s": (PROCESS_CPU,),
    "waiting_by_reason": (Metric("vllm:num_requests_waiting_by_reason", by="reason"),),
    "finished_by_reason": (Metric("vllm:request_success_total", by="finished_reason"),),
    "sleep_state": (Metric("vllm:engine_sleep_state", by="sleep_state", combine="mean"),),
    "ttft_s": (Metric("vllm:time_to_first_token_seconds"),),
    "itl_s": (
        Metric("vllm:inter_token_latency_seconds", "0.11 …"),
        Metric("vllm:time_per_output_token_seconds", "… 0.11"),
    ),
    "e2e_s": (Metric("vllm:e2e_request_latency_seconds"),),
    "queue_s": (
        Metric("vllm:request_queue_time_seconds"),
        Metric("vllm:time_in_queue_requests", "0.6 … 0.8"),
    ),
    "prefill_s": (Metric("vllm:request_prefill_time_seconds"),),
    "decode_s": (Metric("vllm:request_decode_time_seconds"),),
    "request_prompt_tokens": (Metric("vllm:request_prompt_tokens"),),
    "request_generation_tokens": (Metric("vllm:request_generation_tokens"),),
    "request_max_tokens": (Metric("vllm:request_params_max_tokens"),),
    "request_preemptions": (Metric("vllm:request_num_preemptions"),),
}
INFO = Info(
    settings=(CACHE_INFO,),
    model_label="model_name",
    engine_label="engine",
    adapters=("vllm:lora_requests_info", ("running_lora_adapters", "waiting_lora_adapters")),
    block_size=Label(CACHE_INFO, "block_size"),
    # The client of several engines sums their blocks (vLLM 0.32, v1/engine/core_client.py).
    num_blocks=Label(CACHE_INFO, "num_gpu_blocks"),
)
NOT_BYTES = "vLLM exports no KV bytes; the ullage plugin does, and --model derives them"
WITH_PLUGIN = "vLLM does not export it; the ullage plugin does"

VLLM = Dialect(
    engine="vllm",
    title="vLLM",
    proof="recorded",
    versions="0.6 … 0.33",
    marks=("vllm:",),
    unless=("ullage_engine_info",),
    fields=COMMON,
    absent={
        "kv_cached_tokens": "vLLM does not say how many free blocks hold known prefixes",
        "probe_findings": "vLLM does not judge its model, nor does the plugin",
    },
    info=INFO,
    hints={
        "kv_used_bytes": NOT_BYTES,
        "kv_total_bytes": NOT_BYTES,
        "kv_used_tokens": "before May 2026 only --model tells what the blocks hold",
        "kv_total_tokens": (
            "num_gpu_blocks × block_size is the capacity only of models whose layers are all of "
            "one kind, so --model is needed"
        ),
        "page_utilization_ratio": WITH_PLUGIN,
        "oldest_request_age_s": WITH_PLUGIN,
        "recomputed_tokens": WITH_PLUGIN,
        "rejected_requests": "vLLM 0.30 counts no refusals, 0.32 does",
    },
)
