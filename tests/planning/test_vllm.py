"""What vLLM allocates: recorded answers of a real one, and CUDA's rules by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy import load, read_config
from ullage.anatomy.spec import Attention, LinearAttention, Mamba, ShortConv
from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import find_hardware
from ullage.errors import BadUsage
from ullage.planning.vllm import allocate

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
from compare import differences, sized

FIXTURES = Path(__file__).parent / "fixtures" / "vllm-0.32-cpu.jsonl"
RECORDED = [json.loads(line) for line in FIXTURES.read_text().splitlines()]

SHARED = Path(__file__).parents[3] / "shared" / "configs"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/configs is not here")
GIB = 2**30
STATES = {
    "mamba": Mamba(1, d_inner=256, d_state=16, d_conv=4, dt_rank=8),
    "mamba2": Mamba(2, d_inner=256, d_state=32, d_conv=4, num_heads=4, head_dim=64),
    "delta": LinearAttention("gated_delta_net", 2, 4, 32, 32, d_conv=4),
    "conv": ShortConv(channels=64, d_conv=3),
}
CPU = Deployment(platform="cpu")
CUDA = Deployment(platform="cuda")


def spec_of(name: str):
    return load(SHARED / f"{name}_config.json").anatomy.spec


def cut(spec, layers: int):
    return replace(spec, layers=spec.layers[:layers])


# --- recorded: tests/vllm/record.py asks vLLM anew ------------------------------------------------


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: line["case"]["name"])
def test_allocation_equals_the_recorded_answer_of_vllm(line):
    assert differences(line["case"], line["answer"]) == []


def test_the_recordings_cover_every_kind_of_cache():
    kinds = {g["kind"] for line in RECORDED for g in line["answer"].get("groups", ())}
    assert {
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MLAAttentionSpec",
        "MambaSpec",
    } <= kinds
    answers = [line["answer"] for line in RECORDED]
    assert len(RECORDED) >= 40
    assert {"align", "none"} <= {a.get("mamba_cache_mode") for a in answers}
    assert any(a.get("groups") == [] for a in answers), "an encoder without a cache"
    assert any("refused" in a for a in answers), "a pool too small for one request"
    assert any(len({g["page_size_bytes"] for g in a.get("groups", ())}) == 1 for a in answers)


def test_what_is_verified_on_a_cpu_says_so():
    line = next(line for line in RECORDED if "refused" not in line["answer"])
    assert sized(line["case"]).basis == "vllm 0.32 rule, verified on CPU"


# --- CUDA, by hand from the same rules -----------------------------------------------------------


@shared
@pytest.mark.parametrize(
    ("deployment", "gpu", "blocks", "per_request"),
    [
        # 2 full layers and 2 windows of 128: pages of 128 tokens × 2 KB, two layers to a group.
        # full: 8192/128 = 64 blocks; window: (127 + 4096)/128 → 33, and one: 34.
        (replace(CPU, max_model_len=8192), None, 2048, 64 + 34),
        # Two batches of 16,384 in flight exceed the length: 8192/128 + 1 = 65.
        (replace(CUDA, max_model_len=8192, block_size=128), "H100-SXM", 2048, 64 + 65),
        # The block that FlashAttention gets by default holds 16 tokens.
        (replace(CUDA, max_model_len=8192), "H100-SXM", 16384, 512 + 513),
        # On an A100 batches default to 8,192: still more than the length.
        (replace(CUDA, max_model_len=8192, block_size=128), "A100-80", 2048, 64 + 65),
        # Without async scheduling and with small batches: (127 + 1024)/16 → 72, and one.
        (
            replace(CUDA, max_model_len=8192, max_num_batched_tokens=1024, async_scheduling=False),
            "H100-SXM",
            16384,
            512 + 73,
        ),
        # Two batches of 1,024: (127 + 2048)/16 → 136, and one.
        (
            replace(CUDA, max_model_len=8192, max_num_batched_tokens=1024),
            "H100-SXM",
            16384,
            512 + 137,
        ),
    ],
)
def test_windows_reserve_the_batches_in_flight(deployment, gpu, blocks, per_request):
    hardware = find_hardware(gpu) if gpu else None
    spec = cut(spec_of("openai--gpt-oss-120b"), 4)
    got = allocate(spec, deployment, GIB, hardware=hardware, usage="library")
    assert (got.num_blocks, got.max_concurrency) == (blocks, blocks / per_request)
    assert got.kv_cache_tokens == int(blocks / per_request * 8192)
    assert got.basis == ("modelled" if gpu else "vllm 0.32 rule, verified on CPU")


@shared
def test_the_measured_figure_of_gpt_oss_on_a_cpu_comes_out():
    got = allocate(
        cut(spec_of("openai--gpt-oss-120b"), 4),
        replace(CPU, max_model_len=8192),
        GIB,
        usage="library",
    )
    assert got.kv_cache_tokens == 171_196


@shared
def test_kv_heads_are_replicated_beyond_their_number():
    spec = spec_of("Qwen--Qwen3-235B-A22B")
    four = allocate(spec, replace(CUDA, parallel=Parallel(tensor=4)), 8 * GIB)
    eight = allocate(spec, replace(CUDA, parallel=Parallel(tensor=8)), 8 * GIB)
    assert four.num_blocks == eight.num_blocks
    assert four.bytes_per_block == 94 * 16 * 2 * 128 * 2


@shared
def test_sparse_latent_attention_caches_index_keys_in_pages_of_64():
    got = allocate(
        spec_of("deepseek-ai--DeepSeek-V3.2"), CUDA, 8 * GIB, hardware=find_hardware("H200")
    )
    assert got.block_size == 64
    assert got.bytes_per_block == 61 * 64 * (576 * 2 + 128 + 4)
    packed = allocate(
        spec_of("deepseek-ai--DeepSeek-V3.2"),
        replace(CUDA, kv_cache_dtype="fp8"),
        8 * GIB,
        hardware=find_hardware("H200"),
    )
    assert packed.kv_cache_dtype == "fp8_ds_mla"
    assert packed.bytes_per_block == 61 * 64 * (656 + 128 + 4)
    assert allocate(spec_of("deepseek-ai--DeepSeek-V3.2"), CPU, GIB).refusals


@shared
def test_compressed_attention_packs_pages_padded_to_576_bytes():
    got = allocate(
        spec_of("deepseek-ai--DeepSeek-V4-Flash"), CUDA, 8 * GIB, hardware=find_hardware("H200")
    )

    def padded(size: int) -> int:
        return -(-size // 576) * 576

    # 43 layers: 21 pool four tokens to one (and index them), 20 pool 128, two do not pool.
    pooled_fine, pooled_coarse = padded(64 * 584), padded(2 * 584)
    index = padded(64 * 132)
    assert got.bytes_per_block == 21 * (pooled_fine + index) + 20 * pooled_coarse
    assert got.kv_cache_dtype == "fp8_ds_mla"
    assert not got.refusals or "does not fit" in got.refusals[0]


@shared
@pytest.mark.parametrize(
    ("name", "gpu", "kv_cache_dtype", "block"),
    [
        ("Qwen--Qwen3-8B", "H100-SXM", "auto", 16),
        ("deepseek-ai--DeepSeek-V3", "H100-SXM", "auto", 16),  # FlashAttention's latent kernel
        ("deepseek-ai--DeepSeek-V3", "H100-SXM", "fp8", 64),  # FlashMLA
        ("deepseek-ai--DeepSeek-V3", "B200", "auto", 32),  # FlashInfer
        ("deepseek-ai--DeepSeek-V3", "A100-80", "auto", 16),  # Triton
        ("google--gemma-4-26B-A4B", "H100-SXM", "auto", 16),
        ("google--gemma-4-26B-A4B", "H100-SXM", "fp8", 64),  # head size 512 in 8 bits
        ("MiniMaxAI--MiniMax-M3", "H200", "auto", 128),  # block-sparse attention
    ],
)
def test_blocks_follow_the_kernels_of_the_gpu(name, gpu, kv_cache_dtype, block):
    deployment = replace(CUDA, kv_cache_dtype=kv_cache_dtype)
    got = allocate(spec_of(name), deployment, 64 * GIB, hardware=find_hardware(gpu))
    assert got.block_size == block


@shared
def test_chunked_layers_keep_a_chunk_and_what_is_in_flight():
    got = allocate(
        spec_of("meta-llama--Llama-4-Scout-17B-16E-Instruct"),
        replace(CUDA, max_model_len=131_072),
        64 * GIB,
        hardware=find_hardware("H100-SXM"),
    )
    # 36 chunked and 12 full layers: three tables of chunks beside one of everything.
    assert [group.num_layers for group in got.groups] == [12, 12, 12, 12]
    by_kind = {group.kinds: group.blocks_per_request for group in got.groups}
    assert by_kind == {("chunk",): (8192 + 2 * 8192) // 16, ("full",): 131_072 // 16}


@pytest.mark.parametrize("platform", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("asked", [None, 48, 256])
@pytest.mark.parametrize(
    "mixers",
    [("mamba",), ("mamba2",), ("delta",), ("conv",), ("conv", "delta", "conv")],
    ids="+".join,
)
def test_states_without_attention_are_cached_in_the_general_default_block(mixers, asked, platform):
    spec = replace(SMALL, layers=tuple(replace(SMALL.layers[0], mixer=STATES[m]) for m in mixers))
    cached = replace(platform, block_size=asked, enable_prefix_caching=True, max_model_len=2048)
    assert allocate(spec, cached, GIB).block_size == (asked or 16)
    # Without cached prefixes one state stands for the whole length.
    whole = replace(cached, enable_prefix_caching=False)
    assert allocate(spec, whole, GIB).block_size == 2048


@pytest.mark.parametrize("platform", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("caching", [None, False, True])
def test_what_caches_nothing_does_not_start_with_prefix_caching(caching, platform):
    attention = SMALL.layers[0].mixer
    assert isinstance(attention, Attention)
    encoder = replace(
        cut(SMALL, 1),
        kind="encoder",
        layers=(replace(SMALL.layers[0], mixer=replace(attention, causal=False)),),
    )
    got = allocate(encoder, replace(platform, enable_prefix_caching=caching), GIB)
    assert got.groups == ()
    assert got.enable_prefix_caching is bool(caching)
    assert any("prefix caching" in reason for reason in got.refusals) is bool(caching)
    assert bool(got.refusals) is bool(caching)


@shared
def test_an_attention_page_grows_until_it_holds_a_state():
    # 64 × 64 × 128 float32 states and a tail of 3 × (4096 + 2·8·128) in bf16; 1 KB a token.
    spec = spec_of("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    state = 64 * 64 * 128 * 4 + 3 * (4096 + 2048) * 2
    tokens = -(-state // 1024)
    cuda, cpu = allocate(spec, CUDA, 8 * GIB), allocate(spec, CPU, 8 * GIB)
    assert cuda.block_size == -(-tokens // 16) * 16
    assert cpu.block_size == -(-tokens // 128) * 128


def test_a_state_that_vllm_assumes_and_no_layer_keeps_is_no_answer():
    # Asked, vLLM grew this model's blocks to 2,176 tokens for a state that its config describes.
    spec = replace(SMALL, architecture="NemotronHForCausalLM")
    got = allocate(spec, CPU, GIB)
    assert got.basis == "unsupported"
    assert any("a state that no layer here keeps" in warning for warning in got.warnings)
    hybrid = replace(spec, layers=(*spec.layers, replace(spec.layers[0], mixer=STATES["mamba2"])))
    assert allocate(hybrid, CPU, GIB).basis == "vllm 0.32 rule, verified on CPU"


# --- what is always so ---------------------------------------------------------------------------

SMALL = read_config(
    {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "sliding_window": 256,
        "vocab_size": 128,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    },
    file="config.json",
).spec

DEPLOYMENTS = st.builds(
    Deployment,
    platform=st.sampled_from(["cpu", "cuda"]),
    parallel=st.builds(Parallel, tensor=st.sampled_from([1, 2, 4]), pipeline=st.integers(1, 3)),
    max_model_len=st.sampled_from([None, 100, 1024, 4096]),
    max_num_batched_tokens=st.sampled_from([None, 512]),
    max_num_seqs=st.sampled_from([None, 4]),
    block_size=st.sampled_from([None, 32, 64]),
    async_scheduling=st.sampled_from([None, False]),
)


@given(DEPLOYMENTS, st.integers(1, 64 << 20))
def test_the_longest_request_fits_and_one_token_more_does_not(deployment, kv_bytes):
    automatic = allocate(SMALL, replace(deployment, max_model_len=-1), kv_bytes)
    longest = automatic.max_model_len_that_fits
    assert 0 <= longest <= SMALL.max_positions
    # The limits that vLLM derives from the length must stay as they were for the comparison.
    fixed = replace(
        deployment,
        max_num_seqs=automatic.max_num_seqs,
        max_num_batched_tokens=automatic.max_num_batched_tokens,
    )
    for length, starts in ((longest, True), (longest + 1, False)):
        if 1 <= length <= SMALL.max_positions:
            got = allocate(SMALL, replace(fixed, max_model_len=length), kv_bytes)
            assert (not got.refusals) is starts
            assert not starts or got.max_concurrency > 1 or got.num_blocks == 1


@given(DEPLOYMENTS, st.integers(1 << 20, 64 << 20), st.integers(0, 8 << 20))
def test_more_memory_never_holds_less_and_is_never_exceeded(deployment, kv_bytes, more):
    less, enough = (allocate(SMALL, deployment, n) for n in (kv_bytes, kv_bytes + more))
    assert less.num_blocks <= enough.num_blocks
    assert less.kv_cache_tokens <= enough.kv_cache_tokens
    assert kv_bytes - less.bytes_per_block < less.kv_cache_bytes <= kv_bytes


def test_not_fitting_is_an_answer_that_says_what_would():
    got = allocate(SMALL, replace(CPU, max_model_len=4096), 1 << 20)
    assert got.refusals
    assert f"{got.max_model_len_that_fits:,}" in got.refusals[-1]
    assert got.num_blocks > 0


def test_a_length_above_the_models_own_is_refused():
    got = allocate(SMALL, replace(CPU, max_model_len=5000), GIB)
    assert "4,096" in got.refusals[0]


@pytest.mark.parametrize(
    ("rope", "asked", "length"),
    [
        ({"rope_type": "linear", "factor": 4.0}, None, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, None, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8000, 8000),
    ],
)
def test_the_models_own_length_is_scaled_where_the_config_has_not_done_it(rope, asked, length):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
        "vocab_size": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e4, **rope},
        "dtype": "bfloat16",
    }
    spec = read_config(config, file="config.json").spec
    got = allocate(spec, replace(CPU, max_model_len=asked), GIB)
    assert not got.refusals
    assert got.max_model_len == length


def test_auto_takes_the_longest_length_that_fits():
    got = allocate(SMALL, replace(CPU, max_model_len=-1), 2 << 20)
    assert not got.refusals
    assert got.max_model_len == got.max_model_len_that_fits < 4096


def test_every_decision_has_a_source():
    got = allocate(SMALL, replace(CUDA, block_size=32), GIB)
    sources = {decision.name: decision.source for decision in got.decisions}
    assert sources["block_size"] == "flag --block-size"
    assert {"dtype", "kv_cache_dtype", "max_model_len", "max_num_batched_tokens"} <= set(sources)
    assert all(sources.values())


def test_another_engine_or_version_is_refused():
    with pytest.raises(BadUsage, match=r"0\.33"):
        allocate(SMALL, replace(CPU, engine_version="0.33"), GIB)
