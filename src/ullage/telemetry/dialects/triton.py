"""Triton's metrics of its TensorRT-LLM backend (nv_trt_llm_). Data only.

Names are published: the backend's README and tests. Triton's own metrics (nv_inference_) speak of
every model of an ensemble, so none is taken for the language model's.
"""

from __future__ import annotations

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Info, Metric
from ullage.telemetry.snapshot import HISTOGRAMS, Name

BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
REQUESTS = "nv_trt_llm_request_metrics"
USED = Metric(BLOCKS, where=(("kv_cache_block_type", "used"),))
MOST = Metric(BLOCKS, where=(("kv_cache_block_type", "max"),))
EACH = Metric(BLOCKS, where=(("kv_cache_block_type", "tokens_per"),), combine="copies")
COUNTS_NOTHING = "the backend exports gauges, no counters"
NO_HISTOGRAM = "the backend exports no histogram of it"
LENGTHS: tuple[Name, ...] = ("request_prompt_tokens", "request_generation_tokens")

TRITON = Dialect(
    engine="triton",
    title="Triton with TensorRT-LLM",
    proof="published",
    versions="read in its documents",
    marks=("nv_trt_llm_",),
    fields={
        "kv_used_ratio": (
            Arithmetic(USED, "÷", MOST),
            Metric(BLOCKS, where=(("kv_cache_block_type", "fraction"),), combine="copies"),
        ),
        "kv_used_tokens": (Arithmetic(USED, "×", EACH, near=True),),
        "kv_total_tokens": (Arithmetic(MOST, "×", EACH, near=True),),
        "running": (Metric(REQUESTS, where=(("request_type", "scheduled"),)),),
        "waiting": (Metric(REQUESTS, where=(("request_type", "waiting"),)),),
        "request_prompt_tokens": (Metric("nv_llm_input_token_len"),),
        "request_generation_tokens": (Metric("nv_llm_output_token_len"),),
    },
    absent={
        "probe_findings": "Triton does not judge its model",
        "kv_used_bytes": "the backend exports blocks, not their bytes; --model derives them",
        "kv_total_bytes": "the backend exports blocks, not their bytes; --model derives them",
        "kv_cached_tokens": "the backend does not say how many free blocks hold known prefixes",
        "page_utilization_ratio": "the backend does not say how full its blocks are",
        "oldest_request_age_s": "the backend does not say how old its requests are",
        "preemptions": "the backend says how many requests are paused now, and counts no pauses",
        "recomputed_tokens": COUNTS_NOTHING,
        "prompt_tokens": COUNTS_NOTHING,
        "generation_tokens": COUNTS_NOTHING,
        "prefix_queries_tokens": COUNTS_NOTHING,
        "prefix_hits_tokens": COUNTS_NOTHING,
        "rejected_requests": COUNTS_NOTHING,
        "process_cpu_s": "Triton does not export its processor time",
        "waiting_by_reason": "the backend does not say why requests wait",
        "finished_by_reason": COUNTS_NOTHING,
        "sleep_state": "Triton has no sleep state",
        **{name: NO_HISTOGRAM for name in HISTOGRAMS if name not in LENGTHS},
    },
    info=Info(model_label="model", block_size=EACH, num_blocks=MOST),
)
