"""From logits to the next token: greedy or sampled, each request with a random stream of its own.

Holds the choice only. A seeded request gets the same tokens whoever shares its batch: one uniform
number per token is drawn from its own generator. What each parameter does, and in which order,
is vLLM 0.32's (v1/sample/sampler.py, logits_processor/builtin.py, model_executor/layers/utils.py).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ullage.engine.request import Request, SamplingParams

# Below this a temperature is greedy (v1/sample/sampler.py, _SAMPLING_EPS).
GREEDY_TEMPERATURE = 1e-5
# How many of the likeliest tokens are looked at first for top_p; seldom are more needed.
FIRST_CUT = 256


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
    logits_BV: torch.Tensor,
    requests: Sequence[Request],
    streams: Sequence[random.Random],
    eos_ids: Collection[int] = (),
) -> list[Choice]:
    """One choice per row; `streams[b]` advances by one draw where row b is sampled.

    `eos_ids` are what `min_tokens` forbids beside the request's own stop tokens.
    """
    # A sum is finite only if every entry is; one pass, no temporary of the same size.
    finite = torch.isfinite(logits_BV.sum(dim=1)).tolist()
    token_ids: list[int] = logits_BV.argmax(dim=1).tolist()
    choices: list[Choice] = []
    for row, (request, stream) in enumerate(zip(requests, streams, strict=True)):
        if not finite[row]:
            choices.append(Choice(None))
            continue
        token_id, wish = token_ids[row], request.params
        logits_V = logits_BV[row]
        if _adjusts(wish):
            logits_V = _adjusted(logits_V, request, eos_ids)
            token_id = int(logits_V.argmax().item())
        if wish.temperature >= GREEDY_TEMPERATURE:
            token_id = _draw(logits_V, wish, stream.random())
        logprobs = None
        if wish.logprobs is not None:
            # Of the raw logits: vLLM's default, --logprobs-mode raw_logprobs.
            logprobs = token_logprobs(logits_BV[row], token_id, wish.logprobs)
        choices.append(Choice(token_id, logprobs))
    return choices


def token_logprobs(logits_V: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """The log-probability of `token_id` and the `count` best, best first."""
    logprobs_V = logits_V.log_softmax(dim=0)
    values, ids = logprobs_V.topk(min(count, logprobs_V.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs_V[token_id].item()), top)


def _adjusts(wish: SamplingParams) -> bool:
    """Whether the parameters change logits, and so may change even the greedy choice."""
    return bool(
        wish.presence_penalty
        or wish.frequency_penalty
        or wish.repetition_penalty != 1
        or wish.min_tokens
        or wish.logit_bias
    )


def _adjusted(logits_V: torch.Tensor, request: Request, eos_ids: Collection[int]) -> torch.Tensor:
    """A copy with, in this order, early stops forbidden, biases added, penalties applied."""
    wish = request.params
    adjusted_V = logits_V.float().clone()
    if len(request.output_ids) < wish.min_tokens:
        _forbid(adjusted_V, {*eos_ids, *wish.stop_token_ids})
    if wish.logit_bias:
        ids, biases = zip(*wish.logit_bias, strict=True)
        adjusted_V[list(ids)] += torch.tensor(biases)
    if wish.repetition_penalty != 1:
        seen = torch.tensor([*request.prompt_ids, *request.output_ids])
        values = adjusted_V[seen]
        # Written once per distinct token, however often it is in `seen`.
        adjusted_V[seen] = torch.where(
            values > 0, values / wish.repetition_penalty, values * wish.repetition_penalty
        )
    if (wish.frequency_penalty or wish.presence_penalty) and request.output_ids:
        times = Counter(request.output_ids)
        counts = torch.tensor(list(times.values()))
        adjusted_V[list(times)] -= wish.frequency_penalty * counts + wish.presence_penalty
    return adjusted_V


def _forbid(logits_V: torch.Tensor, token_ids: Collection[int]) -> None:
    """Give `token_ids` no chance, unless that would leave nothing to choose from."""
    known = [token for token in token_ids if 0 <= token < logits_V.numel()]
    if len(known) < logits_V.numel():
        logits_V[known] = -math.inf


def _draw(logits_V: torch.Tensor, wish: SamplingParams, uniform: float) -> int:
    """Inverse of the cumulative distribution at `uniform`, after temperature, min_p, top_k, top_p.

    Each of the three narrows what the one before it left, as vLLM applies them.
    """
    scaled_V = logits_V.double() / wish.temperature
    scaled_V -= scaled_V.max()
    ids_V: torch.Tensor | None = None
    if wish.min_p > 0:
        # A probability is below min_p times the greatest.
        ids_V = (scaled_V >= math.log(wish.min_p)).nonzero()[:, 0]
        scaled_V = scaled_V[ids_V]
    if 0 < wish.top_k < scaled_V.numel():
        # As in vLLM all that tie with the k-th stay.
        kept = (scaled_V >= scaled_V.topk(wish.top_k).values[-1]).nonzero()[:, 0]
        ids_V = kept if ids_V is None else ids_V[kept]
        scaled_V = scaled_V[kept]
    weights_V = scaled_V.exp()
    if wish.top_p < 1:
        weights_V, order_V = _nucleus(weights_V, wish.top_p)
        ids_V = order_V if ids_V is None else ids_V[order_V]
    cumulative_V = weights_V.cumsum(dim=0)
    target = uniform * cumulative_V[-1]
    index = int(torch.searchsorted(cumulative_V, target, right=True).item())
    index = min(index, cumulative_V.numel() - 1)
    return index if ids_V is None else int(ids_V[index].item())


def _nucleus(weights_V: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set of greatest weights that reaches the share `top_p`, never empty; places.

    Sorting a whole vocabulary costs milliseconds, and a few hundred tokens usually suffice.
    """
    wanted = top_p * float(weights_V.sum())
    greatest, order = weights_V.topk(min(FIRST_CUT, weights_V.numel()))
    cumulative = greatest.cumsum(dim=0)
    if float(cumulative[-1]) < wanted:
        # numpy sorts with the widest instructions there are: 8 times as fast as torch 2.13 here.
        order = torch.from_numpy(np.argsort(weights_V.numpy())[::-1].copy())
        greatest = weights_V[order]
        cumulative = greatest.cumsum(dim=0)
    keep = int(torch.searchsorted(cumulative, wanted).item()) + 1
    return greatest[:keep], order[:keep]
