"""expected_tensors: names, shapes and counts are those that transformers writes."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers_models as oracle

from ullage.anatomy.config.read import read_config
from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.naming.rows import ALIASES, ROWS
from ullage.anatomy.tensors.expected import TensorSpec, expected_tensors

SHARED = Path(__file__).parents[3] / "shared" / "configs"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the shared configurations are absent"
)


def expand(tensors: tuple[TensorSpec, ...]) -> dict[str, tuple[int, ...]]:
    """Name → shape, experts one by one; prediction layers and towers left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        if tensor.stack in ("mtp", "tower"):
            continue
        names = [tensor.name]
        if tensor.count > 1:
            names = [tensor.name.replace("{e}", str(e)) for e in range(tensor.count)]
        shapes.update(dict.fromkeys(names, tensor.shape))
    return shapes


# --- names and shapes, family by family ----------------------------------------------------------

DECODERS = """
llama mistral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text gemma
gemma2 gemma3_text phi phi3 phimoe gpt2 gptj codegen gpt_neox gpt_bigcode opt bloom mpt
falcon_h1 mamba mamba2 falcon_mamba jamba bamba lfm2 olmo olmo2 olmo3 olmoe cohere cohere2
starcoder2 stablelm granite granitemoe granitemoeshared granitemoehybrid glm glm4 glm4_moe_lite
minimax_m2 ernie4_5 ernie4_5_moe exaone4 smollm3 seed_oss arcee apertus persimmon deepseek_v3
deepseek_v32 glm_moe_dsa flex_olmo mistral4 helium vaultgemma gpt_oss llama4_text nemotron_h
recurrent_gemma hy_v3 solar_open cohere2_moe afmoe laguna minicpm3 youtu sarvam_mla biogpt
internlm3 exaone falcon xglm mimo_v2_flash
""".split()  # noqa: SIM905

CHANGED: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "nemotron": {"vocab_size": 1000, "num_key_value_heads": 8, "head_dim": 128},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
              "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128, "use_qk_norm": True},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
}  # fmt: skip

ENCODERS = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert"),
        "AutoModelForMaskedLM",
    ),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "m2m_100"), "AutoModelForSeq2SeqLM"
    ),
    "whisper": "AutoModelForSpeechSeq2Seq",
}


@pytest.mark.parametrize("model_type", sorted({*DECODERS, *CHANGED}))
def test_a_decoder_is_named_and_shaped_as_on_disk(model_type: str) -> None:
    config, model = oracle.short_config(model_type, None, **CHANGED.get(model_type, {}))
    check(config, model)


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_an_encoder_or_both_is_named_and_shaped_as_on_disk(model_type: str) -> None:
    check(*oracle.short_config(model_type, ENCODERS[model_type]))


def check(config: Any, model: Any) -> None:
    tensors = expected_tensors(read_config(oracle.as_json(config, model), file="t").spec)
    assert all(tensor.named for tensor in tensors)
    assert expand(tensors) == oracle.disk_shapes(model)


def test_a_layout_of_experts_can_be_given() -> None:
    """Qwen3.5's release stacks its experts; transformers writes them one by one."""
    config, model = oracle.short_config("qwen3_5_moe_text", None)
    spec = read_config(oracle.as_json(config, model), file="t").spec
    assert expand(expected_tensors(spec, "each")) == oracle.disk_shapes(model)
    stacked = expand(expected_tensors(spec))
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"] == (256, 2 * 512, 2048)
    assert elements(expected_tensors(spec)) == elements(expected_tensors(spec, "each"))


def test_buffers_that_can_be_computed_are_not_expected() -> None:
    """MiniMax-Text-01's decay tables lie in transformers' state, but hold nothing learned."""
    config, model = oracle.short_config("minimax", None)
    disk = {k: v for k, v in oracle.disk_shapes(model).items() if not re.search("decay|slope", k)}
    tensors = expected_tensors(read_config(oracle.as_json(config, model), file="t").spec)
    assert expand(tensors) == disk


def test_kimi_linear_dense_layers_keep_their_own_name() -> None:
    """transformers renames every `mlp` on the way back, the dense layer's too; its shapes hold."""
    config, model = oracle.short_config("kimi_linear", None)
    disk = oracle.disk_shapes(model)
    tensors = expected_tensors(read_config(oracle.as_json(config, model), file="t").spec)
    renamed = {
        re.sub(r"(layers\.\d+\.)mlp\.(gate|up|down)_proj", r"\1block_sparse_moe.\2_proj", k): v
        for k, v in expand(tensors).items()
    }
    assert renamed == disk


# --- whole models from their real configurations -------------------------------------------------

TOWER = re.compile("visual|vision|multi_modal|mm_projector|vit_|patch_merge")
FULL_SIZE = """
Qwen--Qwen3-0.6B Qwen--Qwen3-235B-A22B Qwen--Qwen3-VL-2B-Instruct Qwen--Qwen3-VL-235B-A22B-Instruct
Qwen--Qwen3.5-27B Qwen--Qwen3.5-397B-A17B deepseek-ai--DeepSeek-V3 deepseek-ai--DeepSeek-V3.2
deepseek-ai--DeepSeek-V4-Flash nvidia--DeepSeek-V4-Pro-NVFP4 google--gemma-4-26B-A4B
meta-llama--Llama-4-Scout-17B-16E-Instruct meta-llama--Meta-Llama-3.1-405B
meta-llama--Meta-Llama-3.1-70B mistralai--Mixtral-8x7B-v0.1 moonshotai--Kimi-K2.5
zai-org--GLM-5 zai-org--GLM-5.2 nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8
nvidia--Nemotron-H-56B-Base-8K MiniMaxAI--MiniMax-M2.5 openai--gpt-oss-120b
""".split()  # noqa: SIM905


def shared(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((SHARED / f"{name}_config.json").read_text())
    return raw


def elements(tensors: tuple[TensorSpec, ...]) -> int:
    return sum(t.num_elements for t in tensors if t.stack not in ("mtp", "tower"))


@needs_shared
@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_real_configuration_counts_as_transformers_counts(name: str) -> None:
    raw = shared(name)
    tensors = expected_tensors(read_config(raw, file=name).spec)
    shapes = oracle.state_shapes(oracle.from_file(raw))
    assert elements(tensors) == sum(prod(s) for k, s in shapes.items() if not TOWER.search(k))


PUBLISHED = {
    "Qwen--Qwen3-0.6B": 596_049_920,
    "meta-llama--Meta-Llama-3.1-8B": 8_030_261_248,
    "mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai--gpt-oss-120b": 116_829_156_672,
    "deepseek-ai--DeepSeek-V3": 671_026_419_200,
}


@needs_shared
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_parameter_counts(name: str) -> None:
    assert elements(expected_tensors(read_config(shared(name), file=name).spec)) == PUBLISHED[name]


# --- families whose names transformers does not write --------------------------------------------


@needs_shared
def test_deepseek_v4_drops_the_model_prefix() -> None:
    """The release says `layers.0.ffn.experts` (NVIDIA lists it so); transformers adds `model.`"""
    raw = shared("deepseek-ai--DeepSeek-V4-Flash")
    tensors = expected_tensors(read_config(raw, file="t").spec)
    disk = oracle.disk_shapes(oracle.from_file({**raw, "num_hidden_layers": 5}))
    mine = {k: v for k, v in expand(tensors).items() if not re.match(r"layers\.(\d\d|[5-9])\.", k)}
    renamed = {
        re.sub(r"^model\.(hc_head\.)?", lambda m: "hc_head_" if m[1] else "", k)
        .replace("hc_head_hc_", "hc_head_")
        .replace("embed_tokens", "embed")
        .replace(".attn.norm.", ".attn.kv_norm."): v
        for k, v in disk.items()
    }
    assert mine == renamed
    listed = shared("nvidia--DeepSeek-V4-Pro-NVFP4")["quantization_config"]["quantized_layers"]
    modules = {t.module.rpartition(".{e}")[0] for t in tensors if t.role == "expert_up"}
    assert set(list(listed)[:3]) <= modules | set(listed)
    assert "layers.0.ffn.experts" in modules


@needs_shared
def test_qwen3_vl_experts_are_stored_input_first() -> None:
    """vLLM 0.32 qwen3_vl_moe.py turns them round while loading; transformers accepts both."""
    tensors = expected_tensors(read_config(shared(FULL_SIZE[3]), file="t").spec)
    first = next(t for t in tensors if t.role == "expert_gate_up")
    assert first.name == "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert first.shape == (128, 4096, 2 * 1536)


@needs_shared
def test_mimo_by_hand() -> None:
    """MiMo-7B: Qwen2 with biases on Q, K and V; one prediction layer of its own."""
    tensors = expected_tensors(read_config(shared("XiaomiMiMo--MiMo-7B-Base"), file="t").spec)
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 + 2 * 1024
    layer = attention + 3 * 4096 * 11008 + 2 * 4096
    assert elements(tensors) == 2 * 151_680 * 4096 + 36 * layer + 4096
    extra = sum(t.num_elements for t in tensors if t.stack == "mtp")
    assert extra == layer + 2 * 4096 * 4096 + 3 * 4096
    assert "model.mtp_layers.0.input_proj.weight" in {t.name for t in tensors}


@needs_shared
def test_minimax_m3_by_hand() -> None:
    """57 sparse layers of 128 experts and one shared; an index branch of 4 heads on each."""
    tensors = expected_tensors(read_config(shared("MiniMaxAI--MiniMax-M3"), file="t").spec)
    hidden = 6144
    attention = 2 * hidden * 8192 + 2 * hidden * 512 + 2 * 128
    index = hidden * 4 * 128 + hidden * 128 + 2 * 128
    dense = 3 * hidden * 12288
    sparse = 129 * 3 * hidden * 3072 + 128 * hidden + 128
    layers = 3 * (attention + dense) + 57 * (attention + index + sparse) + 60 * 2 * hidden
    assert elements(tensors) == 2 * 200_064 * hidden + layers + hidden


@needs_shared
def test_deepseek_prediction_layer_by_hand() -> None:
    """Layer 61 has everything of layer 60, two norms, a projection, and copies of both ends."""
    spec = read_config(shared("deepseek-ai--DeepSeek-V3"), file="t").spec
    tensors = expected_tensors(spec)
    mtp = [t for t in tensors if t.stack == "mtp"]
    last = sum(t.num_elements for t in tensors if t.stack == "decoder" and t.layer == 60)
    own = 2 * 7168 * 7168 + 3 * 7168 + 2 * 129_280 * 7168
    assert sum(t.num_elements for t in mtp) == last + own
    assert all(t.name.startswith("model.layers.61.") for t in mtp)


# --- the table itself ----------------------------------------------------------------------------


def test_every_row_resolves_without_a_placeholder_left() -> None:
    for key in ROWS:
        naming = naming_for(key)
        assert naming.known or ROWS[key].unnamed
        for path in naming.paths.values():
            assert "{" not in path.replace("{i}", "").replace("{e}", ""), (key, path)


def test_aliases_point_at_rows_and_hide_none() -> None:
    assert set(ALIASES.values()) <= set(ROWS)
    assert not set(ALIASES) & set(ROWS)


def test_an_unknown_family_has_shapes_but_no_names() -> None:
    raw = {
        "model_type": "never_seen", "architectures": ["NeverSeenForCausalLM"], "hidden_size": 64,
        "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128,
        "vocab_size": 100, "hidden_act": "silu", "max_position_embeddings": 128,
        "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    tensors = expected_tensors(read_config(raw, file="t").spec)
    assert tensors
    assert not any(tensor.named for tensor in tensors)
    assert elements(tensors) >= 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)


@needs_shared
def test_hundreds_of_experts_stay_about_a_thousand_entries() -> None:
    spec = read_config(shared("moonshotai--Kimi-K2.5"), file="t").spec
    assert len(expected_tensors(spec)) < 1_500


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "gpt2", "gpt_oss", "mamba2"])
def test_what_is_cut_lies_inside_the_shape(model_type: str) -> None:
    config, model = oracle.short_config(model_type, None)
    for tensor in expected_tensors(read_config(oracle.as_json(config, model), file="t").spec):
        whole = tensor.shard == "replicated"
        assert (tensor.cut is None) == whole or tensor.shard == "expert"
        assert tensor.cut is None or tensor.cut < len(tensor.shape)
        assert not tensor.quantizable or len(tensor.shape) in (2, 3)
