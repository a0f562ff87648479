"""Engines that are read along while they answer, and ways to change what they hold.

Holds what the tests of probes and `benchmarks/probes/faults.py` share; the faults are
`planted_faults`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ullage.engine.compiled import fastest
from ullage.engine.engine import Engine
from ullage.engine.linear import Int8Linear, Linear
from ullage.engine.lora import LoraAdapter
from ullage.engine.model.layer import Layer
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.checking import Watched
from ullage.probes.baseline.live import LiveReader, LiveReading
from ullage.probes.baseline.relations import Relations
from ullage.probes.baseline.verdicts import Located

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return",
    "1, 2, 3, 5, 8,",
)
OTHERS = ("Water freezes in a pipe on a cold night, and then it", "Le train de nuit", "[1, 2, [3]]")


def tappable(model: Path, options: EngineOptions | None = None) -> Engine | None:
    """None where its rows cannot be read."""
    engine = Engine.load(model, options or EngineOptions(enforce_eager=True))
    return None if sketches.why_not(engine.decoder) is not None else engine


def read_all(
    engine: Engine, relations: Relations | None, prompts: Sequence[str], new_tokens: int
) -> list[LiveReading]:
    """Every sampled row while the engine answers."""
    found: list[LiveReading] = []
    engine.reader = LiveReader(engine, found.append, relations, every=1, all_rows=True)
    answer(engine, prompts, new_tokens)
    engine.reader = None
    return found


def answer(
    engine: Engine,
    prompts: Sequence[str],
    new_tokens: int,
    loras: Sequence[LoraAdapter | None] = (None,),
    each_step: Callable[[Any], None] = lambda report: None,
) -> None:
    """All prompts with all adapters in one batch."""
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for number, text in enumerate(prompts):
        for lora in loras:
            name = f"{number} {'' if lora is None else lora.name}"
            engine.add_request(name, tuple(engine.tokenizer.encode(text)), params, lora)
    while engine.has_work:
        each_step(engine.step())


@dataclass(frozen=True)
class Judged:
    """`tokens` were generated up to the first alarm (None: none)."""

    fired: tuple[Located, ...]
    tokens: int | None
    rows: int

    @property
    def places(self) -> set[tuple[str, tuple[int, ...]]]:
        return {(one.kind, one.layers) for one in self.fired}


def judged(
    engine: Engine,
    baseline: Baseline,
    prompts: Sequence[str] = OTHERS[:1],
    *,
    new_tokens: int = 64,
    every: int = 16,
    loras: Sequence[LoraAdapter | None] = (None,),
) -> Judged:
    """What a baseline says of an engine that answers, at a sampling."""
    watched = Watched(engine, baseline, every=every)

    def count(report: Any) -> None:
        watched.tokens += sum(one.token_id is not None for one in report.outputs)

    answer(engine, prompts, new_tokens, loras, count)
    engine.reader = None
    fired = tuple(one for one in watched.findings() if one.finding.state == "fired")
    return Judged(fired, watched.first_alarm and watched.first_alarm[1], watched.judge.rows)


# --- planting ---


@contextmanager
def changed(*tensors: torch.Tensor) -> Iterator[None]:
    """They are as they were again at the end."""
    kept = [one.clone() for one in tensors]
    try:
        with torch.inference_mode():
            yield
    finally:
        with torch.inference_mode():
            for one, before in zip(tensors, kept, strict=True):
                one.copy_(before)


def rewired(engine: Engine) -> Engine:
    """Another engine over the same decoder, which reads its layers anew."""
    decoder = engine.decoder
    made = fastest(decoder, engine.options)
    return Engine(made, engine.tokenizer, engine.options, engine.max_model_len)


def eager(engine: Engine) -> Engine:
    """Another engine over the same decoder, all of whose steps run in torch."""
    options = replace(engine.options, enforce_eager=True)
    return Engine(engine.decoder, engine.tokenizer, options, engine.max_model_len)


@contextmanager
def with_layer(engine: Engine, index: int, change: Callable[[Layer], Layer]) -> Iterator[Engine]:
    """An engine whose layer is another."""
    layers = engine.decoder.layers
    before = layers[index]
    try:
        layers[index] = change(before)
        yield rewired(engine)
    finally:
        layers[index] = before


def scaled(linear: Linear, rows: slice, factor: float) -> None:
    """Rows of what is multiplied, in place."""
    where = linear.scales_O if isinstance(linear, Int8Linear) else linear.weight_OI  # type: ignore[attr-defined]
    where[rows] *= factor
    bias = getattr(linear, "bias_O", None)
    if bias is not None:
        bias[rows] *= factor


def tensors_of(linear: Linear) -> tuple[torch.Tensor, ...]:
    found = linear.tensors
    assert found is not None
    return found


def exchange(tensor: torch.Tensor, a: slice, b: slice) -> None:
    kept = tensor[a].clone()
    tensor[a] = tensor[b]
    tensor[b] = kept


def flip_bit(tensor: torch.Tensor, index: tuple[int, ...], bit: int) -> None:
    """Of one element; bits are counted from the lowest."""
    whole = {4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()]
    view = tensor.view(whole)
    width = 8 * tensor.element_size()
    value = (int(view[index]) & (2**width - 1)) ^ (1 << bit)
    view[index] = value - 2**width if value >= 2 ** (width - 1) else value
