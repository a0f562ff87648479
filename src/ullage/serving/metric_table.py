"""Names, texts and buckets of what the engine exports: vLLM 0.32's where vLLM has it, else ullage_.

Pure data, no arithmetic. Names, labels and buckets were read in vLLM 0.32, v1/metrics/loggers.py
and buckets.py, so that dashboards made for it work unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ullage.engine.request import FinishReason
from ullage.engine.scheduling.scheduler import WAIT_CAUSES

LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
ITERATION_BUCKETS = (1, 8, *(2**power for power in range(4, 15)))
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
N_BUCKETS = (1, 2, 5, 10, 20)
# Stand-in for 1-2-5 steps up to the longest request, which each server computes for itself.
TOKEN_BUCKETS: tuple[float, ...] = ()

# vLLM's reasons to wait: for room, or put off for a while.
CAPACITY_CAUSES = WAIT_CAUSES[:4]
CANCELLERS = ("client", "operator", "shutdown")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
PHASES = ("schedule", "forward", "sample")

GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": "Requests that hold KV blocks and run.",
    "vllm:num_requests_waiting": "Requests that wait to be scheduled.",
    "vllm:kv_cache_usage_perc": "Used share of the KV blocks, 0 to 1.",
    "ullage_kv_cache_used_bytes": "Bytes of the KV blocks that requests hold.",
    "ullage_kv_cache_cached_bytes": "Bytes of free KV blocks whose prefixes can still be found.",
    "ullage_kv_cache_total_bytes": "Bytes of all KV blocks.",
    "ullage_kv_page_utilization_ratio": (
        "Tokens held over tokens that the held blocks could hold; NaN while none is held. "
        "Measured at least once a second."
    ),
    "ullage_oldest_request_age_seconds": "Age of the oldest request; NaN while there is none.",
}
COUNTERS: Mapping[str, str] = {
    "vllm:num_preemptions": "Times that a running request lost its blocks and was queued again.",
    "vllm:prompt_tokens": "Prompt tokens of requests that gave a first token.",
    "vllm:prompt_tokens_cached": "Those of them that came from the prefix cache.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found there.",
    # vLLM exports these whether or not it has such caches; here there are none.
    "vllm:external_prefix_cache_queries": "Always 0: there is no cache outside.",
    "vllm:external_prefix_cache_hits": "Always 0: there is no cache outside.",
    "vllm:mm_cache_queries": "Always 0: texts only.",
    "vllm:mm_cache_hits": "Always 0: texts only.",
    "ullage_recomputed_tokens": "Tokens computed again after a preemption.",
    "ullage_kv_blocks_freed": "KV blocks that became free.",
    "ullage_deadline_exceeded": "Requests that were not finished by their deadline.",
}
# Name: text, the label that tells its series apart, the label's values.
LABELLED_GAUGES: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "vllm:num_requests_waiting_by_reason": (
        "Waiting requests: for room (capacity), or put off (deferred).",
        "reason",
        ("capacity", "deferred"),
    ),
    "vllm:engine_sleep_state": (
        "Always awake.",
        "sleep_state",
        ("awake", "weights_offloaded", "discard_all"),
    ),
}
LABELLED_COUNTERS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "vllm:request_success": (
        "Requests that ended, by reason.",
        "finished_reason",
        # vLLM also ends requests for repeating themselves.
        (*(reason.value for reason in FinishReason), "repetition"),
    ),
    "vllm:prompt_tokens_by_source": (
        "Prompt tokens by where their KV came from.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "vllm:prompt_tokens_cached_by_source": (
        "Prefix-cache hits by the tier that held them.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "ullage_wait_seconds": (
        "Seconds that requests waited, added up, by what they waited for.",
        "cause",
        WAIT_CAUSES,
    ),
    "ullage_requests_cancelled": (
        "Requests that were ended from outside, by whom.",
        "by",
        CANCELLERS,
    ),
    "ullage_step_seconds": ("Seconds spent in engine steps, by phase.", "phase", PHASES),
}
# With --probe; the last only with --probe-baseline.
PROBE_GAUGES: Mapping[str, str] = {
    f"ullage_attn_entropy_{name}_nats": (
        f"Attention entropy that {share} of a layer's rows and heads stay below, over the last "
        "rows that the live probe read; NaN until it read one."
    )
    for name, share in (("p5", "5%"), ("p50", "half"), ("p95", "95%"))
}
PROBE_COUNTERS: Mapping[str, str] = {
    "ullage_probe_rows": "Rows of steps that the live probe read.",
    "ullage_probe_seconds": "Processor seconds of the engine's thread that reading them took.",
}
PROBE_FINDINGS: Mapping[str, str] = {
    "ullage_probe_findings": (
        "1 where a rule of the live probe fires, by kind and layer (many: of several). Of a rule "
        "that does not, 0, or NaN while it cannot be evaluated, without kind and layer."
    )
}
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", TTFT_BUCKETS),
    "vllm:inter_token_latency_seconds": ("From one token to the next.", ITL_BUCKETS),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time per token after the first, one value per request.",
        ITL_BUCKETS,
    ),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token.", LATENCY_BUCKETS),
    "vllm:request_queue_time_seconds": ("Arrival to first scheduled.", LATENCY_BUCKETS),
    "vllm:request_prefill_time_seconds": ("First scheduled to first token.", LATENCY_BUCKETS),
    "vllm:request_decode_time_seconds": ("First to last token.", LATENCY_BUCKETS),
    "vllm:request_inference_time_seconds": ("First scheduled to last token.", LATENCY_BUCKETS),
    "vllm:request_prompt_tokens": ("Prompt tokens of each request.", TOKEN_BUCKETS),
    "vllm:request_generation_tokens": ("Generated tokens of each request.", TOKEN_BUCKETS),
    "vllm:request_max_num_generation_tokens": (
        "Generated tokens of the longest of a prompt's choices.",
        TOKEN_BUCKETS,
    ),
    "vllm:request_prefill_kv_computed_tokens": (
        "Prompt tokens of each request that no cache spared.",
        TOKEN_BUCKETS,
    ),
    "vllm:request_params_max_tokens": ("max_tokens of each request.", TOKEN_BUCKETS),
    "vllm:request_params_n": ("n of each prompt.", N_BUCKETS),
    "vllm:iteration_tokens_total": ("Tokens in each engine step.", ITERATION_BUCKETS),
    "vllm:request_num_preemptions": ("Preemptions of each request.", PREEMPTION_BUCKETS),
}


def one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … not above `limit`."""
    steps: list[float] = []
    power = 1
    while power <= limit:
        steps += [step * power for step in (1, 2, 5) if step * power <= limit]
        power *= 10
    return steps
