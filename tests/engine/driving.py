"""Running an engine to its end, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ullage.engine.engine import Engine, StepReport
from ullage.engine.request import Request, SamplingParams

MAX_STEPS = 100_000
STEP_S = 0.003


def slow_steps(patch: pytest.MonkeyPatch, step_s: float = STEP_S) -> None:
    """Give every step a length, so that on any machine who is asked about runs still."""
    quick = Engine.step

    def slowed(engine: Engine) -> StepReport:
        time.sleep(step_s)
        return quick(engine)

    patch.setattr(Engine, "step", slowed)


def finish(engine: Engine) -> dict[str, str]:
    """Step until nobody is left, checking the invariants; the texts by request id."""
    texts: dict[str, str] = {}
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        for output in engine.step().outputs:
            texts[output.request.id] = texts.get(output.request.id, "") + output.text
        engine.scheduler.check()
    assert not engine.has_work, "the engine does not come to an end"
    assert engine.pool.num_used == 0
    return texts


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Request]:
    """All prompts at once, to their end."""
    requests = [
        request
        for index, prompt in enumerate(prompts)
        for request in engine.add_request(str(index), tuple(prompt), params)
    ]
    finish(engine)
    return requests


def greedy_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@contextmanager
def logits_seen(served: Engine) -> Iterator[dict[Request, list[torch.Tensor]]]:
    """The rows of logits that each request was given while the block runs."""
    seen: dict[Request, list[torch.Tensor]] = {}
    forward = served._decoder.forward

    def watched(batch: Any, *rest: Any) -> torch.Tensor:
        logits_BV = forward(batch, *rest)
        for request, row in zip(batch.sampled, logits_BV[: len(batch.sampled)], strict=True):
            seen.setdefault(request, []).append(row.clone())
        return logits_BV

    served._decoder.forward = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        served._decoder.forward = forward  # type: ignore[method-assign]
