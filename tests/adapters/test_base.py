"""The base's modules are found under every name that trainers give them, and under no other."""

from __future__ import annotations

import pytest

from tests.adapters.cases import SIDES
from tests.adapters.test_cases import spec_of
from ullage.adapters.base import base_tree


@pytest.mark.parametrize(
    ("base", "trained", "path", "naming"),
    [
        ("llama", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj",
         "checkpoint"),
        ("llama", "layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", "bare"),
        ("llama", "model.language_model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj",
         "wrapped"),
        ("llava", "model.language_model.layers.0.self_attn.k_proj",
         "language_model.model.layers.0.self_attn.k_proj", "wrapped"),
        ("llava", "language_model.model.layers.0.self_attn.k_proj",
         "language_model.model.layers.0.self_attn.k_proj", "checkpoint"),
        ("qwen2.5-vl", "model.language_model.layers.0.self_attn.v_proj",
         "model.layers.0.self_attn.v_proj", "wrapped"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2",
         "model.layers.0.block_sparse_moe.experts.{e}.w2", "checkpoint"),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj",
         "model.layers.0.block_sparse_moe.experts.gate_up_proj", "renamed"),
        ("mixtral", "model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate", "renamed"),
        ("gpt2", "transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_attn", "checkpoint"),
        ("gpt2", "h.1.attn.c_attn", "transformer.h.1.attn.c_attn", "bare"),
        ("llama-tied", "lm_head", "lm_head", "checkpoint"),
    ],
)  # fmt: skip
def test_a_trained_name_leads_to_the_base_module(base, trained, path, naming):
    match = base_tree(spec_of(base)).find(trained)
    assert match is not None
    assert (match.module.path, match.naming) == (path, naming)


@pytest.mark.parametrize(
    ("base", "trained"),
    [
        ("llama", "model.layers.2.self_attn.q_proj"),
        ("llama", "_orig_mod.model.layers.0.self_attn.q_proj"),
        ("llama", "model.layers.0.self_attn.qkv_proj"),
        ("llama", "model.layers.0.input_layernorm"),
        ("llava", "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"),
        ("llava", "model.vision_tower.layers.0.self_attn.q_proj"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.4.w2"),
        ("mixtral", "model.layers.0.mlp.up_proj"),
        ("gpt2", ""),
        ("gpt2", "."),
        ("llama", "model." * 300_000 + "layers.0.mlp.up_proj"),
        ("llama", "0." * 300_000),
    ],
)
def test_what_the_base_does_not_have_is_not_found(base, trained):
    assert base_tree(spec_of(base)).find(trained) is None


@pytest.mark.parametrize("base", ["llama", "phi3", "gpt2", "glm4", "falcon"])
def test_sides_are_those_of_the_forward_pass(base):
    checked = 0
    for path, module in base_tree(spec_of(base)).modules.items():
        sides = SIDES.get(path.rpartition(".")[2])
        if sides is not None and module.kind in ("linear", "conv1d", "head"):
            assert (module.in_features, module.out_features) == sides, path
            checked += 1
    assert checked >= 2


def test_a_tied_head_says_whose_weight_it_uses():
    tree = base_tree(spec_of("llama-tied"))
    assert tree.modules["lm_head"].tied_to == "model.embed_tokens"
    assert base_tree(spec_of("llama")).modules["lm_head"].tied_to is None


def test_layers_that_share_keys_are_told():
    assert base_tree(spec_of("gemma4-shared")).shared_kv == {1: 0}
