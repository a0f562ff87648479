"""What the engine exports: vLLM 0.32's names and buckets where vLLM has the metric, else ullage_.

Holds the registry and the arithmetic from step reports to metrics. Names, labels and buckets were
read in vLLM 0.32, v1/metrics/loggers.py and buckets.py; dashboards made for it work unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from ullage.engine.engine import Engine, StepReport
from ullage.engine.request import FinishReason, Request

ENGINE_INDEX = "0"
LABELS = ("model_name", "engine")

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
# Stand-in for 1-2-5 steps up to the longest request, which each server computes for itself.
TOKEN_BUCKETS: tuple[float, ...] = ()

GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": "Requests that hold KV blocks and run.",
    "vllm:num_requests_waiting": "Requests that wait to be scheduled.",
    "vllm:kv_cache_usage_perc": "Used share of the KV blocks, 0 to 1.",
    "ullage_kv_cache_used_bytes": "Bytes of the KV blocks that requests hold.",
    "ullage_kv_cache_total_bytes": "Bytes of all KV blocks.",
    "ullage_kv_page_utilization_ratio": (
        "Tokens held over tokens that the held blocks could hold; NaN while none is held."
    ),
}
COUNTERS: Mapping[str, str] = {
    "vllm:num_preemptions": "Times that a running request lost its blocks and was queued again.",
    "vllm:prompt_tokens": "Prompt tokens processed.",
    "vllm:generation_tokens": "Tokens generated.",
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
    "vllm:request_params_max_tokens": ("max_tokens of each request.", TOKEN_BUCKETS),
    "vllm:iteration_tokens_total": ("Tokens in each engine step.", ITERATION_BUCKETS),
    "vllm:request_num_preemptions": ("Preemptions of each request.", PREEMPTION_BUCKETS),
}


class EngineMetrics:
    """One engine's metrics. Written by the engine's thread, rendered by the HTTP loop."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        labels = {"model_name": model_name, "engine": ENGINE_INDEX}
        registry = self._registry
        self._gauges = {
            name: Gauge(name, text, LABELS, registry=registry).labels(**labels)
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: Counter(name, text, LABELS, registry=registry).labels(**labels)
            for name, text in COUNTERS.items()
        }
        if engine.weights_bytes is not None:
            Gauge(
                "ullage_weights_bytes", "Bytes of the weights in memory.", LABELS, registry=registry
            ).labels(**labels).set(engine.weights_bytes)
        token_buckets = one_two_five(engine.max_model_len)
        self._histograms = {
            name: Histogram(
                name, text, LABELS, registry=registry, buckets=buckets or token_buckets
            ).labels(**labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._success = {
            reason: success.labels(**labels, finished_reason=reason.value)
            for reason in FinishReason
        }
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too many waited.",
            ("model_name", "reason"),
            registry=registry,
        ).labels(model_name=model_name, reason="max_num_queued_reqs")
        self._export_cache_config(engine)
        self._loras = Gauge(
            "vllm:lora_requests_info",
            "Adapters of the requests that run and wait, in the labels.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            registry=registry if engine.options.enable_lora else None,
        )

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self._registry)

    def rejected(self) -> None:
        """A request was refused because the queue was full."""
        self._rejections.inc()

    def observe_step(self, report: StepReport, engine: Engine) -> None:
        """Account for one step; requests that it finished have a call of their own."""
        if report.plan.work:
            self._histograms["vllm:iteration_tokens_total"].observe(report.plan.num_tokens)
        self._counters["vllm:num_preemptions"].inc(len(report.plan.preempted))
        for output in report.outputs:
            request = output.request
            if output.token_id is not None:
                self._counters["vllm:generation_tokens"].inc()
                if output.since_previous_s is None:
                    self._observe_first_token(request, report.ended_s)
                else:
                    self._histograms["vllm:inter_token_latency_seconds"].observe(
                        output.since_previous_s
                    )
        self.observe_state(engine)

    def observe_state(self, engine: Engine) -> None:
        """Set the gauges to what holds now."""
        pool = engine.pool
        used_bytes = pool.num_used * engine.kv.bytes_per_block
        held = pool.num_used * pool.block_size
        values = {
            "vllm:num_requests_running": len(engine.scheduler.running),
            "vllm:num_requests_waiting": len(engine.scheduler.waiting),
            "vllm:kv_cache_usage_perc": pool.num_used / pool.num_blocks,
            "ullage_kv_cache_used_bytes": used_bytes,
            "ullage_kv_cache_total_bytes": engine.kv.num_bytes,
            "ullage_kv_page_utilization_ratio": (
                engine.tokens_held() / held if held else float("nan")
            ),
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        if engine.options.enable_lora:
            # vLLM keeps every combination that ever was; only the present one is exported here.
            self._loras.clear()
            self._loras.labels(
                max_lora=str(engine.options.max_loras),
                waiting_lora_adapters=_adapter_names(engine.scheduler.waiting),
                running_lora_adapters=_adapter_names(engine.scheduler.running),
            ).set_to_current_time()

    def observe_finished(self, request: Request) -> None:
        """Account for a request that ended, whatever the reason."""
        assert request.finish_reason is not None
        self._success[request.finish_reason].inc()
        num_generated = len(request.output_ids)
        values: dict[str, float | None] = {
            "vllm:e2e_request_latency_seconds": _between(request.arrival_s, request.finished_s),
            "vllm:request_prompt_tokens": len(request.prompt_ids),
            "vllm:request_generation_tokens": num_generated,
            "vllm:request_params_max_tokens": request.params.max_tokens,
            "vllm:request_num_preemptions": request.num_preemptions,
            "vllm:request_queue_time_seconds": _between(
                request.arrival_s, request.first_scheduled_s
            ),
            "vllm:request_prefill_time_seconds": _between(
                request.first_scheduled_s, request.first_token_s
            ),
            "vllm:request_decode_time_seconds": _between(
                request.first_token_s, request.last_token_s
            ),
            "vllm:request_inference_time_seconds": _between(
                request.first_scheduled_s, request.last_token_s
            ),
        }
        decode_s = values["vllm:request_decode_time_seconds"]
        if decode_s is not None and num_generated > 1:
            per_token_s = decode_s / (num_generated - 1)
            values["vllm:request_time_per_output_token_seconds"] = per_token_s
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)

    def _observe_first_token(self, request: Request, now_s: float) -> None:
        self._counters["vllm:prompt_tokens"].inc(len(request.prompt_ids))
        self._histograms["vllm:time_to_first_token_seconds"].observe(now_s - request.arrival_s)

    def _export_cache_config(self, engine: Engine) -> None:
        """The configuration as labels of a gauge that is always 1, as vLLM does it."""
        pool = engine.pool
        labels = {
            "engine": ENGINE_INDEX,
            "block_size": str(pool.block_size),
            "num_gpu_blocks": str(pool.num_blocks),
            "kv_cache_size_tokens": str(pool.num_tokens),
            "kv_cache_max_concurrency": str(
                pool.num_blocks / pool.blocks_for(engine.max_model_len)
            ),
            "kv_cache_memory_bytes": str(engine.options.kv_cache_memory_bytes),
            "cache_dtype": "float32",
            "enable_prefix_caching": "False",
        }
        Gauge(
            "vllm:cache_config_info",
            "The KV cache's configuration, in the labels.",
            tuple(labels),
            registry=self._registry,
        ).labels(**labels).set(1)


def _adapter_names(requests: Iterable[Request]) -> str:
    return ",".join(sorted({r.lora.name for r in requests if r.lora is not None}))


def one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … not above `limit`."""
    steps: list[float] = []
    power = 1
    while power <= limit:
        steps += [step * power for step in (1, 2, 5) if step * power <= limit]
        power *= 10
    return steps


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
