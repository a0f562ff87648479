"""The compiled step gives what the decoder in torch gives, for every form of layer and storage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import generate, greedy_params
from tests.engine.families import COMMON, write_byte_tokenizer
from ullage.engine.compiled import CompiledDecoder, fastest, why_not
from ullage.engine.engine import Engine
from ullage.engine.kernels.compiling import available
from ullage.engine.options import EngineOptions
from ullage.engine.request import FinishReason, SamplingParams

pytestmark = pytest.mark.skipif(not available(), reason="numba is not installed")
FamilyDir = Callable[[str], Path]
RNG = random.Random(11)  # noqa: S311
PROMPTS = [[RNG.randrange(3, COMMON["vocab_size"]) for _ in range(n)] for n in (1, 7, 40, 130)]
NUM_NEW = 20
RUN = ("llama-biases", "mistral-window", "qwen3", "smollm3")
FALLS_BACK = {
    "gpt2": "positions or norms at the embedding",
    "gemma2": "logits other than those of an RMS norm",
    "mixtral": "a feed-forward other than gated SiLU",
    "granite": "scaled or projected hidden states",
}


def engine_of(directory: Path, *, compiled: bool, **more: Any) -> Engine:
    options = EngineOptions(attention="gathered", kv_cache_memory_bytes=1 << 23, **more)
    engine = Engine.load(directory, options)
    if compiled:
        engine._decoder = CompiledDecoder(engine._decoder)
    return engine


def decodes(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, torch.Tensor]]:
    """Logits of all steps that were decodes alone, by the number of their rows."""
    found: list[tuple[int, torch.Tensor]] = []
    forward = engine._decoder.forward

    def watched(batch: Any, *rest: Any) -> torch.Tensor:
        logits = forward(batch, *rest)
        if not batch.prefills:
            found.append((len(batch.decodes), logits.clone()))
        return logits

    engine._decoder.forward = watched
    generate(engine, prompts, greedy_params(NUM_NEW))
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Each logit within 1e-4, or with a larger tolerance all of them by that part of their norm.

    A number halfway between two whole ones may be rounded either way, and carries on from there.
    """
    if tolerance <= 1e-4:
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    else:
        assert (found - expected).norm() < tolerance * expected.norm()


def assert_alike(
    directory: Path, prompts: list[list[int]], tolerance: float, **options: Any
) -> None:
    plain = decodes(engine_of(directory, compiled=False, **options), prompts)
    fast = decodes(engine_of(directory, compiled=True, **options), prompts)
    assert [rows for rows, _ in plain] == [rows for rows, _ in fast]
    assert len(plain) >= NUM_NEW - 1
    for (_, expected), (_, found) in zip(plain, fast, strict=True):
        assert_close(found, expected, tolerance)


@pytest.mark.parametrize("family", RUN)
def test_every_form_of_layer_gives_the_logits_of_torch(family: str, family_dir: FamilyDir) -> None:
    """Biases; windows with groups of layers; norms of heads; layers without rotation."""
    assert_alike(family_dir(family), PROMPTS, 1e-4)


def test_one_sequence_alone_is_cut_into_ranges(family_dir: FamilyDir) -> None:
    assert_alike(family_dir("llama-biases"), [PROMPTS[-1] * 3], 1e-4)


def test_int8_weights_give_the_logits_of_the_same_weights_in_torch(family_dir: FamilyDir) -> None:
    assert_alike(family_dir("llama-biases"), PROMPTS, 2e-2, quantization="int8")


@pytest.mark.parametrize(
    ("stored", "tolerance"),
    [
        pytest.param("bfloat16", 2e-3, marks=pytest.mark.slow),
        ("int8_per_token_head", 2e-2),
        pytest.param("int4_per_token_head", 2e-1, marks=pytest.mark.slow),
    ],
)
def test_every_storage_holds_what_torch_would_have_stored(
    stored: str, tolerance: float, family_dir: FamilyDir
) -> None:
    """Within what a number rounded the other way changes."""
    assert_alike(family_dir("qwen3"), PROMPTS, tolerance, kv_cache_dtype=stored)


@pytest.mark.slow
def test_bfloat16_weights_give_the_logits_of_the_same_weights_in_float32(
    family_dir: FamilyDir,
) -> None:
    """Between matrices all is float32, unlike in torch, which rounds there too."""
    directory = family_dir("qwen3")
    fast = engine_of(directory, compiled=True, dtype="bfloat16", kv_cache_dtype="float32")
    plain = engine_of(directory, compiled=False)
    decoder = plain._decoder
    held = [decoder.head, *(linear for layer in decoder.layers for linear in layer.linears)]
    for tensor in (decoder.embedding_VE, *(linear.weight_OI for linear in held)):
        tensor.copy_(tensor.bfloat16().float())
    short = [prompt[:20] for prompt in PROMPTS]
    found, expected = decodes(fast, short), decodes(plain, short)
    for (_, one), (_, other) in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    assert fast.weights_bytes < 0.6 * plain.weights_bytes


def test_numbers_that_are_not_finite_end_their_own_request(family_dir: FamilyDir) -> None:
    bad = PROMPTS[2][5]
    others = [[token for token in prompt if token != bad][:20] for prompt in PROMPTS]
    clean = generate(engine_of(family_dir("qwen3"), compiled=True), others, greedy_params(NUM_NEW))
    avoided = SamplingParams(
        max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logit_bias=((bad, -100.0),)
    )
    engine = engine_of(family_dir("qwen3"), compiled=True)
    engine._decoder._decoder.embedding_VE[bad] = float("nan")
    spoilt, *rest = generate(engine, [PROMPTS[2][:20], *others], avoided)
    assert spoilt.finish_reason is FinishReason.ERROR
    assert spoilt.output_ids == []
    for request, same in zip(rest, clean, strict=True):
        if bad not in same.output_ids:
            assert request.output_ids == same.output_ids


def test_prompts_in_short_chunks_beside_decodes_run_compiled(family_dir: FamilyDir) -> None:
    """Chunks of 16 rows: tokens are those of whole prompts in torch."""
    expected = generate(
        engine_of(family_dir("mistral-window"), compiled=False), PROMPTS, greedy_params(NUM_NEW)
    )
    chunked = engine_of(
        family_dir("mistral-window"), compiled=True, max_num_batched_tokens=16, max_num_seqs=4
    )
    chunked._decoder._decoder.forward = None  # not asked
    found = generate(chunked, PROMPTS, greedy_params(NUM_NEW))
    assert [r.output_ids for r in found] == [r.output_ids for r in expected]


def test_prompts_run_compiled_up_to_a_length_and_in_torch_beyond(family_dir: FamilyDir) -> None:
    """Logits of a prompt are the same but for rounding, whoever computed them."""
    for quantization, prompt, asks_torch in (
        ("int8", tuple(PROMPTS[-1] * 3), False),
        # From how many tokens on depends on the processor: 64 or 256.
        ("none", tuple(PROMPTS[2]), False),
        ("none", tuple(PROMPTS[-1] * 3), True),
    ):
        plain = engine_of(family_dir("qwen3"), compiled=False, quantization=quantization)
        fast = engine_of(family_dir("qwen3"), compiled=True, quantization=quantization)
        asked: list[int] = []
        in_torch = fast._decoder._decoder.forward

        def watched(*args: Any, forward: Any = in_torch, seen: list[int] = asked) -> torch.Tensor:
            seen.append(1)
            return forward(*args)

        fast._decoder._decoder.forward = watched
        found, expected = fast.prompt_logits(prompt), plain.prompt_logits(prompt)
        assert bool(asked) is asks_torch
        assert_close(found, expected, 1e-4 if quantization == "none" else 2e-2)


def test_without_numba_all_runs_in_torch(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage.engine.compiled.available", lambda: False)
    monkeypatch.setattr("ullage.engine.linear.int8.available", lambda: False)
    monkeypatch.setattr("ullage.engine.attention.table.available", lambda: False)
    engine = Engine.load(family_dir("llama"), EngineOptions(kv_cache_memory_bytes=1 << 23))
    assert not isinstance(engine._decoder, CompiledDecoder)
    assert engine.eager_because == "numba is not installed"
    expected = generate(
        engine_of(family_dir("llama"), compiled=True), PROMPTS, greedy_params(NUM_NEW)
    )
    found = generate(engine, PROMPTS, greedy_params(NUM_NEW))
    assert [r.output_ids for r in found] == [r.output_ids for r in expected]


# Sizes that no steps of kernels divide: of the hidden state, all heads, the feed-forward, one head,
# the vocabulary; many queries to one key; one layer.
ODD_SIZES: tuple[dict[str, int], ...] = (
    {"hidden_size": 40, "num_attention_heads": 2, "head_dim": 16},
    {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    {"intermediate_size": 80},
    {"intermediate_size": 65},
    {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 12},
    {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32},
    {"vocab_size": 323, "num_hidden_layers": 1},
)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("sizes", ODD_SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_no_size_is_read_askew(sizes: dict[str, int], quantization: str, tmp_path: Path) -> None:
    """Whichever way an engine takes to run a size, its logits are those of torch's way."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(5)
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": 2, **sizes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    options = EngineOptions(kv_cache_memory_bytes=1 << 23, quantization=quantization)
    engines = [Engine.load(tmp_path, replace(options, enforce_eager=e)) for e in (True, False)]
    (_, expected), *_ = decodes(engines[0], PROMPTS[1:2])
    (_, found), *_ = decodes(engines[1], PROMPTS[1:2])
    assert_close(found, expected, 2e-2 if quantization == "int8" else 1e-4)


def test_what_the_step_does_not_run_is_said(family_dir: FamilyDir) -> None:
    for family, reason in FALLS_BACK.items():
        engine = engine_of(family_dir(family), compiled=False)
        assert why_not(engine._decoder) == reason
        assert fastest(engine._decoder, EngineOptions(attention="auto")) is engine._decoder


def test_it_is_compiled_unless_something_else_was_asked_for(family_dir: FamilyDir) -> None:
    decoder = engine_of(family_dir("llama"), compiled=False)._decoder
    assert isinstance(fastest(decoder, EngineOptions(attention="auto")), CompiledDecoder)
    for options in (
        EngineOptions(attention="auto", enforce_eager=True),
        EngineOptions(attention="reference"),
    ):
        assert fastest(decoder, options) is decoder
    engine = Engine.load(family_dir("llama"), EngineOptions(kv_cache_memory_bytes=1 << 23))
    assert engine.eager_because is None
    assert engine_of(family_dir("llama"), compiled=False).eager_because is not None
