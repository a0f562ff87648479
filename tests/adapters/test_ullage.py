"""The verdict on the embedded engine is what the embedded engine does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.adapters.peft_adapters import CASES, make_adapter, make_base, make_model, save_base
from ullage.adapters.check import check
from ullage.adapters.verdict import ServeOptions
from ullage.anatomy import load
from ullage.anatomy.adapters.read import read_adapter
from ullage.engine.batch import build_batch
from ullage.engine.engine import Engine
from ullage.engine.linear import LINEARS
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.engine.options import EngineOptions
from ullage.engine.request import Request, SamplingParams
from ullage.engine.scheduling.scheduler import Plan, Work
from ullage.errors import BadInput

RUN = ("llama", "tied", "biased", "gpt2", "phi3")
RUN_CASES = [name for name, case in CASES.items() if case.base in RUN]
PROMPT = tuple(range(3, 40))
# Each verdict has to come up, or the comparison would show nothing.
WORK = {"plain", "custom name", "rslora", "patterns", "layers", "compiled", "fsdp", "no prefix"}
WORK |= {name for name, case in CASES.items() if case.base in ("gpt2", "phi3")}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    def make(kind: str) -> Engine:
        found = load(save_base(kind, tmp_path_factory.mktemp("base") / kind))
        options = EngineOptions(kv_cache_memory_bytes=1 << 22, enable_lora=True, max_loras=100)
        decoder = Decoder(found.anatomy.spec, Weights(found), LINEARS["none"], 128)
        return Engine(decoder, None, options, 128)

    return cache(make)


def logits(engine: Engine, name: str) -> torch.Tensor:
    request = Request("r", PROMPT, SamplingParams(max_tokens=1))
    request.lora = engine.loras[name]
    num_blocks = -(-len(PROMPT) // engine.pool.block_size)
    work = Work(request, 0, len(PROMPT), (tuple(range(num_blocks)),), True)
    batch = build_batch(Plan((work,)), engine.pool.block_size)
    return engine._decoder.forward(batch, engine.kv, engine._attention)[0]


@pytest.mark.parametrize("name", RUN_CASES)
def test_verdict_message_and_effect_are_the_engines(
    name: str, engine: Callable[[str], Engine], tmp_path: Path
) -> None:
    served = engine(CASES[name].base)
    path = make_adapter(name, tmp_path)
    judged = check(read_adapter(path), served.spec, ServeOptions(engine="ullage"))
    try:
        served.load_lora(name, path)
    except BadInput as refusal:
        assert (judged.verdict, judged.message) == ("rejected", str(refusal))
        assert name not in WORK
        return
    assert judged.verdict == "works"
    with torch.inference_mode():
        trained = make_model(name)(input_ids=torch.tensor([PROMPT])).logits[0, -1]
        base = make_base(CASES[name].base).eval()(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    assert (trained - base).abs().max() > 0.1
    assert torch.allclose(logits(served, name), trained, atol=1e-4)


def test_a_base_that_it_does_not_run_is_said(tmp_path: Path) -> None:
    spec = replace(load(save_base("gpt2", tmp_path / "base")).anatomy.spec, family="ctrl")
    adapter = read_adapter(make_adapter("gpt2", tmp_path))
    judged = check(adapter, spec, ServeOptions(engine="ullage"))
    assert judged.verdict == "rejected"
    assert "is not run by the embedded engine" in (judged.message or "")
