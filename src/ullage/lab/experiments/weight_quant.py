"""Weights in fewer bits: bytes, speed, perplexity, agreement with float32.

Holds the experiment on the engine in this process, one variant after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.lab.passages import Windows, windows
from ullage.lab.result import Bars, Column, Result, Table
from ullage.lab.scoring import Score, score
from ullage.lab.setting import Setting
from ullage.lab.speeds import decode_step_s, prefill_tokens_per_s, way_of, ways
from ullage.lab.units import shown, times
from ullage.pages.words import percent

# Name → the engine's options. The first is what the others are held against.
VARIANTS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Outcome:
    """One variant: bytes of its weights (None: packed unseen), speeds, its score."""

    name: str
    weights_bytes: int | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: tuple[float, ...]
    way: str
    score: Score


def run(setting: Setting) -> Result:
    batches = (1, 2) if setting.quick else (1, 8)
    outcomes: list[Outcome] = []
    text: Windows | None = None
    for name, options in VARIANTS.items():
        setting.progress(f"weight-quant: {name}")
        outcome, text = _measure(setting, name, options, batches, text)
        outcomes.append(outcome)
    assert text is not None, "float32 is always there"
    return Result(
        name="weight-quant",
        learnt=_learnt(outcomes, batches),
        how=(
            f"The engine in this process, {setting.model_name}; KV in float32 for all. "
            f"{ways({o.name: o.way for o in outcomes})}",
            f"Perplexity and agreement: {text.words}, {text.num_scored:,} scored tokens, the same "
            "for all. Agreement: the share of them where the most likely next token is float32's.",
            f"Decoding at {CONTEXT} tokens of context: the fastest steps.",
        ),
        tables=(_table(outcomes, batches),),
        plots=_plots(outcomes, batches),
        data={
            "text": text.words,
            "num_scored": text.num_scored,
            "variants": [_plain(o, outcomes[0], batches) for o in outcomes],
        },
    )


def _measure(
    setting: Setting,
    name: str,
    options: dict[str, Any],
    batches: tuple[int, ...],
    text: Windows | None,
) -> tuple[Outcome, Windows]:
    gc.collect()
    engine = Engine.load(
        setting.model,
        EngineOptions(max_num_batched_tokens=512, kv_cache_dtype="float32", **options),
    )
    assert engine.tokenizer is not None, "a loaded engine has its tokenizer"
    if text is None:
        count, length = (2, 48) if setting.quick else (24, 256)
        text = windows(engine.tokenizer, count, length)
    steps = 4 if setting.quick else 24
    outcome = Outcome(
        name,
        engine.weights_bytes,
        prefill_tokens_per_s(engine, tokens=64 if setting.quick else 512, repeats=2),
        tuple(
            batch / decode_step_s(engine, batch=batch, context=CONTEXT, steps=steps)
            for batch in batches
        ),
        way_of(engine),
        score(_scored(engine, text)),
    )
    return outcome, text


def _scored(engine: Engine, text: Windows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for window in text.ids:
        yield engine.prompt_logits(window)[:-1], torch.tensor(window[1:])


def _table(outcomes: list[Outcome], batches: tuple[int, ...]) -> Table:
    reference = outcomes[0]
    return Table(
        "Weights",
        (
            Column("weights", source=""),
            Column("bytes", "bytes", "measured: of the tensors in memory"),
            Column("of float32", "ratio", "quotient"),
            Column("prefill", "tokens/s"),
            *(Column(f"decode, {batch} at once", "tokens/s") for batch in batches),
            Column("perplexity", "perplexity"),
            Column("change", "change", "against float32"),
            Column("±", "change", "standard error of the paired difference"),
            Column("agreement", "ratio"),
        ),
        tuple(
            (
                o.name,
                o.weights_bytes,
                _of_reference(o, reference),
                o.prefill_tokens_per_s,
                *o.decode_tokens_per_s,
                o.score.perplexity,
                *o.score.change(reference.score),
                o.score.agreement(reference.score),
            )
            for o in outcomes
        ),
        note="Where a kernel packs the weights unseen, their bytes cannot be counted."
        if any(o.weights_bytes is None for o in outcomes)
        else "",
    )


def _of_reference(outcome: Outcome, reference: Outcome) -> float | None:
    if outcome.weights_bytes is None or not reference.weights_bytes:
        return None
    return outcome.weights_bytes / reference.weights_bytes


def _plots(outcomes: list[Outcome], batches: tuple[int, ...]) -> tuple[Bars, ...]:
    names = tuple(o.name for o in outcomes)
    groups = ("prefill", *(f"decode, {batch} at once" for batch in batches))
    return (
        Bars(
            "Speed",
            "tokens/s",
            groups[1:],
            names,
            tuple(tuple(o.decode_tokens_per_s) for o in outcomes),
        ),
        Bars(
            "Bytes of the weights",
            "bytes",
            ("in memory",),
            names,
            tuple((None if o.weights_bytes is None else float(o.weights_bytes),) for o in outcomes),
        ),
    )


def _plain(outcome: Outcome, reference: Outcome, batches: tuple[int, ...]) -> dict[str, object]:
    change, error = outcome.score.change(reference.score)
    return {
        "name": outcome.name,
        "weights_bytes": outcome.weights_bytes,
        "prefill_tokens_per_s": outcome.prefill_tokens_per_s,
        "decode_tokens_per_s": dict(
            zip(map(str, batches), outcome.decode_tokens_per_s, strict=True)
        ),
        "perplexity": outcome.score.perplexity,
        "perplexity_change": change,
        "perplexity_change_error": error,
        "agreement": outcome.score.agreement(reference.score),
    }


def _learnt(outcomes: list[Outcome], batches: tuple[int, ...]) -> str:
    reference = outcomes[0]
    return "; ".join(_judged(o, reference, batches) for o in outcomes[1:]).capitalize() + "."


def _judged(outcome: Outcome, reference: Outcome, batches: tuple[int, ...]) -> str:
    change, _ = outcome.score.change(reference.score)
    speeds = " and ".join(
        f"{times(ours / theirs)} at {batch}"
        for batch, ours, theirs in zip(
            batches, outcome.decode_tokens_per_s, reference.decode_tokens_per_s, strict=True
        )
    )
    said = f"{outcome.name} weights decode {speeds} the speed of float32"
    if (share := _of_reference(outcome, reference)) is not None:
        said += f" in {percent(share)} of the bytes"
    agreement = percent(outcome.score.agreement(reference.score), 1)
    return f"{said}, change perplexity by {shown(change, 'change')} and agree in {agreement}"
