"""Taking a baseline: a model that is known to be well reads prompts and answers them.

Holds the runs and what is kept of them. What a baseline is, and its file, is `baseline`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ullage import __version__
from ullage.engine.engine import Engine
from ullage.engine.lora import LoraAdapter
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.errors import BadUsage
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline import usual
from ullage.probes.baseline.baseline import Baseline, Usual, precision_of
from ullage.probes.baseline.live import LiveReader, LiveReading
from ullage.probes.baseline.relations import Relations
from ullage.probes.baseline.sketch import Form

NEW_TOKENS = 48
"""Answered to each prompt."""
LEAST_ROWS = 64
# The rms of a normal residual is 1.4826 times the median of its absolute values.
_RMS_OF_MEDIAN = 1.4826
# The largest of some hundred normal residuals is four times their rms; one that is more is no
# normal residual, and its rms must allow for it.
_MOST_OF_RMS = 5.0
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
_LEAST_NOISE = 2.0**-22
"""Sums of some thousand float32 numbers, in units of their size."""

Doubles = NDArray[np.float64]


def learn(
    model: str | Path,
    prompts: Sequence[str],
    options: EngineOptions,
    adapters: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    new_tokens: int = NEW_TOKENS,
) -> Baseline:
    """The baseline of `model` as `options` run it; `adapters` by name, each read too.

    Raises UnsupportedModel for a model that cannot be read so, BadUsage for too few prompts,
    LoraRefused.
    """
    engine = Engine.load(model, replace(options, enable_lora=bool(adapters)))
    if engine.tokenizer is None:
        raise BadUsage("the model has no tokenizer, and prompts are text", file=model)
    loaded = [engine.load_lora(one, path) for one, path in (adapters or {}).items()]
    sketch = sketches.take(engine.decoder, tuple(loaded))
    precision = precision_of(options)
    relations = Relations(sketch, _ROUNDING[precision.dtype])
    read: list[_Kept] = []
    for run in _engines(engine):
        run.reader = LiveReader(
            run, lambda one: read.append(_kept(one)), relations, every=1, all_rows=True,
            all_layers=True,
        )  # fmt: skip
        _answer(run, prompts, loaded, new_tokens)
    if len(read) < LEAST_ROWS:
        raise BadUsage(
            f"{len(read)} tokens were read", field="prompts", expected=f"{LEAST_ROWS} or more"
        )
    return Baseline(
        model=str(model) if name is None else name,
        by=f"ullage {__version__}",
        settings=_settings(engine),
        precision=precision,
        max_model_len=engine.max_model_len,
        rounding=_ROUNDING[precision.dtype],
        rows=len(read),
        prompts=len(prompts),
        sketch=sketch,
        noise=np.stack([_noise(read, compiled=compiled) for compiled in (False, True)]),
        usual=_usual(sketch.form, read),
    )


def _engines(engine: Engine) -> list[Engine]:
    """One whose steps are compiled where they can be, and one whose steps run in torch."""
    if not engine.compiled:
        return [engine]
    options = replace(engine.options, enforce_eager=True)
    other = Engine(engine.decoder, engine.tokenizer, options, engine.max_model_len)
    return [engine, other]


def _answer(
    engine: Engine, prompts: Sequence[str], adapters: Sequence[LoraAdapter], new_tokens: int
) -> None:
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    longest = engine.max_model_len - new_tokens
    if longest < 1:
        raise BadUsage(
            f"{new_tokens} tokens answered",
            field="--tokens",
            expected=f"fewer than the longest length, {engine.max_model_len}",
        )
    for number, text in enumerate(prompts):
        ids = tuple(engine.tokenizer.encode(text))[:longest]
        if not ids:
            raise BadUsage("an empty prompt", field="prompts", expected="text")
        for lora in (None, *adapters):
            of = "" if lora is None else lora.name
            engine.add_request(f"{number} {of}", ids, params, lora)
    while engine.has_work:
        engine.step()


def _settings(engine: Engine) -> str:
    """Marks the architecture: a baseline is of one model, whatever its weights."""
    form = sketches.form_of(engine.decoder)
    told = json.dumps([form.layers, form.hidden, form.heads, form.kv_heads, form.head_dim,
                       form.inner, form.vocab, form.activation, form.norm_kind])  # fmt: skip
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Of a reading what a baseline is made of: shares of residuals, and figures."""

    shares: Doubles
    figures: Doubles
    compiled: bool
    request_id: str


def _kept(reading: LiveReading) -> _Kept:
    found = reading.residuals
    assert found is not None
    beyond = np.maximum(found.residual**2 - found.floor**2, 0.0)
    # Of a token whose embedding is 0, as padding's often is, there is no share.
    shares = np.sqrt(beyond) / np.where(found.size > 0, found.size, np.nan)
    return _Kept(shares, reading.figures, reading.compiled, reading.request_id)


def _noise(read: Sequence[_Kept], *, compiled: bool) -> Doubles:
    """Per cell the rms of residuals in units of their size; NaN where it was never read.

    By medians: rows whose residual stream is huge have a rounding of their own (`floor`).
    """
    shares = [one.shares for one in read if one.compiled is compiled]
    if not shares:
        return np.full(len(read[0].shares), np.nan)
    table = np.array(shares)
    known = ~np.isnan(table).all(axis=0)
    noise = np.full(table.shape[1], np.nan)
    of = table[:, known]
    middle = np.nanmedian(of, axis=0) * _RMS_OF_MEDIAN
    most = np.nanmax(of, axis=0) / _MOST_OF_RMS
    noise[known] = np.maximum(np.maximum(middle, most), _LEAST_NOISE)
    return noise


def _usual(form: Form, read: Sequence[_Kept]) -> Usual:
    """Mean and spread over prompts, each of which counts once."""
    by_prompt: dict[str, list[Doubles]] = {}
    for one in read:
        by_prompt.setdefault(one.request_id, []).append(one.figures)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        warnings.filterwarnings("ignore", "Degrees of freedom", RuntimeWarning)
        means = np.array([np.nanmean(rows, axis=0) for rows in by_prompt.values()])
        mean, spread = np.nanmean(means, axis=0), np.nanstd(means, axis=0)
    least = usual.least_spreads(form)
    return Usual(mean, np.where(np.isnan(mean), np.nan, np.fmax(spread, least)))
