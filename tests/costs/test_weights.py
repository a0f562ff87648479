"""stored_bytes and weight_bytes: right sizes, vLLM's rules of cutting, nothing lost or invented."""

from __future__ import annotations

import json
import sys
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import (
    Anatomy,
    Attention,
    Dense,
    Experts,
    LayerSpec,
    ModelSpec,
    Norm,
    Positions,
    WeightScheme,
)
from ullage.anatomy.tensors.expected import TensorSpec, expected_tensors
from ullage.costs.deployment import Parallel
from ullage.costs.weights import (
    WeightBytes,
    all_stages,
    local_shape,
    matrix_bytes,
    stage_layers,
    stored_bytes,
    weight_bytes,
)

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "configs"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the shared configurations are absent"
)
RECORDED = json.loads((HERE / "vllm_weights.json").read_text())


@cache
def anatomy(name: str) -> Anatomy:
    raw = json.loads((SHARED / f"{name}_config.json").read_text())
    place = SHARED / f"{name}_hf_quant_config.json"
    side = json.loads(place.read_text()) if place.exists() else None
    return read_config(raw, file=name, quant_side_file=side)


def spec_of(name: str) -> ModelSpec:
    return anatomy(name).spec


# --- whole checkpoints ---------------------------------------------------------------------------

# Published or otherwise certain sizes of the files, in GB of 1e9 bytes.
SIZES = {
    "Qwen--Qwen3-0.6B": (1.19, 0.005),  # a peer counts the tied embeddings twice: 1.50
    "openai--gpt-oss-120b": (65.2, 0.002),  # a peer prints 60.4
    "meta-llama--Meta-Llama-3.1-405B": (756 * 1.073741824, 0.001),
    "meta-llama--Meta-Llama-3.1-8B": (16.06, 0.001),
    "nvidia--Llama-3.1-70B-Instruct-FP8": (72.66, 0.001),
    "moonshotai--Kimi-K2.5": (594.2, 0.002),
}


@needs_shared
@pytest.mark.parametrize("name", SIZES)
def test_known_sizes_of_checkpoints(name: str) -> None:
    size, tolerance = SIZES[name]
    assert stored_bytes(spec_of(name)).total == pytest.approx(size * 1e9, rel=tolerance)


@needs_shared
@pytest.mark.parametrize(
    "name", [p.name.removesuffix("_config.json") for p in SHARED.glob("*NVFP4_config.json")]
    if SHARED.is_dir() else []
)  # fmt: skip
def test_nvfp4_is_packed_bytes_and_scales_and_never_nothing(name: str) -> None:
    """Every element costs at least its four bits, the experts their scales on top."""
    found = anatomy(name)
    elements = sum(t.num_elements for t in expected_tensors(found.spec) if t.stack != "mtp")
    low, high = stored_bytes(found.low).total, stored_bytes(found.high).total
    assert elements * 4 / 8 < low <= high < elements * 2
    assert stored_bytes(found.low).experts == 0 or stored_bytes(found.low).experts > (
        sum(t.num_elements for t in expected_tensors(found.low) if t.shard == "expert"
            and t.stack != "mtp") * 4.5 / 8 * 0.999
    )  # fmt: skip


@needs_shared
def test_deepseek_v4_keeps_experts_in_four_bits_and_the_rest_in_eight() -> None:
    by_hand = 0
    for tensor in expected_tensors(spec_of("deepseek-ai--DeepSeek-V4-Flash")):
        if tensor.stack != "mtp" and tensor.shard == "expert":
            by_hand += tensor.num_elements // 2 + tensor.num_elements // 32
    experts = stored_bytes(spec_of("deepseek-ai--DeepSeek-V4-Flash")).experts
    routers = 43 * 256 * 4096 * 2 + 40 * 256 * 4 + 3 * 129_280 * 6 * 8
    assert experts == by_hand + routers


# --- one matrix, against tensors spelled out -----------------------------------------------------

# What each method writes for one [out, in] = [768, 1024] matrix: (bytes per element, shape) each.
OUT, IN = 768, 1024
LAYOUTS: dict[str, tuple[WeightScheme, list[tuple[int, tuple[int, ...]]]]] = {
    "fp8 in blocks": (
        WeightScheme("fp8_block", 8, 0, 32, block=(128, 128)),
        [(1, (OUT, IN)), (4, (6, 8))],
    ),
    "fp8 per tensor with an input scale": (
        WeightScheme("fp8", 8, -1, 32, tensor_scales=1),
        [(1, (OUT, IN)), (4, ()), (4, ())],
    ),
    "nvfp4: weight, weight_scale, weight_scale_2, input_scale": (
        WeightScheme("nvfp4", 4, 16, 8, tensor_scales=2),
        [(1, (OUT, IN // 2)), (1, (OUT, IN // 16)), (4, ()), (4, ())],
    ),
    "mxfp4: blocks, scales": (
        WeightScheme("mxfp4", 4, 32, 8),
        [(1, (OUT, IN // 32, 16)), (1, (OUT, IN // 32))],
    ),
    "awq: qweight, qzeros, scales": (
        WeightScheme("awq", 4, 128, 16, zero_bits=4),
        [(4, (IN, OUT // 8)), (4, (IN // 128, OUT // 8)), (2, (IN // 128, OUT))],
    ),
    "gptq: qweight, qzeros, scales, g_idx": (
        WeightScheme("gptq", 4, 128, 16, zero_bits=4, index_bits=32),
        [(4, (IN // 8, OUT)), (4, (IN // 128, OUT // 8)), (2, (IN // 128, OUT)), (4, (IN,))],
    ),
    "compressed-tensors: weight_packed, weight_scale, weight_shape": (
        WeightScheme("int4_group", 4, 32, 16, tensor_scales=4),
        [(4, (OUT, IN // 8)), (2, (OUT, IN // 32)), (8, (2,))],
    ),
    "bitsandbytes int8: weight, SCB": (
        WeightScheme("bnb_int8", 8, 0, 32),
        [(1, (OUT, IN)), (4, (OUT,))],
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_matrix_is_the_sum_of_the_tensors_that_hold_it(case: str) -> None:
    scheme, tensors = LAYOUTS[case]
    assert matrix_bytes(OUT, IN, scheme) == sum(width * prod(shape) for width, shape in tensors)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "phi3"])
def test_fp8_checkpoints_weigh_what_transformers_allocates(model_type: str) -> None:
    """transformers' own FP8 modules on the meta device, weights in bfloat16 elsewhere."""
    sys.path.insert(0, str(HERE.parent / "anatomy"))
    import transformers_models as oracle
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    config, model = oracle.short_config(model_type, None)
    with oracle.torch.device("meta"):
        packed = replace_with_fp8_linear(
            model.to(oracle.torch.bfloat16),
            modules_to_not_convert=["lm_head"],
            quantization_config=FineGrainedFP8Config(weight_block_size=(128, 128)),
            pre_quantized=True,
        )
    size = sum(t.numel() * t.element_size() for t in packed.state_dict().values())
    raw = oracle.as_json(config, model)
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert stored_bytes(read_config(raw, file="t").spec).total == size


# --- against vLLM --------------------------------------------------------------------------------

# vLLM holds these few small tensors in another width than the model's, and so than ours.
WIDER = {
    "nvidia--Llama-3.1-70B-Instruct-FP8": 2e-7,  # the scales of K and V, four bytes each
}


def recorded_spec(entry: dict[str, Any]) -> ModelSpec | None:
    if "config" in entry:
        return read_config(entry["config"], file=entry["name"]).spec
    if not SHARED.is_dir():
        return None
    raw = json.loads((SHARED / f"{entry['name']}_config.json").read_text())
    if entry["name"] in WIDER:
        return spec_of(entry["name"])
    raw.pop("quantization_config", None)
    return read_config(raw, file=entry["name"]).spec


@pytest.mark.parametrize("entry", RECORDED["weights"], ids=lambda entry: entry["name"])
def test_a_rank_holds_what_vllm_holds(entry: dict[str, Any]) -> None:
    """Parameters of vLLM 0.32 built on the meta device (tools/vllm_weights.py), to the byte."""
    spec = recorded_spec(entry)
    if spec is None:
        pytest.skip("the shared configurations are absent")
    for rank in entry["ranks"]:
        parallel = Parallel(rank["tensor"], data=rank["data"], expert=rank["expert"])
        held = weight_bytes(spec, parallel)
        tolerance = WIDER.get(entry["name"], 0.0)
        assert held.total - held.absorbed == pytest.approx(rank["bytes"], rel=tolerance, abs=0), (
            rank
        )


@pytest.mark.parametrize("case", RECORDED["pipeline"], ids=lambda c: f"{c['layers']}/{c['stages']}")
def test_stages_are_dealt_as_vllm_deals_them(case: dict[str, Any]) -> None:
    assert [list(b) for b in stage_layers(case["layers"], case["stages"])] == case["bounds"]


# --- nothing lost, nothing invented --------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Small decoders whose heads, widths and experts divide by every tensor size drawn below."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4])) * (8 // min(kv_heads, 8))
    head_dim = draw(st.sampled_from([8, 16]))
    attention = Attention(
        heads, kv_heads, head_dim, head_dim, q_bias=draw(st.booleans()),
        kv_bias=draw(st.booleans()), o_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from([None, "head"])), sinks=draw(st.booleans()),
    )  # fmt: skip
    dense = Dense(draw(st.sampled_from([64, 128])), "silu", gated=draw(st.booleans()))
    experts = Experts(
        draw(st.sampled_from([8, 12, 16])), 2, 32, "silu", gated=True,
        shared_intermediate=draw(st.sampled_from([0, 64])),
    )  # fmt: skip
    layers = tuple(
        LayerSpec(i, attention, draw(st.sampled_from([dense, experts])))
        for i in range(draw(st.integers(1, 9)))
    )
    return ModelSpec(
        model_type="llama", architecture="", family="llama", kind="decoder", hidden_size=64,
        vocab_size=draw(st.integers(1, 700)), max_positions=128, layers=layers,
        norm=Norm("rms", 1e-6), positions=Positions("rope"), tie_embeddings=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
    )  # fmt: skip


def count(tensor: TensorSpec, parallel: Parallel, rank: int = 0) -> int:
    shape, number = local_shape(tensor, parallel, rank)
    return number * prod(shape)


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.booleans())
def test_the_ranks_together_hold_everything_once_or_a_copy_each(
    spec: ModelSpec, tensor_size: int, data: int, expert: bool
) -> None:
    parallel = Parallel(tensor_size, data=data, expert=expert)
    width = tensor_size * data
    for tensor in expected_tensors(spec):
        held = sum(count(tensor, parallel, rank) for rank in range(width))
        if tensor.shard == "expert" and (expert or tensor.cut is not None):
            assert held == tensor.num_elements
        elif tensor.shard == "replicated":
            assert held == tensor.num_elements * width
        elif tensor.shard == "vocab":
            rows = tensor.shape[0]
            padded = ceil(rows / 64) * 64
            assert held == tensor.num_elements // rows * padded * data
        elif tensor.shard == "kv":
            copies = max(1, tensor_size // tensor.groups)
            assert held == tensor.num_elements * copies * data
        else:
            assert held == tensor.num_elements * data


@settings(max_examples=60, deadline=None)
@given(models(), st.booleans())
def test_more_tensor_parallelism_never_makes_a_rank_heavier(spec: ModelSpec, expert: bool) -> None:
    sizes = [weight_bytes(spec, Parallel(t, expert=expert)).total for t in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 6))
def test_the_stages_together_are_the_model_and_a_copy_of_tied_embeddings(
    spec: ModelSpec, pipeline: int
) -> None:
    pipeline = min(pipeline, len(spec.layers))
    whole = weight_bytes(spec, Parallel())
    stages = all_stages(spec, Parallel(pipeline=pipeline))
    copy = whole.embedding if spec.tie_embeddings and pipeline > 1 else 0
    assert sum(s.total for s in stages) == whole.total + copy
    heaviest = weight_bytes(spec, Parallel(pipeline=pipeline))
    assert heaviest.total == max(s.total for s in stages)
    assert weight_bytes(spec, Parallel(pipeline=pipeline), stage=0) == stages[0]


@settings(max_examples=40, deadline=None)
@given(models())
def test_one_rank_holds_the_checkpoint_and_the_vocabularys_padding(spec: ModelSpec) -> None:
    element = 4 if spec.dtype == "float32" else 2
    padding = (ceil(spec.vocab_size / 64) * 64 - spec.vocab_size) * 64 * element
    ends = 1 if spec.tie_embeddings else 2
    assert weight_bytes(spec).total == stored_bytes(spec).total + padding * ends


@settings(max_examples=30, deadline=None)
@given(models(), st.sampled_from(["float16", "float32"]))
def test_a_served_dtype_scales_every_part(spec: ModelSpec, dtype: str) -> None:
    from_element = 4 if spec.dtype == "float32" else 2
    to_element = 4 if dtype == "float32" else 2
    assert weight_bytes(spec, dtype=dtype).total * from_element == (
        weight_bytes(spec).total * to_element
    )


@needs_shared
def test_uneven_experts_weigh_most_on_the_first_ranks() -> None:
    """128 experts over 3 × 2 ranks: two ranks hold 22, four hold 21."""
    spec = spec_of("Qwen--Qwen3-235B-A22B")
    parallel = Parallel(2, data=3, expert=True)
    held = [weight_bytes(spec, parallel, rank=rank).experts for rank in range(6)]
    one = 94 * 3 * 4096 * 1536 * 2
    assert [(h - held[-1]) // one for h in held] == [1, 1, 0, 0, 0, 0]
    assert weight_bytes(spec, parallel).experts == max(held)


@needs_shared
def test_latent_attention_keeps_its_absorbed_matrices_beside_the_weights() -> None:
    """DeepSeek-V3 in vLLM: W_UK and W_UV in bfloat16, 128 heads × (128 + 128) × 512 a layer."""
    held = weight_bytes(spec_of("deepseek-ai--DeepSeek-V3"), Parallel(8))
    assert held.absorbed == 61 * (128 // 8) * 256 * 512 * 2
    assert stored_bytes(spec_of("deepseek-ai--DeepSeek-V3")).absorbed == 0


@needs_shared
def test_towers_are_cut_where_their_heads_divide() -> None:
    """Qwen3-VL-2B: 24 blocks, 16 heads, 1024 wide, MLPs of 4096. Gemma-4's vLLM never cuts."""
    spec = spec_of("Qwen--Qwen3-VL-2B-Instruct")
    whole = weight_bytes(spec).towers
    linears = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096) * 2
    assert weight_bytes(spec, Parallel(8)).towers == whole - linears * 7 // 8
    assert weight_bytes(spec, Parallel(32)).towers == whole
    gemma = spec_of("google--gemma-4-26B-A4B")
    assert weight_bytes(gemma, Parallel(8)).towers == weight_bytes(gemma).towers > 0


@needs_shared
def test_prediction_layers_are_priced_apart() -> None:
    held = weight_bytes(spec_of("deepseek-ai--DeepSeek-V3"), Parallel(8))
    assert held.mtp > 0
    assert held.with_mtp == held.total + held.mtp


def test_parts_add_up() -> None:
    parts = WeightBytes(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert (parts.total, parts.with_mtp) == (45, 55)
    assert sum(size for _, size in parts.parts()) == 55
