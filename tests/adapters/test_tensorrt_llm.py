"""The verdict on TensorRT-LLM is what its loader's source says of names, ranks and scales."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.adapters.cases import BASES, Case, names, pairs, write
from tests.adapters.peft_adapters import CASES, make_adapter, save_base
from ullage.adapters.check import check
from ullage.adapters.verdict import Judgement, ServeOptions, State
from ullage.anatomy import load, read_config
from ullage.anatomy.adapters.read import read_adapter

QV = ("self_attn.q_proj", "self_attn.v_proj")
EVERY = (*QV, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj")  # fmt: skip


def judged(
    base: str, shapes: dict[str, Any], folder: Path, config: dict[str, Any] | None = None,
    **options: Any,
) -> Judgement:  # fmt: skip
    path = write(Case(base, shapes, "", 0, 0, config=config or {}), folder)
    spec = read_config(json.loads(json.dumps(BASES[base])), file=base).spec
    return check(read_adapter(path), spec, ServeOptions(engine="tensorrt-llm", **options))


WORKS = {
    "all linear modules": ("llama", pairs(names(*EVERY))),
    "Qwen": ("qwen3", pairs(names(*EVERY))),
    "Gemma": ("gemma2", pairs(names(*EVERY))),
    "Phi's fused attention": ("phi3", pairs(names("self_attn.qkv_proj"))),
    "parts of a fused matrix": ("phi3", pairs(names(*QV, "mlp.gate_proj"))),
    "a fused matrix of parts": ("llama", pairs(names("self_attn.qkv_proj"))),
    "attention of a mixture": ("mixtral", pairs(names(*QV))),
    "queries alone": ("llama", pairs(names("self_attn.q_proj"))),
    "no prefix": ("llama", pairs(names(*QV), stem="")),
    "a compiled adapter": ("llama", pairs(names(*QV), stem="_orig_mod.base_model.model.")),
    "a wrapper's language model": (
        "llava", pairs(names(*QV, tree="model.language_model.layers.{i}."))),
    "the highest rank": ("llama", pairs(names(*QV), rank=64)),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_what_it_applies_works(name: str, tmp_path: Path) -> None:
    base, shapes = WORKS[name]
    judgement = judged(base, shapes, tmp_path / "a")
    assert judgement.verdict == "works", (judgement.message, judgement.modules[:1])
    assert judgement.basis == "source"
    assert "tensorrt-llm 1.2" in judgement.source


def test_its_source_claims_a_version_for_what_was_matched_to_one_alone(tmp_path: Path) -> None:
    source = judged("llama", pairs(names(*QV)), tmp_path / "a").source
    versioned, _, by_commit = source.partition(";")
    assert "1.2.0rc2" in versioned
    assert "lora_manager.py" in versioned and "lora_helper.py" in versioned
    assert "loraUtils.cpp (2a9abd9)" in by_commit and "gated_mlp.py (90f3bec)" in by_commit


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_another_activation_than_silu_is_noted(activation: str, tmp_path: Path) -> None:
    """Adapters run the base's own activation; which versions serve such a base is said."""
    path = write(Case("gemma2", pairs(names(*EVERY)), "", 0, 0), tmp_path / "a")
    config = {**BASES["gemma2"], "hidden_act": activation, "hidden_activation": activation}
    spec = read_config(config, file="x").spec
    judgement = check(read_adapter(path), spec, ServeOptions(engine="tensorrt-llm"))
    assert judgement.verdict == "works"
    noted = [note for note in judgement.notes if "activation" in note]
    assert bool(noted) == (activation != "silu")
    assert all(activation in note for note in noted)


@pytest.mark.parametrize("name", ["WhisperForCausalLM", "BartForConditionalGeneration"])
def test_a_layer_with_two_attentions_is_not_known(name: str, tmp_path: Path) -> None:
    """What was read of the engine tells modules apart by the layer's number and the last name."""
    config = {**getattr(transformers, name).config_class().to_dict(), "architectures": [name]}
    spec = read_config(config, file="x").spec
    width = spec.hidden_size
    modules = [f"model.decoder.layers.0.{part}.q_proj" for part in ("self_attn", "encoder_attn")]
    for number, module in enumerate(modules):
        shapes = pairs([module], sides={"q_proj": (width, width)})
        path = write(Case("llama", shapes, "", 0, 0), tmp_path / str(number))
        judgement = check(read_adapter(path), spec, ServeOptions(engine="tensorrt-llm"))
        assert judgement.verdict == "unknown"
        assert any(name in note and "which of" in note for note in judgement.notes)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "the adapter's name in the keys": (
        "llama", pairs(names(*QV), leaf=".lora_{}.default.weight"), {}, "'unsupported key "),
    "a trained norm": (
        "llama", pairs(names(*QV)) | {"base_model.model.model.norm.weight": (64,)}, {},
        "'unsupported key base_model.model.model.norm.weight from HF LoRA weights'"),
    "a bias": (
        "llama", pairs(names(*QV)) | {
            f"base_model.model.{names(*QV)[0]}.lora_B.bias": (64,)}, {}, "'unsupported key "),
    "another family's names": (
        "gpt2", pairs(names("attn.c_attn", tree="transformer.h.{i}.")), {},
        "hf_module c_attn is not in supported list"),
    "FSDP inside": (
        "llama", pairs(names(*QV, tree="model.layers.{i}._fsdp_wrapped_module.")), {},
        "hf_module self_attn.q_proj is not in supported list"),
    "rank 128": (
        "llama", pairs(names(*QV), rank=128), {"r": 128},
        "Invalid low_rank (128). low_rank must be smaller than mMaxLowRank (64)"),
    "a layer too many": (
        "llama", pairs(names(*QV, layers=3)), {}, "Expected layerId to be in the range"),
    "A without B": (
        "llama", {k: v for k, v in pairs(names(*QV)).items() if "lora_A" in k}, {},
        "Layer 0 is missing required 'out' matrix (lora_B equivalent) for attn_q"),
    "nothing but a head": (
        "llama", pairs(["lm_head"]), {}, "lora_target_modules is empty."),
    "a head that is not stored": (
        "llama", pairs(names(*QV)), {"modules_to_save": ["lm_head"]},
        "'base_model.model.lm_head.weight'"),
    "a smaller base's adapter": (
        "llama", pairs(names("self_attn.q_proj"), sides={"q_proj": (32, 32)}), {},
        "lora_weights has to few values for attn_q"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_is_said_in_its_words(name: str, tmp_path: Path) -> None:
    base, shapes, config, message = REFUSED[name]
    judgement = judged(base, shapes, tmp_path / "a", config)
    assert judgement.verdict == "rejected"
    assert message in (judgement.message or "")


def test_the_scale_is_by_each_matrix_s_own_rank_and_rslora_is_read(tmp_path: Path) -> None:
    shapes = pairs(names("self_attn.q_proj"), rank=4) | pairs(names("self_attn.v_proj"), rank=16)
    config = {"use_rslora": True, "rank_pattern": {"q_proj": 4, "v_proj": 16}}
    judgement = judged("llama", shapes, tmp_path / "a", config)
    assert judgement.verdict == "works"
    found = {m.module.rpartition(".")[2]: m.scale_applied for m in judgement.modules}
    assert found == {"q_proj": 16 / math.sqrt(4), "v_proj": 16 / math.sqrt(16)}


def test_alpha_patterns_are_not_read(tmp_path: Path) -> None:
    judgement = judged("llama", pairs(names(*QV)), tmp_path / "a", {"alpha_pattern": {"q_proj": 4}})
    states = {m.module.rpartition(".")[2]: m.state for m in judgement.modules}
    assert states == {"q_proj": State.WRONG_SCALE, "v_proj": State.APPLIED}


def test_a_larger_base_s_adapter_is_read_as_other_matrices(tmp_path: Path) -> None:
    shapes = pairs(names("self_attn.q_proj"), sides={"q_proj": (128, 128)})
    judgement = judged("llama", shapes, tmp_path / "a")
    assert {m.state for m in judgement.modules} == {State.SHAPE_MISMATCH}
    assert judgement.verdict == "partial"


def test_halves_of_a_fused_gate_and_up_are_exchanged(tmp_path: Path) -> None:
    judgement = judged("phi3", pairs(names("self_attn.qkv_proj", "mlp.gate_up_proj")),
                       tmp_path / "a")  # fmt: skip
    states = {m.module.rpartition(".")[2]: m.state for m in judgement.modules}
    assert states == {"qkv_proj": State.APPLIED, "gate_up_proj": State.ALTERED}
    assert judgement.verdict == "partial"


def test_what_it_leaves_out_in_silence_is_said(tmp_path: Path) -> None:
    head = judged("llama", pairs([*names(*QV), "lm_head"]), tmp_path / "a")
    assert (head.verdict, head.matched, head.total) == ("partial", 4, 5)
    left = judged("llama", pairs(names(*QV)), tmp_path / "b", lora_target_modules=("o_proj",))
    assert left.verdict == "no_effect"
    assert {m.state for m in left.modules} == {State.IGNORED}
    each = names(*(f"block_sparse_moe.experts.{e}.w1" for e in range(4)))
    assert judged("mixtral", pairs(each), tmp_path / "c").verdict == "no_effect"


def test_target_modules_may_have_either_name(tmp_path: Path) -> None:
    shapes = pairs(names(*QV))
    for number, targets in enumerate((("q_proj",), ("attn_q",), ("attn_v", "attn_q"))):
        judgement = judged("llama", shapes, tmp_path / str(number), lora_target_modules=targets)
        assert judgement.verdict == "works"  # queries, keys and values go together


@pytest.mark.parametrize("name", ["plain", "attention only", "rank 64", "custom name", "rslora",
                                  "moe attention", "compiled", "no prefix"])  # fmt: skip
def test_adapters_of_the_real_peft_work(name: str, tmp_path: Path) -> None:
    spec = load(save_base(CASES[name].base, tmp_path / "base")).anatomy.spec
    adapter = read_adapter(make_adapter(name, tmp_path))
    judgement = check(adapter, spec, ServeOptions(engine="tensorrt-llm"))
    assert judgement.verdict == "works", judgement.message
