"""Greedy tokens are those of transformers on tiny random models, however requests are served.

A first difference is excused only where the reference's two best logits lie within 1e-4.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import generate, greedy_params
from tests.engine.families import COMMON, FAMILIES
from tests.engine.references import is_greedy, load_reference
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import Request

NUM_NEW = 64
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 40, 64, 100, 130, 150, 200, 250, 300)
MIB = 1 << 20
FamilyDir = Callable[[str], Path]
RNG = random.Random(7)  # noqa: S311
PROMPTS = [[RNG.randrange(3, COMMON["vocab_size"]) for _ in range(n)] for n in LENGTHS]


class Case:
    """One family: its directory and its reference model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model: Any = load_reference(directory)

    def check(self, request: Request) -> None:
        assert len(request.output_ids) == request.params.max_tokens
        prompt = list(request.prompt_ids)
        assert is_greedy(self.model, prompt, request.output_ids), len(prompt)


@pytest.fixture(scope="module")
def cases(family_dir: FamilyDir) -> Callable[[str], Case]:
    return cache(lambda family: Case(family_dir(family)))


def engine(directory: Path, **options: Any) -> Engine:
    options = {"kv_cache_memory_bytes": 16 * MIB, **options}
    return Engine.load(directory, EngineOptions(**options))


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_in_a_batch_of_16(cases: Callable[[str], Case], family: str) -> None:
    case = cases(family)
    served = engine(case.directory, max_num_seqs=16)
    for request in generate(served, PROMPTS, greedy_params(NUM_NEW)):
        case.check(request)
    for prompt in PROMPTS[::5]:
        (request,) = generate(served, [prompt], greedy_params(NUM_NEW))
        case.check(request)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_prompt_equal_the_reference(
    cases: Callable[[str], Case], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases(family)
    served = engine(case.directory)
    seen: list[torch.Tensor] = []
    forward = served._decoder.forward
    monkeypatch.setattr(served._decoder, "forward", lambda *a: seen.append(forward(*a)) or seen[-1])
    prompt = PROMPTS[-1]
    generate(served, [prompt], greedy_params(1))
    with torch.inference_mode():
        expected = case.model(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(seen[0], expected, atol=1e-3, rtol=1e-4)


SERVINGS = {
    "blocks of 1": {"block_size": 1},
    "blocks of 7": {"block_size": 7},
    "blocks of 512": {"block_size": 512},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "chunks of 5 for 3": {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    "reference attention": {"attention": "reference"},
    # 512 tokens of KV in all: a request or two at a time, the others wait or are thrown out.
    "too little KV": {"kv_cache_memory_bytes": 512 * 3 * 2 * 2 * 16 * 4, "max_num_seqs": 16},
}


@pytest.mark.parametrize("serving", SERVINGS)
def test_tokens_do_not_depend_on_how_they_are_served(
    cases: Callable[[str], Case], serving: str
) -> None:
    case = cases("llama")
    served = engine(case.directory, **SERVINGS[serving])
    requests = generate(served, PROMPTS, greedy_params(NUM_NEW))
    for request in requests:
        case.check(request)
    if serving == "too little KV":
        assert sum(request.num_preemptions for request in requests) > 0


def test_requests_that_arrive_while_others_run_change_nothing(
    cases: Callable[[str], Case],
) -> None:
    case = cases("qwen3")
    served = engine(case.directory, max_num_batched_tokens=48, max_num_seqs=6)
    requests = []
    for index, prompt in enumerate(PROMPTS):
        requests += served.add_request(str(index), tuple(prompt), greedy_params(NUM_NEW))
        for _ in range(index % 4):
            served.step()
    while served.has_work:
        served.step()
    for request in requests:
        case.check(request)
