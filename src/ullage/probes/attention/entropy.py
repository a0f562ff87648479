"""The exact entropy of attention rows in one pass over the keys; no matrix of scores is stored.

Holds what a row may see and what rows become (`RowReadings`, `head_readings`); what is kept of the
keys is `sums`. Who hands in queries and keys is `embedded` and `through_transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ullage.engine.rule import AttentionRule
from ullage.probes.attention.readings import HeadReading, Spread
from ullage.probes.attention.sums import Asked, Counted, count_for

Piece = tuple[int, torch.Tensor] | tuple[int, torch.Tensor, torch.Tensor]


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
    keys: torch.Tensor | Iterable[Piece],
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
    dimensions. Whatever dtype comes, the arithmetic is float32, or float64 for float64. With values
    (beside the keys, in pieces as their third part) attention itself comes of the same pass.
    """
    pieces: Iterable[Piece]
    if isinstance(keys, torch.Tensor):
        pieces = [(0, keys) if values_SKD is None else (0, keys, values_SKD)]
    elif values_SKD is None:
        pieces = keys
    else:
        raise ValueError("values lie beside the keys, in pieces as those do")
    low_R, high_R = seen_interval(rows_R, rule, sight)
    count = count_for(Asked(q_RHD, rows_R, low_R, high_R, sight.padding, sight.keep, rule))
    visible_R = torch.zeros_like(rows_R)
    kinds = set()
    for first, k_SKD, *values in pieces:
        end = first + len(k_SKD)
        _check(q_RHD, k_SKD, end, sight)
        count.see(first, k_SKD, values[0] if values else None)
        visible_R += _num_seen(low_R.clamp(min=first), high_R.clamp(max=end), sight.keep)
        kinds.add(len(values))
    if len(kinds) > 1:
        raise ValueError("pieces with values and without")
    return readings_of(count.counted(), visible_R, sinks_H)


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


def readings_of(
    counted: Counted, visible_R: torch.Tensor, sinks_H: torch.Tensor | None = None
) -> RowReadings:
    """What the sums say; `counted.output_RHD` is not yet divided by them."""
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


def head_readings(parts: Iterable[RowReadings]) -> tuple[HeadReading, ...]:
    """Statistics of each head over the rows of all parts (chunks of a prompt, say)."""
    totals = HeadTotals()
    for rows in parts:
        totals.add(rows)
    return totals.readings()


class HeadTotals:
    """What the rows of a layer come to, taken in part by part: of a row only entropies are kept.

    That is four bytes a head, which quantiles need; of all else there are sums.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._entropies: list[torch.Tensor] = []
        self._with_sink: list[torch.Tensor] = []
        self._top_H: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor] = {}

    def add(self, rows: RowReadings) -> None:
        entropy_RH, top_RH = rows.entropy_nats, rows.max_score
        good_RH = entropy_RH.isfinite() & top_RH.isfinite()
        self._num_rows += len(entropy_RH)
        self._entropies.append(entropy_RH.where(good_RH, math.nan))
        if rows.entropy_with_sink_nats is not None:
            self._with_sink.append(rows.entropy_with_sink_nats.where(good_RH, math.nan))
        top_H = top_RH.where(good_RH, -math.inf).amax(0)
        self._top_H = top_H if self._top_H is None else torch.maximum(self._top_H, top_H)
        # Of one visible key the most is 0: such a row says nothing of how far it could have been.
        most_R1 = rows.visible.log().where(rows.visible > 1, math.nan)[:, None]
        columns = {
            "entropy_normalized": entropy_RH / most_R1,
            "sink_mass": rows.first_mass,
            "band_mass": rows.band_mass,
            "band_entropy_nats": rows.band_entropy_nats,
            "effective_context": entropy_RH.exp(),
            "learned_sink_mass": rows.learned_sink_mass,
        }
        for name, column_RH in columns.items():
            if column_RH is not None:
                counted_RH = good_RH & column_RH.isfinite()
                sum_H = column_RH.where(counted_RH, 0.0).sum(0, dtype=torch.float64)
                self._sums[name] = self._sums.get(name, 0) + sum_H
                self._counts[name] = self._counts.get(name, 0) + counted_RH.sum(0)

    def readings(self) -> tuple[HeadReading, ...]:
        """In the order of heads; none where no rows came."""
        if self._top_H is None:
            return ()
        entropy_RH = torch.cat(self._entropies)
        with_sink_RH = torch.cat(self._with_sink) if self._with_sink else None
        means = {
            name: [s / n if n else None for s, n in zip(sum_H.tolist(), count_H, strict=True)]
            for name, sum_H in self._sums.items()
            for count_H in [self._counts[name].tolist()]
        }
        readings = []
        for head, top in enumerate(self._top_H.tolist()):
            entropy_R = entropy_RH[:, head]
            good_R = entropy_R.isfinite()
            readings.append(
                HeadReading(
                    head=head,
                    rows=self._num_rows,
                    not_finite=int((~good_R).sum()),
                    entropy_nats=_spread(entropy_R[good_R]),
                    max_score=top if good_R.any() else None,
                    entropy_with_sink_nats=(
                        None if with_sink_RH is None else _spread(with_sink_RH[good_R, head])
                    ),
                    **{name: column[head] for name, column in means.items()},
                )
            )
        return tuple(readings)


def _spread(values: torch.Tensor) -> Spread | None:
    """None of no rows."""
    if not len(values):
        return None
    values = values.double()
    p5, p95 = torch.quantile(values, values.new_tensor([0.05, 0.95])).tolist()
    return Spread(float(values.mean()), p5, p95)
