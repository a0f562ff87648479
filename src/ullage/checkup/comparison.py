"""Predicted beside actual: KV growth, weights, decode and prefill speed, each with its error.

Holds the predictions (from `costs/`, on a HardwareSpec) and their comparison with what was
measured. The error is (actual − predicted) / predicted; it is published, not hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ullage.anatomy.spec import ModelSpec
from ullage.checkup.figures import Figure, figure
from ullage.checkup.measure import Growth, GrowthPoint, Measurements
from ullage.checkup.metrics import CacheInfo
from ullage.costs.hardware import HardwareSpec
from ullage.costs.kv import kv_bytes_per_token, state_bytes_per_sequence
from ullage.costs.kv_formats import element_bytes
from ullage.costs.operators import step_operators, total_flops
from ullage.costs.roofline import ElementBytes, roofline
from ullage.costs.step import Step

BYTES_EXPORTED = "engine: ullage_kv_cache_used_bytes"
BLOCKS_EXPORTED = "engine: blocks in use; each block priced as predicted, no bytes are exported"


@dataclass(frozen=True, slots=True)
class Serving:
    """How the engine computes: dtypes of weights and of the KV cache, and on what device.

    `hardware` is None where nobody said what the server runs on; `weight_bytes_per_element` may be
    a fraction (quantised weights with their scales).
    """

    compute_dtype: str
    kv_dtype: str
    weight_bytes_per_element: float
    hardware: HardwareSpec | None

    @property
    def unbounded(self) -> str | None:
        """Why no roofline can be drawn, or None when it can."""
        if self.hardware is None:
            return "which hardware the server runs on is not known; name it with --gpu"
        if self.hardware.flops_per_s(self.compute_dtype) is None:
            return f"{self.hardware.name} has no known rate for {self.compute_dtype} arithmetic"
        return None


@dataclass(frozen=True, slots=True)
class StepBound:
    """The roofline of one step: least seconds, FLOPs, bytes moved."""

    seconds: float
    flops: float
    num_bytes: float


def step_bound(spec: ModelSpec, step: Step, serving: Serving) -> StepBound:
    """The least time that one forward step can take on the serving hardware."""
    assert serving.hardware is not None, "a bound needs a device"
    element = ElementBytes(
        weight=serving.weight_bytes_per_element,
        activation=element_bytes("auto", serving.compute_dtype),
        cache=element_bytes(serving.kv_dtype, serving.compute_dtype),
    )
    operators = step_operators(spec, step)
    times = roofline(operators, serving.hardware, element, serving.compute_dtype)
    return StepBound(
        seconds=sum(t.seconds for t in times),
        flops=total_flops(operators),
        num_bytes=sum(t.bytes for t in times),
    )


# --- the growth of the KV cache ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrowthFit:
    """KV in use by tokens: (tokens, bytes) seen and predicted, and the slopes of both.

    `measured_bytes_per_token` is taken from the first rise to the last, so that neither the block
    begun nor the block unfinished counts; None when fewer than two rises were seen.
    `resolution` is the relative error that the time between samples leaves.
    """

    seen: tuple[tuple[int, float], ...]
    predicted: tuple[tuple[int, float], ...]
    predicted_bytes_per_token: int
    measured_bytes_per_token: float | None
    resolution: float | None
    block_size: int
    bytes_source: str

    @property
    def bytes_seen(self) -> bool:
        """Whether the engine told bytes; else it told blocks, and each was priced as predicted."""
        return self.bytes_source == BYTES_EXPORTED


def fit_growth(
    spec: ModelSpec, growth: Growth, cache: CacheInfo | None, serving: Serving
) -> GrowthFit | None:
    """Set the growth that was seen beside ceil(tokens / block) × block × bytes per token.

    None when nothing grows, or the engine does not tell its block size or what is in use. Where it
    tells blocks but no bytes, a block is priced as predicted, and `bytes_source` says so.
    """
    if cache is None or not cache.block_size or not growth.points:
        return None
    each = kv_bytes_per_token(spec, kv_cache_dtype=serving.kv_dtype, dtype=serving.compute_dtype)
    if each == 0:
        return None
    state = state_bytes_per_sequence(spec, dtype=serving.compute_dtype)
    block_bytes = cache.block_size * each
    seen, said = _seen_bytes(growth.points, cache, block_bytes)
    if not seen:
        return None
    last = seen[-1][0]
    edges = [0, *range(1, last + 1, cache.block_size), last]
    predicted = [(t, float(-(-t // cache.block_size) * block_bytes + state)) for t in edges]
    slope, resolution = _slope(seen)
    return GrowthFit(
        seen=tuple(seen),
        predicted=tuple(predicted),
        predicted_bytes_per_token=each,
        measured_bytes_per_token=slope,
        resolution=resolution,
        block_size=cache.block_size,
        bytes_source=said,
    )


def _seen_bytes(
    points: Sequence[GrowthPoint], cache: CacheInfo, block_bytes: int
) -> tuple[list[tuple[int, float]], str]:
    exact = [(p.tokens, p.used_bytes) for p in points if p.used_bytes is not None]
    if exact:
        return exact, BYTES_EXPORTED
    if not cache.num_blocks:
        return [], ""
    blocks = [
        (p.tokens, round(p.used_ratio * cache.num_blocks) * float(block_bytes))
        for p in points
        if p.used_ratio is not None
    ]
    return blocks, BLOCKS_EXPORTED


def _slope(seen: Sequence[tuple[int, float]]) -> tuple[float | None, float | None]:
    """Bytes per token between the first and the last rise, and its relative resolution.

    A rise is known to lie after the tokens of the sample before it and at or before its own, so
    the tokens between two rises are known to a range; the slope is taken at its middle.
    """
    rises = [(a, b) for a, b in pairwise(seen) if b[1] > a[1]]
    if len(rises) < 2:
        return None, None
    (before_first, first), (before_last, last) = rises[0], rises[-1]
    least = before_last[0] + 1 - first[0]
    most = last[0] - (before_first[0] + 1)
    if least <= 0:
        return None, None
    middle = (least + most) / 2
    # One token more: the engine may take a token's place a step before it counts the token.
    return (last[1] - first[1]) / middle, ((most - least) / 2 + 1) / middle


# --- rows ----------------------------------------------------------------------------------------


def compared(name: str, predicted: Figure, actual: Figure, note: str = "") -> dict[str, Any]:
    """One row: both figures and the relative error of the prediction."""
    error = (actual["value"] - predicted["value"]) / predicted["value"]
    return {
        "name": name,
        "predicted": predicted,
        "actual": actual,
        "error": figure(error, "ratio", "(actual − predicted) / predicted"),
        "note": note,
    }


def growth_row(fit: GrowthFit) -> dict[str, Any] | None:
    """The price of a token where the engine tells bytes, the tokens of a block where it does not.

    None when the growth was too short for a slope.
    """
    slope, resolution = fit.measured_bytes_per_token, fit.resolution
    if slope is None or resolution is None:
        return None
    said = f"sampling resolves ±{resolution:.1%}"
    if not fit.bytes_seen:
        tokens = fit.block_size * fit.predicted_bytes_per_token / slope
        return compared(
            "tokens to fill a KV block",
            figure(fit.block_size, "tokens", "engine: vllm:cache_config_info"),
            figure(tokens, "tokens", "measured", said),
            said,
        )
    return compared(
        "KV bytes per token",
        figure(fit.predicted_bytes_per_token, "bytes/token", "modelled from the spec, exact"),
        figure(slope, "bytes/token", "measured", f"{said}; {fit.bytes_source}"),
        said,
    )


def speed_rows(spec: ModelSpec, seen: Measurements, serving: Serving) -> list[dict[str, Any]]:
    """Decode alone, decode in a batch, and the first token of each lone prompt."""
    basis = "modelled: roofline of the measured limits, a bound"
    rows: list[dict[str, Any]] = []
    for label, size, rate, context in decodes(seen):
        bound = step_bound(spec, Step(size, 1, int(context)), serving)
        rows.append(
            compared(
                label,
                figure(size / bound.seconds, "tokens/s", basis),
                figure(rate, "tokens/s", "measured"),
            )
        )
    for point in seen.prefill:
        bound = step_bound(spec, Step(1, point.prompt_tokens), serving)
        rows.append(
            compared(
                f"TTFT, a prompt of {point.prompt_tokens} tokens",
                figure(bound.seconds, "s", basis),
                figure(point.ttft_s, "s", "measured"),
            )
        )
    return rows


def decodes(seen: Measurements) -> list[tuple[str, int, float, float]]:
    """(label, sequences, tokens/s, mean context) of each decode experiment that gave a rate."""
    out = [("decode, one sequence", 1, seen.growth.tokens_per_s, seen.growth.mean_context)]
    batch = seen.batch
    if batch.tokens_per_s is not None and batch.num_sequences > 1:
        label = f"decode, {batch.num_sequences} sequences"
        out.append((label, batch.num_sequences, batch.tokens_per_s, batch.mean_context))
    return out


def roofline_points(spec: ModelSpec, seen: Measurements, serving: Serving) -> list[dict[str, Any]]:
    """Where each experiment lies: FLOPs per byte from the model, FLOP/s from the measured time."""
    points: list[dict[str, Any]] = []
    for label, size, rate, context in decodes(seen):
        bound = step_bound(spec, Step(size, 1, int(context)), serving)
        points.append(_point(label, f"decode × {size}", bound, size / rate))
    longest = max(seen.prefill, key=lambda p: p.prompt_tokens)
    bound = step_bound(spec, Step(1, longest.prompt_tokens), serving)
    name = f"prefill of {longest.prompt_tokens}"
    short = f"prefill {longest.prompt_tokens}"
    points.append(_point(name, short, bound, longest.ttft_s))
    return points


def _point(name: str, short: str, bound: StepBound, seconds: float) -> dict[str, Any]:
    return {
        "name": name,
        "short": short,
        "flops_per_byte": bound.flops / bound.num_bytes,
        "flops_per_s": bound.flops / seconds,
        "source": "FLOPs and bytes modelled by costs.operators, time measured",
    }
