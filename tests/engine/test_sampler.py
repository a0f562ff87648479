"""Sampling: the right distribution, the right cut, seeds that repeat, failures that are seen."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.engine.request import SamplingParams
from ullage.engine.sampler import Choice, choose

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def draw(params: SamplingParams, count: int = 4000, seed: int = 1) -> Counter[int | None]:
    stream = random.Random(seed)  # noqa: S311
    return Counter(choose(LOGITS[None], [params], [stream])[0].token_id for _ in range(count))


def expected(temperature: float, kept: list[int]) -> torch.Tensor:
    """Renormalised probabilities of `kept`, written out."""
    weights = torch.zeros(5)
    weights[kept] = (LOGITS[kept].double() / temperature).exp().float()
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0), [0, 1, 2, 3]),
        (SamplingParams(temperature=2.0), [0, 1, 2, 3]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 1]),
        # Probabilities 0.64, 0.24, 0.09, …: 0.7 is reached by two, 0.6 by one.
        (SamplingParams(temperature=1.0, top_p=0.7), [0, 1]),
        (SamplingParams(temperature=1.0, top_p=0.6), [0]),
        (SamplingParams(temperature=1.0, top_p=0.7, top_k=1), [0]),
        (SamplingParams(temperature=1.0, top_p=1e-9), [0]),
        (SamplingParams(temperature=1.0, top_k=99), [0, 1, 2, 3]),
    ],
)
def test_tokens_come_as_often_as_they_should(params: SamplingParams, kept: list[int]) -> None:
    counts = draw(params)
    wanted = expected(params.temperature, kept)
    for token in range(5):
        share = counts[token] / 4000
        # Five standard deviations: one false alarm in a million, and the seed is fixed.
        allowed = 5 * (float(wanted[token]) * (1 - float(wanted[token])) / 4000) ** 0.5
        assert abs(share - float(wanted[token])) <= allowed + 1e-12


def test_temperature_zero_is_greedy_and_draws_nothing() -> None:
    stream = random.Random(3)  # noqa: S311
    state = stream.getstate()
    assert choose(LOGITS[None], [SamplingParams(temperature=0.0)], [stream]) == [Choice(0)]
    assert stream.getstate() == state


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), others=st.integers(0, 5))
def test_a_seed_gives_the_same_tokens_in_any_company(seed: int, others: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed)
    alone = random.Random(seed)  # noqa: S311
    single = [choose(LOGITS[None], [params], [alone])[0].token_id for _ in range(8)]
    logits = LOGITS.repeat(others + 1, 1)
    streams = [random.Random(i) for i in range(others)] + [random.Random(seed)]  # noqa: S311
    crowd = [choose(logits, [params] * (others + 1), streams)[-1].token_id for _ in range(8)]
    assert crowd == single


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = torch.stack([LOGITS, LOGITS.clone()])
    logits[1, 3] = bad
    params = [SamplingParams(temperature=0.0)] * 2
    streams = [random.Random(0), random.Random(0)]  # noqa: S311
    assert choose(logits, params, streams) == [Choice(0), Choice(None)]


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    (choice,) = choose(LOGITS[None], [params], [random.Random(0)])  # noqa: S311
    wanted = (LOGITS.double() - LOGITS.double().exp().sum().log()).tolist()
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(wanted[0], abs=1e-5)
    assert [token for token, _ in choice.logprobs.top] == [0, 1]
    assert [value for _, value in choice.logprobs.top] == pytest.approx(wanted[:2], abs=1e-5)
