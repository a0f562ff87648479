"""read_quantization and scheme_for: what is packed, how, and what stays in the model's dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.anatomy.config.read import read_config
from ullage.anatomy.quantization.match import SchemeTable
from ullage.anatomy.quantization.methods import READERS
from ullage.anatomy.quantization.read import doubt_of, read_quantization
from ullage.anatomy.spec import Quantization, WeightScheme
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.errors import BadInput, MalformedConfig

SHARED = Path(__file__).parents[3] / "shared" / "configs"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the shared configurations are absent"
)


def read(section: Mapping[str, object], **around: object) -> Quantization | None:
    return read_quantization({"quantization_config": section, **around}, None, file="config.json")


def only_scheme(section: Mapping[str, object]) -> WeightScheme:
    quantization = read(section)
    assert quantization is not None
    ((target, scheme),) = quantization.schemes
    assert target == "Linear"
    return scheme


# --- one method after another --------------------------------------------------------------------


def group(**weights: object) -> dict[str, object]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


SCHEMES: dict[str, tuple[dict[str, object], WeightScheme]] = {
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        WeightScheme("fp8_block", 8, 0, 32, block=(128, 128)),
    ),
    "fp8 per tensor, static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        WeightScheme("fp8", 8, -1, 32, tensor_scales=1),
    ),
    "compressed int4 in groups": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | group(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
        WeightScheme("int4_group", 4, 32, 16, tensor_scales=4),
    ),
    "compressed int4, asymmetric, ordered": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | group(num_bits=4, type="int", strategy="group", group_size=128, symmetric=False,
                actorder="group"),
        WeightScheme("int4_group", 4, 128, 16, zero_bits=4, tensor_scales=4, index_bits=32),
    ),
    "compressed int8 per channel": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"}
        | group(num_bits=8, type="int", strategy="channel"),
        WeightScheme("int8_channel", 8, 0, 16),
    ),
    "compressed fp8 in blocks": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"}
        | group(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        WeightScheme("fp8_block", 8, 0, 32, block=(128, 128)),
    ),
    "compressed nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        | group(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        WeightScheme("nvfp4", 4, 16, 8, tensor_scales=1),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []},
        WeightScheme("nvfp4", 4, 16, 8, tensor_scales=2),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        WeightScheme("awq", 4, 128, 16, zero_bits=4),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        WeightScheme("gptq", 4, 128, 16, zero_bits=4, index_bits=32),
    ),
    "gptq, one group": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        WeightScheme("gptq", 8, 0, 16, zero_bits=8, index_bits=32),
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        WeightScheme("bnb_int8", 8, 0, 32),
    ),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4,
                                                                         "group_size": 64}}},
        WeightScheme("hqq", 4, 64, 16, zero_bits=16),
    ),
    "aqlm 1x16": (
        {"quant_method": "aqlm", "num_codebooks": 1, "nbits_per_codebook": 16, "in_group_size": 8,
         "out_group_size": 1},
        WeightScheme("aqlm", 2, 0, 16, tensor_scales=65536 * 8 // 2),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        WeightScheme("fp8_channel", 8, 0, 32),
    ),
    "quark fp8": (
        {"quant_method": "quark", "global_quant_config": {
            "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
        WeightScheme("fp8", 8, -1, 32, tensor_scales=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEMES)
def test_each_method_says_bits_groups_and_scales(case: str) -> None:
    section, scheme = SCHEMES[case]
    assert only_scheme(section) == scheme


def test_no_section_is_no_quantisation() -> None:
    assert read_quantization({"model_type": "llama"}, None, file="config.json") is None


def test_the_section_may_lie_with_the_language_model() -> None:
    config = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    quantization = read_quantization(config, None, file="config.json")
    assert quantization is not None
    assert quantization.method == "fp8"


def test_the_side_file_alone_is_enough() -> None:
    side = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
                             "exclude_modules": ["lm_head"]}}  # fmt: skip
    quantization = read_quantization({}, side, file="config.json")
    assert quantization is not None
    assert (quantization.method, quantization.kv_scheme) == ("modelopt", "fp8")
    assert quantization.ignore == ("lm_head",)


@pytest.mark.parametrize(
    ("scheme", "kv"),
    [
        (None, None),
        ({"num_bits": 8, "type": "float"}, "fp8"),
        ({"num_bits": 8, "type": "int"}, "int8"),
    ],
)
def test_the_kv_scheme_is_vllms_word(scheme: object, kv: str | None) -> None:
    quantization = read({"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    assert quantization is not None
    assert quantization.kv_scheme == kv


# --- what is not known widens, and is never the model's dtype in silence -------------------------


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "some-new-method", "bits": 3},
        {"quant_method": "vptq"},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        {"quant_method": "compressed-tensors", "format": "marlin-24"} | group(num_bits=4),
        {"quant_method": "compressed-tensors", "format": "dense"} | group(num_bits=8),
        {"bits": 4},
    ],
)
def test_an_unknown_layout_brackets_the_weights(section: dict[str, object]) -> None:
    config = {"quantization_config": section}
    quantization = read_quantization(config, None, file="config.json")
    doubt = doubt_of(quantization, config, None, file="config.json")
    assert doubt is not None
    assert doubt.high is None, "at most the model's own dtype"
    assert doubt.low.schemes[0][1].bits < 2
    assert doubt.likely is None, "the upper end, so that nothing is said to fit that may not"


def test_a_section_about_the_kv_cache_alone_packs_nothing() -> None:
    section = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    config = {"quantization_config": section}
    quantization = read_quantization(config, None, file="config.json")
    assert quantization is not None
    assert doubt_of(quantization, config, None, file="config.json") is None
    assert SchemeTable(quantization).scheme(Q, "q") is None


def test_a_side_file_without_exclusions_brackets_all_but_the_experts() -> None:
    side = {"quantization": {"quant_algo": "NVFP4"}}
    quantization = read_quantization({}, side, file="config.json")
    doubt = doubt_of(quantization, {}, side, file="config.json")
    assert doubt is not None
    assert doubt.field == "quantization.exclude_modules"
    assert doubt.high is not None
    assert [target for target, _ in doubt.high.schemes] == ["RoutedExperts"]


BAD: dict[str, dict[str, object]] = {
    "section": {"quantization_config": "fp8"},
    "method": {"quantization_config": {"quant_method": 8}},
    "block": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
    "block of zero": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}},
    "bits": {"quantization_config": {"quant_method": "awq", "bits": "four"}},
    "group": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -7}},
    "ignore": {"quantization_config": {"quant_method": "compressed-tensors", "ignore": [1]}},
    "algorithm": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP3"}},
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_field_is_one_sentence(case: str) -> None:
    with pytest.raises(MalformedConfig) as caught:
        read_quantization(BAD[case], None, file="config.json")
    assert caught.value.file == "config.json"
    assert "quantization_config" in (caught.value.field or "")
    assert caught.value.expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["quant_method", "bits", "group_size", "weights", "targets", "config_groups", "format",
             "num_bits", "strategy", "ignore", "quant_algo", "quantized_layers", "dynamic",
             "weight_block_size", "block_structure", "kv_cache_scheme", "exclude_modules", "type"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(READERS)), st.dictionaries(st.text(max_size=8), JSON, max_size=4), JSON
)
def test_any_json_is_read_or_refused_in_a_sentence(
    method: str, section: dict[str, object], inner: object
) -> None:
    config = {"quantization_config": {**section, "quant_method": method, "config_groups": inner}}
    if isinstance(inner, dict):
        config["quantization_config"] |= {k: v for k, v in inner.items() if k != "quant_method"}
    try:
        quantization = read_quantization(config, None, file="config.json")
        assert quantization is not None
        SchemeTable(quantization).scheme("model.layers.0.mlp.up_proj", "up")
    except BadInput as error:
        assert "\n" not in str(error)


# --- which modules -------------------------------------------------------------------------------

FP8 = WeightScheme("fp8", 8, -1, 32)
Q = "model.layers.3.self_attn.q_proj"


def table(*ignore: str, schemes: tuple[tuple[str, WeightScheme], ...] = (("Linear", FP8),)) -> Any:
    return SchemeTable(Quantization("test", schemes, ignore))


@pytest.mark.parametrize(
    "pattern",
    [
        Q,
        "layers.3.self_attn.q_proj",
        "language_model.model.layers.3.self_attn.q_proj",
        "model.language_model.layers.3.self_attn.q_proj",
        "model.layers.3.self_attn*",
        "model.layers.3.*",
        "model.layers.3*",
        "model.layers.3.self_attn",
        "model.layers.*.self_attn",
        "*.self_attn.*",
        "re:.*self_attn.*",
        r"re:model\.layers\.\d+\.self_attn\.[qk]_proj$",
        "q_proj",
        "self_attn.q_proj",
        "model.layers.3.self_attn.q_proj.weight",
    ],
)
def test_every_way_of_writing_an_exclusion(pattern: str) -> None:
    assert table(pattern).scheme(Q, "q") is None


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.31*",
        "model.layers.1*",
        "model.layers.30.self_attn.q_proj",
        "model.layers.3.self_attn.q_proj_extra",
        "*.mlp.*",
        "proj",
        "re:self_attn",
        "lm_head",
        "model.layers.*.self",
    ],
)
def test_what_an_exclusion_does_not_cover(pattern: str) -> None:
    assert table(pattern).scheme(Q, "q") == FP8


def test_layer_one_is_not_layer_ten() -> None:
    """ModelOpt writes `model.layers.1*`; vLLM 0.32 takes it for layer 1 and what lies in it."""
    ten = "model.layers.10.self_attn.q_proj"
    assert table("model.layers.1*").scheme(ten, "q") == FP8
    assert table("model.layers.1*").scheme("model.layers.1.self_attn.q_proj", "q") is None


def test_linear_never_implies_ends_or_routers() -> None:
    for module, role in (("lm_head", "lm_head"), ("model.layers.0.mlp.gate", "router"),
                         ("model.embed_tokens", "embed")):  # fmt: skip
        assert table().scheme(module, role) is None
        named = table(schemes=((module, FP8),))
        assert named.scheme(module, role) == FP8


def test_names_win_over_kinds_and_the_first_name_wins() -> None:
    other = WeightScheme("int8", 8, 0, 16)
    schemes = (("re:.*q_proj", other), ("re:.*self_attn.*", FP8), ("Linear", FP8))
    assert table(schemes=schemes).scheme(Q, "q") == other


def test_experts_stand_for_all_of_them() -> None:
    module = "model.layers.3.mlp.experts.{e}.up_proj"
    assert table("model.layers.3.mlp.experts").scheme(module, "expert_up") is None
    experts = table(schemes=(("RoutedExperts", FP8),))
    assert experts.scheme(module, "expert_up") == FP8
    assert experts.scheme(Q, "q") is None


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", "re:(.*)*x", "re:" + ".*a" * 9, "re:[", "re:(?P<"]
)
def test_a_pattern_that_cannot_be_matched_safely_is_refused(pattern: str) -> None:
    with pytest.raises(MalformedConfig):
        table(pattern)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abl.*?0[]{}\\", max_size=20), st.text(alphabet="abl.0", max_size=40))
def test_any_glob_is_answered(pattern: str, module: str) -> None:
    assert table(pattern).scheme(module, "q") in (None, FP8)


# --- real exclusion lists ------------------------------------------------------------------------

# The roles that stay in bfloat16, read off each file's list by hand.
PLAIN = {
    "nvidia--DeepSeek-V3.1-NVFP4": {"q_a", "q_b", "kv_a", "kv_b", "router", "lm_head"},
    "nvidia--GLM-5-NVFP4": {"q_a", "q_b", "kv_a", "kv_b", "o", "indexer", "router", "lm_head"},
    "nvidia--Kimi-K2.5-NVFP4": {"q_a", "q_b", "kv_a", "kv_b", "o", "router", "lm_head"},
    "nvidia--MiniMax-M2.5-NVFP4": {"q", "k", "v", "o", "router", "lm_head"},
    "nvidia--Qwen3-235B-A22B-NVFP4": {"router", "lm_head"},
    "nvidia--Gemma-4-26B-A4B-NVFP4": {"q", "k", "v", "o", "router", "gate", "up", "down"},
    "nvidia--Llama-3.1-70B-Instruct-FP8": {"lm_head"},
    "openai--gpt-oss-120b": {"q", "k", "v", "o", "router", "lm_head"},
    "deepseek-ai--DeepSeek-V3": {"router", "lm_head"},
    "moonshotai--Kimi-K2.5": {"q_a", "q_b", "kv_a", "kv_b", "o", "gate", "up", "down", "router",
                              "shared_gate", "shared_up", "shared_down", "lm_head"},
}  # fmt: skip


@needs_shared
@pytest.mark.parametrize("name", PLAIN)
def test_real_lists_leave_the_right_roles_alone(name: str) -> None:
    raw = json.loads((SHARED / f"{name}_config.json").read_text())
    place = SHARED / f"{name}_hf_quant_config.json"
    side = json.loads(place.read_text()) if place.exists() else None
    spec = read_config(raw, file=name, quant_side_file=side).spec
    assert spec.quantization is not None
    compiled = SchemeTable(spec.quantization)
    by_role: dict[str, set[bool]] = {}
    for tensor in expected_tensors(spec):
        if tensor.quantizable and tensor.stack == "decoder":
            plain = compiled.scheme(tensor.module, tensor.role) is None
            by_role.setdefault(tensor.role, set()).add(plain)
    assert {role for role, plain in by_role.items() if plain == {True}} == PLAIN[name]


@needs_shared
def test_a_mixed_checkpoint_has_three_kinds() -> None:
    """Qwen3.6-27B: FP8 attention, NVFP4 MLP and output head, bfloat16 for the delta-net's gates."""
    raw = json.loads((SHARED / "nvidia--Qwen3.6-27B-NVFP4_config.json").read_text())
    spec = read_config(raw, file="t").spec
    assert spec.quantization is not None
    compiled = SchemeTable(spec.quantization)
    names = {
        leaf: compiled.scheme(f"model.language_model.layers.0.{leaf}", "linear_in")
        for leaf in ("linear_attn.in_proj_qkv", "linear_attn.in_proj_a", "mlp.up_proj")
    }
    assert [s and s.name for s in names.values()] == ["fp8", None, "nvfp4"]
    assert compiled.scheme("lm_head", "lm_head") is not None
