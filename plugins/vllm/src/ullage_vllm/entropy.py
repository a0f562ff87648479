"""The exact entropy of attention rows in one pass over the keys, as in docs/probes.md: "One pass".

Holds the arithmetic alone, in torch; whose queries and keys those are is `layers`. The same
numbers as the embedded engine's probe, which a test holds it to; nothing is imported from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

BAND = 16
"""Positions to each side of a row that count as near it."""
TILE = 2048
"""Keys that are looked at together; more than BAND, so that a row's band lies in its last tile."""
COLUMNS = (
    "entropy_nats",
    "sink_mass",
    "band_mass",
    "band_entropy_nats",
    "max_score",
    "entropy_with_sink_nats",
    "learned_sink_mass",
)
"""Of each row and head, in this order; the last two are NaN without learned sinks."""

MOST_SCORES = 1 << 20
"""Scores of one row that are held at a time, over layers."""

Fetch = Callable[[int, int], torch.Tensor]
"""Of positions start ≤ s < stop, float32: keys [kv heads, dim, s] or values [kv heads, s, dim]."""


@dataclass(frozen=True)
class Keys:
    """Of one layer and sequence, fetched `at_once` positions at a time: few enough that a piece
    stays in the processor's cache between its copy and its product."""

    fetch: Fetch
    at_once: int = 512

    def pieces(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        for at in range(start, stop, self.at_once):
            yield self.fetch(at, min(at + self.at_once, stop))


@dataclass(frozen=True)
class Rule:
    """score(t, s) = cap(q_t·k_s·scale) + slope·(s − t) for s ≤ t; with a window, s > t − window."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes_H: torch.Tensor | None = None
    sinks_H: torch.Tensor | None = None

    def low(self, position: int) -> int:
        """The first position that a row sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class Rows:
    """`columns_RHC` as COLUMNS says; attention itself where values were given."""

    columns_RHC: torch.Tensor
    output_RHD: torch.Tensor | None = None


def read(
    q_RHD: torch.Tensor,
    positions: Sequence[int],
    keys: Keys,
    rule: Rule,
    values: Fetch | None = None,
) -> Rows:
    """The rows of one sequence at these positions, ascending.

    One row alone needs no mask: what it sees is all that is fetched. `values` give `output_RHD`.
    """
    rows = len(q_RHD)
    q_RHD = q_RHD.float() * rule.scale
    lows = [rule.low(position) for position in positions]
    whole, band = _Sums(), _Sums()
    first_RH: torch.Tensor | None = None
    for start, stop in _tiles(min(lows), positions[-1] + 1):
        scores_RHS = _scores(q_RHD, keys.pieces(start, stop), start, positions, rule)
        seen = near = None
        if rows > 1:
            seen, near = _masks(positions, lows, start, stop, q_RHD.device)
        if start == 0:
            first_RH = scores_RHS[..., 0]
            if rows > 1:
                hidden = torch.tensor([low > 0 for low in lows], device=q_RHD.device)
                first_RH = first_RH.masked_fill(hidden[:, None], -math.inf)
        whole.see(scores_RHS, seen, None if values is None else values(start, stop))
        nearest = min(max(low, at - BAND) for low, at in zip(lows, positions, strict=True))
        begin = max(start, nearest)
        if begin < stop:
            near = None if near is None else near[..., begin - start :]
            band.see(scores_RHS[..., begin - start :], near)
    return Rows(_columns(whole, band, first_RH, rule.sinks_H), whole.attention(rule))


@dataclass(frozen=True)
class Place:
    """One layer's query of a row, and the keys that it may see."""

    q_HD: torch.Tensor
    keys: Keys
    rule: Rule


def one_row(places: Sequence[Place], position: int) -> torch.Tensor:
    """COLUMNS of one row in several layers, [heads of all, columns] in their order.

    As `read`, but what follows the scores is done for many layers together: of a decode step the
    calls cost more than the arithmetic.
    """
    found: dict[int, torch.Tensor] = {}
    for low in sorted({place.rule.low(position) for place in places}):
        batch: list[int] = []
        scores: list[torch.Tensor] = []
        seeing = [at for at, place in enumerate(places) if place.rule.low(position) == low]
        for at in seeing:
            place = places[at]
            q_RHD = place.q_HD[None].float() * place.rule.scale
            pieces = place.keys.pieces(low, position + 1)
            scores.append(_scores(q_RHD, pieces, low, [position], place.rule))
            batch.append(at)
            if at == seeing[-1] or sum(one.numel() for one in scores) > MOST_SCORES:
                columns = _columns_of_one(torch.cat(scores, 1), low, position, places, batch)
                parts = torch.split(columns, [len(places[one].q_HD) for one in batch])
                found.update(zip(batch, parts, strict=True))
                batch, scores = [], []
    return torch.cat([found[at] for at in range(len(places))])


def _columns_of_one(
    scores_RHS: torch.Tensor, low: int, position: int, places: Sequence[Place], batch: list[int]
) -> torch.Tensor:
    whole, band = _Sums(), _Sums()
    whole.see(scores_RHS, None)
    band.see(scores_RHS[..., max(low, position - BAND) - low :], None)
    sinks_H = None
    if any(places[at].rule.sinks_H is not None for at in batch):
        none = [scores_RHS.new_full((len(places[at].q_HD),), math.nan) for at in batch]
        listed = [places[at].rule.sinks_H for at in batch]
        sinks_H = torch.cat(
            [nan if own is None else own for own, nan in zip(listed, none, strict=True)]
        )
    return _columns(whole, band, scores_RHS[..., 0] if low == 0 else None, sinks_H)[0]


def weights(q_HD: torch.Tensor, position: int, keys: Keys, rule: Rule, head: int) -> list[float]:
    """One head's weights of the keys that a row sees, the last at the row itself; of keys alone."""
    q_RHD = q_HD[None].float() * rule.scale
    parts = [
        _scores(q_RHD, keys.pieces(start, stop), start, [position], rule)[0, head]
        for start, stop in _tiles(rule.low(position), position + 1)
    ]
    return [float(one) for one in torch.softmax(torch.cat(parts).double(), 0).tolist()]


def _tiles(low: int, high: int) -> Iterator[tuple[int, int]]:
    """From low to high; the last one is whole, so that it holds a single row's band."""
    start = low
    while start < high:
        stop = start + ((high - start - 1) % TILE + 1)
        yield start, stop
        start = stop


def _scores(
    q_RHD: torch.Tensor,
    pieces: Iterator[torch.Tensor],
    start: int,
    positions: Sequence[int],
    rule: Rule,
) -> torch.Tensor:
    """[rows, heads, keys]. Query head h reads kv head h // (heads / kv heads)."""
    rows, heads, dim = q_RHD.shape
    parts = []
    for k_KDS in pieces:
        kv_heads = len(k_KDS)
        q_KQD = q_RHD.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        parts.append(torch.bmm(q_KQD, k_KDS))
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    scores = scores.reshape(kv_heads, rows, heads // kv_heads, -1)
    scores_RHS = scores.transpose(0, 1).reshape(rows, heads, -1)
    if rule.soft_cap:
        scores_RHS = torch.tanh(scores_RHS / rule.soft_cap) * rule.soft_cap
    if rule.slopes_H is not None:
        at_S = torch.arange(start, start + scores_RHS.shape[-1], device=scores_RHS.device)
        away_RS = at_S[None] - torch.tensor(positions, device=at_S.device)[:, None]
        scores_RHS = scores_RHS + rule.slopes_H[None, :, None] * away_RS[:, None]
    return scores_RHS


def _masks(
    positions: Sequence[int], lows: Sequence[int], start: int, stop: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, 1, keys]: who sees what, and what of it lies in the band."""
    at_S = torch.arange(start, stop, device=device)
    row_R1 = torch.tensor(positions, device=device)[:, None]
    seen_RS = (at_S <= row_R1) & (at_S >= torch.tensor(lows, device=device)[:, None])
    return seen_RS[:, None], (seen_RS & (at_S >= row_R1 - BAND))[:, None]


class _Sums:
    """Of scores seen so far: the highest m, l = Σ e^(s−m), T = Σ e^(s−m)·(s−m), Σ e^(s−m)·v."""

    def __init__(self) -> None:
        self.top: torch.Tensor | None = None
        self.total = self.moment = torch.empty(0)
        self.values: torch.Tensor | None = None

    def see(
        self,
        scores_RHS: torch.Tensor,
        seen: torch.Tensor | None,
        values_KSD: torch.Tensor | None = None,
    ) -> None:
        if seen is not None:
            scores_RHS = scores_RHS.masked_fill(~seen, -math.inf)
        top_RH = scores_RHS.amax(-1)
        if self.top is not None:
            top_RH = torch.maximum(top_RH, self.top)
        # A row of which nothing was seen yet: any finite m will do, its sums are 0.
        base_RH = top_RH if seen is None else top_RH.masked_fill(top_RH == -math.inf, 0.0)
        less_RHS = scores_RHS - base_RH[..., None]
        weights_RHS = torch.exp(less_RHS)
        if seen is not None:
            less_RHS = less_RHS.masked_fill(~seen, 0.0)
        total = weights_RHS.sum(-1).double()
        moment = (weights_RHS * less_RHS).sum(-1).double()
        values = None if values_KSD is None else _weighed(weights_RHS, values_KSD)
        if self.top is not None:
            # Below −10,000 nothing is left of it, and −∞ · 0 would be no number.
            fall_RH = (self.top - base_RH).double().clamp(min=-1e4)
            kept_RH = fall_RH.exp()
            moment = moment + kept_RH * (self.moment + fall_RH * self.total)
            total = total + kept_RH * self.total
            if values is not None and self.values is not None:
                values = values + self.values * kept_RH[..., None].float()
        self.top, self.total, self.moment, self.values = top_RH, total, moment, values

    def entropy(self) -> torch.Tensor:
        return (self.total.log() - self.moment / self.total).clamp(min=0.0)

    def share(self, whole: _Sums) -> torch.Tensor:
        """Of the weight that `whole` has."""
        assert self.top is not None and whole.top is not None
        return (self.top - whole.top).double().exp() * self.total / whole.total

    def with_one(self, score_RH: torch.Tensor) -> _Sums:
        """And one score more."""
        assert self.top is not None
        both = _Sums()
        both.top = torch.maximum(self.top, score_RH)
        fall, own = ((x - both.top).double() for x in (self.top, score_RH))
        both.total = fall.exp() * self.total + own.exp()
        both.moment = fall.exp() * (self.moment + fall * self.total) + own.exp() * own
        return both

    def attention(self, rule: Rule) -> torch.Tensor | None:
        """What the values come to, the learned sink in the denominator."""
        if self.values is None:
            return None
        total = self.total
        if rule.sinks_H is not None:
            sunk = self.with_one(rule.sinks_H.float().expand_as(total))
            total = total / self.share(sunk)
        return self.values / total[..., None].float()


def _weighed(weights_RHS: torch.Tensor, values_KSD: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim]"""
    rows, heads, _ = weights_RHS.shape
    kv_heads = values_KSD.shape[0]
    grouped = weights_RHS.reshape(rows, kv_heads, heads // kv_heads, -1).transpose(0, 1)
    out = torch.bmm(grouped.reshape(kv_heads, -1, grouped.shape[-1]), values_KSD)
    return (
        out.reshape(kv_heads, rows, heads // kv_heads, -1).transpose(0, 1).reshape(rows, heads, -1)
    )


def _columns(
    whole: _Sums, band: _Sums, first_RH: torch.Tensor | None, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    assert whole.top is not None
    nan = torch.full_like(whole.total, math.nan)
    first = torch.zeros_like(whole.total)
    if first_RH is not None:
        first = (first_RH - whole.top).double().exp() / whole.total
    with_sink, sink_mass = nan, nan
    if sinks_H is not None:
        sunk = whole.with_one(sinks_H.float().expand_as(whole.top))
        with_sink, sink_mass = sunk.entropy(), (1 - whole.share(sunk)).clamp(min=0.0)
    listed = (
        whole.entropy(),
        first,
        band.share(whole).clamp(max=1.0),
        band.entropy(),
        whole.top.double(),
        with_sink,
        sink_mass,
    )
    return torch.stack(listed, -1).float()
