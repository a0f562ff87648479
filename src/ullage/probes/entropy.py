"""The exact entropy of attention rows in one pass over the keys; no matrix of scores is stored.

Holds the pass over tiles and what rows become (`RowReadings`, `head_readings`). Who hands in
queries and keys is `embedded` and `through_transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ullage.engine.rule import AttentionRule
from ullage.probes.readings import HeadReading, Spread

# Keys of a row's neighbourhood on each side, as folklore estimates entropy.
BAND = 16
# Scores of one tile: with the few that are made of them they stay in the second cache.
_TILE_SCORES = 1 << 18
_TILE_KEYS = 512

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
    dimensions. Whatever dtype comes, the arithmetic is float32, or float64 for float64.

    With the highest score m, l = Σ e^(s−m) and T = Σ e^(s−m)(s−m), kept tile by tile, the entropy
    is ln l − T/l. Both terms are at least 0, so nothing cancels, however high the scores; the usual
    log-sum-exp minus mean score loses the digits that high scores use up.
    """
    if values_SKD is not None and not isinstance(keys, torch.Tensor):
        raise ValueError("values need the keys in one tensor")
    dtype = torch.float64 if q_RHD.dtype is torch.float64 else torch.float32
    num_heads = q_RHD.shape[1]
    tile_rows = max(1, min(len(rows_R), _TILE_SCORES // (num_heads * _TILE_KEYS)))
    blocks = (
        _Block(
            q_RHD[i : i + tile_rows].to(dtype), rows_R[i : i + tile_rows], rule, sight, values_SKD
        )
        for i in range(0, len(rows_R), tile_rows)
    )
    read: list[RowReadings] = []
    if isinstance(keys, torch.Tensor):
        for block in blocks:
            block.see(0, keys)
            read.append(block.readings(sinks_H))
    else:
        waiting = list(blocks)
        for first, k_SKD in keys:
            for block in waiting:
                block.see(first, k_SKD)
        read = [block.readings(sinks_H) for block in waiting]
    return _joined(read)


class _Sums:
    """m, l and T of a set of keys for each row: [heads, rows]."""

    def __init__(self, like: torch.Tensor) -> None:
        self.top = torch.full_like(like, -math.inf)
        self.total = torch.zeros_like(like)
        self.moment = torch.zeros_like(like)

    def add(self, scores_HRS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count scores in (−inf: hidden), overwritten by weights e^(s−m); them and the factor
        by which all earlier weights shrink."""
        top = torch.maximum(self.top, scores_HRS.amax(-1))
        # Nothing seen so far: any finite number will do, and −inf − −inf would be NaN.
        base = torch.where(top == -math.inf, 0.0, top)
        # e^−1000 is 0 in float64 too, and 0·−1000 is 0 where 0·−inf would be NaN.
        offsets_HRS = scores_HRS.sub_(base[..., None]).clamp_(min=-1000.0)
        weights_HRS = offsets_HRS.exp()
        shift = torch.where(self.total == 0, 0.0, self.top - base)
        factor = shift.exp()
        moment = torch.einsum("hrs,hrs->hr", weights_HRS, offsets_HRS)
        self.moment = factor * (self.moment + shift * self.total) + moment
        self.total = factor * self.total + weights_HRS.sum(-1)
        self.top = top
        return weights_HRS, factor

    def with_one(self, score_HR: torch.Tensor) -> _Sums:
        """As if one key more had been seen."""
        more = _Sums(self.top)
        more.top, more.total, more.moment = self.top, self.total, self.moment
        more.add(score_HR[..., None].clone())
        return more

    def share(self, of: _Sums) -> torch.Tensor:
        """The weight of these keys among those of `of`, which has them all."""
        base = torch.where(self.total == 0, 0.0, self.top - of.top)
        return self.total * base.exp() / of.total

    def entropy(self) -> torch.Tensor:
        return (self.total.log() - self.moment / self.total).clamp(min=0.0)


class _Block:
    """Some rows and what they have seen so far."""

    def __init__(
        self,
        q_RHD: torch.Tensor,
        rows_R: torch.Tensor,
        rule: AttentionRule,
        sight: Sight,
        values_SKD: torch.Tensor | None,
    ) -> None:
        self._q_RHD, self._rows_R, self._rule, self._sight = q_RHD, rows_R, rule, sight
        self._values_SKD = values_SKD
        self._low_R, self._high_R = seen_interval(rows_R, rule, sight)
        self._low, self._high = int(self._low_R.min()), int(self._high_R.max())
        self._all_from, self._all_to = int(self._low_R.max()), int(self._high_R.min())
        like = q_RHD.new_empty(q_RHD.shape[1], q_RHD.shape[0])
        self._all, self._band, self._first = _Sums(like), _Sums(like), _Sums(like)
        self._visible = torch.zeros_like(rows_R)
        self._output_HRD: torch.Tensor | None = None

    def see(self, first: int, k_SKD: torch.Tensor) -> None:
        """Keys from position `first` on."""
        num_rows = len(self._rows_R)
        width = max(_TILE_KEYS, _TILE_SCORES // (num_rows * self._q_RHD.shape[1]))
        start, end = max(first, self._low), min(first + len(k_SKD), self._high)
        for at in range(start, end, width):
            to = min(end, at + width)
            self._see_tile(at, k_SKD[at - first : to - first].to(self._q_RHD.dtype))

    def _see_tile(self, at: int, k_SKD: torch.Tensor) -> None:
        num_rows, num_heads, _ = self._q_RHD.shape
        num_keys, num_kv_heads, dim = k_SKD.shape
        end = at + num_keys
        q_KND = self._q_RHD.view(num_rows, num_kv_heads, -1, dim).permute(1, 2, 0, 3)
        scores_KNS = torch.matmul(q_KND.reshape(num_kv_heads, -1, dim), k_SKD.permute(1, 2, 0))
        scores_HRS = scores_KNS.view(num_heads, num_rows, num_keys)
        positions_S = torch.arange(at, end, device=k_SKD.device)
        _bend(scores_HRS, self._rule, self._rows_R, positions_S)
        if at < self._all_from or end > self._all_to or self._sight.keep is not None:
            hidden_RS = self._hidden(positions_S)
            scores_HRS.masked_fill_(hidden_RS, -math.inf)
            self._visible += (~hidden_RS).sum(-1)
        else:
            self._visible += num_keys
        if at <= self._sight.padding < end:
            self._first.add(scores_HRS[..., self._sight.padding - at, None].clone())
        self._see_band(at, scores_HRS)
        weights_HRS, factor_HR = self._all.add(scores_HRS)
        if self._values_SKD is not None:
            self._weigh(weights_HRS, factor_HR, self._values_SKD[at:end].to(k_SKD.dtype))

    def _hidden(self, positions_S: torch.Tensor) -> torch.Tensor:
        hidden_RS = positions_S < self._low_R[:, None]
        hidden_RS |= positions_S >= self._high_R[:, None]
        if self._sight.keep is not None:
            hidden_RS |= ~self._sight.keep[positions_S]
        return hidden_RS

    def _see_band(self, at: int, scores_HRS: torch.Tensor) -> None:
        num_keys = scores_HRS.shape[-1]
        offsets = torch.arange(-BAND, BAND + 1, device=self._rows_R.device)
        index_RB = self._rows_R[:, None] + offsets - at
        outside_RB = (index_RB < 0) | (index_RB >= num_keys)
        if outside_RB.all():
            return
        index_RB = index_RB.clamp(0, num_keys - 1)
        scores_HRB = scores_HRS.gather(-1, index_RB.expand(len(scores_HRS), -1, -1))
        self._band.add(scores_HRB.masked_fill_(outside_RB, -math.inf))

    def _weigh(
        self, weights_HRS: torch.Tensor, factor_HR: torch.Tensor, v_SKD: torch.Tensor
    ) -> None:
        num_heads, num_rows, num_keys = weights_HRS.shape
        weights_KNS = weights_HRS.view(v_SKD.shape[1], -1, num_keys)
        sums_HRD = torch.matmul(weights_KNS, v_SKD.transpose(0, 1)).view(num_heads, num_rows, -1)
        if self._output_HRD is None:
            self._output_HRD = sums_HRD
        else:
            self._output_HRD = self._output_HRD * factor_HR[..., None] + sums_HRD

    def readings(self, sinks_H: torch.Tensor | None) -> RowReadings:
        whole = self._all
        sunk = None
        if sinks_H is not None:
            sunk = whole.with_one(sinks_H.to(whole.top.dtype)[:, None].expand_as(whole.top))
        output_RHD = None
        if self._output_HRD is not None:
            under = whole.total if sunk is None else whole.total / whole.share(sunk)
            output_RHD = (self._output_HRD / under[..., None]).transpose(0, 1)
        # Where nothing was seen 0/0 says NaN by itself, for m it must be said.
        top = torch.where(whole.total == 0, math.nan, whole.top)
        with_sink = None if sunk is None else sunk.entropy() + 0 * top
        sink_mass = None if sunk is None else 1 - whole.share(sunk) + 0 * top
        return RowReadings(
            entropy_nats=whole.entropy().T.float(),
            max_score=top.T.float(),
            first_mass=self._first.share(whole).T.float(),
            band_mass=self._band.share(whole).T.float(),
            band_entropy_nats=self._band.entropy().T.float(),
            visible=self._visible,
            entropy_with_sink_nats=None if with_sink is None else with_sink.T.float(),
            learned_sink_mass=None if sink_mass is None else sink_mass.T.float(),
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


def _bend(
    scores_HRS: torch.Tensor, rule: AttentionRule, rows_R: torch.Tensor, positions_S: torch.Tensor
) -> None:
    """From products to scores, in place."""
    if rule.soft_cap is None:
        scores_HRS.mul_(rule.scale)
    else:
        scores_HRS.mul_(rule.scale / rule.soft_cap).tanh_().mul_(rule.soft_cap)
    if rule.slopes:
        slopes_H11 = scores_HRS.new_tensor(rule.slopes)[:, None, None]
        distance_RS = (positions_S - rows_R[:, None]).to(scores_HRS.dtype)
        scores_HRS.addcmul_(slopes_H11, distance_RS.expand_as(scores_HRS))


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
