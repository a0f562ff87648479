"""What one sequence keeps: against known right answers, real caches and brute force."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy import load, read_config
from ullage.costs.deployment import Parallel
from ullage.costs.kv import (
    kv_bytes,
    kv_bytes_per_token,
    kv_heads_per_rank,
    layers_kv,
    pipeline_stages,
    state_bytes_per_sequence,
)
from ullage.errors import BadUsage

SHARED = Path(__file__).parents[3] / "shared" / "configs"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/configs is not here")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}


def spec_of(name: str):
    return load(SHARED / f"{name}_config.json").anatomy.spec


# Models whose peers' figures are known to be wrong, and the right ones (131,072 tokens in bf16,
# ideal, without recurrent state), in bytes.
@shared
@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("nvidia--Nemotron-H-56B-Base-8K", 5.37e9),
        ("deepseek-ai--DeepSeek-V3", 9.2e9),
        ("Qwen--Qwen3.5-397B-A17B", 4.0e9),
        ("openai--gpt-oss-120b", 4.84e9),
        ("Qwen--Qwen3-VL-8B-Instruct", 19.3e9),
    ],
)
def test_one_long_sequence_is_what_it_should_be(name, right):
    spec = spec_of(name)
    ideal = kv_bytes(spec, 131_072) - state_bytes_per_sequence(spec)
    assert ideal == pytest.approx(right, rel=0.01)


@shared
def test_mamba_and_delta_net_layers_keep_state_and_do_not_grow():
    nemotron, qwen = spec_of("nvidia--Nemotron-H-56B-Base-8K"), spec_of("Qwen--Qwen3.5-397B-A17B")
    # 54 Mamba-2 layers: 256 × 64 × 256 float32 states, a bf16 tail of 3 × (16384 + 2·8·256).
    tail = 3 * (16384 + 4096) * 2
    assert state_bytes_per_sequence(nemotron) == 54 * (256 * 64 * 256 * 4 + tail)
    # 45 delta-net layers: 64 × 128 × 128 float32 states, a bf16 tail of 3 × (2·16·128 + 64·128).
    assert state_bytes_per_sequence(qwen) == 45 * (64 * 128 * 128 * 4 + 3 * 12288 * 2)


@shared
def test_windows_are_bounded_and_do_not_count_as_growth():
    gpt = spec_of("openai--gpt-oss-120b")
    assert kv_bytes_per_token(gpt) == 18 * 2 * 8 * 64 * 2
    windows = sum(row.window * row.window_token_bytes for row in layers_kv(gpt))
    assert windows == 18 * 128 * 2 * 8 * 64 * 2
    assert kv_bytes(gpt, 100) == 36 * 100 * 2 * 8 * 64 * 2  # below the window all layers grow


@pytest.mark.parametrize(("window", "growing"), [(4096, 0), (32767, 0), (32768, 8), (262144, 8)])
def test_a_window_no_shorter_than_the_longest_sequence_never_closes(window, growing):
    """8 KV heads of 16 in bfloat16 over two layers: 2 × 2 × 16 × 2 bytes for each head."""
    config = {
        "model_type": "mistral",
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "max_position_embeddings": 32768,
        "sliding_window": window,
        "torch_dtype": "bfloat16",
    }
    spec = read_config(config, file="config.json").spec
    assert kv_bytes_per_token(spec) == growing * 2 * 2 * 16 * 2
    for context in (1, window, 40_000):
        kept = context if growing else min(context, window)
        assert kv_bytes(spec, context) == kept * 8 * 2 * 2 * 16 * 2


@shared
def test_a_latent_is_the_same_on_every_rank_and_kv_heads_are_replicated():
    latent, grouped = spec_of("deepseek-ai--DeepSeek-V3"), spec_of("Qwen--Qwen3-235B-A22B")
    assert kv_bytes_per_token(latent, Parallel(tensor=8)) == kv_bytes_per_token(latent)
    whole = kv_bytes_per_token(grouped)
    assert kv_bytes_per_token(grouped, Parallel(tensor=4)) * 4 == whole
    assert kv_bytes_per_token(grouped, Parallel(tensor=8)) * 4 == whole  # 4 KV heads


@shared
def test_pooled_keys_count_their_ratio():
    spec = spec_of("deepseek-ai--DeepSeek-V4-Flash")
    ratios = [row.ratio for row in layers_kv(spec)]
    fine, coarse = ratios.count(4), ratios.count(128)
    assert fine and coarse
    # 512 elements in bf16 and, at the fine ratio, an 8-bit index key with a float32 scale.
    expected = fine * (1024 + 132) / 4 + coarse * 1024 / 128
    assert kv_bytes_per_token(spec) == -(-expected // 1)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
def test_kv_equals_what_transformers_caches(model_type):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=64,
        max_position_embeddings=128,
        pad_token_id=0,
        dtype="float32",
        **({"sliding_window": 8} if model_type == "gemma2" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = 24
    with torch.no_grad():
        output = model(torch.ones(1, tokens, dtype=torch.long), use_cache=True)
    cache = getattr(output, "cache", None) or output.past_key_values
    held = sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    )
    spec = read_config(
        {**config.to_dict(), "architectures": [type(model).__name__]}, file="config.json"
    ).spec
    ours = kv_bytes(spec, tokens, dtype="float32")
    # transformers keeps window − 1 tokens of a sliding layer: the current one is appended.
    missing = sum(row.window_token_bytes for row in layers_kv(spec, dtype="float32") if row.window)
    assert ours - missing == held


@given(st.integers(1, 200), st.integers(1, 16))
def test_pipeline_stages_cover_all_layers_evenly(num_layers, pipeline):
    stages = pipeline_stages(num_layers, pipeline)
    assert [i for stage in stages for i in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert len(stages) == pipeline


@given(st.integers(0, 2000), st.sampled_from(["auto", "fp8"]), st.integers(1, 3))
def test_a_context_costs_the_sum_of_its_tokens(context, kv_cache_dtype, pipeline):
    spec = read_config(LLAMA, file="config.json").spec
    parallel = Parallel(pipeline=pipeline)
    token = kv_bytes_per_token(spec, parallel, kv_cache_dtype)
    assert kv_bytes(spec, context, parallel, kv_cache_dtype) == context * token
    element = 1 if kv_cache_dtype == "fp8" else 2
    assert token == -(-3 // pipeline) * 2 * 2 * 16 * element


@given(st.integers(1, 128), st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_hold_all_kv_heads_between_them(heads, tensor):
    assert kv_heads_per_rank(heads, tensor) >= 1
    if heads % tensor == 0:
        assert kv_heads_per_rank(heads, tensor) * tensor == heads


def test_an_unknown_kv_dtype_is_refused_by_name():
    spec = read_config(LLAMA, file="config.json").spec
    with pytest.raises(BadUsage, match="fp8_e4m3fn"):
        kv_bytes_per_token(spec, kv_cache_dtype="fp8_e4m3fn")
