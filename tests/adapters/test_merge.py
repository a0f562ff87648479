"""A merged checkpoint is told from one that was not merged, or merged with another scale."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.peft_adapters import CASES, make_adapter, make_base, make_model, save_base
from ullage.adapters.merge import MergedTensor, merge_check
from ullage.adapters.rewriting.placing import FixRefused
from ullage.anatomy import load
from ullage.anatomy.adapters.read import read_adapter
from ullage.cli.main import main

WEIGHTS = "model.safetensors"
Q1 = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: save_base(kind, tmp_path_factory.mktemp("base") / kind))


def merge(name: str, folder: Path, dtype: torch.dtype = torch.float32, times: float = 1.0) -> Path:
    """The case's adapter merged by PEFT itself, its scale multiplied by `times`."""
    model = make_model(name)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            for key in module.scaling:
                module.scaling[key] *= times
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = model.to(dtype).merge_and_unload()
    merged.save_pretrained(folder)
    return folder


def states(adapter: Path, base: Path, merged: Path) -> dict[str, MergedTensor]:
    before, after = load(base), load(merged)
    assert before.checkpoint is not None
    assert after.checkpoint is not None
    found = merge_check(
        read_adapter(adapter), before.anatomy.spec, before.checkpoint, after.checkpoint
    )
    return {tensor.name: tensor for tensor in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "rslora patterns", "gpt2", "fused", "layers"])
def test_what_peft_merges_is_called_merged(
    name: str, dtype: torch.dtype, base_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter(name, tmp_path)
    found = states(adapter, base_dir(CASES[name].base), merge(name, tmp_path / "merged", dtype))
    counts = Counter(tensor.state.value for tensor in found.values())
    assert set(counts) == {"merged", "unchanged"}, counts
    assert counts["merged"] == len(read_adapter(adapter).modules)
    for tensor in found.values():
        if tensor.state == "merged":
            assert tensor.scale_found == pytest.approx(1, abs=0.02)


def test_an_embedding_and_a_head_are_merged_too(
    base_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    found = states(
        make_adapter("embeddings", tmp_path), base_dir("llama"), merge("embeddings", tmp_path / "m")
    )
    assert found["model.embed_tokens.weight"].state == "merged"
    assert found["lm_head.weight"].state == "merged"


@pytest.mark.parametrize("times", [0.25, 0.5, 2.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_scale_is_named(
    times: float, dtype: torch.dtype, base_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """rsLoRA's factor forgotten, alpha halved, an adapter subtracted."""
    adapter = make_adapter("rslora", tmp_path)
    merged = merge("rslora", tmp_path / "merged", dtype, times)
    for tensor in states(adapter, base_dir("llama"), merged).values():
        if tensor.state != "unchanged":
            assert tensor.state == "wrong_scale"
            assert tensor.scale_found == pytest.approx(times, rel=0.03)


def test_single_tensors_that_are_wrong_are_found(
    base_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter("plain", tmp_path)
    merged = merge("plain", tmp_path / "merged")
    base = make_base("llama").state_dict()
    tensors = load_file(merged / WEIGHTS)
    tensors[Q1] = base[Q1].clone()
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += 0.01
    tensors["model.norm.weight"][0] += 1e-3
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    save_file(tensors, merged / WEIGHTS, metadata={"format": "pt"})
    found = states(adapter, base_dir("llama"), merged)
    assert found[Q1].state == "not_merged"
    assert found["model.layers.0.mlp.up_proj.weight"].state == "wrong"
    assert found["model.norm.weight"].state == "changed"
    assert found["model.layers.0.self_attn.o_proj.weight"].state == "missing"
    assert Counter(t.state for t in found.values())["merged"] == 14 - 3


def test_a_change_below_rounding_is_not_called_a_fault(
    base_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter("plain", tmp_path)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 1e-7}))
    plain = tmp_path / "merged"
    make_base("llama").to(torch.bfloat16).save_pretrained(plain)
    found = states(adapter, base_dir("llama"), plain)
    assert {tensor.state.value for tensor in found.values()} == {"below_rounding", "unchanged"}


def test_adapters_without_a_certain_change_are_refused(
    base_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("dora", "modules_to_save", "moe experts"):
        adapter = make_adapter(name, tmp_path)
        base = base_dir(CASES[name].base)
        with pytest.raises(FixRefused):
            states(adapter, base, base)


def test_the_command(
    base_dir: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, base = make_adapter("plain", tmp_path), base_dir("llama")
    merged = merge("plain", tmp_path / "merged")
    argv = ["adapter", "merge-check", str(adapter), "--base", str(base), "--merged"]
    assert main([*argv, str(merged), "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["merged"] is True
    assert document["counts"]["merged"] == 14
    assert main([*argv, str(base)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("NOT merged as trained: 14 not_merged")
    assert "  not_merged: model.layers.0." in said
    config = str(base / "config.json")
    assert main(["adapter", "merge-check", str(adapter), "--base", config, "--merged", config]) == 2
    assert "no weights here" in capsys.readouterr().err
