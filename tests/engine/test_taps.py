"""Taps: what a step copies of a row is what the model was there, whoever runs the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.driving import generate, greedy_params
from tests.engine.families import FAMILIES
from tests.engine.test_compiled import PROMPTS, RUN
from ullage.engine.batch import Batch
from ullage.engine.compiled import CompiledDecoder
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.taps import PLACES, Taps, why_not

ELSEWHERE = ("gpt2", "llama-tied-mha", "llama3-rope")


class Copying:
    """Every sampled row of every step, or every n-th of them."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.found: list[tuple[Batch, Taps, torch.Tensor]] = []

    def rows(self, batch: Batch) -> Sequence[int]:
        return batch.sampled_rows.tolist()[:: self.every]

    def take(self, batch: Batch, taps: Taps, logits_SV: torch.Tensor) -> None:
        self.found.append((batch, taps, logits_SV.clone()))


def engine_of(directory: Path, *, compiled: bool, **more: Any) -> Engine:
    options = EngineOptions(attention="gathered", kv_cache_memory_bytes=1 << 23, **more)
    engine = Engine.load(directory, options)
    if compiled:
        engine._decoder = CompiledDecoder(engine._decoder)
    return engine


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", RUN)
def test_compiled_steps_and_steps_in_torch_keep_the_same(
    name: str, quantization: str, family_dir: Any
) -> None:
    found = []
    for compiled in (False, True):
        engine = engine_of(family_dir(name), compiled=compiled, quantization=quantization)
        engine.reader = reader = Copying(every=2)
        generate(engine, PROMPTS, greedy_params(6))
        found.append(reader.found)
    in_torch, in_code = found
    assert len(in_torch) == len(in_code)
    assert not any(taps.compiled for _, taps, _ in in_torch)
    assert sum(taps.compiled for _, taps, _ in in_code) > 3
    # A product rounded to int8 the other way, by a last bit of its input, moves what follows it.
    tolerance = 6e-2 if quantization == "int8" else 1e-4
    for (_, one, _), (_, other, _) in zip(in_torch, in_code, strict=True):
        assert one.rows == other.rows
        for place in PLACES:
            expected = one.at(place)
            largest = max(float(np.abs(expected).max(initial=0)), 1.0)
            np.testing.assert_allclose(
                other.at(place), expected, atol=tolerance * largest, err_msg=place
            )


@pytest.mark.parametrize("compiled", [False, True])
def test_reading_along_changes_nothing(compiled: bool, family_dir: Any) -> None:
    answers = []
    for reader in (None, Copying()):
        engine = engine_of(family_dir("qwen3"), compiled=compiled)
        engine.reader = reader
        answers.append([r.output_ids for r in generate(engine, PROMPTS, greedy_params(12))])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_reader_nothing_is_made_and_nobody_is_called(
    compiled: bool, family_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(name: str, was: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            made.append(name)
            return was(*args, **named)

        return call

    for name, value in list(vars(Taps).items()):
        if callable(value):
            monkeypatch.setattr(Taps, name, counted(name, value))
    for reader in (None, Copying()):
        engine = engine_of(family_dir("qwen3"), compiled=compiled)
        engine.reader = reader
        generate(engine, PROMPTS, greedy_params(12))
        assert bool(made) == (reader is not None)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_kept_is_what_transformers_has_there(compiled: bool, family_dir: Any) -> None:
    """Module by module, of the last row of a prompt: hooks of an independent implementation."""
    import transformers

    directory = family_dir("llama")
    engine = engine_of(directory, compiled=compiled)
    engine.reader = reader = Copying()
    prompt = PROMPTS[2]
    generate(engine, [prompt], greedy_params(1))
    ((_, taps, _),) = reader.found
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}

    def watch(name: str, module: Any, *, inputs: bool) -> None:
        def hook(_: Any, given: Any, made: Any) -> None:
            seen[name] = (given[0] if inputs else made)[0, -1].detach()

        module.register_forward_hook(hook)

    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        watch(f"{index} x", layer.input_layernorm, inputs=True)
        watch(f"{index} normed", layer.input_layernorm, inputs=False)
        for part in "qkv":
            watch(f"{index} {part}", getattr(attention, f"{part}_proj"), inputs=False)
        watch(f"{index} mixed", attention.o_proj, inputs=True)
        watch(f"{index} middle", layer.post_attention_layernorm, inputs=True)
        watch(f"{index} mlp_normed", layer.post_attention_layernorm, inputs=False)
        watch(f"{index} gate", mlp.gate_proj, inputs=False)
        watch(f"{index} up", mlp.up_proj, inputs=False)
        watch(f"{index} hidden", mlp.down_proj, inputs=True)
    watch("last x", model.model.norm, inputs=True)
    watch("last normed", model.model.norm, inputs=False)
    with torch.no_grad():
        model(torch.tensor([prompt]))
    last = len(model.model.layers)
    for index in range(last):
        seen[f"{index} qkv"] = torch.cat([seen.pop(f"{index} {part}") for part in "qkv"])
    for name, expected in seen.items():
        at, place = name.split()
        found = taps.at(place)[last if at == "last" else int(at), 0]
        torch.testing.assert_close(
            torch.from_numpy(found.copy()), expected, atol=2e-4, rtol=2e-4, msg=name
        )


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_step_in_torch_of_any_plain_layer_is_kept(name: str, family_dir: Any) -> None:
    engine = engine_of(family_dir(name), compiled=False)
    assert why_not(engine.decoder) is None
    engine.reader = reader = Copying()
    generate(engine, PROMPTS, greedy_params(3))
    for _, taps, logits_SV in reader.found:
        normed = torch.from_numpy(taps.at("normed")[-1].copy())
        torch.testing.assert_close(engine.decoder.head(normed), logits_SV, atol=1e-4, rtol=1e-4)
        for place in PLACES:
            if taps.widths[place]:
                assert np.abs(taps.at(place)).sum(-1).all(), place


def test_models_without_these_places_say_so(family_dir: Any) -> None:
    reasons = {
        name: why_not(engine_of(family_dir(name), compiled=False).decoder)
        for name in ("mixtral", "gemma2", "gpt_neox")
        if name in FAMILIES
    }
    assert reasons["mixtral"] == "experts"
    assert "residuals" in str(reasons["gemma2"])
