"""The verdict on SGLang is what its source says, and what its own loading code did when asked."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.cases import BASES, Case, names, pairs, write
from tests.adapters.peft_adapters import CASES, make_adapter, save_base
from ullage.adapters.check import check
from ullage.adapters.engines.sglang_fuse import Weight, normalise
from ullage.adapters.verdict import Judgement, ServeOptions, State
from ullage.anatomy import load, read_config
from ullage.anatomy.adapters.read import read_adapter

RECORD = Path(__file__).with_name("sglang_loads.jsonl")
LOADS = [json.loads(line) for line in RECORD.read_text().splitlines()]
QV = ("self_attn.q_proj", "self_attn.v_proj")
QKV = (*QV, "self_attn.k_proj")


def judged(
    base: str, shapes: dict[str, Any], folder: Path, config: dict[str, Any], **options: Any
) -> Judgement:
    path = write(Case(base, shapes, "", 0, 0, config=config), folder)
    spec = read_config(json.loads(json.dumps(BASES[base])), file=base).spec
    return check(read_adapter(path), spec, ServeOptions(engine="sglang", **options))


def with_targets(*leaves: str, **more: Any) -> dict[str, Any]:
    return {"target_modules": list(leaves), **more}


@pytest.mark.parametrize("number", range(len(LOADS)))
def test_names_lead_where_its_own_code_put_them(number: int, tmp_path: Path) -> None:
    record = LOADS[number]
    shapes = {name: tuple(shape) for name, shape in record["shapes"].items()}
    judgement = judged("llama", shapes, tmp_path / "a", record["config"])
    if "error" in record:
        assert judgement.verdict == "rejected"
        # The set of targets is printed in the order of chance.
        assert sorted(judgement.message or "") == sorted(record["error"])
        return
    for layer, weights in enumerate(record["weights"]):
        own = {
            name: Weight(shape, ()) for name, shape in shapes.items() if f"layers.{layer}." in name
        }
        found = {name: list(weight.shape) for name, weight in normalise(own).items()}
        assert found == weights
    for module in judgement.modules:
        if module.state is State.APPLIED:
            assert module.scale_applied == record["scaling"]


def test_the_record_has_loads_and_errors_of_every_kind() -> None:
    errors = {record["error"].split()[0] for record in LOADS if "error" in record}
    assert len(errors) >= 4
    assert sum("weights" in record for record in LOADS) > 50


@pytest.mark.parametrize("prefix", [
    "base_model.model.model.", "model.", "", "_orig_mod.base_model.model.model.",
    "base_model.model.model.language_model.", "pretrained_model.base_model.model.model.",
])  # fmt: skip
def test_what_stands_before_the_layers_does_not_matter(prefix: str, tmp_path: Path) -> None:
    shapes = pairs(names(*QV, tree=prefix + "layers.{i}."), stem="")
    assert (
        judged("llama", shapes, tmp_path / "a", with_targets("q_proj", "v_proj")).verdict == "works"
    )


def test_rslora_is_applied_too_weakly_by_the_root_of_its_rank(tmp_path: Path) -> None:
    """sglang#40835."""
    config = with_targets("q_proj", "v_proj", use_rslora=True)
    judgement = judged("llama", pairs(names(*QV)), tmp_path / "a", config)
    assert judgement.verdict == "partial"
    for module in judgement.modules:
        assert module.state is State.WRONG_SCALE
        assert module.scale_expected is not None
        assert module.scale_applied is not None
        assert math.isclose(module.scale_expected / module.scale_applied, math.sqrt(8))


def test_alpha_patterns_are_not_read(tmp_path: Path) -> None:
    config = with_targets("q_proj", "v_proj", alpha_pattern={"q_proj": 4})
    judgement = judged("llama", pairs(names(*QV)), tmp_path / "a", config)
    states = {module.module.rpartition(".")[2]: module.state for module in judgement.modules}
    assert states == {"q_proj": State.WRONG_SCALE, "v_proj": State.APPLIED}


def test_ranks_of_a_pattern_do_not_fit_the_buffers(tmp_path: Path) -> None:
    shapes = pairs(names("self_attn.o_proj"), rank=4)
    config = with_targets("o_proj", rank_pattern={"o_proj": 4})
    judgement = judged("llama", shapes, tmp_path / "a", config)
    assert judgement.verdict == "rejected"
    assert judgement.message == (
        "LoRA buffer shape torch.Size([8, 64]) does not match weight shape torch.Size([4, 64])."
    )


REFUSED = {
    "DoRA": ("llama", pairs(names(*QV)), with_targets("q_proj", "v_proj", use_dora=True),
             "doesn't support DoRA adapters"),
    "queries alone": ("llama", pairs(names("self_attn.q_proj")), with_targets("q_proj"),
                      "self_attn.v_proj.lora_A.weight'"),
    "keys alone": ("llama", pairs(names("self_attn.k_proj")), with_targets("k_proj"),
                   "Cannot find target module name for"),
    "up without gate": ("llama", pairs(names("mlp.up_proj")), with_targets("up_proj"),
                        "Cannot find target module name for"),
    "an expression": ("llama", pairs(names(*QV)), {"target_modules": ".*q_proj"},
                      "Only 'all' or 'all-linear' can be used"),
    "another method": ("llama", pairs(names(*QV)), {"peft_type": "VERA"}, "AssertionError"),
    "GPT-2": ("gpt2", pairs(names("attn.c_attn", tree="transformer.h.{i}.")),
              with_targets("c_attn"), "get_hidden_dim not implemented for c_attn"),
    "a router": ("qwen3-moe", pairs(names("mlp.gate")), with_targets("gate"),
                 "get_hidden_dim not implemented for gate"),
    "a layer too many": ("llama", pairs(names(*QV, layers=3)), with_targets("q_proj", "v_proj"),
                         "index 2 is out of range"),
    "a trained norm": ("llama", pairs(names(*QV)) | {
        "base_model.model.model.layers.0.input_layernorm.weight": (64,)},
        with_targets("q_proj", "v_proj", modules_to_save=["input_layernorm"]),
        "Cannot find target module name for"),
    "an embedding of another vocabulary": ("llama", {
        "base_model.model.model.embed_tokens.lora_embedding_A": (8, 260),
        "base_model.model.model.embed_tokens.lora_embedding_B": (64, 8)},
        with_targets("embed_tokens"), "torch.Size([8, 256]) does not match"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_is_said_in_its_words(name: str, tmp_path: Path) -> None:
    base, shapes, config, message = REFUSED[name]
    judgement = judged(base, shapes, tmp_path / "a", config)
    assert judgement.verdict == "rejected"
    assert message in (judgement.message or "")
    assert judgement.basis == "source"
    assert "sglang 0.5.23" in judgement.source


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EACH = ("gate_proj", "up_proj", "down_proj")
EXPERT_SIDES = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
EVERY = tuple(f"{'self_attn' if leaf in ALL[:4] else 'mlp'}.{leaf}" for leaf in ALL)
WORKS = {
    "all linear modules": ("llama", pairs(names(*EVERY)), with_targets(*ALL)),
    "attention of Qwen": ("qwen3", pairs(names(*QKV)), with_targets("q_proj", "k_proj", "v_proj")),
    "Gemma": ("gemma2", pairs(names(*EVERY)), with_targets(*ALL)),
    "Phi's fused modules": ("phi3", pairs(names("self_attn.qkv_proj", "mlp.gate_up_proj")),
                            with_targets("qkv_proj", "gate_up_proj")),
    "attention of a mixture": ("mixtral", pairs(names(*QV)), with_targets("q_proj", "v_proj")),
    "gate without up": ("llama", pairs(names("mlp.gate_proj")), with_targets("gate_proj")),
    "a vocabulary": ("llama", pairs(["lm_head"]) | {
        "base_model.model.model.embed_tokens.lora_embedding_A": (8, 256),
        "base_model.model.model.embed_tokens.lora_embedding_B": (64, 8),
        "base_model.model.model.embed_tokens.base_layer.weight": (256, 64)},
        with_targets("lm_head", "embed_tokens")),
    "a language model in a wrapper": (
        "llava", pairs(names(*QV, tree="model.language_model.layers.{i}.")),
        with_targets("q_proj", "v_proj")),
    "experts one by one": (
        "qwen3-moe", pairs(names(*(f"mlp.experts.{e}.{p}" for e in range(4) for p in EACH)),
                           sides=EXPERT_SIDES), with_targets(*EACH)),
    "all-linear": ("llama", pairs(names(*EVERY)), {"target_modules": "all-linear"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_what_it_applies_works(name: str, tmp_path: Path) -> None:
    base, shapes, config = WORKS[name]
    judgement = judged(base, shapes, tmp_path / "a", config)
    assert judgement.verdict == "works", (judgement.message, judgement.modules[:1])


def test_targets_are_the_served_modules_by_their_full_path(tmp_path: Path) -> None:
    config = with_targets(*ALL)
    judgement = judged("llama", pairs(names(*EVERY)), tmp_path / "a", config)
    assert {module.target for module in judgement.modules} == set(
        names("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    )
    base, shapes, config = WORKS["experts one by one"]
    experts = judged(base, shapes, tmp_path / "b", config)
    assert {module.target for module in experts.modules} == set(
        names("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    )


def test_what_it_leaves_out_in_silence_is_said(tmp_path: Path) -> None:
    config = with_targets("q_proj", "v_proj", modules_to_save=["lm_head"])
    shapes = pairs(names(*QV)) | {"base_model.model.lm_head.weight": (256, 64)}
    judgement = judged("llama", shapes, tmp_path / "a", config)
    assert (judgement.verdict, judgement.matched, judgement.total) == ("partial", 4, 5)
    biased = pairs(names(*QV)) | {
        f"base_model.model.{name}.lora_B.bias": (8,) for name in names(*QV)
    }
    judgement = judged("llama", biased, tmp_path / "b", with_targets("q_proj", "v_proj"))
    assert {module.state for module in judgement.modules} == {State.ALTERED}
    assert judgement.verdict == "partial"
    tower = pairs(names("attn.qkv", tree="model.visual.blocks.{i}."))
    judgement = judged("qwen2.5-vl", tower, tmp_path / "c", with_targets("q_proj", "v_proj"))
    assert judgement.verdict == "no_effect"


def test_new_tokens_are_refused_and_the_base_model_s_own_are_not(tmp_path: Path) -> None:
    for number, verdict in ((255, "works"), (256, "rejected")):
        case = Case("llama", pairs(names(*QV)), "", 0, 0,
                    config=with_targets("q_proj", "v_proj"))  # fmt: skip
        path = write(case, tmp_path / str(number))
        (path / "added_tokens.json").write_text(json.dumps({"<new>": number}))
        spec = read_config(json.loads(json.dumps(BASES["llama"])), file="x").spec
        judgement = check(read_adapter(path), spec, ServeOptions(engine="sglang"))
        assert judgement.verdict == verdict


def test_limits_are_the_adapter_s_own_until_they_are_given(tmp_path: Path) -> None:
    shapes, config = pairs(names(*QV), rank=64), with_targets("q_proj", "v_proj", r=64)
    assert judged("llama", shapes, tmp_path / "a", config).verdict == "works"
    limited = judged("llama", shapes, tmp_path / "b", config, max_lora_rank=32)
    assert "with rank 64 is incompatible" in (limited.message or "")
    narrow = judged("llama", shapes, tmp_path / "c", config, lora_target_modules=("o_proj",))
    assert "contains target modules ['qkv_proj']" in (narrow.message or "")
    every = judged("llama", shapes, tmp_path / "d", config, lora_target_modules=("all",))
    assert every.verdict == "works"


def test_a_slot_takes_its_targets_in_every_layer(tmp_path: Path) -> None:
    config = with_targets("q_proj", "v_proj")
    judgement = judged("llama", pairs(names(*QV)), tmp_path / "a", config)
    # Two layers: A [3·8, 64] and B [64 + 32 + 32, 8] in bfloat16.
    assert judgement.slot_bytes == 2 * 2 * (24 * 64 + 128 * 8)


@pytest.mark.parametrize("name", ["plain", "attention only", "custom name", "fsdp", "ddp",
                                  "moe attention", "fused"])  # fmt: skip
def test_adapters_of_the_real_peft_work(name: str, tmp_path: Path) -> None:
    spec = load(save_base(CASES[name].base, tmp_path / "base")).anatomy.spec
    adapter = read_adapter(make_adapter(name, tmp_path))
    judgement = check(adapter, spec, ServeOptions(engine="sglang"))
    assert judgement.verdict == "works", judgement.message


def test_a_tower_s_layers_take_the_place_of_the_model_s(tmp_path: Path) -> None:
    """Only the layer's number counts, and both have a layer 0."""
    spec = load(save_base("vlm", tmp_path / "base")).anatomy.spec
    adapter = read_adapter(make_adapter("vision-language", tmp_path))
    assert any("vision_tower" in module.module for module in adapter.modules)
    judgement = check(adapter, spec, ServeOptions(engine="sglang"))
    assert "does not match weight shape" in (judgement.message or "")
    tower = names(*QV, tree="model.vision_tower.encoder.layers.{i}.")
    text = names(*QV, tree="model.language_model.layers.{i}.")
    same_sizes = judged("llava", pairs(text + tower), tmp_path / "a",
                        with_targets("q_proj", "v_proj"))  # fmt: skip
    states = {module.module: module.state for module in same_sizes.modules}
    assert {states[name] for name in text} == {State.DOUBLED}
    assert {states[name] for name in tower} == {State.APPLIED}


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"[]", b'{"a": "b"}', None])
def test_a_strange_list_of_tokens_adds_none(content: bytes | None, tmp_path: Path) -> None:
    case = Case("llama", pairs(names(*QV)), "", 0, 0, config=with_targets("q_proj", "v_proj"))
    file = write(case, tmp_path / "a") / "added_tokens.json"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    spec = read_config(json.loads(json.dumps(BASES["llama"])), file="x").spec
    judgement = check(read_adapter(tmp_path / "a"), spec, ServeOptions(engine="sglang"))
    assert judgement.verdict == "works"
