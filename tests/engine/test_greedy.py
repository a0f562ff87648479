"""Logits and greedy tokens are those of transformers on tiny random models, however served.

Every row that the engine samples from is compared, prefill and decode, to 1e-4 in float32. A first
token that differs is excused only where the reference's two best logits lie within 1e-4.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import generate, greedy_params, logits_seen
from tests.engine.families import COMMON, FAMILIES, VARIATIONS
from tests.engine.references import is_greedy, load_reference
from ullage.anatomy import read_config
from ullage.engine.engine import Engine
from ullage.engine.model.families import FORWARDS
from ullage.engine.options import EngineOptions
from ullage.engine.request import Request

NUM_NEW = 64
TOLERANCE = 1e-4
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 40, 64, 100, 130, 150, 200, 250, 300)
# One of each way in which a layer sees, rotates, norms or joins; the others are slow tests.
PARTED = ("llama", "mistral-window", "qwen3", "smollm3", "gemma2", "gemma3", "phi3-longrope")
PARTED += ("gpt2", "opt-post", "bloom-odd-heads", "mpt", "falcon-7b", "mixtral", "qwen2-moe")
MIB = 1 << 20
FamilyDir = Callable[[str], Path]
RNG = random.Random(7)  # noqa: S311
PROMPTS = [[RNG.randrange(3, COMMON["vocab_size"]) for _ in range(n)] for n in LENGTHS]
FEW = [PROMPTS[LENGTHS.index(n)] for n in (1, 5, 17, 40, 130)]


class Case:
    """One family: its directory and its reference model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model: Any = load_reference(directory)

    def check(self, request: Request) -> None:
        assert len(request.output_ids) == request.params.max_tokens
        prompt = list(request.prompt_ids)
        assert is_greedy(self.model, prompt, request.output_ids), len(prompt)

    @torch.inference_mode()
    def check_logits(self, request: Request, rows: list[torch.Tensor]) -> None:
        """Every row that a token was taken from, against one pass of the reference over all."""
        prompt = list(request.prompt_ids)
        tokens = prompt + request.output_ids[:-1]
        expected_TV = self.model(torch.tensor([tokens])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack(rows), expected_TV, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def cases(family_dir: FamilyDir) -> Callable[[str], Case]:
    return cache(lambda family: Case(family_dir(family)))


def engine(directory: Path, **options: Any) -> Engine:
    options = {"kv_cache_memory_bytes": 16 * MIB, **options}
    return Engine.load(directory, EngineOptions(**options))


def check_all(
    case: Case, prompts: list[list[int]], num_new: int = NUM_NEW, **options: Any
) -> list[Request]:
    """Serve `prompts` together; their logits and tokens are the reference's."""
    served = engine(case.directory, **options)
    with logits_seen(served) as seen:
        requests = generate(served, prompts, greedy_params(num_new))
    for request in requests:
        case.check_logits(request, seen[request])
        case.check(request)
    return requests


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f in VARIATIONS else ()) for f in FAMILIES],
)
def test_logits_and_tokens_alone_and_in_a_batch(cases: Callable[[str], Case], family: str) -> None:
    case = cases(family)
    check_all(case, FEW)
    check_all(case, FEW[3:4])


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in PARTED else pytest.mark.slow) for f in FAMILIES],
)
def test_chunks_odd_blocks_and_preemption(cases: Callable[[str], Case], family: str) -> None:
    """Three at a time in chunks of 5, blocks of 7, and KV for hardly more than the longest."""
    case = cases(family)
    kv = engine(case.directory).kv
    block_bytes = kv.bytes_per_block // kv.block_size * 7
    requests = check_all(
        case,
        FEW[::-1],
        24,
        block_size=7,
        max_num_batched_tokens=5,
        max_num_seqs=3,
        max_model_len=160,
        kv_cache_memory_bytes=25 * len(kv.layout.groups) * block_bytes,
    )
    if not any(group.window for group in kv.layout.groups):  # windows free blocks: all may fit
        assert sum(request.num_preemptions for request in requests) > 0


SERVINGS = {
    "16 at a time": {"max_num_seqs": 16},
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
    requests = check_all(cases("llama"), PROMPTS[::2], **SERVINGS[serving])
    if serving == "too little KV":
        assert sum(request.num_preemptions for request in requests) > 0


def test_every_family_that_runs_was_compared() -> None:
    compared = {
        read_config(make().to_dict(), file="config.json").spec.family for make in FAMILIES.values()
    }
    assert compared == set(FORWARDS)


@pytest.mark.slow
@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_however_it_is_served(
    cases: Callable[[str], Case], family: str, serving: str
) -> None:
    if serving == "too little KV":
        pytest.skip("the size is that of the llama case; preemption has a test of its own")
    check_all(cases(family), PROMPTS, **SERVINGS[serving])


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
