"""Matrices and norms are found by what they are for; numbers that only compute are kept."""

from __future__ import annotations

import pytest
from gguf_cases import CASES

from ullage.anatomy import read_config
from ullage.anatomy.spec import ModelSpec
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.anatomy.tensors.slots import Slots

# A slot in another's place would find a tensor of another shape or name.
PARTS = {
    "gpt2": {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "pre2": "ln_2"},
    "phi3": {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"},
    "gemma2": {"pre2": "pre_feedforward_layernorm", "post2": "post_feedforward_layernorm"},
    "bloom": {"qkv": "self_attention.query_key_value", "up": "mlp.dense_h_to_4h"},
    "qwen3": {"q": "self_attn.q_proj", "q_norm": "self_attn.q_norm"},
    "qwen2moe": {"router": "mlp.gate", "s_up": "mlp.shared_expert.up_proj"},
}


def spec_of(name: str, **changes: object) -> ModelSpec:
    return read_config({**CASES[name].config, **changes}, file="config.json").spec


@pytest.mark.parametrize("name", PARTS)
def test_a_slot_is_the_expected_tensor_of_its_layer(name: str) -> None:
    spec = spec_of(name)
    slots, expected = Slots(spec), {tensor.name: tensor for tensor in expected_tensors(spec)}
    for layer in range(spec.num_layers):
        for slot, path in PARTS[name].items():
            found = slots.find(slot, layer)
            assert found is not None, slot
            assert found.layer == layer
            assert found.module.endswith(f".{layer}.{path}")
            assert expected[found.name] == found


def test_what_a_model_lacks_is_none() -> None:
    slots = Slots(spec_of("gpt2"))
    assert slots.find("gate", 0) is None
    assert slots.find("qkv", 4) is None  # it has four layers
    assert slots.find("lm_head") is None  # tied
    bias = slots.find("qkv", 0, ".bias")
    assert bias is not None
    assert bias.shape == (192,)
    assert Slots(spec_of("qwen3")).find("q", 0, ".bias") is None


def test_usual_values_are_no_numerics() -> None:
    assert spec_of("llama").numerics == ()
    assert spec_of("gpt2", scale_attn_weights=True).numerics == ()
    assert spec_of("mistral3", clip_qkv=None).numerics == ()


def test_values_that_change_what_is_computed_are_kept_whatever_they_are() -> None:
    assert spec_of("gpt2", scale_attn_weights=False).numerics == (("scale_attn_weights", False),)
    assert spec_of("olmo", clip_qkv=8).numerics == (("clip_qkv", 8),)
    ((key, shown),) = spec_of("qwen2", dual_chunk_attention_config={"chunk_size": 8}).numerics
    assert (key, shown) == ("dual_chunk_attention_config", "an object of 1 keys")


def test_an_absent_key_is_answered_as_its_class_does() -> None:
    plain = {key: value for key, value in CASES["command-r"].config.items() if key != "logit_scale"}
    assert read_config(plain, file="config.json").spec.numerics == (("logit_scale", 0.0625),)
    assert spec_of("qwen2moe").numerics == (("norm_topk_prob", False),)


def test_numerics_change_no_tensor() -> None:
    one, other = spec_of("granite"), spec_of("granite", residual_multiplier=1.0)
    assert one.numerics != other.numerics
    assert expected_tensors(one) == expected_tensors(other)
