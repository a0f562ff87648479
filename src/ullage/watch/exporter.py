"""What watching knows, as a page of Prometheus metrics: `ullage_watch_…`, of the last round.

Holds the table of metrics, the text format and the application that serves it. Series exist only
for what is known: what is absent has none, and is never 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ullage.telemetry.gpus import REASONS
from ullage.telemetry.snapshot import Gpu, Histograms
from ullage.watch.figures import Figures, figures_of
from ullage.watch.sight import Sight

PREFIX = "ullage_watch_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABEL = 200
MAX_REASONS = 8
Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]
Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: its name without the prefix, type, help, and its samples of a round."""

    name: str
    help: str
    samples: Callable[[Round], Iterator[Sample]]
    type: str = "gauge"


@dataclass(frozen=True, slots=True)
class Round:
    """A Sight with its figures, each worked out once for all metrics; `num` counts rounds."""

    sight: Sight
    figures: Sequence[Figures]
    num: int


NUMBERS: Mapping[str, tuple[str, str]] = {
    "kv_used_ratio": ("kv_used_ratio", "KV cache that requests hold, over all of it."),
    "kv_used_bytes": ("kv_used_bytes", "KV cache that requests hold."),
    "kv_total_bytes": ("kv_total_bytes", "KV cache of the engine."),
    "kv_free_bytes": ("kv_free_bytes", "KV cache that no request holds."),
    "kv_used_tokens": ("kv_used_tokens", "Tokens of KV cache that requests hold."),
    "kv_total_tokens": ("kv_total_tokens", "Tokens that the KV cache has room for."),
    "kv_free_tokens": ("kv_free_tokens", "Tokens of KV cache that no request holds."),
    "kv_cached_tokens": ("kv_cached_tokens", "Tokens of prefixes that may be found again."),
    "page_utilization_ratio": (
        "page_utilization_ratio",
        "Tokens held over the tokens that the held pages could hold.",
    ),
    "running": ("requests_running", "Requests in the engine's batch."),
    "waiting": ("requests_waiting", "Requests in the engine's queue."),
    "oldest_request_age_s": ("oldest_request_age_seconds", "Age of the oldest request."),
    "preemptions_per_s": ("preemptions_per_second", "Preemptions since the scrape before."),
    "recomputed_tokens_per_s": (
        "recomputed_tokens_per_second",
        "Tokens computed again after preemptions, since the scrape before.",
    ),
    "prompt_tokens_per_s": (
        "prompt_tokens_per_second",
        "Prompt tokens since the scrape before.",
    ),
    "generation_tokens_per_s": (
        "generation_tokens_per_second",
        "Generated tokens since the scrape before.",
    ),
    "rejected_requests_per_s": (
        "rejected_requests_per_second",
        "Requests refused since the scrape before.",
    ),
    "prefix_hit_ratio": (
        "prefix_hit_ratio",
        "Prompt tokens found in the prefix cache over those looked up, recently.",
    ),
}
SPREADS: Mapping[Histograms, tuple[str, str]] = {
    "ttft_s": ("ttft_seconds", "Time to the first token"),
    "itl_s": ("itl_seconds", "Time between tokens"),
    "e2e_s": ("e2e_seconds", "Time from a request to its last token"),
    "queue_s": ("queue_seconds", "Time in the queue"),
}
GPUS: Mapping[str, tuple[str, str]] = {
    "used_bytes": ("gpu_used_bytes", "Memory of the GPU in use."),
    "total_bytes": ("gpu_total_bytes", "Memory of the GPU."),
    "busy_ratio": ("gpu_busy_ratio", "Share of time in which the GPU ran a kernel."),
    "sm_clock_hz": ("gpu_sm_clock_hertz", "Clock of the GPU's multiprocessors."),
    "max_sm_clock_hz": ("gpu_max_sm_clock_hertz", "Highest clock of the multiprocessors."),
    "power_watts": ("gpu_power_watts", "Power that the GPU draws."),
    "temperature_celsius": ("gpu_temperature_celsius", "Temperature of the GPU."),
    "xid_errors": (
        "gpu_last_xid",
        "Code of the GPU's last Xid error, 0 for none; it stays, whatever was mended since.",
    ),
    "xid_s": (
        "gpu_last_xid_timestamp_seconds",
        "When that error was seen to come, in Unix time; none if it was there from the start.",
    ),
}


def exposition(sight: Sight | None, num_rounds: int) -> bytes:
    """The page in Prometheus' text format 0.0.4, UTF-8. Before the first round only the count."""
    views = () if sight is None else sight.views
    made = None if sight is None else Round(sight, [figures_of(v) for v in views], num_rounds)
    lines = [
        f"# HELP {PREFIX}rounds_total Rounds of watching since the start.",
        f"# TYPE {PREFIX}rounds_total counter",
        f"{PREFIX}rounds_total {num_rounds}",
    ]
    for metric in METRICS if made is not None else ():
        assert made is not None
        samples = [
            f"{PREFIX}{metric.name}{_labels(labels)} {_value(value)}"
            for labels, value in metric.samples(made)
        ]
        if samples:
            lines.append(f"# HELP {PREFIX}{metric.name} {metric.help}")
            lines.append(f"# TYPE {PREFIX}{metric.name} {metric.type}")
            lines += samples
    return "\n".join([*lines, ""]).encode("utf-8", "replace")


class Exporter:
    """Keeps the last round and writes its page when it is asked for, once per round."""

    def __init__(self) -> None:
        self._sight: Sight | None = None
        self._num_rounds = 0
        self._page: bytes | None = None

    def take(self, sight: Sight) -> None:
        """Tell of this round from now on."""
        self._sight = sight
        self._num_rounds += 1
        self._page = None

    def page(self) -> bytes:
        """The metrics of the last round."""
        if self._page is None:
            self._page = exposition(self._sight, self._num_rounds)
        return self._page


def create_app(exporter: Exporter) -> Any:
    """A Starlette application with GET /metrics and nothing else."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def metrics(_: Request) -> Response:
        return Response(exporter.page(), headers={"content-type": CONTENT_TYPE})

    return Starlette(routes=[Route("/metrics", metrics)])


# --- samples --------------------------------------------------------------------------------------


def _number(field: str) -> Callable[[Round], Iterator[Sample]]:
    def samples(made: Round) -> Iterator[Sample]:
        for one in made.figures:
            if field in one.numbers:
                yield _of(one), one.numbers[field]

    return samples


def _spread(field: Histograms) -> Callable[[Round], Iterator[Sample]]:
    """Both ends of the bucket that holds each quantile; +Inf where it has no upper end."""

    def samples(made: Round) -> Iterator[Sample]:
        for one in made.figures:
            spread = one.spreads.get(field)
            if spread is None:
                continue
            for share, quantile in (("0.5", spread.p50), ("0.99", spread.p99)):
                for bound in ("low", "high"):
                    labels = (*_of(one), ("q", share), ("bound", bound))
                    yield labels, getattr(quantile, bound)

    return samples


def _gpu(field: str) -> Callable[[Round], Iterator[Sample]]:
    def samples(made: Round) -> Iterator[Sample]:
        yield from _of_gpus(made, lambda gpu: getattr(gpu, field))

    return samples


def _of_gpus(made: Round, told: Callable[[Gpu], Told | None]) -> Iterator[tuple[Labels, Told]]:
    """What each GPU tells, with its labels; of two with one index the first that tells it."""
    for one in made.figures:
        seen: set[str] = set()
        for gpu in one.gpus:
            value = told(gpu)
            if value is not None and gpu.index not in seen:
                seen.add(gpu.index)
                yield (*_of(one), ("gpu", gpu.index)), value


def _gpu_clock_reasons(made: Round) -> Iterator[Sample]:
    for labels, reasons in _of_gpus(made, lambda gpu: gpu.throttled_because):
        yield labels, float(len(reasons))


def _gpu_clock_held(made: Round) -> Iterator[Sample]:
    """A bit that has no name here is `other`, so that no driver bounds the page."""
    known = frozenset(REASONS.values())
    for labels, reasons in _of_gpus(made, lambda gpu: gpu.throttled_because):
        for reason in sorted({one if one in known else "other" for one in reasons}):
            yield (*labels, ("reason", reason)), 1.0


def _up(made: Round) -> Iterator[Sample]:
    for view, one in zip(made.sight.views, made.figures, strict=True):
        if view.asked:  # else nothing is known of it: source_up tells that
            yield _of(one), float(one.time_s is not None)


def _info(made: Round) -> Iterator[Sample]:
    for one in made.figures:
        if one.identity is not None:
            model = one.identity.models[0] if one.identity.models else ""
            facts = (
                ("engine", one.identity.engine),
                ("version", one.identity.version),
                ("model", model),
            )
            yield (*_of(one), *facts), 1.0


def _waiting_by_reason(made: Round) -> Iterator[Sample]:
    """The largest MAX_REASONS; what is beyond them is `other`, so that a server bounds no page."""
    for one in made.figures:
        reasons = one.labelled.get("waiting_by_reason", {})
        held = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
        rest = sum(num for _, num in held[MAX_REASONS:])
        for reason, num in [*held[:MAX_REASONS], *([("other", rest)] if rest else [])]:
            yield (*_of(one), ("reason", reason)), num


def _time_to_full(made: Round) -> Iterator[Sample]:
    for one in made.figures:
        if one.time_to_full is not None:
            yield (*_of(one), ("bound", "low")), one.time_to_full.low_s
            yield (*_of(one), ("bound", "high")), one.time_to_full.high_s


def _rule_fired(made: Round) -> Iterator[Sample]:
    """1 fired, 0 clear; a rule that could not be evaluated has no series."""
    for judged in made.sight.judged:
        finding = judged.finding
        if finding.state != "not_evaluable":
            labels = (
                ("url", judged.url),
                ("rule", finding.id),
                ("severity", finding.severity.name),
            )
            yield labels, float(finding.state == "fired")


def _not_evaluable(made: Round) -> Iterator[Sample]:
    counts: dict[str, int] = {}
    for judged in made.sight.judged:
        counts.setdefault(judged.url, 0)
        counts[judged.url] += judged.finding.state == "not_evaluable"
    for url, num in counts.items():
        yield (("url", url),), float(num)


def _incidents(made: Round) -> Iterator[Sample]:
    for incident in made.sight.incidents:
        if incident.until_s is None:
            yield (("url", incident.url), ("rule", incident.finding.id)), incident.since_s


def _once(value: Callable[[Round], float]) -> Callable[[Round], Iterator[Sample]]:
    def samples(made: Round) -> Iterator[Sample]:
        yield (), value(made)

    return samples


def _of(figures: Figures) -> Labels:
    return (("url", figures.url),)


METRICS: tuple[Metric, ...] = (
    Metric(
        "last_round_timestamp_seconds",
        "When the last round ended, in Unix time.",
        _once(lambda made: made.sight.time_s),
    ),
    Metric("interval_seconds", "Between rounds.", _once(lambda made: made.sight.interval_s)),
    Metric("replicas", "Replicas watched.", _once(lambda made: float(len(made.figures)))),
    Metric(
        "source_up",
        "Whether what names the replicas (Prometheus, Kubernetes) answered in the last round.",
        _once(lambda made: float(not made.sight.error)),
    ),
    Metric(
        "up",
        "Whether the replica answered in the last round; no series where it could not be asked.",
        _up,
    ),
    Metric("replica_info", "What runs there, 1.", _info),
    *(Metric(name, text, _number(field)) for field, (name, text) in NUMBERS.items()),
    Metric(
        "requests_waiting_by_reason", "Requests in the engine's queue, by why.", _waiting_by_reason
    ),
    Metric(
        "time_to_full_seconds",
        "Until the KV cache is full if it goes on filling as it does, low to high bound.",
        _time_to_full,
    ),
    *(
        Metric(name, f"{text}, recently: low and high bound of the bucket.", _spread(field))
        for field, (name, text) in SPREADS.items()
    ),
    *(Metric(name, text, _gpu(field)) for field, (name, text) in GPUS.items()),
    Metric(
        "gpu_clock_reasons",
        "For how many reasons the driver holds the GPU's clocks down, idleness aside.",
        _gpu_clock_reasons,
    ),
    Metric("gpu_clock_held", "1 for each of those reasons.", _gpu_clock_held),
    Metric("rule_fired", "1 while a rule fires, 0 while it is clear.", _rule_fired),
    Metric("rules_not_evaluable", "Rules that lack what they need to judge.", _not_evaluable),
    Metric(
        "incident_start_timestamp_seconds",
        "Since when a rule has fired without a pause, in Unix time.",
        _incidents,
    ),
)
assert set(GPUS) <= set(Gpu.__dataclass_fields__)


# --- text -----------------------------------------------------------------------------------------


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels) + "}"


def _escaped(text: str) -> str:
    """A label's value; a long one ends in its digest, so that two stay two."""
    if len(text) > MAX_LABEL:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        text = f"{text[: MAX_LABEL - 13]}…{digest}"
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _value(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.0f}" if value == int(value) and abs(value) < 2**53 else repr(value)
