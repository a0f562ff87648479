"""The run as a part of the document: figures, distributions, series, each request, the scaling.

Holds the translation of `LoadSummary`, `Series` and `Scaling` to JSON data. A metric that the
engine does not export is named in `absent`, and is None in the series, never 0.
"""

from __future__ import annotations

from typing import Any

from ullage.checkup.figures import Figure, figure, named
from ullage.checkup.measure import Measurements
from ullage.checkup.metrics import Series
from ullage.traffic.summary import Distribution, LoadSummary, output_tokens
from ullage.traffic.trace import TRACE_NAME, Scaling

CLIENT = "measured at the client"
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def run_part(seen: Measurements, summary: LoadSummary) -> dict[str, Any]:
    """Everything that the trace slice showed."""
    series = seen.series
    ends = [*(r.end_s for r in seen.results), *(s.time_s for s in series.samples)]
    span_s = max(ends, default=0.0)
    return {
        "captions": _captions(seen, summary),
        "num_planned": summary.num_planned,
        "num_succeeded": summary.num_succeeded,
        "peak_kv_usage": series.peak("kv_usage_ratio"),
        "num_preemptions": series.rise("num_preemptions"),
        "decode_alone": seen.growth.tokens_per_s,
        "decode_batch": seen.batch.tokens_per_s,
        "batch_size": seen.batch.num_sequences,
        "prompts": seen.prompts.description,
        "figures": _figures(summary, series),
        "distributions": {
            "ttft": _distribution(summary.ttft),
            "inter_token": _distribution(summary.inter_token),
            "end_to_end": _distribution(summary.end_to_end),
        },
        "span_s": span_s,
        "series": {
            "time_s": [s.time_s for s in series.samples],
            "kv_usage_ratio": [s.kv_usage_ratio for s in series.samples],
            "num_running": [s.num_running for s in series.samples],
            "num_waiting": [s.num_waiting for s in series.samples],
            "num_preemptions": [s.num_preemptions for s in series.samples],
        },
        "absent": list(series.absent),
        "requests": [
            {
                "arrival_s": r.arrival_s,
                "sent_s": r.sent_s,
                "ttft_s": r.ttft_s,
                "end_s": r.end_s,
                "prompt_tokens": r.prompt_tokens or r.planned_prompt_tokens,
                "output_tokens": output_tokens(r),
                "planned_output_tokens": r.planned_output_tokens,
                "inter_token_s": [round(gap, 6) for gap in r.inter_token_s],
                "error": r.error,
            }
            for r in seen.results
        ],
        "errors": [{"reason": reason, "count": n} for reason, n in summary.errors],
        "scaling": scaling_part(seen.workload.scaling),
    }


def _captions(seen: Measurements, summary: LoadSummary) -> list[str]:
    scaling = seen.workload.scaling
    out = [
        f"{summary.num_succeeded} of {summary.num_planned} requests of a real trace were answered. "
        f"Its lengths were multiplied by {scaling.length_factor:.2f}, its clock by "
        f"{scaling.speed_up:.2f}, so that this machine could serve it.",
        "Requests were sent when the trace says, whether or not the ones before were done.",
    ]
    if summary.num_succeeded < 100:
        out.append(
            f"The p99 of {summary.num_succeeded} requests is the slowest of them: read it as that."
        )
    if summary.max_lag_s > 0.1:
        out.append(
            f"The client itself sent up to {summary.max_lag_s:.2f} s late: times include that."
        )
    if summary.num_short:
        out.append(f"{summary.num_short} answers ended before the length that the trace asks for.")
    return out


def _figures(summary: LoadSummary, series: Series) -> list[dict[str, Any]]:
    rows = [
        named("requests answered", figure(summary.num_succeeded, "", CLIENT)),
        named("requests failed", figure(summary.num_failed, "", CLIENT)),
        named("wall time", figure(summary.wall_s, "s", CLIENT)),
    ]
    if summary.requests_per_s is not None:
        rows.append(
            named("request throughput", figure(summary.requests_per_s, "requests/s", CLIENT))
        )
    counted = (
        "engine's own count"
        if not summary.counted_by_events
        else f"text events of {summary.counted_by_events} requests, engine's count of the others"
    )
    rows.append(named("prompt tokens", figure(summary.prompt_tokens, "tokens", counted)))
    rows.append(named("output tokens", figure(summary.output_tokens, "tokens", counted)))
    if summary.output_tokens_per_s is not None:
        rate = figure(summary.output_tokens_per_s, "tokens/s", "measured", counted)
        rows.append(named("output throughput", rate))
    rows += [row for row in (peak_usage(series), preemptions(series)) if row is not None]
    return rows


def peak_usage(series: Series) -> dict[str, Any] | None:
    peak = series.peak("kv_usage_ratio")
    if peak is None:
        return None
    return named("KV cache in use, peak", figure(peak, "ratio", "engine: vllm:kv_cache_usage_perc"))


def preemptions(series: Series) -> dict[str, Any] | None:
    rise = series.rise("num_preemptions")
    if rise is None:
        return None
    return named("preemptions", figure(int(rise), "", "engine: vllm:num_preemptions_total"))


def _distribution(data: Distribution | None) -> dict[str, Any] | None:
    if data is None:
        return None
    marks: dict[str, Figure] = {
        name: figure(data.quantile(share), "s", CLIENT) for name, share in QUANTILES
    }
    return {
        "values": [round(v, 6) for v in data.values],
        "mean": figure(data.mean, "s", CLIENT),
        **marks,
    }


def scaling_part(scaling: Scaling) -> dict[str, Any]:
    """What was done to the trace, number by number, and why."""

    def row(name: str, planned: float, unit: str, recorded: str) -> dict[str, Any]:
        return named(name, figure(planned, unit, recorded))

    return {
        "trace": TRACE_NAME,
        "figures": [
            row("requests", scaling.num_rows, "", f"the first of {scaling.num_recorded} shipped"),
            row(
                "prompt tokens",
                scaling.planned_prompt_tokens,
                "tokens",
                f"recorded: {scaling.recorded_prompt_tokens:,}",
            ),
            row(
                "output tokens",
                scaling.planned_output_tokens,
                "tokens",
                f"recorded: {scaling.recorded_output_tokens:,}",
            ),
            row(
                "arrivals",
                scaling.planned_span_s,
                "s",
                f"recorded: {scaling.recorded_span_s:.1f} s",
            ),
            row("lengths", scaling.length_factor, "×", "prompts and answers alike"),
            row("clock", scaling.speed_up, "×", "below 1: slower than recorded"),
            row("clipped to max_model_len", scaling.num_clipped, "", "rows, after scaling"),
            row("lifted to the least length", scaling.num_raised, "", "rows, after scaling"),
        ],
        "sentence": f"The trace is {TRACE_NAME}. Why it was scaled so: {scaling.reason}.",
    }
