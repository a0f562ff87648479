"""llama.cpp server's metrics (--metrics). Data only.

Names were read in llama.cpp b11434 (tools/server/server-task.cpp), and its page is recorded. It
prints six digits, so a counter above a million moves in steps.
"""

from __future__ import annotations

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Metric
from ullage.telemetry.snapshot import HISTOGRAMS

SIX = "six digits"
COMPUTED = Metric("llamacpp:prompt_tokens_total", note=SIX)
CACHED = Metric("llamacpp:prompt_tokens_cached_total", note=SIX)
NOT_TOLD = "llama.cpp does not export it"
NO_HISTOGRAM = "llama.cpp exports no histograms"
GONE = "llama.cpp says nothing of its KV cache since pull request 13660 (May 2025)"

LLAMACPP = Dialect(
    engine="llamacpp",
    title="llama.cpp",
    proof="recorded",
    versions="b11434",
    marks=("llamacpp:",),
    fields={
        "kv_used_ratio": (Metric("llamacpp:kv_cache_usage_ratio", "before May 2025"),),
        "kv_used_tokens": (Metric("llamacpp:kv_cache_tokens", "before May 2025"),),
        "running": (Metric("llamacpp:requests_processing"),),
        "waiting": (Metric("llamacpp:requests_deferred"),),
        "prompt_tokens": (Arithmetic(COMPUTED, "+", CACHED),),
        "generation_tokens": (Metric("llamacpp:tokens_predicted_total", note=SIX),),
        "prefix_queries_tokens": (Arithmetic(COMPUTED, "+", CACHED),),
        "prefix_hits_tokens": (CACHED,),
    },
    absent={
        "probe_findings": "llama.cpp does not judge its model",
        "kv_used_bytes": GONE,
        "kv_total_bytes": GONE,
        "kv_total_tokens": GONE,
        "kv_cached_tokens": NOT_TOLD,
        "page_utilization_ratio": "llama.cpp has no pages",
        "oldest_request_age_s": NOT_TOLD,
        "preemptions": "llama.cpp preempts no request",
        "recomputed_tokens": NOT_TOLD,
        "rejected_requests": NOT_TOLD,
        "process_cpu_s": NOT_TOLD,
        "waiting_by_reason": NOT_TOLD,
        "finished_by_reason": NOT_TOLD,
        "sleep_state": NOT_TOLD,
        **dict.fromkeys(HISTOGRAMS, NO_HISTOGRAM),
    },
    hints={
        "kv_used_ratio": GONE,
        "kv_used_tokens": GONE,
        "prompt_tokens": "older ones count only the tokens that the cache did not have",
    },
)
