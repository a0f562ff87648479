"""Text Generation Inference's metrics, versions 2 and 3. Data only.

Names are published: its documentation and router sources. It is in maintenance only.
"""

from __future__ import annotations

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Info, Metric

# What the batch may come to hold, which TGI reserves when it lets a request in.
HELD = Metric("tgi_batch_current_max_tokens", note="reserved for the batch")
MOST = Metric("tgi_batch_max_total_tokens", combine="copies")
NOT_COUNTED = "TGI does not count it"
NOT_TOLD = "TGI does not export it"

TGI = Dialect(
    engine="tgi",
    title="TGI",
    proof="published",
    versions="read in its documents and in sources of version 3",
    marks=("tgi_",),
    fields={
        "kv_used_ratio": (Arithmetic(HELD, "÷", MOST),),
        "kv_used_tokens": (HELD,),
        "kv_total_tokens": (MOST,),
        "running": (Metric("tgi_batch_current_size"),),
        "waiting": (Metric("tgi_queue_size"),),
        "prompt_tokens": (Metric("tgi_request_input_length_sum"),),
        "generation_tokens": (Metric("tgi_request_generated_tokens_sum"),),
        "rejected_requests": (Metric("tgi_request_failure", where=(("err", "overloaded"),)),),
        "itl_s": (
            Metric("tgi_request_mean_time_per_token_duration", note="one mean for each request"),
        ),
        "e2e_s": (Metric("tgi_request_duration"),),
        "queue_s": (Metric("tgi_request_queue_duration"),),
        "request_prompt_tokens": (Metric("tgi_request_input_length"),),
        "request_generation_tokens": (Metric("tgi_request_generated_tokens"),),
        "request_max_tokens": (Metric("tgi_request_max_new_tokens"),),
    },
    absent={
        "probe_findings": "TGI does not judge its model",
        "kv_used_bytes": "TGI exports no KV bytes; --model derives them",
        "kv_total_bytes": "TGI exports no KV bytes; --model derives them",
        "kv_cached_tokens": NOT_TOLD,
        "page_utilization_ratio": NOT_TOLD,
        "oldest_request_age_s": NOT_TOLD,
        "preemptions": "TGI reserves what a request may need, so it preempts none",
        "recomputed_tokens": NOT_COUNTED,
        "prefix_queries_tokens": NOT_COUNTED,
        "prefix_hits_tokens": NOT_COUNTED,
        "process_cpu_s": NOT_TOLD,
        "waiting_by_reason": NOT_TOLD,
        "finished_by_reason": "TGI counts successes and failures, not how a request ended",
        "sleep_state": "TGI has no sleep state",
        "ttft_s": NOT_TOLD,
        "prefill_s": NOT_TOLD,
        "decode_s": NOT_TOLD,
        "request_preemptions": NOT_TOLD,
    },
    info=Info(),
    hints={"rejected_requests": "TGI writes it from the first refusal on"},
)
