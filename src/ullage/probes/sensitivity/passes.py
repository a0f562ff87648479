"""A few short prompts through a decoder at once, from any layer on, and how far two passes are.

Holds the pass, without a cache: keys and values of a step are all that its rows see. What is
changed between passes is `changes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from ullage.engine.attention import AttentionStep
from ullage.engine.attention.protocol import hidden
from ullage.engine.batch import Batch, Span
from ullage.engine.kv import KVCache
from ullage.engine.model.decoder import Decoder
from ullage.engine.rule import AttentionRule
from ullage.engine.taps import Taps
from ullage.probes.sameness.answers import LEAST_LOGPROB

# Rows whose log-probabilities over the whole vocabulary are held at once.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class Moved:
    """How far one pass is from the exact one; None where numbers are not finite any more.

    `kl_nats`: mean over rows of KL(exact ‖ this). `logprob_nats`: mean |Δ log-probability| of the
    prompts' own next tokens. `entropy_nats`: mean |Δ entropy| over layers, heads and rows that see
    two keys or more. `agreement`: share of rows whose likeliest token is the same.
    """

    kl_nats: float | None
    logprob_nats: float | None
    entropy_nats: float | None
    agreement: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Float32: logits [rows, vocab] and the log of their exponentials' sum; entropies [layers,
    rows, heads] of the layers that ran."""

    logits_TV: torch.Tensor
    whole_T: torch.Tensor
    entropy_LTH: torch.Tensor

    def next_logprobs(self, prompts: Prompts) -> torch.Tensor:
        """float64, of each token of the prompts that stands behind another."""
        rows_R = prompts.asked_R
        found_R = self.logits_TV[rows_R, prompts.next_R] - self.whole_T[rows_R]
        return found_R.double().clamp(min=LEAST_LOGPROB)


class Prompts:
    """Prompts laid out beside each other, all from position 0."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        """Each has two tokens or more."""
        lengths = torch.tensor([len(ids) for ids in prompts])
        firsts = lengths.cumsum(0) - lengths
        self.ids_T = torch.tensor([token for ids in prompts for token in ids])
        self.positions_T = torch.cat([torch.arange(int(n)) for n in lengths])
        self.num_prompts = len(prompts)
        # Row of the batch for each place of [prompts, longest], and which places are rows.
        places_S = torch.arange(int(lengths.max()))
        self.real_PS = places_S < lengths[:, None]
        self.rows_PS = torch.where(self.real_PS, firsts[:, None] + places_S, 0)
        spans = tuple(
            Span(int(first), int(count), 0, ((),))
            for first, count in zip(firsts, lengths, strict=True)
        )
        everywhere = torch.arange(len(self.ids_T))
        nowhere = torch.empty(0, dtype=torch.int64)
        self.batch = Batch(self.ids_T, self.positions_T, (nowhere,), (), spans, everywhere, ())
        # Rows that have a next token, and which it is.
        self.asked_R = (self.positions_T[1:] > 0).nonzero()[:, 0]
        self.next_R = self.ids_T[self.asked_R + 1]


class _Together:
    """Attention of all prompts in one product, padded, with the entropy of every row."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self.entropies: list[torch.Tensor] = []

    def watches(self, batch: Batch) -> bool:  # noqa: ARG002
        return True

    def prepare(self, batch: Batch) -> AttentionStep:  # noqa: ARG002
        self.entropies.clear()
        return self._attend

    def _attend(
        self,
        layer: int,  # noqa: ARG002
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        rows_PS, real_PS = self._prompts.rows_PS, self._prompts.real_PS
        group = q_THD.shape[1] // k_TKD.shape[1]
        q_PHSD = q_THD[rows_PS].transpose(1, 2)
        k_PHSD = k_TKD[rows_PS].transpose(1, 2).repeat_interleave(group, 1)
        # What nobody sees may hold anything: zero times NaN would be NaN.
        v_PSKD = v_TKD[rows_PS].masked_fill(~real_PS[..., None, None], 0.0)
        v_PHSD = v_PSKD.transpose(1, 2).repeat_interleave(group, 1)
        scores = (q_PHSD @ k_PHSD.transpose(-1, -2)) * rule.scale
        if rule.soft_cap is not None:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        places_S = torch.arange(rows_PS.shape[1])
        if rule.slopes:
            scores += torch.tensor(rule.slopes)[:, None, None] * (places_S - places_S[:, None])
        unseen_SS = hidden(places_S[:, None], places_S, rule.window)
        weights = scores.masked_fill(unseen_SS, -math.inf).softmax(-1)
        entropy_PHS = -torch.special.xlogy(weights, weights).sum(-1)
        self.entropies.append(entropy_PHS.transpose(1, 2)[real_PS])
        return (weights @ v_PHSD).transpose(1, 2)[real_PS]


class _OneGroup:
    def __getitem__(self, layer: int) -> int:
        return 0


class _NoCache:
    """In a cache's place: nothing is stored, for nothing is read again."""

    layout = SimpleNamespace(group_of=_OneGroup())

    def write(self, *_: object) -> None:
        pass


class _Residuals(Taps):
    """Of all that a step could keep, the residual in front of every layer, and the last."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def keep(self, layer: int, **values: torch.Tensor) -> None:  # noqa: ARG002
        if "x" in values:
            self.found.append(values["x"])

    def narrow(self, sampled_rows: torch.Tensor) -> None:
        """All rows are sampled."""


class _Rest(Decoder):
    """A decoder from one of its layers on, given what goes into it."""

    def __init__(self, whole: Decoder, first: int, x_TE: torch.Tensor) -> None:
        self.__dict__.update(whole.__dict__)
        self.layers = whole.layers[first:]
        self._x_TE = x_TE

    def _embed(self, batch: Batch) -> torch.Tensor:  # noqa: ARG002
        return self._x_TE


class Runner:
    """Passes of one decoder over one set of prompts. The first is the exact one."""

    def __init__(self, decoder: Decoder, prompts: Prompts) -> None:
        self.decoder, self.prompts = decoder, prompts
        residuals = _Residuals()
        self.exact = self._pass(decoder, residuals)
        self._residuals = tuple(residuals.found)
        self.num_passes = 1

    def moved(self, first: int | None) -> Moved:
        """Of the decoder as it is now, if nothing in front of layer `first` was changed.

        `first` None: anything was; the number of layers: only what comes behind them.
        """
        self.num_passes += 1
        decoder = self.decoder
        if first is not None:
            decoder = _Rest(decoder, first, self._residuals[first])
        return apart(self.prompts, self.exact, self._pass(decoder))

    def _pass(self, decoder: Decoder, taps: Taps | None = None) -> Pass:
        return run(decoder, self.prompts, taps)


@torch.inference_mode()
def run(decoder: Decoder, prompts: Prompts, taps: Taps | None = None) -> Pass:
    """One pass over all prompts."""
    attention = _Together(prompts)
    cache = cast("KVCache", _NoCache())
    logits_TV = decoder.forward(prompts.batch, cache, attention, taps)
    found = attention.entropies
    entropies = torch.stack(found) if found else torch.empty(0, *logits_TV.shape[:1], 0)
    return Pass(logits_TV, logits_TV.logsumexp(-1), entropies)


@torch.inference_mode()
def apart(prompts: Prompts, exact: Pass, other: Pass) -> Moved:
    """How far `other`, which may begin at a later layer, is from `exact`."""
    rows = len(exact.logits_TV)
    kl_nats, same = 0.0, 0
    for at in range(0, rows, _ROWS):
        some = slice(at, at + _ROWS)
        one_TV, two_TV = exact.logits_TV[some], other.logits_TV[some]
        share_TV = (one_TV - exact.whole_T[some, None]).exp()
        # Σ p·(Δ whole − Δ logit), without a table of log-probabilities: the vocabulary is long.
        gap_T = (share_TV * (two_TV - one_TV)).sum(-1).double()
        kl_nats += float(((other.whole_T - exact.whole_T)[some].double() - gap_T).sum())
        same += int((one_TV.argmax(-1) == two_TV.argmax(-1)).sum())
    told, now = (one.next_logprobs(prompts) for one in (exact, other))
    seeing_T = prompts.positions_T > 0
    layers = len(other.entropy_LTH)
    moved = 0.0
    if layers:
        gap = (exact.entropy_LTH[-layers:] - other.entropy_LTH)[:, seeing_T].abs()
        moved = float(gap.double().mean()) * layers / len(exact.entropy_LTH)
    finite = math.isfinite(kl_nats) and math.isfinite(moved)
    return Moved(
        max(kl_nats, 0.0) / rows if finite else None,
        float((told - now).abs().mean()) if finite else None,
        moved if finite else None,
        same / rows,
    )
