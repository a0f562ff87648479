"""Sampling: the right distribution, the right cut, seeds that repeat, failures that are seen."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.engine.request import Request, SamplingParams
from ullage.engine.sampler import Choice, choose, token_logprobs

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def asked(params: SamplingParams, prompt: tuple[int, ...] = (0,), *said: int) -> Request:
    return Request("r", prompt, params, output_ids=list(said))


def draw(params: SamplingParams, count: int = 4000, seed: int = 1) -> Counter[int | None]:
    stream = random.Random(seed)  # noqa: S311
    request = asked(params)
    return Counter(choose(LOGITS[None], [request], [stream])[0].token_id for _ in range(count))


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
        # Shares of the greatest: 1, 0.37, 0.14, 0.05.
        (SamplingParams(temperature=1.0, min_p=0.3), [0, 1]),
        (SamplingParams(temperature=1.0, min_p=1.0), [0]),
        (SamplingParams(temperature=1.0, min_p=0.1, top_k=2), [0, 1]),
        # Of the three that min_p leaves the first two reach 0.9; of all they would not.
        (SamplingParams(temperature=1.0, min_p=0.1, top_p=0.9), [0, 1]),
        (SamplingParams(temperature=1.0, top_p=0.9), [0, 1, 2]),
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


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_temperature_zero_is_greedy_and_draws_nothing(temperature: float) -> None:
    stream = random.Random(3)  # noqa: S311
    state = stream.getstate()
    request = asked(SamplingParams(temperature=temperature))
    assert choose(LOGITS[None], [request], [stream]) == [Choice(0)]
    assert stream.getstate() == state


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), others=st.integers(0, 5))
def test_a_seed_gives_the_same_tokens_in_any_company(seed: int, others: int) -> None:
    request = asked(SamplingParams(temperature=1.0, seed=seed))
    alone = random.Random(seed)  # noqa: S311
    single = [choose(LOGITS[None], [request], [alone])[0].token_id for _ in range(8)]
    logits = LOGITS.repeat(others + 1, 1)
    streams = [random.Random(i) for i in range(others)] + [random.Random(seed)]  # noqa: S311
    crowd = [choose(logits, [request] * (others + 1), streams)[-1].token_id for _ in range(8)]
    assert crowd == single


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = torch.stack([LOGITS, LOGITS.clone()])
    logits[1, 3] = bad
    requests = [asked(SamplingParams(temperature=0.0, presence_penalty=1.0))] * 2
    streams = [random.Random(0), random.Random(0)]  # noqa: S311
    assert choose(logits, requests, streams) == [Choice(0), Choice(None)]


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((1, 50.0),))
    (choice,) = choose(LOGITS[None], [asked(params)], [random.Random(0)])  # noqa: S311
    wanted = (LOGITS.double() - LOGITS.double().exp().sum().log()).tolist()
    assert choice.token_id == 1
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(wanted[1], abs=1e-5)
    assert [token for token, _ in choice.logprobs.top] == [0, 1]
    assert [value for _, value in choice.logprobs.top] == pytest.approx(wanted[:2], abs=1e-5)


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    assert len(token_logprobs(LOGITS, 0, 20).top) == 5


# --- against transformers' own processors ---------------------------------------------------------

NUM_VOCAB = 700


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The tokens that transformers' warpers leave, in vLLM's order: min_p, top_k, top_p."""
    import transformers as t

    warpers = t.LogitsProcessorList([t.TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(t.MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(t.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(t.TopPLogitsWarper(params.top_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())[0]
    return set(torch.isfinite(scores).nonzero()[:, 0].tolist())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.3, 2.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
    top_k=st.sampled_from([0, 1, 7, 300]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.1]),
    spread=st.sampled_from([0.3, 3.0]),
)
def test_what_may_be_drawn_is_what_transformers_leaves(
    seed: int, temperature: float, min_p: float, top_k: int, top_p: float, spread: float
) -> None:
    """The greatest uniform number reaches the last token that is left, no other set does."""
    logits = torch.randn(NUM_VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    kept = kept_by_transformers(logits, params)
    order = [token for token in logits.argsort(descending=True).tolist() if token in kept]
    assert order == logits.argsort(descending=True).tolist()[: len(kept)]

    class Fixed(random.Random):
        def __init__(self, value: float) -> None:
            self.value = value
            super().__init__(0)

        def random(self) -> float:
            return self.value

    weights = (logits.double() / temperature).softmax(0)
    share = weights / weights[sorted(kept)].sum()
    # Which token a uniform number gives depends on the order they are laid out in; how much
    # of [0, 1) each token gets does not. Many evenly spaced numbers measure it.
    count = 400
    request = asked(params)
    drawn = Counter(
        choose(logits[None], [request], [Fixed((i + 0.5) / count)])[0].token_id
        for i in range(count)
    )
    assert set(drawn) <= kept
    for token, times in drawn.items():
        assert times == pytest.approx(float(share[token]) * count, abs=1.01)
    assert all(token in drawn for token in kept if float(share[token]) * count > 1.01)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    prompt=st.lists(st.integers(0, 29), min_size=1, max_size=12),
    said=st.lists(st.integers(0, 29), max_size=12),
    penalty=st.floats(0.2, 3.0),
)
def test_the_repetition_penalty_is_transformers(
    seed: int, prompt: list[int], said: list[int], penalty: float
) -> None:
    import transformers as t

    logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 3
    oracle = t.RepetitionPenaltyLogitsProcessor(penalty)
    wanted = oracle(torch.tensor([[*prompt, *said]]), logits[None].clone())[0]
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    (choice,) = choose(logits[None], [asked(params, tuple(prompt), *said)], [random.Random()])  # noqa: S311
    assert choice.token_id is not None
    assert wanted[choice.token_id] == wanted.max()


@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(st.integers(0, 4), max_size=12),
    presence=st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
    frequency=st.sampled_from([-2.0, 0.0, 0.3, 2.0]),
    bias=st.dictionaries(st.integers(0, 4), st.sampled_from([-100.0, -1.5, 40.0]), max_size=3),
)
def test_openais_penalties_and_biases_written_out(
    said: list[int], presence: float, frequency: float, bias: dict[int, float]
) -> None:
    """Penalties look at the answer only: the prompt holds token 0 and that changes nothing."""
    wanted = [
        float(LOGITS[token])
        + bias.get(token, 0.0)
        - frequency * said.count(token)
        - presence * (token in said)
        for token in range(5)
    ]
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    (choice,) = choose(LOGITS[None], [asked(params, (0,), *said)], [random.Random()])  # noqa: S311
    assert choice.token_id is not None
    assert wanted[choice.token_id] == pytest.approx(max(wanted), abs=1e-4)


def test_min_tokens_forbids_every_end_until_enough_is_said() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1, 99), ignore_eos=True)
    for said, wanted in (((), 2), ((2,), 2), ((2, 2), 0)):
        request = asked(params, (0,), *said)
        (choice,) = choose(LOGITS[None], [request], [random.Random()], {0})  # noqa: S311
        assert choice.token_id == wanted


def test_min_tokens_of_a_vocabulary_of_ends_still_gives_a_token() -> None:
    params = SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=(0, 1, 2, 3, 4))
    (choice,) = choose(LOGITS[None], [asked(params)], [random.Random(0)])  # noqa: S311
    assert choice.token_id in range(5)
