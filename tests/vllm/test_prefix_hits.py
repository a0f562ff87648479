"""What the embedded engine's prefix cache finds and what its windows hold, against vLLM's code."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from ask import ask_vllm

from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.layout import FREED, KVGroup
from ullage.engine.paging.prefix import extend_names, longest_hit
from ullage.engine.paging.tables import blocks_of_group
from ullage.engine.request import Request, SamplingParams

pytestmark = pytest.mark.vllm

ORACLE = Path(__file__).parents[2] / "tools" / "vllm_hit_oracle.py"
QUESTIONS = 400


def draw_question(draw: random.Random) -> dict:
    size = draw.choice((1, 4, 16))
    likely = draw.choice((0.3, 0.7, 0.95))
    return {
        # vLLM needs one block even where a window of 1 sees nothing before its own row.
        "window": draw.choice((None, 2, size, size + 1, 3 * size + 2, 100)) if size > 1 else 5,
        "block_size": size,
        "cached": [draw.random() < likely for _ in range(draw.randint(0, 20))],
        "chunk": draw.choice((1, 16, 100)),
        "max_model_len": draw.choice((50, 400)),
    }


def ours(question: dict) -> dict:
    size, cached, window = question["block_size"], question["cached"], question["window"]
    pool = BlockPool(len(cached) + 1, size)
    request = Request("r", tuple(range(size * len(cached) + 1)), SamplingParams())
    extend_names(request, len(cached), size)
    for block, name, there in zip(
        pool.allocate(len(cached)), request.block_names, cached, strict=True
    ):
        if there:
            pool.publish(block, (0, name))
    found = longest_hit(pool, [KVGroup((0,), window)], request)
    most = None
    if window is not None:
        most = blocks_of_group(question["max_model_len"], window, question["chunk"], size)
    return {
        "hit": found.num_blocks,
        "kept": [block != FREED for block in found.tables[0]],
        "most": most,
    }


def test_hits_are_vllms(vllm_python: Path) -> None:
    draw = random.Random(32)  # noqa: S311
    questions = [draw_question(draw) for _ in range(QUESTIONS)]
    answers = list(ask_vllm(vllm_python, ORACLE, questions))
    assert len(answers) == QUESTIONS
    assert {bool(answer["hit"]) for answer in answers} == {True, False}
    for question, answer in zip(questions, answers, strict=True):
        found = ours(question)
        assert (found["hit"], found["kept"]) == (answer["hit"], answer["kept"]), question
        if answer["most"] is not None:
            # vLLM always counts a block for a window that begins within one; never fewer than we.
            assert 0 <= answer["most"] - found["most"] <= 1, question
