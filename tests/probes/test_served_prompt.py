"""A prompt read in a running engine is the prompt read alone, and disturbs nobody who runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import generate, greedy_params
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.paging.blocks import OutOfBlocks
from ullage.errors import BadInput
from ullage.probes.attention.embedded import read_prompt as read_alone
from ullage.probes.attention.served_prompt import AskedPrompt, OneRow, read_prompt

# Groups of heads, one KV head, windows, caps, slopes, experts.
KINDS = ("llama", "mistral-window", "gemma2", "mpt", "bloom-odd-heads", "falcon-7b", "mixtral")
PROMPT = tuple(torch.randint(3, 300, (70,), generator=torch.Generator().manual_seed(5)).tolist())
CHUNKED = EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_batched_tokens=32, max_num_seqs=8)

Directory = Callable[[str], Path]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int4_per_token_head"])
@pytest.mark.parametrize("family", KINDS)
def test_it_is_read_as_alone(family: str, kv_cache_dtype: str, family_dir: Directory) -> None:
    options = replace(CHUNKED, kv_cache_dtype=kv_cache_dtype)
    engine = Engine.load(family_dir(family), options)
    before = _answer(engine)
    told = read_prompt(engine, AskedPrompt(PROMPT, rows=23)).to_json("m")
    alone = read_alone(
        family_dir(family),
        PROMPT,
        name="m",
        rows=23,
        options=replace(options, attention="gathered"),
    ).to_json()
    assert {**told, "layers": None} == {**alone, "layers": None}
    for one, other in zip(_heads(told), _heads(alone), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], abs=2e-3, rel=2e-3), name
    assert engine.pool.num_used == 0
    assert _answer(engine) == before


def _answer(engine: Engine) -> list[int]:
    (request,) = generate(engine, [PROMPT[:9]], greedy_params(6))
    return request.output_ids


def _heads(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [head for layer in document["layers"] for head in layer["heads"]]


@pytest.mark.parametrize("family", KINDS)
def test_the_weights_of_a_row_have_its_entropy(family: str, family_dir: Directory) -> None:
    engine = Engine.load(family_dir(family), CHUNKED)
    last = len(PROMPT) - 1
    for layer, head in ((0, 0), (2, 3), (1, 2)):
        asked = AskedPrompt(PROMPT, 1, [layer], OneRow(layer, head, last))
        told = read_prompt(engine, asked).to_json("m")
        weights, (reading,) = told["weights"], [one for one in _heads(told) if one["head"] == head]
        window = engine.decoder.windows[layer]
        assert weights["first_key"] == (0 if window is None else max(0, last + 1 - window))
        assert len(weights["values"]) == last + 1 - weights["first_key"]
        assert sum(weights["values"]) == pytest.approx(1)
        entropy = -sum(v * math.log(v) for v in weights["values"] if v > 0)
        assert entropy == pytest.approx(reading["entropy_nats"]["mean"], abs=1e-4)


def test_a_row_of_which_nothing_else_is_read_is_weighed(family_dir: Directory) -> None:
    engine = Engine.load(family_dir("llama"), CHUNKED)
    found = read_prompt(engine, AskedPrompt(PROMPT, 1, None, OneRow(1, 1, 20))).weights
    assert found is not None
    assert found.positions == tuple(range(21))


def test_a_full_pool_is_said_and_nothing_is_kept(family_dir: Directory) -> None:
    options = EngineOptions(kv_cache_memory_bytes=1 << 16, max_model_len=80, max_num_seqs=8)
    engine = Engine.load(family_dir("llama"), options)
    held = engine.add_request("a", PROMPT, greedy_params(8))
    engine.step()
    used = engine.pool.num_used
    with pytest.raises(OutOfBlocks):
        read_prompt(engine, AskedPrompt(PROMPT))
    assert engine.pool.num_used == used
    assert held[0].id == "a"
    with pytest.raises(BadInput):
        read_prompt(engine, AskedPrompt(PROMPT * 2))
