"""From logits to the next token: greedy or sampled, each request with a random stream of its own.

Holds the choice only. A seeded request gets the same tokens whoever shares its batch: one uniform
number per token is drawn from its own generator.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ullage.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's log-probability and the best alternatives, of the unmodified logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one row gives: a token, or None when its logits are not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


def choose(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], streams: Sequence[random.Random]
) -> list[Choice]:
    """One choice per row; `streams[b]` advances by one draw where row b is sampled."""
    # A sum is finite only if every entry is; one pass, no temporary of the same size.
    finite = torch.isfinite(logits_BV.sum(dim=1)).tolist()
    token_ids: list[int] = logits_BV.argmax(dim=1).tolist()
    choices: list[Choice] = []
    for row, (wish, stream) in enumerate(zip(params, streams, strict=True)):
        if not finite[row]:
            choices.append(Choice(None))
            continue
        token_id = token_ids[row]
        if wish.temperature > 0:
            token_id = _draw(logits_BV[row], wish, stream.random())
        logprobs = None
        if wish.logprobs is not None:
            logprobs = _logprobs(logits_BV[row], token_id, wish.logprobs)
        choices.append(Choice(token_id, logprobs))
    return choices


def _draw(logits_V: torch.Tensor, wish: SamplingParams, uniform: float) -> int:
    """Inverse of the cumulative distribution at `uniform`, after temperature, top-k, top-p."""
    scaled_V = logits_V.double() / wish.temperature
    ids_V: torch.Tensor | None = None
    if 0 < wish.top_k < scaled_V.numel():
        scaled_V, ids_V = scaled_V.topk(wish.top_k)
    elif wish.top_p < 1:
        scaled_V, ids_V = scaled_V.sort(descending=True)
    cumulative_V = scaled_V.softmax(dim=0).cumsum(dim=0)
    if wish.top_p < 1:
        # The smallest set of likeliest tokens that reaches top_p; never empty.
        keep = int(torch.searchsorted(cumulative_V, wish.top_p).item()) + 1
        cumulative_V = cumulative_V[:keep]
    target = uniform * cumulative_V[-1]
    index = int(torch.searchsorted(cumulative_V, target, right=True).item())
    index = min(index, cumulative_V.numel() - 1)
    return index if ids_V is None else int(ids_V[index].item())


def _logprobs(logits_V: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    logprobs_V = logits_V.log_softmax(dim=0)
    values, ids = logprobs_V.topk(count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs_V[token_id].item()), top)
