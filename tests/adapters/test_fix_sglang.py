"""What SGLang would scale wrongly is rewritten so that it does not, and PEFT agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapters.peft_adapters import CASES, make_adapter, make_base, make_model, save_base
from ullage.adapters.check import check
from ullage.adapters.rewriting.fix import fix
from ullage.adapters.verdict import ServeOptions
from ullage.anatomy import load
from ullage.anatomy.adapters.read import read_adapter

IDS = torch.tensor([[3, 9, 27, 81, 5, 15, 45]])
SGLANG = ServeOptions(engine="sglang")


@pytest.mark.parametrize("name", ["rslora", "patterns", "rslora patterns"])
def test_the_scale_is_folded_and_the_sum_is_the_same(name: str, tmp_path: Path) -> None:
    import peft

    spec = load(save_base(CASES[name].base, tmp_path / "base")).anatomy.spec
    adapter = read_adapter(make_adapter(name, tmp_path))
    assert check(adapter, spec, SGLANG).verdict != "works"
    fixed = fix(adapter, spec, SGLANG, tmp_path / "fixed")
    assert fixed.judgement.verdict == "works"
    again = check(read_adapter(tmp_path / "fixed"), spec, SGLANG)
    assert again.verdict == "works"
    model = peft.PeftModel.from_pretrained(make_base(CASES[name].base), tmp_path / "fixed").eval()
    with torch.inference_mode():
        wanted = make_model(name)(input_ids=IDS).logits
        base = make_base(CASES[name].base).eval()(input_ids=IDS).logits
        assert (wanted - base).abs().max() > 0.1
        assert torch.allclose(model(input_ids=IDS).logits, wanted, atol=1e-4)
