"""Weights are found wherever a checkpoint of the family keeps them, and read as the spec says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ullage.anatomy import load
from ullage.engine.engine import Engine
from ullage.engine.model.weights import Weights
from ullage.engine.options import EngineOptions
from ullage.errors import MalformedCheckpoint, UnsupportedModel

FamilyDir = Callable[[str], Path]
PROMPT = tuple(range(3, 60))


def logits(directory: Path) -> torch.Tensor:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22)
    return Engine.load(directory, options).prompt_logits(PROMPT)


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a model whose tensors are as `change` makes them."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("family", "prefix"), [("gpt2", "transformer."), ("bloom", "transformer.")]
)
def test_the_prefix_of_the_inner_model_may_be_left_out(
    family: str, prefix: str, family_dir: FamilyDir, tmp_path: Path
) -> None:
    """As the releases of GPT-2 and BLOOM do."""
    source = family_dir(family)
    bare = rewritten(
        source,
        tmp_path / "bare",
        lambda tensors: {key.removeprefix(prefix): value for key, value in tensors.items()},
    )
    assert torch.equal(logits(bare), logits(source))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_read_as_what_they_are(
    dtype: torch.dtype, family_dir: FamilyDir, tmp_path: Path
) -> None:
    narrow = rewritten(
        family_dir("qwen2"),
        tmp_path / "narrow",
        lambda tensors: {key: value.to(dtype) for key, value in tensors.items()},
    )
    back = rewritten(
        narrow,
        tmp_path / "back",
        lambda tensors: {key: value.float() for key, value in tensors.items()},
    )
    assert torch.equal(logits(narrow), logits(back))


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Qwen-MoE's experts as trainers of transformers 5 hold them: all of a layer in two tensors."""
    found = {key: value for key, value in tensors.items() if ".experts." not in key}
    layers = {key.split(".experts.")[0] for key in tensors if ".experts." in key}
    for layer in layers:
        count = sum(key.startswith(f"{layer}.experts.") for key in tensors) // 3

        def part(name: str, layer: str = layer, count: int = count) -> torch.Tensor:
            return torch.stack(
                [tensors[f"{layer}.experts.{e}.{name}.weight"] for e in range(count)]
            )

        found[f"{layer}.experts.gate_up_proj"] = torch.cat([part("gate_proj"), part("up_proj")], 1)
        found[f"{layer}.experts.down_proj"] = part("down_proj")
    return found


def test_experts_may_be_stacked(family_dir: FamilyDir, tmp_path: Path) -> None:
    source = family_dir("qwen3-moe")
    together = rewritten(source, tmp_path / "together", stacked)
    assert torch.equal(logits(together), logits(source))


def test_a_missing_expert_is_named(family_dir: FamilyDir, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    part = rewritten(
        family_dir("qwen3-moe"),
        tmp_path / "part",
        lambda tensors: {key: value for key, value in tensors.items() if key != name},
    )
    with pytest.raises(MalformedCheckpoint, match=f"{name}: missing"):
        logits(part)


def test_matrices_come_as_out_by_in_however_they_are_stored(family_dir: FamilyDir) -> None:
    weights = Weights(load(family_dir("gpt2")))
    tensors = load_file(family_dir("gpt2") / "model.safetensors")
    stored = tensors["transformer.h.1.mlp.c_fc.weight"]
    assert stored.shape == (64, 256)
    assert torch.equal(weights.tensor("up", 1), stored.T)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (
            "llama",
            {"model_type": "solar", "architectures": ["SolarForCausalLM"]},
            "family: .*solar",
        ),
        ("gpt2", {"architectures": ["GPT2Model"]}, "lm_head"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("opt", {"_remove_final_layer_norm": True}, "remove_final_layer_norm"),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "clip_qkv"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("cohere", {"use_qk_norm": True}, "qk_norm"),
        ("stablelm", {"qk_layernorm": True}, "qk_norm"),
        ("olmo2", {"hidden_act": "xielu"}, "activation"),
    ],
)
def test_what_a_configuration_turns_on_and_nobody_proved_is_refused(
    family: str, changes: dict[str, Any], said: str, family_dir: FamilyDir, tmp_path: Path
) -> None:
    config = json.loads((family_dir(family) / "config.json").read_text())
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    copy = shutil.copytree(family_dir(family), tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=said):
        logits(copy)
