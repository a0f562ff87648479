"""KV in fewer bits: bytes, speed, perplexity, agreement with float32.

Holds the experiment on the engine in this process, one format after the other. Prompts run in
small chunks, so that every scored token reads the keys and values before it as they were stored.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ullage.engine.engine import Engine
from ullage.engine.kv import KV_FORMATS
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.lab.passages import Windows, windows
from ullage.lab.result import Axis, Bars, Column, Lines, Result, Series, Table
from ullage.lab.scoring import Score, score
from ullage.lab.setting import Setting
from ullage.lab.speeds import decode_step_s, way_of, ways
from ullage.lab.units import shown, times
from ullage.pages.words import byte_size, percent

REFERENCE, HALF, EIGHT_BITS = "float32", "bfloat16", "int8_per_token_head"
CHUNK = 64
"""Tokens of a prompt run at once. The first chunk finds nothing stored and is not scored."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Windows of text, greedy prompts and their answers, decoding for speed."""

    num_windows: int
    window: int
    num_prompts: int
    answer: int
    batch: int
    context: int
    steps: int


FULL, QUICK = Sizes(20, 256, 8, 48, 8, 512, 16), Sizes(2, 96, 2, 8, 2, 64, 3)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One format: bytes of a token, seconds of a decode step, its score, its greedy answers."""

    name: str
    bits: int
    token_bytes: float
    step_s: float
    way: str
    score: Score
    answers: tuple[tuple[int, ...], ...]


def run(setting: Setting) -> Result:
    sizes = QUICK if setting.quick else FULL
    outcomes: list[Outcome] = []
    text: Windows | None = None
    for name in KV_FORMATS:
        setting.progress(f"kv-quant: {name}")
        outcome, text = _measure(setting, name, sizes, text)
        outcomes.append(outcome)
        gc.collect()
    assert text is not None, "there are formats"
    num_scored = len(outcomes[0].score.nll)
    return Result(
        name="kv-quant",
        learnt=_learnt(outcomes, sizes),
        how=(
            f"The engine in this process, {setting.model_name}, weights in float32; int8 and int4 "
            f"have a scale for each token and head. {ways({o.name: o.way for o in outcomes})}",
            f"Perplexity and agreement: {text.words}; the {num_scored:,} tokens behind the first "
            f"{CHUNK} of each are scored, run {CHUNK} at a time, so that all read stored KV. The "
            "same tokens for all formats. Agreement: the most likely next token is float32's.",
            f"Greedy: {sizes.num_prompts} prompts continued by {sizes.answer} tokens, how many "
            "come before the first that is not float32's. Step: "
            f"{sizes.batch} requests of {sizes.context} tokens decode, the fastest of "
            f"{sizes.steps}.",
        ),
        tables=(_table(outcomes, sizes),),
        plots=_plots(outcomes),
        data={
            "text": text.words,
            "num_scored": num_scored,
            "formats": [_plain(o, outcomes, sizes) for o in outcomes],
        },
    )


def _measure(
    setting: Setting, name: str, sizes: Sizes, text: Windows | None
) -> tuple[Outcome, Windows]:
    engine = Engine.load(
        setting.model,
        EngineOptions(
            kv_cache_dtype=name,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=sizes.batch,
            long_prefill_token_threshold=0,
            max_model_len=sizes.window + sizes.context + 256,
            enable_prefix_caching=False,
        ),
    )
    assert engine.tokenizer is not None, "a loaded engine has its tokenizer"
    if text is None:
        text = windows(engine.tokenizer, sizes.num_windows, sizes.window)
    outcome = Outcome(
        name,
        KV_FORMATS[name].bits,
        engine.kv.bytes_per_block / engine.kv.block_size * len(engine.kv.layout.groups),
        decode_step_s(engine, batch=sizes.batch, context=sizes.context, steps=sizes.steps),
        way_of(engine),
        score(_scored(engine, text)),
        _continued(engine, text.ids[: sizes.num_prompts], sizes.answer),
    )
    return outcome, text


def _scored(engine: Engine, text: Windows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for window in text.ids:
        yield engine.prompt_logits(window)[CHUNK:-1], torch.tensor(window[CHUNK + 1 :])


def _continued(
    engine: Engine, prompts: tuple[tuple[int, ...], ...], answer: int
) -> tuple[tuple[int, ...], ...]:
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    requests = [
        request
        for index, prompt in enumerate(prompts)
        for request in engine.add_request(f"greedy-{index}", prompt, params)
    ]
    while engine.has_work:
        engine.step()
    return tuple(tuple(request.output_ids) for request in requests)


def _same(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """How many tokens agree before the first that does not."""
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))


def _mean_same(outcome: Outcome, reference: Outcome) -> float:
    pairs = zip(outcome.answers, reference.answers, strict=True)
    counts = [_same(ours, theirs) for ours, theirs in pairs]
    return sum(counts) / len(counts)


def _named(outcomes: list[Outcome], name: str) -> Outcome:
    return next(o for o in outcomes if o.name == name)


def _table(outcomes: list[Outcome], sizes: Sizes) -> Table:
    reference, half = _named(outcomes, REFERENCE), _named(outcomes, HALF)
    return Table(
        "KV formats",
        (
            Column("KV cache", source=""),
            Column("bytes per token", "bytes", "measured: the pool's blocks, scales included"),
            Column("of bfloat16", "ratio", "quotient"),
            Column("decode step", "s"),
            Column("perplexity", "perplexity"),
            Column("change", "change", "against float32"),
            Column("±", "change", "standard error of the paired difference"),
            Column("agreement", "ratio"),
            Column("greedy tokens alike", "", f"mean, of {sizes.answer}"),
        ),
        tuple(
            (
                o.name,
                o.token_bytes,
                o.token_bytes / half.token_bytes,
                o.step_s,
                o.score.perplexity,
                *o.score.change(reference.score),
                o.score.agreement(reference.score),
                _mean_same(o, reference),
            )
            for o in outcomes
        ),
    )


def _plots(outcomes: list[Outcome]) -> tuple[Bars | Lines, ...]:
    reference = _named(outcomes, REFERENCE)
    return (
        Bars(
            "Bytes of one token's KV",
            "bytes",
            ("all layers, scales included",),
            tuple(o.name for o in outcomes),
            tuple((o.token_bytes,) for o in outcomes),
        ),
        Lines(
            "What is lost",
            Axis("bits of a number"),
            Axis("tokens whose most likely successor is another", "ratio"),
            (
                Series(
                    "disagreement",
                    tuple(
                        (float(o.bits), 1 - o.score.agreement(reference.score))
                        for o in sorted(outcomes, key=lambda o: o.bits)
                    ),
                ),
            ),
        ),
        Bars(
            "Time of a decode step",
            "s",
            ("all requests, one token each",),
            tuple(o.name for o in outcomes),
            tuple((o.step_s,) for o in outcomes),
        ),
    )


def _plain(outcome: Outcome, outcomes: list[Outcome], sizes: Sizes) -> dict[str, Any]:
    reference, half = _named(outcomes, REFERENCE), _named(outcomes, HALF)
    change, error = outcome.score.change(reference.score)
    return {
        "name": outcome.name,
        "bytes_per_token": outcome.token_bytes,
        "of_bfloat16": outcome.token_bytes / half.token_bytes,
        "decode_step_s": outcome.step_s,
        "perplexity": outcome.score.perplexity,
        "perplexity_change": change,
        "perplexity_change_error": error,
        "perplexity_change_from_bfloat16": outcome.score.change(half.score)[0],
        "agreement": outcome.score.agreement(reference.score),
        "greedy_tokens_alike": _mean_same(outcome, reference),
        "greedy_tokens": sizes.answer,
    }


def _learnt(outcomes: list[Outcome], sizes: Sizes) -> str:
    reference, half = _named(outcomes, REFERENCE), _named(outcomes, HALF)
    eight = _named(outcomes, EIGHT_BITS)
    least = min(outcomes, key=lambda o: o.token_bytes)
    change, _ = eight.score.change(half.score)
    said = (
        f"KV in 8 bits takes {percent(eight.token_bytes / half.token_bytes, 1)} of bfloat16's "
        f"bytes ({byte_size(eight.token_bytes)} per token), changes perplexity by "
        f"{shown(change, 'change')} and agrees with float32 in "
        f"{percent(eight.score.agreement(reference.score), 1)} of the tokens; a step of "
        f"{sizes.batch} requests takes {times(eight.step_s / half.step_s)} as long"
    )
    if least is not eight:
        change, _ = least.score.change(half.score)
        said += (
            f". {least.name} takes {percent(least.token_bytes / half.token_bytes, 1)}, changes it "
            f"by {shown(change, 'change')} and agrees in "
            f"{percent(least.score.agreement(reference.score), 1)}"
        )
    return said + "."
