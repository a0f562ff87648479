"""What the engine exports, filled from its step reports and from requests as they end.

Holds the registry and the arithmetic; names, texts and buckets are `metric_table`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

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
from ullage.engine.positions.scaling import model_rope_fingerprint
from ullage.engine.reports import page_utilization
from ullage.engine.request import Request
from ullage.serving.metric_table import (
    CAPACITY_CAUSES,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    LABELLED_GAUGES,
    PHASES,
    REJECTIONS,
    one_two_five,
)
from ullage.serving.quality import AnswerWatch

if TYPE_CHECKING:
    from ullage.serving.live_probe import LiveProbe

ENGINE_INDEX = "0"
LABELS = ("model_name", "engine")
# Looking at every block of every request takes a while: so much of the time at most, and yet once
# a second.
UTILIZATION_SHARE = 0.005
UTILIZATION_EVERY_S = 1.0
NAN = float("nan")
Series = TypeVar("Series", Counter, Gauge)


class EngineMetrics:
    """One engine's metrics. Written by the engine's thread, rendered by the HTTP loop."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.labels = labels = {"model_name": model_name, "engine": ENGINE_INDEX}
        self._gauges = {
            name: Gauge(name, text, LABELS, registry=registry).labels(**labels)
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: Counter(name, text, LABELS, registry=registry).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self._labelled_gauges = self._labelled(Gauge, LABELLED_GAUGES)
        self._labelled_counters = self._labelled(Counter, LABELLED_COUNTERS)
        self._labelled_gauges["vllm:engine_sleep_state"]["awake"].set(1)
        token_buckets = one_two_five(engine.max_model_len)
        self._histograms = {
            name: Histogram(
                name, text, LABELS, registry=registry, buckets=buckets or token_buckets
            ).labels(**labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too many waited.",
            ("model_name", "reason"),
            registry=registry,
        )
        self._rejections = {
            reason: rejections.labels(model_name=model_name, reason=reason) for reason in REJECTIONS
        }
        if engine.weights_bytes is not None:
            Gauge(
                "ullage_weights_bytes", "Bytes of the weights in memory.", LABELS, registry=registry
            ).labels(**labels).set(engine.weights_bytes)
        self._info("vllm:cache_config_info", "The KV cache's configuration.", _cache(engine))
        self._info("ullage_engine_info", "How the engine computes.", _computation(engine))
        self._loras = Gauge(
            "vllm:lora_requests_info",
            "Adapters of the requests that run and wait, in the labels.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            registry=registry if engine.options.enable_lora else None,
        )
        self.answers: AnswerWatch | None = None
        self.live: LiveProbe | None = None
        self._utilization_again_s = 0.0
        self._waits: Mapping[str, int] = {}
        # A gauge that nobody set says 0, which of a pool's bytes or an age is not true.
        self.observe_state(engine)

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)

    # --- called from the HTTP loop ---

    def rejected(self, reason: str) -> None:
        """A request was refused because the queue was full, by one of REJECTIONS."""
        self._rejections[reason].inc()

    # --- called from the engine's thread ---

    def begin(self) -> None:
        """The warm-up is over."""
        if self.live is not None:
            self.live.begin()

    def cancelled(self, by: str) -> None:
        """A request was ended from outside, by one of metric_table.CANCELLERS."""
        self._labelled_counters["ullage_requests_cancelled"][by].inc()

    def observe_step(self, report: StepReport, engine: Engine) -> None:
        """Account for one step; requests that it finished have a call of their own."""
        if report.plan.work:
            self._histograms["vllm:iteration_tokens_total"].observe(report.plan.num_tokens)
            self._observe_phases(report)
        counts = {
            "vllm:num_preemptions": len(report.plan.preempted),
            "vllm:prefix_cache_queries": report.plan.prefix_queries,
            "vllm:prefix_cache_hits": report.plan.prefix_hits,
            "ullage_recomputed_tokens": report.num_recomputed,
            "ullage_kv_blocks_freed": max(0, report.num_freed),
        }
        for name, count in counts.items():
            self._counters[name].inc(count)
        device = self._labelled_counters["vllm:prompt_tokens_cached_by_source"]["device"]
        device.inc(report.plan.prefix_hits)
        for cause, seconds in report.waits_s.items():
            self._labelled_counters["ullage_wait_seconds"][cause].inc(max(0.0, seconds))
        for output in report.outputs:
            if output.token_id is None:
                continue
            self._counters["vllm:generation_tokens"].inc()
            if output.since_previous_s is None:
                self._observe_first_token(output.request)
            else:
                self._histograms["vllm:inter_token_latency_seconds"].observe(
                    output.since_previous_s
                )
        if self.answers is not None:
            self.answers.take(report.outputs)
        self._waits = report.plan.waits
        self.observe_state(engine)

    def observe_state(self, engine: Engine) -> None:
        """Set the gauges to what holds now."""
        pool, now_s = engine.pool, time.monotonic()
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        arrivals = [request.arrival_s for request in (*running, *waiting)]
        values = {
            "vllm:num_requests_running": len(running),
            "vllm:num_requests_waiting": len(waiting),
            "vllm:kv_cache_usage_perc": pool.num_used / pool.num_blocks,
            "ullage_kv_cache_used_bytes": pool.num_used * engine.kv.bytes_per_block,
            "ullage_kv_cache_cached_bytes": pool.num_cached * engine.kv.bytes_per_block,
            "ullage_kv_cache_total_bytes": engine.kv.num_bytes,
            "ullage_oldest_request_age_seconds": now_s - min(arrivals) if arrivals else NAN,
        }
        if not running or now_s >= self._utilization_again_s:
            # Of an idle engine at once, of one that has just begun at its next step.
            ratio = page_utilization(running, pool)
            took_s = time.monotonic() - now_s
            pause_s = min(UTILIZATION_EVERY_S, took_s / UTILIZATION_SHARE) if running else 0.0
            self._utilization_again_s = now_s + pause_s
            values["ullage_kv_page_utilization_ratio"] = NAN if ratio is None else ratio
        for name, value in values.items():
            self._gauges[name].set(value)
        # Those that came since the last step wait for the next one.
        put_off = sum(n for cause, n in self._waits.items() if cause not in CAPACITY_CAUSES)
        deferred = min(put_off, len(waiting))
        by_reason = self._labelled_gauges["vllm:num_requests_waiting_by_reason"]
        by_reason["deferred"].set(deferred)
        by_reason["capacity"].set(len(waiting) - deferred)
        if engine.options.enable_lora:
            # vLLM keeps every combination that ever was; only the present one is exported here.
            self._loras.clear()
            self._loras.labels(
                max_lora=str(engine.options.max_loras),
                waiting_lora_adapters=_adapter_names(waiting),
                running_lora_adapters=_adapter_names(running),
            ).set_to_current_time()

    def observe_finished(self, request: Request) -> None:
        """Account for a request that ended, whatever the reason."""
        assert request.finish_reason is not None
        if self.answers is not None:
            self.answers.gone(request)
        self._labelled_counters["vllm:request_success"][request.finish_reason.value].inc()
        if request.expired:
            self._counters["ullage_deadline_exceeded"].inc()
        num_prompt, num_generated = len(request.prompt_ids), len(request.output_ids)
        decode_s = _between(request.first_token_s, request.last_token_s)
        per_token_s = None
        if decode_s is not None and num_generated > 1:
            per_token_s = decode_s / (num_generated - 1)
        values: dict[str, float | None] = {
            "e2e_request_latency_seconds": _between(request.arrival_s, request.finished_s),
            "request_prompt_tokens": num_prompt,
            "request_generation_tokens": num_generated,
            "request_prefill_kv_computed_tokens": num_prompt - request.num_cached_tokens,
            "request_params_max_tokens": request.params.max_tokens,
            "request_num_preemptions": request.num_preemptions,
            "request_queue_time_seconds": _between(request.arrival_s, request.first_scheduled_s),
            "request_prefill_time_seconds": _between(
                request.first_scheduled_s, request.first_token_s
            ),
            "request_decode_time_seconds": decode_s,
            "request_inference_time_seconds": _between(
                request.first_scheduled_s, request.last_token_s
            ),
            "request_time_per_output_token_seconds": per_token_s,
        }
        for name, value in values.items():
            if value is not None:
                self._histograms[f"vllm:{name}"].observe(value)

    def observe_choices(self, requests: Sequence[Request]) -> None:
        """Account for all choices of one prompt, once the last of them has ended."""
        self._histograms["vllm:request_params_n"].observe(len(requests))
        self._histograms["vllm:request_max_num_generation_tokens"].observe(
            max(len(request.output_ids) for request in requests)
        )

    def _observe_phases(self, report: StepReport) -> None:
        times = (report.started_s, report.scheduled_s, report.forwarded_s, report.ended_s)
        seconds = self._labelled_counters["ullage_step_seconds"]
        for phase, start_s, end_s in zip(PHASES, times, times[1:], strict=False):
            seconds[phase].inc(end_s - start_s)

    def _observe_first_token(self, request: Request) -> None:
        assert request.first_token_s is not None
        num_prompt, num_cached = len(request.prompt_ids), request.num_cached_tokens
        if request.index == 0:
            # A prompt counts once, however many choices answer it.
            self._counters["vllm:prompt_tokens"].inc(num_prompt)
            self._counters["vllm:prompt_tokens_cached"].inc(num_cached)
            by_source = self._labelled_counters["vllm:prompt_tokens_by_source"]
            by_source["local_compute"].inc(num_prompt - num_cached)
            by_source["local_cache_hit"].inc(num_cached)
        self._histograms["vllm:time_to_first_token_seconds"].observe(
            request.first_token_s - request.arrival_s
        )

    def _labelled(
        self, kind: type[Series], table: Mapping[str, tuple[str, str, Sequence[str]]]
    ) -> dict[str, dict[str, Series]]:
        """Every series of every metric of the table, so that none is absent before its first."""
        found: dict[str, dict[str, Series]] = {}
        for name, (text, label, values) in table.items():
            metric = kind(name, text, (*LABELS, label), registry=self.registry)
            found[name] = {
                value: metric.labels(**self.labels, **{label: value}) for value in values
            }
        return found

    def _info(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        """Facts as labels of a gauge that is always 1, as vLLM does it."""
        gauge = Gauge(name, text, ("engine", *labels), registry=self.registry)
        gauge.labels(engine=ENGINE_INDEX, **labels).set(1)


def _cache(engine: Engine) -> dict[str, str]:
    """What vLLM's cache_config_info says, of this cache."""
    pool, options = engine.pool, engine.options
    num_groups = len(engine.kv.layout.groups)
    longest = num_groups * pool.blocks_for(engine.max_model_len)
    return {
        "block_size": str(pool.block_size),
        "num_gpu_blocks": str(pool.num_blocks),
        "kv_cache_size_tokens": str(pool.num_blocks // num_groups * pool.block_size),
        "kv_cache_max_concurrency": str(pool.num_blocks / longest),
        "kv_cache_memory_bytes": str(options.kv_cache_memory_bytes),
        "cache_dtype": options.kv_format.name,
        "enable_prefix_caching": str(options.enable_prefix_caching),
    }


def _computation(engine: Engine) -> dict[str, str]:
    """Which of its paths the engine took, and the fingerprint of its rotary tables."""
    options = engine.options
    return {
        "attention": engine.attention,
        "step": "compiled" if engine.compiled else "torch",
        "quantization": options.quantization,
        "dtype": options.dtype,
        "scheduling": options.scheduling,
        "scheduling_policy": options.scheduling_policy,
        "rope_fingerprint": model_rope_fingerprint(engine.spec, engine.max_model_len) or "",
    }


def _adapter_names(requests: Iterable[Request]) -> str:
    return ",".join(sorted({r.lora.name for r in requests if r.lora is not None}))


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
