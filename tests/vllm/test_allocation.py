"""Thirty random reduced models with random limits: vLLM starts each, ullage says the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from ask import ask_vllm
from compare import beyond_sizing, differences
from draws import draw_case, sources

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

ORACLE = Path(__file__).parents[2] / "tools" / "vllm_oracle.py"
CASES = 30
SPARE = 10


def test_allocations_equal_vllms(vllm_python, seed, capsys):
    draw, pool = random.Random(seed), list(sources())  # noqa: S311
    cases = [draw_case(draw.randrange(10**9), pool).as_json() for _ in range(CASES + SPARE)]
    compared, allocated, wrong = 0, 0, []
    for start in range(0, len(cases), 10):
        batch = cases[start : start + 10]
        for case, answer in zip(batch, ask_vllm(vllm_python, ORACLE, batch), strict=True):
            if compared == CASES:
                break
            if beyond_sizing(answer):
                continue
            compared += 1
            allocated += "refused" not in answer
            lines = differences(case, answer)
            with capsys.disabled():
                print(f"{'differs' if lines else 'equal':8}{case['name']}", flush=True)
            if lines:
                wrong.append(f"{json.dumps(case)}\n  " + "\n  ".join(lines))
        if compared == CASES:
            break
    assert not wrong, f"seed {seed}\n" + "\n".join(wrong)
    assert compared == CASES
    assert allocated >= CASES // 2
