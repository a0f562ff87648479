"""Checkpoints against specs: what is missing, strange, of another shape or storage type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ullage.anatomy import read_config
from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry
from ullage.anatomy.compare import compare
from ullage.anatomy.files.safetensors import DTYPE_BITS
from ullage.anatomy.spec import ModelSpec, Unknown
from ullage.anatomy.stored import without_common_end
from ullage.anatomy.tensors.expected import expected_tensors

Tensors = dict[str, tuple[str, tuple[int, ...]]]

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def spec_of(config: dict[str, object], **changes: object) -> ModelSpec:
    return read_config({**config, **changes}, file="config.json").spec


def count_parameters(spec: ModelSpec) -> int:
    return sum(tensor.num_elements for tensor in expected_tensors(spec))


def tensors_of(spec: ModelSpec, dtype: str = "BF16") -> Tensors:
    return {
        tensor.name.replace("{e}", str(expert)): (dtype, tensor.shape)
        for tensor in expected_tensors(spec)
        for expert in range(tensor.count)
    }


def index_of(tensors: Tensors, **fields: object) -> CheckpointIndex:
    entries, position = [], 0
    for name, (dtype, shape) in tensors.items():
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        entries.append(TensorEntry(name, dtype, shape, "m", position, position + bits // 8))
        position += bits // 8
    index = CheckpointIndex("safetensors", tuple(entries), ("m",))
    return replace(index, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [LLAMA, MOE])
def test_a_checkpoint_as_predicted_agrees(config: dict[str, object]) -> None:
    spec = spec_of(config)
    tensors = tensors_of(spec)
    comparison = compare(spec, index_of(tensors))
    assert comparison.agrees
    assert comparison.matched == len(tensors)
    assert comparison.num_parameters == count_parameters(spec)
    assert comparison.explained == ()


def renamed(change: Callable[[str], str]) -> CheckpointIndex:
    return index_of({change(n): t for n, t in tensors_of(spec_of(LLAMA)).items()})


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.removeprefix("model."),
        lambda n: "language_model." + n,
        lambda n: n.replace("model.", "model.language_model.", 1),
        lambda n: n.replace("model.", "language_model.model.", 1),
        lambda n: n.replace("model.", "model.text_model.", 1),
    ],
)
def test_the_same_names_under_another_prefix_agree(change: Callable[[str], str]) -> None:
    assert compare(spec_of(LLAMA), renamed(change)).agrees


def test_another_naming_is_not_comparable() -> None:
    strange = renamed(lambda n: n.replace("self_attn.", "attention.w").replace("layers", "lyrs"))
    comparison = compare(spec_of(LLAMA), strange)
    assert not comparison.comparable
    assert not comparison.agrees
    assert "another naming" in (comparison.reason or "")


def test_missing_unexpected_and_misshapen_tensors_are_told_apart() -> None:
    spec = spec_of(LLAMA)
    tensors = tensors_of(spec)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = ("BF16", (510, 256))
    tensors["model.layers.0.mlp.third_proj.weight"] = ("BF16", (512, 256))
    comparison = compare(spec, index_of(tensors))
    assert [d.name for d in comparison.missing] == ["model.layers.1.mlp.up_proj.weight"]
    assert [(d.expected, d.found) for d in comparison.wrong_shape] == [("[512, 256]", "[510, 256]")]
    assert [d.name for d in comparison.unexpected] == ["model.layers.0.mlp.third_proj.weight"]
    assert not comparison.agrees


def test_a_missing_expert_is_counted() -> None:
    spec = spec_of(MOE)
    tensors = tensors_of(spec)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"] = ("BF16", (64, 256))
    comparison = compare(spec, index_of(tensors))
    (missing,) = comparison.missing
    assert (missing.name, missing.expected, missing.found, missing.count) == (
        "model.layers.1.mlp.experts.{e}.up_proj.weight",
        "4 experts",
        "3 of them",
        1,
    )
    (odd,) = comparison.wrong_shape
    assert "model.layers.0.mlp.experts.2.up_proj.weight differs" in odd.found


def test_experts_may_be_stacked_or_one_by_one() -> None:
    """Re-saved checkpoints stack what the family's own release keeps apart, and the other way."""
    spec = spec_of(MOE)
    stacked = {t.name: ("BF16", t.shape) for t in expected_tensors(spec, "stacked")}
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    for tensors in (tensors_of(spec), stacked):
        comparison = compare(spec, index_of(tensors))
        assert comparison.comparable
        assert not comparison.missing
        assert not comparison.unexpected


def test_tensors_of_a_missing_shard_are_not_missing_tensors() -> None:
    spec = spec_of(MOE)
    tensors = tensors_of(spec)
    gone = [name for name in tensors if ".layers.1." in name]
    for name in gone:
        del tensors[name]
    index = index_of(
        tensors, missing_files=("b",), absent_tensors=tuple((name, "b") for name in gone)
    )
    comparison = compare(spec, index)
    assert comparison.missing == ()
    assert comparison.matched == len(tensors)


def test_tied_heads_and_buffers_are_explained() -> None:
    spec = spec_of(LLAMA, tie_word_embeddings=True)
    tensors = {
        **tensors_of(spec),
        "lm_head.weight": ("BF16", (320, 256)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (32,)),
    }
    comparison = compare(spec, index_of(tensors))
    assert comparison.agrees
    assert comparison.explained == (("buffer", 1), ("tied head", 1))


def test_an_untied_model_needs_its_head() -> None:
    spec = spec_of(LLAMA)
    tensors = tensors_of(spec)
    del tensors["lm_head.weight"]
    assert [d.name for d in compare(spec, index_of(tensors)).missing] == ["lm_head.weight"]


# --- quantisation --------------------------------------------------------------------------------


def linear_modules(spec: ModelSpec) -> list[tuple[str, tuple[int, int]]]:
    return [
        (t.module, (t.shape[0], t.shape[1]))
        for t in expected_tensors(spec)
        if t.quantizable and t.layer is not None
    ]


def fp8() -> tuple[ModelSpec, Tensors]:
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    spec = spec_of(LLAMA, quantization_config=scheme)
    tensors = tensors_of(spec)
    for module, (rows, columns) in linear_modules(spec):
        tensors[module + ".weight"] = ("F8_E4M3", (rows, columns))
        tensors[module + ".weight_scale_inv"] = ("F32", (-(-rows // 128), -(-columns // 128)))
    return spec, tensors


def packed(method: str) -> tuple[ModelSpec, Tensors]:
    """AWQ and GPTQ: eight 4-bit weights in one int32, along another dimension each."""
    scheme = {"quant_method": method, "bits": 4, "group_size": 128, "zero_point": True}
    spec = spec_of(LLAMA, quantization_config={**scheme, "sym": True, "desc_act": False})
    tensors = tensors_of(spec, "F16")
    for module, (rows, columns) in linear_modules(spec):
        del tensors[module + ".weight"]
        across, along = (8, 1) if method == "awq" else (1, 8)
        tensors[module + ".qweight"] = ("I32", (columns // along, rows // across))
        tensors[module + ".qzeros"] = ("I32", (columns // 128, rows // 8))
        tensors[module + ".scales"] = ("F16", (columns // 128, rows))
        if method == "gptq":
            tensors[module + ".g_idx"] = ("I32", (columns,))
    return spec, tensors


def nvfp4() -> tuple[ModelSpec, Tensors]:
    scheme = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["Linear"],
            }
        },
    }
    spec = spec_of(LLAMA, quantization_config=scheme)
    tensors = tensors_of(spec)
    for module, (rows, columns) in linear_modules(spec):
        tensors[module + ".weight"] = ("U8", (rows, columns // 2))
        tensors[module + ".weight_scale"] = ("F8_E4M3", (rows, columns // 16))
        tensors[module + ".weight_scale_2"] = ("F32", ())
        tensors[module + ".input_scale"] = ("F32", ())
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = ("F32", ())
    return spec, tensors


@pytest.mark.parametrize(
    "made",
    [fp8, lambda: packed("awq"), lambda: packed("gptq"), nvfp4],
    ids=["fp8", "awq", "gptq", "nvfp4"],
)
def test_quantised_checkpoints_agree(made: Callable[[], tuple[ModelSpec, Tensors]]) -> None:
    spec, tensors = made()
    comparison = compare(spec, index_of(tensors))
    assert comparison.agrees, comparison
    assert dict(comparison.explained)["quantisation"] >= 14
    assert comparison.num_parameters == count_parameters(spec)


def test_a_config_that_claims_quantisation_of_plain_weights_is_caught() -> None:
    spec, _ = fp8()
    comparison = compare(spec, index_of(tensors_of(spec)))
    assert len(comparison.wrong_dtype) == len(linear_modules(spec))
    assert comparison.wrong_dtype[0].found == "BF16"


def test_quantised_weights_that_the_config_does_not_mention_are_caught() -> None:
    _, tensors = fp8()
    comparison = compare(spec_of(LLAMA), index_of(tensors))
    assert {d.found for d in comparison.wrong_dtype} == {"F8_E4M3"}
    assert all(d.name.endswith("weight_scale_inv") for d in comparison.unexpected)
    assert comparison.unexpected


# --- what cannot be compared ---------------------------------------------------------------------


def test_an_index_without_headers_is_not_comparable() -> None:
    index = CheckpointIndex("safetensors", (), (), missing_files=("a",))
    comparison = compare(spec_of(LLAMA), index)
    assert (comparison.comparable, comparison.reason) == (
        False,
        "no header of the checkpoint could be read",
    )


def test_a_spec_that_does_not_know_its_weights_is_not_comparable() -> None:
    spec = replace(spec_of(LLAMA), unknowns=(Unknown("gate", "?", ("weights",)),))
    comparison = compare(spec, index_of(tensors_of(spec_of(LLAMA))))
    assert not comparison.comparable
    assert "gate" in (comparison.reason or "")


def test_names_are_compared_even_where_the_quantisation_is_not_understood() -> None:
    spec, tensors = fp8()
    unsure = replace(spec, unknowns=(Unknown("quantization.ignore", "?", ("weights",)),))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    comparison = compare(unsure, index_of({**tensors_of(spec_of(LLAMA)), **tensors}))
    assert comparison.agrees
    assert not comparison.knows_storage
    del tensors["model.norm.weight"]
    missing = compare(unsure, index_of(tensors)).missing
    assert [d.name for d in missing] == ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]


def test_an_unknown_gguf_architecture_is_not_comparable() -> None:
    index = replace(
        index_of({"x": ("F32", (2,))}),
        format="gguf",
        metadata=(("general.architecture", "nosuch"),),
    )
    assert "nosuch" in (compare(spec_of(LLAMA), index).reason or "")


def test_common_ends_of_prefixes_are_taken_off() -> None:
    assert without_common_end("model.", "language_model.model.") == ("", "language_model.")
    assert without_common_end("encoder.", "bert.encoder.") == ("", "bert.")
    assert without_common_end("model.", "") == ("model.", "")


# --- against real models -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_what_transformers_saves_agrees(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ullage.anatomy import load

    sizes = {
        "LlamaForCausalLM": {**LLAMA},
        "Qwen3ForCausalLM": {**LLAMA, "head_dim": 32},
        "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99},
    }[kind]
    sizes = {k: v for k, v in sizes.items() if k not in ("model_type", "architectures", "dtype")}
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    found = load(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.is_complete
    comparison = compare(found.anatomy.spec, found.checkpoint)
    assert comparison.agrees, comparison
    assert comparison.num_parameters == model.num_parameters()


BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
POOLER = {"pooler.dense.weight": ("F32", (64, 64)), "pooler.dense.bias": ("F32", (64,))}
CLS = {"cls.seq_relationship.weight": ("F32", (2, 64))}


@pytest.mark.parametrize("pooler", [POOLER, {}])
def test_a_bare_encoder_may_have_its_pooler_or_not(pooler: Tensors) -> None:
    spec = spec_of(BERT, architectures=["BertModel"])
    tensors = {k: v for k, v in tensors_of(spec, "F32").items() if not k.startswith("pooler.")}
    assert compare(spec, index_of({**tensors, **pooler})).agrees


def test_what_pretraining_puts_on_an_encoder_is_explained() -> None:
    spec = spec_of(BERT, architectures=["BertForMaskedLM"])
    pooler = {f"bert.{name}": value for name, value in POOLER.items()}
    comparison = compare(spec, index_of({**tensors_of(spec, "F32"), **pooler, **CLS}))
    assert comparison.agrees
    assert comparison.explained == (("task head", 3),)


def test_a_task_head_on_a_model_that_generates_is_not() -> None:
    spec = spec_of(LLAMA)
    score = {"score.weight": ("BF16", (2, 256))}
    comparison = compare(spec, index_of({**tensors_of(spec), **score}))
    assert [d.name for d in comparison.unexpected] == ["score.weight"]
