"""How fast an engine in this process prefills and decodes: the fastest of its own steps.

Holds the driving of an engine for time, with token ids that no answer depends on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from ullage.engine.engine import Engine
from ullage.engine.request import SamplingParams


def way_of(engine: Engine) -> str:
    """How this engine runs its steps, in words."""
    steps = "compiled steps" if engine.compiled else "PyTorch's operations"
    return f"{steps}, attention {engine.attention}"


def ways(by_name: Mapping[str, str]) -> str:
    """How variants ran, in a sentence: once where all ran alike."""
    alike = set(by_name.values())
    if len(alike) == 1:
        return f"All ran in {alike.pop()}."
    return "; ".join(f"{name} ran in {way}" for name, way in by_name.items()) + "."


def decode_step_s(engine: Engine, *, batch: int, context: int, steps: int) -> float:
    """Seconds of the fastest step in which `batch` requests of about `context` tokens decode."""
    requests = [
        request
        for index in range(batch)
        for request in engine.add_request(
            f"decode-{index}",
            random_ids(engine, context, seed=index),
            # The first decode while the last one's prompt comes in: as long as they may.
            _endless(engine.max_model_len - context),
        )
    ]
    taken: list[float] = []
    while len(taken) < steps:
        report = engine.step()
        # Only steps in which everybody decodes: prompts come in one after the other.
        if len(report.plan.work) == batch and report.plan.num_tokens == batch:
            taken.append(report.ended_s - report.started_s)
        assert engine.has_work, "answers are long enough for all steps"
    for request in requests:
        engine.abort(request)
    return min(taken)


def prefill_tokens_per_s(engine: Engine, *, tokens: int, repeats: int) -> float:
    """Tokens per second of lone prompts, each run in as few steps as the engine's budget allows."""
    rates = []
    for turn in range(repeats + 1):
        (request,) = engine.add_request(
            f"prefill-{turn}", random_ids(engine, tokens, seed=500 + turn), _endless(2)
        )
        spent = 0.0
        while not request.output_ids:
            report = engine.step()
            spent += report.ended_s - report.started_s
        engine.abort(request)
        rates.append(tokens / spent)
    return max(rates)


def random_ids(engine: Engine, count: int, *, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    return tuple(draw.randrange(8, engine.spec.vocab_size) for _ in range(count))


def _endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
