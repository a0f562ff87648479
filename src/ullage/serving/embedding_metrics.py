"""What an embedding server exports: vLLM 0.32's names where vLLM has the metric for such models.

As there, every text of a request counts as a request of its own. What speaks of KV or of tokens
that are generated is absent here, since there is neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from ullage.engine.encoder.embedder import Embedder
from ullage.engine.positions.scaling import model_rope_fingerprint
from ullage.serving.metric_table import ITERATION_BUCKETS, LATENCY_BUCKETS, one_two_five
from ullage.serving.metrics import ENGINE_INDEX, LABELS

HISTOGRAMS: Mapping[str, str] = {
    "vllm:e2e_request_latency_seconds": "Arrival to embedding.",
    "vllm:request_queue_time_seconds": "Arrival to the batch that took the text.",
    "vllm:request_inference_time_seconds": "Time in that batch.",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """One text: its tokens, and when it came, was begun and was done (time.monotonic())."""

    num_tokens: int
    arrival_s: float
    started_s: float
    ended_s: float


class EmbeddingMetrics:
    """One embedder's metrics, written by both threads, rendered by the HTTP loop."""

    def __init__(self, embedder: Embedder, model_name: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        labels = {"model_name": model_name, "engine": ENGINE_INDEX}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, LABELS, registry=self._registry).labels(**labels)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, text, LABELS, registry=self._registry, buckets=buckets)
            return made.labels(**labels)

        self._running = gauge("vllm:num_requests_running", "Texts in the batch that runs.")
        self._waiting = gauge("vllm:num_requests_waiting", "Texts that wait for a batch.")
        if embedder.weights_bytes is not None:
            gauge("ullage_weights_bytes", "Bytes of the weights in memory.").set(
                embedder.weights_bytes
            )
        computation = _computation(embedder)
        Gauge(
            "ullage_engine_info",
            "How the embedder computes.",
            tuple(computation),
            registry=self._registry,
        ).labels(**computation).set(1)
        self._prompt_tokens = Counter(
            "vllm:prompt_tokens", "Tokens processed.", LABELS, registry=self._registry
        ).labels(**labels)
        success = Counter(
            "vllm:request_success",
            "Texts that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._ended = {
            reason: success.labels(**labels, finished_reason=reason) for reason in ("stop", "abort")
        }
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too many waited.",
            ("model_name", "reason"),
            registry=self._registry,
        ).labels(model_name=model_name, reason="max_num_queued_reqs")
        self._latencies = {
            name: histogram(name, text, LATENCY_BUCKETS) for name, text in HISTOGRAMS.items()
        }
        self._lengths = histogram(
            "vllm:request_prompt_tokens",
            "Tokens of each text.",
            one_two_five(embedder.max_model_len),
        )
        self._batches = histogram(
            "vllm:iteration_tokens_total", "Tokens in each batch.", ITERATION_BUCKETS
        )

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self._registry)

    def rejected(self) -> None:
        """A request was refused because the queue was full."""
        self._rejections.inc()

    def aborted(self, num_texts: int) -> None:
        """Texts were dropped because their client went away."""
        self._ended["abort"].inc(num_texts)

    def running(self, num_texts: int) -> None:
        self._running.set(num_texts)

    def waiting(self, num_texts: int) -> None:
        self._waiting.set(num_texts)

    def observe(self, batch: Sequence[Timing]) -> None:
        """Account for one batch that is done."""
        self._batches.observe(sum(text.num_tokens for text in batch))
        for text in batch:
            self._prompt_tokens.inc(text.num_tokens)
            self._ended["stop"].inc()
            self._lengths.observe(text.num_tokens)
            spans = (
                ("vllm:e2e_request_latency_seconds", text.ended_s - text.arrival_s),
                ("vllm:request_queue_time_seconds", text.started_s - text.arrival_s),
                ("vllm:request_inference_time_seconds", text.ended_s - text.started_s),
            )
            for name, seconds in spans:
                self._latencies[name].observe(seconds)


def _computation(embedder: Embedder) -> dict[str, str]:
    """How embeddings are made, and the fingerprint of the rotary tables."""
    return {
        "engine": ENGINE_INDEX,
        "quantization": embedder.options.quantization,
        "pooling": "+".join(embedder.pooling.modes),
        "normalized": str(embedder.pooling.normalize),
        "rope_fingerprint": model_rope_fingerprint(embedder.spec, embedder.max_model_len) or "",
    }
