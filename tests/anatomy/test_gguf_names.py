"""GGUF names lead to Hugging Face names, and what else a converter changed is known."""

from __future__ import annotations

import pytest

from ullage.anatomy.gguf.architectures import GGUF_ARCHITECTURES
from ullage.anatomy.gguf.names import (
    ARCHITECTURES,
    GGUF_ONLY,
    INTERLEAVED_ROTARY,
    SHIFTED_NORMS,
    TRANSPOSED,
    gguf_tensor_names,
    half_split_rows,
    hf_tensor_name,
)

# Names that the reference map reaches another way: fused or split by a converter's own code, or
# spelled as the tensors of an older export.
BY_CONVERTER = {
    "bloom": {"token_embd_norm", "blk.{i}.ffn_norm"},
    "deepseek2": {"blk.{i}.attn_k_b", "blk.{i}.attn_v_b"},
    "gpt-oss": {"blk.{i}.ffn_gate_exps", "blk.{i}.ffn_up_exps"},
    "granitemoe": {
        "blk.{i}.ffn_gate_exps",
        "blk.{i}.ffn_up_exps",
        "blk.{i}.ffn_gate_shexp",
        "blk.{i}.ffn_up_shexp",
    },
    "qwen3next": {"blk.{i}.ssm_dt"},
    "qwen35": {"blk.{i}.ssm_dt"},
    "qwen35moe": {"blk.{i}.ssm_dt"},
}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_name_is_the_reference_map_s(architecture: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    reference = gguf.get_tensor_name_map(kind, 4)
    held = {gguf.TENSOR_NAMES[t].replace("{bid}", "{i}") for t in gguf.MODEL_TENSORS[kind]}
    names = gguf_tensor_names(architecture)
    assert names is not None
    checked = 0
    for pattern, hf_pattern in names.items():
        base, hf_base = pattern.removesuffix(".weight"), hf_pattern
        if base.endswith(".bias"):
            base, hf_base = base.removesuffix(".bias"), hf_base.removesuffix("_bias")
        if base not in held or base in BY_CONVERTER.get(architecture, ()):
            continue
        hf_name = hf_base.replace("{i}", "3").replace("experts.{e}.", "experts.")
        found = reference.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert found == base.replace("{i}", "3"), hf_name
        checked += 1
    assert checked >= 8


def test_every_architecture_with_a_configuration_has_names() -> None:
    assert set(GGUF_ARCHITECTURES) <= ARCHITECTURES
    assert INTERLEAVED_ROTARY | SHIFTED_NORMS | set(TRANSPOSED) <= ARCHITECTURES


@pytest.mark.parametrize(
    ("architecture", "gguf_name", "hf_name"),
    [
        ("llama", "blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("llama", "token_embd.weight", "model.embed_tokens.weight"),
        ("llama", "output.weight", "lm_head.weight"),
        ("qwen2", "blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        (
            "qwen3moe",
            "blk.7.ffn_up_exps.weight",
            "model.layers.7.mlp.experts.{e}.up_proj.weight",
        ),
        (
            "deepseek2",
            "blk.5.exp_probs_b.bias",
            "model.layers.5.mlp.gate.e_score_correction_bias",
        ),
        ("gpt-oss", "blk.1.attn_sinks.weight", "model.layers.1.self_attn.sinks"),
        ("mamba", "blk.2.ssm_a", "backbone.layers.2.mixer.A_log"),
        ("llama", "rope_freqs.weight", None),
        ("llama", "blk.x.attn_q.weight", None),
        ("llama", "blk.1", None),
        ("llama", "nothing.weight", None),
        ("nosuch", "token_embd.weight", None),
    ],
)
def test_one_name_at_a_time(architecture: str, gguf_name: str, hf_name: str | None) -> None:
    assert hf_tensor_name(architecture, gguf_name) == hf_name


def test_tables_of_angles_exist_in_gguf_only() -> None:
    for architecture in ARCHITECTURES:
        names = gguf_tensor_names(architecture)
        assert names is not None
        assert not GGUF_ONLY & set(names)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (4, 6), (3, 64)])
def test_rows_come_back_as_transformers_puts_them_back(num_heads: int, head_dim: int) -> None:
    numpy = pytest.importorskip("numpy")
    module = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    rows = numpy.arange(num_heads * head_dim * 2).reshape(num_heads * head_dim, 2)
    undone = module.LlamaTensorProcessor()._reverse_permute_weights(rows, num_heads, num_heads)
    assert (rows[half_split_rows(num_heads, head_dim)] == undone).all()
