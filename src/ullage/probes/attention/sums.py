"""What is kept of the keys that rows have seen: m, l and T, from which entropy and masses follow.

Holds the sums, how torch fills them tile by tile on any device, and how compiled loops do on CPUs.
What a row may see and what the sums are made into is `entropy`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ullage.engine.kernels.compiling import available
from ullage.engine.rule import AttentionRule

# Keys of a row's neighbourhood on each side, as folklore estimates entropy.
BAND = 16
# Scores of one tile: with the few that are made of them they stay in the second cache.
_TILE_SCORES = 1 << 18
_TILE_KEYS = 512
# Rows and keys that are converted at once where they are not float32.
_CONVERTED = 4096


@dataclass(slots=True)
class Sums:
    """Of a set of keys: highest score m, l = Σ e^(s−m), T = Σ e^(s−m)(s−m); of any one shape."""

    top: torch.Tensor
    total: torch.Tensor
    moment: torch.Tensor

    @classmethod
    def of_none(cls, like: torch.Tensor) -> Sums:
        zeros = torch.zeros_like(like)
        return cls(torch.full_like(like, -math.inf), zeros, zeros.clone())

    def add(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count scores in along a last dimension (−inf: hidden).

        They are overwritten. Returns their weights e^(s−m), and by what earlier weights shrink.
        """
        top = torch.maximum(self.top, scores.amax(-1))
        # Nothing seen so far: any finite number will do, and −inf − −inf would be NaN.
        base = torch.where(top == -math.inf, 0.0, top)
        # e^−1000 is 0 in float64 too, and 0·−1000 is 0 where 0·−inf would be NaN.
        offsets = scores.sub_(base[..., None]).clamp_(min=-1000.0)
        weights = offsets.exp()
        shift = torch.where(self.total == 0, 0.0, self.top - base)
        factor = shift.exp()
        moment = torch.linalg.vecdot(weights, offsets)
        self.moment = factor * (self.moment + shift * self.total) + moment
        self.total = factor * self.total + weights.sum(-1)
        self.top = top
        return weights, factor

    def with_one(self, score: torch.Tensor) -> Sums:
        """As if one key more had been seen."""
        more = Sums(self.top, self.total, self.moment)
        more.add(score[..., None].clone())
        return more

    def share(self, of: Sums) -> torch.Tensor:
        """The weight of these keys among those of `of`, which has them all."""
        base = torch.where(self.total == 0, 0.0, self.top - of.top)
        return self.total * base.exp() / of.total

    def entropy(self) -> torch.Tensor:
        """ln l − T/l: two terms of at least 0 each, so nothing cancels, however high the scores."""
        return (self.total.log() - self.moment / self.total).clamp(min=0.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows at positions `rows_R` of one sequence, which see low ≤ s < high where `keep` says so."""

    q_RHD: torch.Tensor
    rows_R: torch.Tensor
    low_R: torch.Tensor
    high_R: torch.Tensor
    first_token: int
    keep: torch.Tensor | None
    rule: AttentionRule


@dataclass(frozen=True, slots=True)
class Counted:
    """[rows, heads] of all keys seen, of the band's, of the first token; Σ weight·value if any."""

    whole: Sums
    band: Sums
    first: Sums
    output_RHD: torch.Tensor | None


class Count(Protocol):
    """Rows that look at keys as they come."""

    def see(self, first: int, k_SKD: torch.Tensor, v_SKD: torch.Tensor | None) -> None:
        """Keys, and perhaps values, from position `first` on."""

    def counted(self) -> Counted:
        """What all keys so far come to."""


def count_for(asked: Asked) -> Count:
    """Compiled loops where they can be had, else torch, which also does float64."""
    on_cpu = asked.q_RHD.device.type == "cpu"
    if on_cpu and asked.q_RHD.dtype is not torch.float64 and available():
        return CompiledCount(asked)
    return TiledCount(asked)


class TiledCount:
    """By torch's matrix products, on any device."""

    def __init__(self, asked: Asked) -> None:
        q_RHD = asked.q_RHD
        self._asked = asked
        self._dtype = torch.float64 if q_RHD.dtype is torch.float64 else torch.float32
        each = max(1, _TILE_SCORES // (q_RHD.shape[1] * _TILE_KEYS))
        self._blocks = [
            _Block(asked, slice(i, min(i + each, len(q_RHD))), self._dtype)
            for i in range(0, len(q_RHD), each)
        ]

    def see(self, first: int, k_SKD: torch.Tensor, v_SKD: torch.Tensor | None) -> None:
        for block in self._blocks:
            block.see(first, k_SKD, v_SKD)

    def counted(self) -> Counted:
        def joined(name: str) -> Sums:
            parts = [getattr(block, name) for block in self._blocks]
            return Sums(
                torch.cat([part.top for part in parts], -1).T,
                torch.cat([part.total for part in parts], -1).T,
                torch.cat([part.moment for part in parts], -1).T,
            )

        outputs = [block.output_HRD for block in self._blocks if block.output_HRD is not None]
        output_RHD = torch.cat(outputs, 1).transpose(0, 1) if outputs else None
        return Counted(joined("whole"), joined("band"), joined("first"), output_RHD)


class _Block:
    """Some rows, few enough that their scores of a tile stay near; sums are [heads, rows]."""

    def __init__(self, asked: Asked, rows: slice, dtype: torch.dtype) -> None:
        self._asked, self._dtype = asked, dtype
        self._q_RHD, self._rows_R = asked.q_RHD[rows], asked.rows_R[rows]
        self._low_R, self._high_R = asked.low_R[rows], asked.high_R[rows]
        self._low, self._high = int(self._low_R.min()), int(self._high_R.max())
        self._all_from, self._all_to = int(self._low_R.max()), int(self._high_R.min())
        like = self._q_RHD.new_empty(self._q_RHD.shape[1], len(self._rows_R), dtype=dtype)
        self.whole, self.band, self.first = (Sums.of_none(like) for _ in range(3))
        self.output_HRD: torch.Tensor | None = None

    def see(self, first: int, k_SKD: torch.Tensor, v_SKD: torch.Tensor | None) -> None:
        width = max(_TILE_KEYS, _TILE_SCORES // (len(self._rows_R) * self._q_RHD.shape[1]))
        start, end = max(first, self._low), min(first + len(k_SKD), self._high)
        for at in range(start, end, width):
            here = slice(at - first, min(end, at + width) - first)
            weights_HRS, factor_HR = self._see_tile(at, k_SKD[here].to(self._dtype))
            if v_SKD is not None:
                self._weigh(weights_HRS, factor_HR, v_SKD[here].to(self._dtype))

    def _see_tile(self, at: int, k_SKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_heads, dim = self._q_RHD.shape
        num_keys, num_kv_heads, _ = k_SKD.shape
        first_token, keep, end = self._asked.first_token, self._asked.keep, at + num_keys
        q_RKGD = self._q_RHD.to(self._dtype).reshape(num_rows, num_kv_heads, -1, dim)
        q_KND = q_RKGD.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, dim)
        scores_KNS = torch.matmul(q_KND, k_SKD.permute(1, 2, 0))
        scores_HRS = scores_KNS.view(num_heads, num_rows, num_keys)
        positions_S = torch.arange(at, end, device=k_SKD.device)
        bend(scores_HRS, self._asked.rule, self._rows_R, positions_S)
        # Only overflow makes −inf, and a row of which anything is not finite must not look well.
        scores_HRS.masked_fill_(scores_HRS == -math.inf, math.nan)
        if at < self._all_from or end > self._all_to or keep is not None:
            hidden_RS = (positions_S < self._low_R[:, None]) | (
                positions_S >= self._high_R[:, None]
            )
            if keep is not None:
                hidden_RS |= ~keep[at:end]
            scores_HRS.masked_fill_(hidden_RS, -math.inf)
        if at <= first_token < end:
            self.first.add(scores_HRS[..., first_token - at, None].clone())
        self._see_band(at, scores_HRS)
        return self.whole.add(scores_HRS)

    def _see_band(self, at: int, scores_HRS: torch.Tensor) -> None:
        num_keys = scores_HRS.shape[-1]
        offsets = torch.arange(-BAND, BAND + 1, device=self._rows_R.device)
        index_RB = self._rows_R[:, None] + offsets - at
        outside_RB = (index_RB < 0) | (index_RB >= num_keys)
        if outside_RB.all():
            return
        index_RB = index_RB.clamp(0, num_keys - 1)
        scores_HRB = scores_HRS.gather(-1, index_RB.expand(len(scores_HRS), -1, -1))
        self.band.add(scores_HRB.masked_fill_(outside_RB, -math.inf))

    def _weigh(
        self, weights_HRS: torch.Tensor, factor_HR: torch.Tensor, v_SKD: torch.Tensor
    ) -> None:
        num_heads, num_rows, num_keys = weights_HRS.shape
        weights_KNS = weights_HRS.view(v_SKD.shape[1], -1, num_keys)
        sums_HRD = torch.matmul(weights_KNS, v_SKD.transpose(0, 1)).view(num_heads, num_rows, -1)
        if self.output_HRD is None:
            self.output_HRD = torch.zeros_like(sums_HRD)
        self.output_HRD = self.output_HRD * factor_HR[..., None] + sums_HRD


def bend(
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


class CompiledCount:
    """By the package's own loops: one pass, all threads; a third of what torch's products take."""

    def __init__(self, asked: Asked) -> None:
        from ullage.engine.kernels.entropy import NUM_SUMS

        self._asked = asked
        num_rows, num_heads, _ = asked.q_RHD.shape
        self._sums_RHX = torch.zeros((num_rows, num_heads, NUM_SUMS), dtype=torch.float64)
        self._sums_RHX[..., [0, 3, 6]] = -math.inf
        self._slopes = torch.tensor(asked.rule.slopes, dtype=torch.float32).numpy()
        keep = torch.empty(0, dtype=torch.bool) if asked.keep is None else asked.keep
        self._keep = keep.contiguous().numpy()
        self._output_RHD: torch.Tensor | None = None

    def see(self, first: int, k_SKD: torch.Tensor, v_SKD: torch.Tensor | None) -> None:
        q_RHD = self._asked.q_RHD
        if v_SKD is not None and self._output_RHD is None:
            self._output_RHD = torch.zeros((*q_RHD.shape[:2], v_SKD.shape[-1]))
        # What lies as the loops read it is read in one call.
        each_rows = len(q_RHD) if _readable(q_RHD) else _CONVERTED
        readable = _readable(k_SKD) and (v_SKD is None or _readable(v_SKD))
        each_keys = len(k_SKD) if readable else _CONVERTED
        for i in range(0, len(k_SKD), each_keys):
            here = slice(i, i + each_keys)
            k, v = _floats(k_SKD[here]), None if v_SKD is None else _floats(v_SKD[here])
            for r in range(0, len(q_RHD), each_rows):
                self._see_some(slice(r, r + each_rows), first + i, k, v)

    def _see_some(
        self, rows: slice, first: int, k_SKD: torch.Tensor, v_SKD: torch.Tensor | None
    ) -> None:
        from ullage.engine.kernels.entropy import see_keys
        from ullage.engine.kernels.product import team

        asked, rule = self._asked, self._asked.rule
        q_RHD = _floats(asked.q_RHD[rows])
        out = None if self._output_RHD is None else self._output_RHD[rows]
        places = torch.tensor([_place(x) for x in (q_RHD, k_SKD, v_SKD, out)]).numpy()
        team().run(
            see_keys, 1, places, k_SKD.shape[1], k_SKD.shape[2],
            0 if v_SKD is None else v_SKD.shape[2], len(k_SKD), first, asked.rows_R[rows].numpy(),
            asked.low_R[rows].numpy(), asked.high_R[rows].numpy(), asked.first_token, BAND,
            self._keep, _float32(rule.scale), _float32(rule.soft_cap or 0), self._slopes,
            self._sums_RHX[rows].numpy(),
        )  # fmt: skip

    def counted(self) -> Counted:
        return counted_of(self._sums_RHX, self._output_RHD)


def counted_of(sums_RHX: torch.Tensor, output_RHD: torch.Tensor | None) -> Counted:
    """The sums of `kernels.entropy` by name."""
    top, total, moment, *band, first = sums_RHX.unbind(-1)
    seen = (first > -math.inf).to(first.dtype) + 0 * first.clamp(min=0)
    alone = Sums(first, seen, torch.zeros_like(first))
    return Counted(Sums(top, total, moment), Sums(*band), alone, output_RHD)


def _readable(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.stride(-1) == 1


def _floats(x: torch.Tensor) -> torch.Tensor:
    return x if _readable(x) else x.float().contiguous()


def _float32(x: float) -> Any:
    import numpy as np

    return np.float32(x)


def _place(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Address, and strides of tokens and heads."""
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))
