"""The ledger adds up to the byte, fails closed, and gives the numbers that peers get wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.anatomy import load
from ullage.anatomy.spec import (
    Anatomy,
    Attention,
    Dense,
    Experts,
    LayerSpec,
    ModelSpec,
    Norm,
    Positions,
    Rope,
    Unknown,
)
from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import Gpus, catalogue, find_hardware, measured_machine, parse_gpus
from ullage.errors import BadUsage
from ullage.planning.ledger import DEFAULT_UTILIZATION, build_ledger, check_sizes
from ullage.planning.parallel_sizes import accepted_tensor_sizes, refused_sizes, spread
from ullage.planning.workload import answer_workload

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
SHARED = sorted(
    path for path in CONFIGS.glob("*_config.json") if not path.name.endswith("_quant_config.json")
)
GIB = 2**30


def shared(name: str) -> Anatomy:
    path = CONFIGS / f"{name}_config.json"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return load(path).anatomy


def tiny(**changes: object) -> ModelSpec:
    """Eight layers of grouped attention, 1.6 B parameters."""
    layer = LayerSpec(0, Attention(32, 8, 128, 128), Dense(14336, "silu", gated=True))
    spec = ModelSpec(
        model_type="llama",
        architecture="LlamaForCausalLM",
        family="generic",
        kind="decoder",
        hidden_size=4096,
        vocab_size=128256,
        max_positions=32768,
        layers=tuple(replace(layer, index=i) for i in range(8)),
        norm=Norm("rms", 1e-5),
        positions=Positions("rope"),
        tie_embeddings=False,
        dtype="bfloat16",
    )
    return replace(spec, **changes)


def known(spec: ModelSpec) -> Anatomy:
    return Anatomy(spec, spec, spec)


# --- the sum -------------------------------------------------------------------------------------

deployments = st.builds(
    Deployment,
    kv_cache_dtype=st.sampled_from(["auto", "fp8"]),
    kv_cache_memory_bytes=st.one_of(st.none(), st.integers(1, 400 * GIB)),
    gpu_memory_utilization=st.one_of(st.none(), st.floats(0.01, 1.0)),
    max_model_len=st.one_of(st.none(), st.just(-1), st.integers(1, 32768)),
    max_num_seqs=st.one_of(st.none(), st.integers(1, 2048)),
    max_num_batched_tokens=st.one_of(st.none(), st.integers(2048, 65536)),
    block_size=st.sampled_from([None, 16, 32, 64]),
    enable_prefix_caching=st.sampled_from([None, True, False]),
    parallel=st.builds(
        Parallel,
        tensor=st.sampled_from([1, 2, 4, 8, 16]),
        pipeline=st.sampled_from([1, 2, 3]),
        data=st.sampled_from([1, 2]),
    ),
)
GPUS = [spec for spec in catalogue() if spec.platform in ("cuda", "rocm")]


@given(deployments, st.sampled_from(GPUS))
@settings(deadline=None, max_examples=150)
def test_the_parts_sum_to_the_device_to_the_byte(deployment, hardware):
    ledger = build_ledger(known(tiny()), deployment, Gpus(hardware, 64))
    assert sum(part.num_bytes for part in ledger.parts) == hardware.memory_bytes
    parts = {part.name: part for part in ledger.parts}
    for part in ledger.parts:
        assert part.bounds.low <= part.num_bytes <= part.bounds.high
        assert part.source
        assert part.name == "free" or part.num_bytes >= 0
    if ledger.fits:
        assert ledger.deficit is not None
        assert ledger.deficit.high == 0
        assert not ledger.refusals
        assert parts["free"].num_bytes >= 0
    if ledger.fits is False and not ledger.deficit.high:
        assert ledger.refusals
    if deployment.kv_cache_memory_bytes is not None:
        assert parts["kv_and_state"].num_bytes <= deployment.kv_cache_memory_bytes


@pytest.mark.parametrize("path", SHARED or [None], ids=lambda p: p and p.name[:-12])
def test_every_shared_config_sizes_on_several_deployments(path):
    if path is None:
        pytest.skip(f"{CONFIGS} is not here")
    anatomy = load(path).anatomy
    settings_tried = [
        ("H100-SXM:1", Deployment()),
        ("H100-SXM:8", Deployment(parallel=Parallel(tensor=8))),
        ("B200:8", Deployment(parallel=Parallel(tensor=4, pipeline=2), max_model_len=-1)),
        ("MI300X:8", Deployment(parallel=Parallel(tensor=8), kv_cache_memory_bytes=20 * GIB)),
        ("RTX-4090:1", Deployment(max_model_len=8192)),
    ]
    for written, deployment in settings_tried:
        gpus = parse_gpus(written)
        ledger = build_ledger(anatomy, deployment, gpus)
        assert sum(part.num_bytes for part in ledger.parts) == gpus.hardware.memory_bytes
        assert ledger.heavy.weights.total >= ledger.light.weights.total > 0
        assert ledger.fits is not None or ledger.deficit.low < ledger.deficit.high
        assert ledger.fits is None or ledger.heavy.allocation.basis != "unsupported"


# --- the rule ------------------------------------------------------------------------------------


def test_a_gpu_gives_the_kv_cache_its_share_less_all_else():
    """gpu_memory_utilization × total, rounded up, less weights, activations, runtime and graphs;
    the CUDA context lies outside of the share."""
    hardware = find_hardware("A100")
    ledger = build_ledger(known(tiny()), Deployment(), Gpus(hardware))
    case = ledger.heavy
    share = -(-hardware.memory_bytes * 92 // 100)
    inside = case.weights.total + case.claims.activations + case.claims.engine
    assert case.kv_budget_bytes == share - inside
    assert ledger.utilization == DEFAULT_UTILIZATION == 0.92
    assert case.allocation.num_blocks == case.kv_budget_bytes // case.allocation.bytes_per_block


def test_a_named_size_is_taken_exactly():
    deployment = Deployment(kv_cache_memory_bytes=10 * GIB, gpu_memory_utilization=0.5)
    ledger = build_ledger(known(tiny()), deployment, parse_gpus("H100"))
    assert ledger.heavy.kv_budget_bytes == ledger.light.kv_budget_bytes == 10 * GIB
    assert ledger.heavy.allocation == ledger.light.allocation
    assert ledger.utilization is None


def test_a_deficit_is_what_would_make_it_fit():
    """With exactly the missing bytes more of KV cache, one longest request fits; with one byte
    less it does not."""
    base = Deployment(kv_cache_memory_bytes=100 * 2**20)
    short = build_ledger(known(tiny()), base).deficit.high
    assert short > 0
    enough, lacking = (
        build_ledger(known(tiny()), replace(base, kv_cache_memory_bytes=100 * 2**20 + extra))
        for extra in (short, short - 1)
    )
    assert enough.deficit.high == 0
    assert not enough.refusals
    assert lacking.deficit.high == 1
    assert lacking.refusals


def test_a_share_that_the_context_already_eats_into_does_not_start():
    ledger = build_ledger(known(tiny()), Deployment(gpu_memory_utilization=1.0), parse_gpus("H100"))
    assert ledger.fits is False
    assert ledger.deficit.low == ledger.light.claims.context


def test_weights_that_exceed_the_device_leave_a_true_zero():
    spec = tiny(layers=tuple(replace(tiny().layers[0], index=i) for i in range(126)))
    ledger = build_ledger(known(spec), Deployment(), parse_gpus("RTX-4090"))
    assert ledger.fits is False
    assert ledger.heavy.allocation.num_blocks == 0
    free = next(part for part in ledger.parts if part.name == "free")
    assert free.num_bytes < 0
    assert sum(part.num_bytes for part in ledger.parts) == ledger.device_bytes


def test_what_lies_between_the_two_ends_is_not_decided():
    """A KV need that only the lighter engine leaves room for is neither fits nor does not."""
    gpus = parse_gpus("RTX-4090")
    ledger = build_ledger(known(tiny()), Deployment(max_model_len=1), gpus)
    heavy, light = ledger.heavy.kv_budget_bytes, ledger.light.kv_budget_bytes
    per_token = 8 * 8 * 256 * 2
    spec = tiny(max_positions=10**9)
    between = (heavy + light) // 2 // per_token
    undecided = build_ledger(known(spec), Deployment(max_model_len=between), gpus)
    assert undecided.fits is None
    assert undecided.deficit.low == 0 < undecided.deficit.high


def test_an_unknown_model_is_held_between_its_two_readings():
    low, high = tiny(), tiny(layers=tuple(replace(tiny().layers[0], index=i) for i in range(12)))
    high = replace(high, unknowns=(Unknown("num_layers", "?", ("weights", "kv")),))
    ledger = build_ledger(Anatomy(high, low, high), Deployment(), parse_gpus("L40S"))
    assert ledger.heavy.weights.total > ledger.light.weights.total
    bounds = {part.name: part.bounds for part in ledger.parts}
    assert bounds["weights"].low == ledger.light.weights.total
    assert bounds["kv_and_state"].low == ledger.heavy.allocation.kv_cache_bytes


def test_without_a_device_nothing_is_said_to_fit():
    ledger = build_ledger(known(tiny()), Deployment(kv_cache_memory_bytes=8 * GIB))
    assert ledger.fits is None
    assert ledger.parts == ()
    assert "--gpu" in dict(ledger.not_evaluable)["fits"]
    blind = build_ledger(known(tiny()), Deployment())
    assert blind.heavy.allocation is None
    assert "num_blocks" in dict(blind.not_evaluable)


def test_what_no_rule_of_the_engine_covers_is_not_said_to_fit():
    spec = tiny(kind="encoder-decoder", encoder_layers=tiny().layers)
    ledger = build_ledger(known(spec), Deployment(), parse_gpus("B200"))
    assert ledger.heavy.allocation.basis == "unsupported"
    assert ledger.fits is None
    assert "not reproduced" in dict(ledger.not_evaluable)["fits"]


def test_a_kv_cache_too_small_for_one_request_is_refused_without_a_device():
    ledger = build_ledger(known(tiny()), Deployment(kv_cache_memory_bytes=2**20))
    assert ledger.fits is False
    assert ledger.refusals


def test_a_measured_cpu_machine_has_a_ledger_too():
    machine = measured_machine(
        "this machine",
        memory_bytes=64 * GIB,
        bandwidth_bytes_per_s=2e10,
        flops=(("float32", 1e11),),
        method="test",
    )
    deployment = Deployment(platform="cpu", kv_cache_memory_bytes=8 * GIB)
    ledger = build_ledger(known(tiny()), deployment, Gpus(machine))
    assert sum(part.num_bytes for part in ledger.parts) == 64 * GIB
    assert ledger.fits is True


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deployment", "gpus", "words"),
    [
        (Deployment(parallel=Parallel(tensor=3)), None, "32 attention heads do not divide by 3"),
        (Deployment(parallel=Parallel(pipeline=9)), None, "8 layers do not fill 9"),
        (Deployment(parallel=Parallel(expert=True)), None, "no experts"),
        (Deployment(parallel=Parallel(tensor=8)), "H100:4", "8 ranks"),
        (Deployment(engine="sglang"), None, "sglang"),
        (Deployment(engine_version="0.33"), None, "0.33"),
        (Deployment(platform="cpu"), "H100", "not a cpu device"),
    ],
)
def test_what_the_engine_refuses_is_one_sentence(deployment, gpus, words):
    with pytest.raises(BadUsage) as caught:
        build_ledger(known(tiny()), deployment, gpus and parse_gpus(gpus))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_accepted_sizes_are_named_in_the_refusal():
    with pytest.raises(BadUsage, match="one of 1, 2, 4, 8, 16, 32"):
        check_sizes(tiny(), Deployment(parallel=Parallel(tensor=3)), None)


def test_experts_may_stay_whole_where_their_width_does_not_divide():
    layers = (LayerSpec(0, Attention(32, 8, 128, 128), Experts(64, 4, 1000, "silu", True)),)
    spec = tiny(layers=layers)
    assert 16 not in accepted_tensor_sizes(spec, Parallel())
    assert 16 in accepted_tensor_sizes(spec, Parallel(expert=True))


def test_devices_become_tensor_ranks_where_the_model_allows_it():
    deployment, words = spread(tiny(), Deployment(), 8)
    assert deployment.parallel == Parallel(tensor=8)
    assert "tensor_parallel_size 8" in words
    deployment, words = spread(tiny(), Deployment(), 6)
    assert deployment.parallel == Parallel(tensor=2, data=3)
    assert "data_parallel_size 3" in words
    assert refused_sizes(tiny(), deployment.parallel) == ()


# --- workloads -----------------------------------------------------------------------------------


def test_a_workload_is_counted_in_whole_requests_beside_the_null_block():
    ledger = build_ledger(known(tiny()), Deployment(kv_cache_memory_bytes=8 * GIB))
    per_block = 16 * 8 * 8 * 256 * 2
    blocks = 8 * GIB // per_block
    answer = answer_workload(ledger, 1000, 10_000)
    assert answer.holds.low == (blocks - 1) // -(-1000 // 16)
    assert answer.fits is False
    assert answer.limit == "KV cache"
    assert answer.replicas == -(-10_000 // answer.holds.low)
    assert answer.short_bytes.low == 10_000 * 63 * per_block + per_block - 8 * GIB


def test_max_num_seqs_limits_a_workload_that_the_cache_would_hold():
    deployment = Deployment(kv_cache_memory_bytes=8 * GIB, max_num_seqs=14)
    answer = answer_workload(build_ledger(known(tiny()), deployment), 100, 20)
    assert (answer.holds.low, answer.limit, answer.fits) == (14, "max_num_seqs 14", False)
    assert answer.replicas == 2
    assert answer_workload(build_ledger(known(tiny()), deployment), 100, 14).fits is True


def test_data_parallel_replicas_share_a_workload():
    deployment = Deployment(kv_cache_memory_bytes=8 * GIB, parallel=Parallel(data=4))
    one = build_ledger(known(tiny()), replace(deployment, parallel=Parallel()))
    four = build_ledger(known(tiny()), deployment)
    assert answer_workload(four, 9000, 1).holds.low == 4 * answer_workload(one, 9000, 1).holds.low


def test_a_context_beyond_the_model_is_refused():
    ledger = build_ledger(known(tiny()), Deployment(kv_cache_memory_bytes=GIB))
    with pytest.raises(BadUsage, match="at most 32,768"):
        answer_workload(ledger, 32769, 1)
    with pytest.raises(BadUsage, match="nothing says how large"):
        answer_workload(build_ledger(known(tiny()), Deployment()), 100, 1)


def test_a_context_beyond_the_length_that_is_served_is_refused():
    """vLLM turns such a request away: saying that it fits would be an answer to no question."""
    deployment = Deployment(kv_cache_memory_bytes=8 * GIB, max_model_len=2000)
    ledger = build_ledger(known(tiny()), deployment)
    with pytest.raises(BadUsage, match=r"--context: 2,001 tokens are beyond --max-model-len"):
        answer_workload(ledger, 2001, 1)
    assert answer_workload(ledger, 2000, 1).fits is True


def test_a_context_may_go_as_far_as_scaled_positions():
    """vLLM multiplies the configured maximum by a linear factor (config/model.py)."""
    spec = tiny()
    mixer = replace(spec.layers[0].mixer, rope=Rope(1e4, 128, scaling="linear", factor=4.0))
    scaled = replace(spec, layers=tuple(replace(x, mixer=mixer) for x in spec.layers))
    ledger = build_ledger(known(scaled), Deployment(kv_cache_memory_bytes=64 * GIB))
    assert ledger.decided.longest_model_len == 4 * 32768
    assert answer_workload(ledger, 4 * 32768, 1).fits is True
    with pytest.raises(BadUsage, match="at most 131,072"):
        answer_workload(ledger, 4 * 32768 + 1, 1)


def test_a_model_without_a_maximum_length_takes_what_is_asked():
    """vLLM assumes 2,048 only where nobody says a length (_get_and_verify_max_len)."""
    spec = tiny(max_positions=0)
    deployment = Deployment(kv_cache_memory_bytes=8 * GIB, max_model_len=9000)
    ledger = build_ledger(known(spec), deployment)
    assert (ledger.decided.max_model_len, ledger.refusals) == (9000, ())
    assert answer_workload(ledger, 9000, 1).fits is True
    with pytest.raises(BadUsage, match="beyond --max-model-len"):
        answer_workload(ledger, 9001, 1)
    open_length = build_ledger(known(spec), replace(deployment, max_model_len=None))
    assert open_length.decided.max_model_len == 2048
    assert answer_workload(open_length, 9001, 1).fits is True


def test_a_workload_is_not_said_to_fit_where_no_rule_covers_the_model():
    spec = tiny(kind="encoder-decoder", encoder_layers=tiny().layers)
    ledger = build_ledger(known(spec), Deployment(), parse_gpus("B200"))
    assert answer_workload(ledger, 1000, 1).fits is None


# --- a real server -------------------------------------------------------------------------------


def test_a_real_start_up_lies_in_the_range_that_was_promised():
    """vLLM 0.31, Llama-3.1-8B, one A100 80GB, no flags: 56.21 GiB of KV cache, 460,496 tokens,
    3.51 requests of 131,072 tokens (a public start-up log)."""
    anatomy = shared("meta-llama--Meta-Llama-3.1-8B")
    ledger = build_ledger(anatomy, Deployment(), parse_gpus("A100"))
    least, most = ledger.heavy.allocation, ledger.light.allocation
    assert least.kv_cache_tokens <= 460_496 <= most.kv_cache_tokens
    assert least.max_concurrency <= 3.51 <= most.max_concurrency
    assert most.kv_cache_tokens / least.kv_cache_tokens < 1.05
    assert ledger.heavy.kv_budget_bytes / GIB <= 56.21 <= ledger.light.kv_budget_bytes / GIB


# --- numbers that peers get wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("openai--gpt-oss-120b", 65.2), ("Qwen--Qwen3-0.6B", 1.19)]
)
def test_weights_that_peers_get_wrong(name, gigabytes):
    ledger = build_ledger(shared(name), Deployment())
    assert ledger.heavy.weights.total / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_llama_405b_in_bf16_does_not_fit_eight_devices_of_80_gb():
    deployment = Deployment(parallel=Parallel(tensor=8), max_model_len=1024)
    ledger = build_ledger(
        shared("meta-llama--Meta-Llama-3.1-405B"), deployment, parse_gpus("H100:8")
    )
    assert ledger.fits is False
    assert ledger.deficit.low > 0
    assert ledger.heavy.weights.total * 8 / GIB == pytest.approx(756, rel=0.005)


def test_llama_70b_is_refused_on_three_ranks():
    with pytest.raises(BadUsage, match="64 attention heads do not divide by 3"):
        build_ledger(
            shared("meta-llama--Meta-Llama-3.1-70B"),
            Deployment(parallel=Parallel(tensor=3)),
            parse_gpus("H100:8"),
        )


def test_kv_heads_that_ranks_outnumber_are_copied():
    """Qwen3-235B has 4 KV heads: eight ranks hold 28 requests where a division says 57."""
    anatomy = shared("Qwen--Qwen3-235B-A22B")
    # One head's keys and values of 94 layers for 40,960 tokens, 28 times.
    kv = 28 * 40960 * 94 * 2 * 128 * 2 + 94 * 16 * 2 * 128 * 2
    for tensor, most in ((4, 28), (8, 28)):
        deployment = Deployment(parallel=Parallel(tensor=tensor), kv_cache_memory_bytes=kv)
        allocation = build_ledger(anatomy, deployment).heavy.allocation
        assert int(allocation.max_concurrency) == most


def test_an_fp4_checkpoint_is_packed_codes_and_scales():
    packed = build_ledger(shared("nvidia--Qwen3-235B-A22B-NVFP4"), Deployment())
    plain = build_ledger(shared("Qwen--Qwen3-235B-A22B"), Deployment())
    share = packed.heavy.weights.total / plain.heavy.weights.total
    # 4 bits and one 8-bit scale per 16 elements of 16 bits each; attention stays in 16.
    assert 4.5 / 16 < share < 0.32
