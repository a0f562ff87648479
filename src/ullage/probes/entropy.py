"""The exact entropy of attention rows in one pass over the keys; no matrix of scores is stored.

Holds what a row may see and what rows become (`RowReadings`, `head_readings`); what is kept of the
keys is `sums`. Who hands in queries and keys is `embedded` and `through_transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ullage.engine.rule import AttentionRule
from ullage.probes.readings import HeadReading, Spread
from ullage.probes.sums import Asked, Counted, count_for

Keys = torch.Tensor | Iterable[tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class RowReadings:
    """Float32 [rows, heads], except `visible` (int64 [rows], keys that a row sees).

    A row that sees nothing, or whose scores are not finite, has NaN. `band_entropy_nats` is NaN
    where the band holds no visible key. The masses and entropies are of the keys alone; with
    learned sinks `entropy_with_sink_nats` and `learned_sink_mass` are of keys and sink together.
    `output_RHD` is there when values were given: attention itself, the sink in its denominator.
    """

    entropy_nats: torch.Tensor
    max_score: torch.Tensor
    first_mass: torch.Tensor
    band_mass: torch.Tensor
    band_entropy_nats: torch.Tensor
    visible: torch.Tensor
    entropy_with_sink_nats: torch.Tensor | None = None
    learned_sink_mass: torch.Tensor | None = None
    output_RHD: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys a row at position t may see, beside the rule's window.

    `causal`: s ≤ t; else both sides, and the window both ways: |s − t| < window. `padding`
    positions at the left are no tokens: the first token is at `padding`. `chunk`: only keys of the
    row's own chunk of so many tokens (Llama 4). `keep`, bool [positions], is False where a key is
    hidden from every row, whatever else holds.
    """

    causal: bool = True
    padding: int = 0
    chunk: int | None = None
    keep: torch.Tensor | None = None


def attention_rows(
    q_RHD: torch.Tensor,
    keys: Keys,
    rows_R: torch.Tensor,
    rule: AttentionRule,
    *,
    sight: Sight = Sight(),
    sinks_H: torch.Tensor | None = None,
    values_SKD: torch.Tensor | None = None,
) -> RowReadings:
    """Entropy and its companions of the query rows at positions `rows_R`, of one sequence.

    `keys` are [positions, kv heads, dim] from position 0 on, or pieces of that as (first position,
    keys), each position once, in any order (a paged cache gives some hundred positions at a time;
    what no row sees may be left out). Heads of queries are a multiple of those of keys: query head
    h reads kv head h // (H / K), so that MLA in its latent form is one kv head of rank + rope
    dimensions. Whatever dtype comes, the arithmetic is float32, or float64 for float64. `values`
    only go with keys in one tensor.
    """
    if values_SKD is not None and not isinstance(keys, torch.Tensor):
        raise ValueError("values need the keys in one tensor")
    low_R, high_R = seen_interval(rows_R, rule, sight)
    count = count_for(Asked(q_RHD, rows_R, low_R, high_R, sight.padding, sight.keep, rule))
    visible_R = torch.zeros_like(rows_R)
    pieces = [(0, keys)] if isinstance(keys, torch.Tensor) else keys
    for first, k_SKD in pieces:
        end = first + len(k_SKD)
        _check(q_RHD, k_SKD, end, sight)
        count.see(first, k_SKD, values_SKD)
        visible_R += _num_seen(low_R.clamp(min=first), high_R.clamp(max=end), sight.keep)
    return _readings(count.counted(), visible_R, sinks_H)


def _check(q_RHD: torch.Tensor, k_SKD: torch.Tensor, end: int, sight: Sight) -> None:
    heads, kv_heads = q_RHD.shape[1], k_SKD.shape[1]
    if heads % kv_heads or q_RHD.shape[2] != k_SKD.shape[2]:
        raise ValueError(f"queries {tuple(q_RHD.shape)} do not go with keys {tuple(k_SKD.shape)}")
    if sight.keep is not None and len(sight.keep) < end:
        raise ValueError(f"keep says nothing of positions {len(sight.keep)} to {end - 1}")


def _num_seen(low_R: torch.Tensor, high_R: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    high_R = torch.maximum(low_R, high_R)
    if keep is None:
        return high_R - low_R
    before = torch.cat([keep.new_zeros(1, dtype=torch.int64), keep.cumsum(0)])
    return before[high_R.clamp(max=len(keep))] - before[low_R.clamp(max=len(keep))]


def _readings(
    counted: Counted, visible_R: torch.Tensor, sinks_H: torch.Tensor | None
) -> RowReadings:
    whole, output_RHD = counted.whole, counted.output_RHD
    # Where nothing was seen 0/0 says NaN by itself; of the highest score it must be said.
    top_RH = torch.where(whole.total == 0, math.nan, whole.top)
    with_sink = sink_mass = None
    if sinks_H is not None:
        sunk = whole.with_one(sinks_H.to(whole.top.dtype).expand_as(whole.top))
        with_sink = (sunk.entropy() + 0 * top_RH).float()
        sink_mass = (1 - whole.share(sunk) + 0 * top_RH).clamp(min=0.0).float()
    if output_RHD is not None:
        share_RH = 1.0 if sinks_H is None else whole.share(sunk)
        output_RHD = output_RHD * (share_RH / whole.total).to(output_RHD.dtype)[..., None]
    return RowReadings(
        entropy_nats=whole.entropy().float(),
        max_score=top_RH.float(),
        first_mass=counted.first.share(whole).float(),
        band_mass=counted.band.share(whole).clamp(max=1.0).float(),
        band_entropy_nats=counted.band.entropy().float(),
        visible=visible_R,
        entropy_with_sink_nats=with_sink,
        learned_sink_mass=sink_mass,
        output_RHD=output_RHD,
    )


def seen_interval(
    rows_R: torch.Tensor, rule: AttentionRule, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions low ≤ s < high that each row may see: every rule here shows one stretch."""
    low_R = torch.full_like(rows_R, sight.padding)
    high_R = rows_R + 1 if sight.causal else torch.full_like(rows_R, torch.iinfo(torch.int64).max)
    if rule.window is not None:
        low_R = torch.maximum(low_R, rows_R - rule.window + 1)
        high_R = torch.minimum(high_R, rows_R + rule.window)
    if sight.chunk is not None:
        start_R = (rows_R - sight.padding) // sight.chunk * sight.chunk + sight.padding
        low_R = torch.maximum(low_R, start_R)
        high_R = torch.minimum(high_R, start_R + sight.chunk)
    return low_R, high_R


def _joined(parts: Sequence[RowReadings]) -> RowReadings:
    if len(parts) == 1:
        return parts[0]
    columns: list[Any] = []
    for field in fields(RowReadings):
        column = [getattr(part, field.name) for part in parts]
        columns.append(None if column[0] is None else torch.cat(column))
    return RowReadings(*columns)


def head_readings(parts: Sequence[RowReadings]) -> tuple[HeadReading, ...]:
    """Statistics of each head over the rows of all parts (chunks of a prompt, say)."""
    rows = _joined(parts)
    entropy_RH = rows.entropy_nats
    return tuple(_head_reading(head, rows) for head in range(entropy_RH.shape[1]))


def _head_reading(head: int, rows: RowReadings) -> HeadReading:
    entropy_R, top_R = rows.entropy_nats[:, head], rows.max_score[:, head]
    good_R = entropy_R.isfinite() & top_R.isfinite()
    several_R = good_R & (rows.visible > 1)
    normalized_R = entropy_R[several_R] / rows.visible[several_R].log()

    def mean(column_RH: torch.Tensor | None) -> float | None:
        return None if column_RH is None else _mean(column_RH[good_R, head])

    with_sink = rows.entropy_with_sink_nats
    return HeadReading(
        head=head,
        rows=len(entropy_R),
        not_finite=int((~good_R).sum()),
        entropy_nats=_spread(entropy_R[good_R]),
        entropy_normalized=_mean(normalized_R),
        sink_mass=mean(rows.first_mass),
        band_mass=mean(rows.band_mass),
        band_entropy_nats=mean(rows.band_entropy_nats),
        effective_context=_mean(entropy_R[good_R].exp()),
        max_score=float(top_R[good_R].max()) if good_R.any() else None,
        entropy_with_sink_nats=None if with_sink is None else _spread(with_sink[good_R, head]),
        learned_sink_mass=mean(rows.learned_sink_mass),
    )


def _mean(values: torch.Tensor) -> float | None:
    values = values[values.isfinite()].double()
    return float(values.mean()) if len(values) else None


def _spread(values: torch.Tensor) -> Spread | None:
    """None of no rows."""
    mean = _mean(values)
    if mean is None:
        return None
    p5, p95 = torch.quantile(values.double(), values.new_tensor([0.05, 0.95]).double()).tolist()
    return Spread(mean, p5, p95)
