"""What a KV cache saves a decoder, and why an encoder has nothing to put there.

Holds the experiment on the engine's decoder and an encoder of the same shape, in this process.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ullage.anatomy import load
from ullage.anatomy.spec import Dense, ModelSpec
from ullage.engine.encoder.encoder import Encoder
from ullage.engine.encoder.weights import EncoderWeights
from ullage.engine.engine import Engine
from ullage.engine.linear import LINEARS
from ullage.engine.options import EngineOptions
from ullage.lab.result import Axis, Column, Lines, Result, Series, Table
from ullage.lab.setting import Setting
from ullage.lab.shape import attention_shape
from ullage.lab.speeds import decode_step_s, prefill_tokens_per_s, random_ids
from ullage.lab.synthetic import write_encoder
from ullage.lab.timing import race
from ullage.lab.units import times
from ullage.pages.words import byte_size, seconds

LENGTHS, QUICK_LENGTHS = (64, 128, 256, 512), (16, 48)


@dataclass(frozen=True, slots=True)
class Point:
    """At a text of `tokens`: seconds of one more token with the cache and without it, bytes that
    the cache holds, seconds of the encoder's pass over the whole text."""

    tokens: int
    cached_s: float
    uncached_s: float
    kv_bytes: int
    encoder_s: float


@dataclass(frozen=True, slots=True)
class Moved:
    """How much earlier tokens' results move when one token is added behind them: the largest
    difference over the largest value."""

    decoder: float
    encoder: float


def run(setting: Setting) -> Result:
    lengths = QUICK_LENGTHS if setting.quick else LENGTHS
    engine = Engine.load(
        setting.model,
        EngineOptions(
            max_num_seqs=1,
            max_num_batched_tokens=max(lengths),
            max_model_len=max(lengths) + 64,
            enable_prefix_caching=False,
        ),
    )
    encoder = _encoder(setting.model, engine.spec, max(lengths))
    points = []
    for tokens in lengths:
        setting.progress(f"encoder-decoder: {tokens} tokens")
        points.append(_measure(engine, encoder, tokens, setting.quick))
    moved = _moved(engine, encoder, min(lengths))
    return Result(
        name="encoder-decoder",
        learnt=_learnt(points, moved),
        how=(
            f"The engine's decoder, {setting.model_name}, one request; without the cache each new "
            "token runs the whole text again. The fastest steps.",
            "The engine's encoder with random weights in the decoder's shape "
            f"({encoder.spec.num_layers} layers, hidden size {encoder.spec.hidden_size}): one pass "
            "over the whole text, the fastest of several.",
            f"Moved: {min(lengths)} tokens with and without one more behind them; the largest "
            "change of the first ones' logits (decoder) and hidden states (encoder), as a share of "
            "the largest value.",
        ),
        tables=(_table(points), _moved_table(moved)),
        plots=_plots(points),
        data={
            "points": [
                {
                    "tokens": p.tokens,
                    "cached_s": p.cached_s,
                    "uncached_s": p.uncached_s,
                    "kv_bytes": p.kv_bytes,
                    "encoder_s": p.encoder_s,
                }
                for p in points
            ],
            "moved": {"decoder": moved.decoder, "encoder": moved.encoder},
        },
    )


def _encoder(model: Path, spec: ModelSpec, max_tokens: int) -> Encoder:
    """An encoder as wide and deep as the decoder, random weights: only its work is measured."""
    shape = attention_shape(model)
    mlp = next((m for layer in spec.layers if isinstance(m := layer.feed_forward, Dense)), None)
    with tempfile.TemporaryDirectory(prefix="ullage-lab-") as scratch:
        place = write_encoder(
            Path(scratch),
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            intermediate_size=4 * shape.hidden_size if mlp is None else mlp.intermediate,
            num_heads=_heads(shape.hidden_size, shape.num_heads),
            max_tokens=max_tokens + 1,
        )
        found = load(place)
        return Encoder(found.anatomy.spec, EncoderWeights(found), LINEARS["none"])


def _heads(hidden_size: int, num_heads: int) -> int:
    """As many heads as the decoder has, or the next fewer that cut the hidden size evenly."""
    return next(n for n in range(num_heads, 0, -1) if hidden_size % n == 0)


def _measure(engine: Engine, encoder: Encoder, tokens: int, quick: bool) -> Point:
    steps = 3 if quick else 12
    cached_s = decode_step_s(engine, batch=1, context=tokens, steps=steps)
    uncached = tokens / prefill_tokens_per_s(engine, tokens=tokens, repeats=1 if quick else 3)
    text = [min(token, encoder.spec.vocab_size - 1) for token in random_ids(engine, tokens, seed=9)]
    passes = race({"encoder": lambda: encoder.forward([text])}, budget_s=0.1 if quick else 2.0)
    blocks = engine.pool.blocks_for(tokens) * len(engine.kv.layout.groups)
    kv_bytes = blocks * engine.kv.bytes_per_block
    return Point(tokens, cached_s, uncached, kv_bytes, passes["encoder"])


def _moved(engine: Engine, encoder: Encoder, tokens: int) -> Moved:
    ids = random_ids(engine, tokens + 1, seed=11)
    shorter_TV, longer_TV = engine.prompt_logits(ids[:-1]), engine.prompt_logits(ids)
    text = [min(token, encoder.spec.vocab_size - 1) for token in ids]
    shorter_TE, longer_TE = encoder.forward([text[:-1]])[0], encoder.forward([text])[0]
    return Moved(_change(shorter_TV, longer_TV[:-1]), _change(shorter_TE, longer_TE[:-1]))


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())


def _table(points: list[Point]) -> Table:
    return Table(
        "One more token, and a whole text",
        (
            Column("tokens before", source=""),
            Column("with cache", "s"),
            Column("without", "s", "measured: the whole text again"),
            Column("without / with", "times", "quotient"),
            Column("KV held", "bytes", "measured: whole blocks"),
            Column("encoder, whole text", "s"),
            Column("per token", "s", "quotient"),
            Column("encoder's KV", "bytes", "the engine's encoder has none"),
        ),
        tuple(
            (
                p.tokens,
                p.cached_s,
                p.uncached_s,
                p.uncached_s / p.cached_s,
                p.kv_bytes,
                p.encoder_s,
                p.encoder_s / p.tokens,
                0,
            )
            for p in points
        ),
    )


def _moved_table(moved: Moved) -> Table:
    return Table(
        "What one more token changes in the ones before it",
        (Column("model", source=""), Column("largest change", "change")),
        (("decoder", moved.decoder), ("encoder", moved.encoder)),
    )


def _plots(points: list[Point]) -> tuple[Lines, ...]:
    def series(name: str, field: str) -> Series:
        return Series(name, tuple((float(p.tokens), float(getattr(p, field))) for p in points))

    return (
        Lines(
            "Time against the text's length",
            Axis("tokens", log=True),
            Axis("time", "s", log=True),
            (
                series("decoder, one token without cache", "uncached_s"),
                series("decoder, one token with cache", "cached_s"),
                series("encoder, the whole text", "encoder_s"),
            ),
        ),
    )


def _learnt(points: list[Point], moved: Moved) -> str:
    first, last = points[0], points[-1]
    growth = math.log(last.uncached_s / first.uncached_s) / math.log(last.tokens / first.tokens)
    stays = moved.decoder < 1e-4 < moved.encoder
    rounding = f"nothing but rounding ({moved.decoder:.0e})" if moved.decoder else "nothing"
    reason = (
        f"One more token moves a decoder's earlier results by {rounding} and an encoder's by "
        f"{moved.encoder:.1%}: what a decoder computed "
        "may be kept, what an encoder computed is out of date, and it has its whole text at once"
        if stays
        else f"One more token moved a decoder's earlier results by {moved.decoder:.1%} and an "
        f"encoder's by {moved.encoder:.1%}, which does not tell them apart"
    )
    return (
        f"{reason}. At {last.tokens:,} tokens the cache ({byte_size(last.kv_bytes)}) makes a "
        f"decoder's next token {times(last.uncached_s / last.cached_s)} as fast "
        f"({seconds(last.cached_s, 2)} instead of {seconds(last.uncached_s, 2)}, which grows with "
        f"the {growth:.1f}th power of the length); an encoder of the same shape reads all of it in "
        f"{seconds(last.encoder_s, 2)} and keeps no KV."
    )
