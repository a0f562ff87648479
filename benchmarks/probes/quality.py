"""What the output-quality watch costs: processor time per token beside the engine's own.

SmolLM2-135M in int8 serves answers of 96 tokens, 1, 8 and 32 at a time. The processor time of the
process inside each call of the watch is added up (its looks at the logits, its tokens, the readings
at the end, the series), and so is that of the steps. A fourth row has no model: logits of a
vocabulary of 151,936, as Qwen's. Writes QUALITY.md beside itself:

    .venv/bin/python benchmarks/probes/quality.py
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

import torch
from measure_process import cpu_name
from prometheus_client import CollectorRegistry
from tests.engine.references import smollm2_gguf

from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.engine.steps import Output
from ullage.probes.quality.quality import LOOK_EVERY_STEPS
from ullage.serving.quality import AnswerWatch

RESULTS = Path(__file__).with_name("QUALITY.md")
ANSWER_TOKENS, ROUNDS = 96, 1
LARGE_VOCABULARY = 151_936


@dataclass(frozen=True)
class Row:
    """Microseconds of processor time per token: of a step, and of each call of the watch."""

    what: str
    tokens: int
    step: float | None
    look: float
    take: float | None

    def line(self) -> str:
        step = "" if self.step is None else f"{self.step:,.0f}"
        share = ""
        if self.step is not None and self.take is not None:
            share = f"{(self.look + self.take) / self.step:.2%}"
        take = "" if self.take is None else f"{self.take:.1f}"
        return f"| {self.what} | {step} | {self.look:.1f} | {take} | {share} |"


class Clock:
    """Adds up the processor time that the process spends inside calls, by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] += time.process_time() - started

        return timed


def served(engine: Engine, batch: int) -> Row:
    clock = Clock()
    watch = AnswerWatch(engine, CollectorRegistry(), {"model_name": "m", "engine": "0"})
    look = engine.on_logits
    assert look is not None and engine.tokenizer is not None
    engine.on_logits = clock.wrap("look", look)
    take, step = clock.wrap("take", watch.take), clock.wrap("step", engine.step)
    words = ["Write", "about", "the", "sea", "and", "the", "sky", "in", "plain", "words"]
    draw, tokens = random.Random(1), 0  # noqa: S311
    for number in range(ROUNDS * batch):
        text = " ".join(draw.sample(words, 9))
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.8, seed=number)
        engine.add_request(str(number), tuple(engine.tokenizer.encode(text)), params)
    while engine.has_work:
        outputs = step().outputs
        take(outputs)
        tokens += len(outputs)
    engine.on_logits = None
    per_token = {name: 1e6 * seconds / tokens for name, seconds in clock.seconds.items()}
    alone = per_token["step"] - per_token["look"]
    return Row(f"{batch} at a time", tokens, alone, per_token["look"], per_token["take"])


def large_vocabulary(engine: Engine, batch: int = 32) -> Row:
    """The look alone, at logits of a large model; a token of one takes its steps far longer."""
    clock = Clock()
    watch = AnswerWatch(engine, CollectorRegistry(), {"model_name": "m", "engine": "0"})
    look = engine.on_logits
    assert look is not None
    engine.on_logits = None
    logits = torch.randn(batch, LARGE_VOCABULARY)
    timed, steps = clock.wrap("look", look), 10 * LOOK_EVERY_STEPS
    requests = [
        one
        for number in range(batch)
        for one in engine.add_request(f"v{number}", (1,), SamplingParams())
    ]
    watch.take([Output(one, 1, "", finished=False) for one in requests])
    for _ in range(steps):
        timed(requests, logits)
    for one in requests:
        engine.abort(one)
    per_token = 1e6 * clock.seconds["look"] / (steps * batch)
    what = f"{batch} at a time, vocabulary of {LARGE_VOCABULARY:,}"
    return Row(what, steps * batch, None, per_token, None)


def main() -> None:
    model = smollm2_gguf()
    assert model is not None, "make setup brings SmolLM2"
    options = EngineOptions(
        quantization="int8", max_num_seqs=32, max_num_batched_tokens=512, max_model_len=512
    )
    engine = Engine.load(model, options)
    engine.add_request("warm", (1, 2, 3), SamplingParams(max_tokens=4))
    while engine.has_work:
        engine.step()
    rows = [served(engine, batch) for batch in (1, 8, 32)]
    rows.append(large_vocabulary(engine))
    text = "\n".join(
        [
            "# What the output-quality watch costs",
            "",
            f"SmolLM2-135M in int8, answers of {ANSWER_TOKENS} tokens; {cpu_name()}, "
            f"{torch.get_num_threads()} threads. Microseconds of processor time per token; looks "
            f"at every {LOOK_EVERY_STEPS}th step. Made by `benchmarks/probes/quality.py`.",
            "",
            "| | step | looks at logits | tokens, readings, series | watch / step |",
            "|---|---|---|---|---|",
            *(row.line() for row in rows),
            "",
        ]
    )
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
