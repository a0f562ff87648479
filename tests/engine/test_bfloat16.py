"""bfloat16 weights and activations err no more than transformers does in bfloat16.

Both are measured against the same model in float32. Norms, attention and logits are float32 here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.adapters import load_adapted, write_adapter
from tests.engine.driving import generate, greedy_params, logits_seen
from tests.engine.references import load_reference
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage

FamilyDir = Callable[[str], Path]
PROMPT = [(11 * i) % 300 + 3 for i in range(100)]
FAMILIES = ("llama", "gemma2", "gpt2", "opt-post", "bloom", "falcon-40b", "qwen2-moe")
OPTIONS = {"kv_cache_memory_bytes": 1 << 22, "dtype": "bfloat16"}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_err_no_more_than_transformers(
    family: str, family_dir: FamilyDir
) -> None:
    directory = family_dir(family)
    served = Engine.load(directory, EngineOptions(**OPTIONS))
    with logits_seen(served) as seen:
        (request,) = generate(served, [PROMPT], greedy_params(8))
    tokens = torch.tensor([PROMPT + request.output_ids[:-1]])
    model = load_reference(directory)
    with torch.inference_mode():
        exact_TV = model(tokens).logits[0, len(PROMPT) - 1 :]
        theirs_TV = model.to(torch.bfloat16)(tokens).logits[0, len(PROMPT) - 1 :]
    ours = error(torch.stack(seen[request]), exact_TV)
    assert 0 < ours < 1.2 * error(theirs_TV, exact_TV)


def test_weights_take_half_the_bytes(family_dir: FamilyDir) -> None:
    wide, narrow = (
        Engine.load(family_dir("gpt2"), EngineOptions(**{**OPTIONS, "dtype": dtype})).weights_bytes
        for dtype in ("float32", "bfloat16")
    )
    assert wide is not None
    assert narrow is not None
    # Norms and biases stay float32.
    assert 0.5 < narrow / wide < 0.53


def test_adapters_err_no_more_than_theirs(family_dir: FamilyDir, tmp_path: Path) -> None:
    model = family_dir("llama")
    adapter = write_adapter(model, tmp_path / "adapter")
    served = Engine.load(model, EngineOptions(**OPTIONS, enable_lora=True))
    lora = served.load_lora("adapter", adapter)
    found_TV = served.prompt_logits(tuple(PROMPT), lora)
    adapted, tokens = load_adapted(model, adapter), torch.tensor([PROMPT])
    with torch.inference_mode():
        exact_TV = adapted(tokens).logits[0]
        theirs_TV = adapted.to(torch.bfloat16)(tokens).logits[0]
    ours = error(found_TV, exact_TV)
    assert ours < 1.2 * error(theirs_TV, exact_TV)
    assert error(served.prompt_logits(tuple(PROMPT)), exact_TV) > 3 * ours


def test_int8_weights_are_not_multiplied_in_bfloat16() -> None:
    with pytest.raises(BadUsage, match="--dtype: bfloat16 with --quantization int8"):
        EngineOptions(dtype="bfloat16", quantization="int8")
