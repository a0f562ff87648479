"""A lone safetensors file: what its shapes prove is exact, what they leave open is bracketed."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_files import write_safetensors

from ullage.anatomy import load, read_config
from ullage.anatomy.files.index import read_checkpoint
from ullage.anatomy.infer import anatomy_from_headers
from ullage.anatomy.spec import Attention, Experts, ModelSpec
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.errors import UnsupportedModel

BASE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
MODELS = {
    "llama": {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama, tied": {
        **BASE,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    },
    "qwen2": {**BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "mixtral": {
        **BASE,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **BASE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}


def stored(folder: Path, config: dict[str, object], dtype: str = "BF16") -> Path:
    spec = read_config(config, file="config.json").spec
    tensors = {
        t.name.replace("{e}", str(e)): (dtype, t.shape)
        for t in expected_tensors(spec)
        for e in range(t.count)
    }
    return write_safetensors(folder / "model.safetensors", tensors)


def kv_elements(spec: ModelSpec) -> list[int]:
    mixers = [layer.mixer for layer in spec.layers]
    assert all(isinstance(mixer, Attention) for mixer in mixers)
    return [m.num_kv_heads * (m.head_dim + m.v_head_dim) for m in mixers]  # type: ignore[union-attr]


def names_and_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...], int]]:
    return [(t.name, t.shape, t.count) for t in expected_tensors(spec)]


@pytest.mark.parametrize("name", MODELS)
def test_what_shapes_prove_is_exact(tmp_path: Path, name: str) -> None:
    original = read_config(MODELS[name], file="config.json").spec
    index = read_checkpoint(stored(tmp_path, MODELS[name]))
    assert index is not None
    anatomy = anatomy_from_headers(index).anatomy
    for spec in (anatomy.spec, anatomy.low, anatomy.high):
        assert kv_elements(spec) == kv_elements(original)
        assert names_and_shapes(spec) == names_and_shapes(original)
        assert spec.dtype == "bfloat16"
        assert spec.tie_embeddings == original.tie_embeddings
    dims = [s.layers[0].mixer.head_dim for s in (anatomy.low, anatomy.high)]  # type: ignore[union-attr]
    assert dims[0] >= 64 >= dims[1]


def test_a_norm_per_head_proves_the_heads(tmp_path: Path) -> None:
    index = read_checkpoint(stored(tmp_path, MODELS["qwen3"]))
    assert index is not None
    anatomy = anatomy_from_headers(index).anatomy
    assert {s.layers[0].mixer.num_heads for s in (anatomy.low, anatomy.high)} == {8}  # type: ignore[union-attr]
    assert "num_key_value_heads" not in {u.field for u in anatomy.spec.unknowns}


def test_what_shapes_do_not_prove_is_listed(tmp_path: Path) -> None:
    model = load(stored(tmp_path, MODELS["mixtral"]))
    unknown = {u.field: u.widens for u in model.anatomy.spec.unknowns}
    assert unknown["num_key_value_heads"] == ("kv",)
    assert unknown["num_experts_per_tok"] == ("flops",)
    assert {"max_position_embeddings", "sliding_window", "rope_theta"} <= set(unknown)
    experts = [a.layers[0].feed_forward for a in (model.anatomy.low, model.anatomy.high)]
    assert [e.top_k for e in experts if isinstance(e, Experts)] == [1, 4]
    assert model.anatomy.low.max_positions < model.anatomy.high.max_positions
    assert {s.source for s in model.anatomy.sources} <= {
        "header: shapes",
        "header: whether lm_head is stored",
    }


def refused(tensors: dict[str, tuple[str, tuple[int, ...]]], folder: Path) -> str:
    file = write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(UnsupportedModel) as caught:
        load(file)
    assert "config.json" in str(caught.value)
    return str(caught.value)


def test_what_is_not_a_plain_decoder_is_refused(tmp_path: Path) -> None:
    q = {"model.layers.0.self_attn.q_proj.weight": ("BF16", (64, 64))}
    embed = {"model.embed_tokens.weight": ("BF16", (10, 64))}
    assert "0 tensors called embed_tokens" in refused({"conv.weight": ("F32", (3, 3))}, tmp_path)
    assert "layers without self_attn" in refused(
        {**embed, "model.layers.0.mixer.A_log": ("F32", (3,))}, tmp_path
    )
    assert "not numbered from 0" in refused(
        {**embed, "model.layers.7.self_attn.q_proj.weight": ("BF16", (64, 64))}, tmp_path
    )
    assert "k_proj" in refused(
        {**embed, **q, "model.layers.0.mlp.up_proj.weight": ("BF16", (9, 64))}, tmp_path
    )
    assert "not a matrix" in refused({"model.embed_tokens.weight": ("BF16", (10,)), **q}, tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    file = stored(tmp_path, MODELS["llama"], "F8_E4M3")
    with pytest.raises(UnsupportedModel, match=r"quantised weights \(F8_E4M3"):
        load(file)


def test_a_tensor_that_nothing_explains_is_refused(tmp_path: Path) -> None:
    spec = read_config(MODELS["llama"], file="config.json").spec
    tensors = {t.name: ("BF16", t.shape) for t in expected_tensors(spec)}
    tensors["model.layers.1.self_attn.sinks"] = ("BF16", (8,))
    assert "model.layers.1.self_attn.sinks" in refused(tensors, tmp_path)
