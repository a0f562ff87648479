"""The real configurations: every one gives a spec, with nothing unread and nothing unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import (
    Anatomy,
    Attention,
    CompressedAttention,
    Dense,
    Experts,
    LatentAttention,
    LinearAttention,
    Mamba,
    ModelSpec,
    NoFeedForward,
    NoMixer,
)
from ullage.costs.weights import stored_bytes

SHARED = Path(__file__).parents[3] / "shared" / "configs"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared configurations are absent")
NAMES = sorted(
    path.name.removesuffix("_config.json")
    for path in SHARED.glob("*_config.json")
    if not path.name.endswith("hf_quant_config.json")
)

# What is not known, and why.
KNOWN_UNKNOWNS = {
    "MiniMaxAI--MiniMax-M3": {"num_mtp_modules"},
    # The released files say neither fp4 nor fp8 for the experts; quantization.py brackets both.
    "sgl-project--DeepSeek-V4-Flash-FP8": {"expert_dtype"},
    "sgl-project--DeepSeek-V4-Pro-FP8": {"expert_dtype"},
    # Their side files list no excluded modules, though some must be.
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": {"quantization.exclude_modules"},
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": {"quantization.exclude_modules"},
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": {"quantization.exclude_modules"},
}


def anatomy(name: str) -> Anatomy:
    side = SHARED / f"{name}_hf_quant_config.json"
    return read_config(
        json.loads((SHARED / f"{name}_config.json").read_text()),
        file=f"{name}_config.json",
        quant_side_file=json.loads(side.read_text()) if side.exists() else None,
    )


def spec(name: str) -> ModelSpec:
    return anatomy(name).spec


def mixers(model: ModelSpec, kind: type) -> list[int]:
    return [layer.index for layer in model.layers if isinstance(layer.mixer, kind)]


def sparse(model: ModelSpec) -> list[int]:
    return [x.index for x in model.layers if isinstance(x.feed_forward, Experts)]


def one(items: Iterable[object]) -> object:
    distinct = set(items)
    assert len(distinct) == 1, distinct
    return distinct.pop()


def test_the_configurations_are_there() -> None:
    assert len(NAMES) == 61


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_unread_and_nothing_unknown(name: str) -> None:
    made = anatomy(name)
    assert made.unread == ()
    assert {u.field for u in made.spec.unknowns} == KNOWN_UNKNOWNS.get(name, set())
    if not made.spec.unknowns:
        assert made.low is made.spec is made.high


@pytest.mark.parametrize("name", NAMES)
def test_every_source_names_the_file_a_class_or_a_derivation(name: str) -> None:
    made = anatomy(name)
    assert made.sources
    for source in made.sources:
        kind, _, rest = source.source.partition(": ")
        assert kind in ("config", "default", "derived") and rest, source
    by_field = {
        s.field.rpartition(".")[2]: s for s in made.sources if "vision_config" not in s.field
    }
    assert by_field["hidden_size"].source.startswith("config: ")
    assert by_field["hidden_size"].value == str(made.spec.hidden_size)


class TestQwen3:
    def test_dense(self) -> None:
        model = spec("Qwen--Qwen3-0.6B")
        mixer = one(layer.mixer for layer in model.layers)
        assert isinstance(mixer, Attention)
        assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (16, 8, 128)
        assert mixer.qk_norm == "head" and not mixer.q_bias and mixer.window is None
        assert model.tie_embeddings
        assert one(layer.feed_forward for layer in model.layers) == Dense(3072, "silu", True)

    def test_experts(self) -> None:
        model = spec("Qwen--Qwen3-235B-A22B")
        experts = one(layer.feed_forward for layer in model.layers)
        assert isinstance(experts, Experts)
        assert (experts.num_experts, experts.top_k, experts.intermediate) == (128, 8, 1536)
        assert experts.shared_intermediate == 0 and not experts.score_correction_bias

    def test_the_nested_text_model_gives_the_dtype(self) -> None:
        model = spec("Qwen--Qwen3-VL-8B-Instruct")
        assert model.dtype == "bfloat16" and model.num_layers == 36
        (tower,) = model.towers
        assert (tower.modality, tower.num_layers, tower.hidden_size) == ("vision", 27, 1152)

    def test_every_fourth_layer_of_qwen3_5_is_attention(self) -> None:
        model = spec("Qwen--Qwen3.5-27B")
        assert mixers(model, Attention) == list(range(3, 64, 4))
        delta = model.layers[0].mixer
        assert delta == LinearAttention("gated_delta_net", 16, 48, 128, 128, 4, "float32")
        full = model.layers[3].mixer
        assert isinstance(full, Attention)
        assert full.output_gate == "element"
        assert full.rope is not None
        assert (full.rope.rotary_dim, full.rope.sections) == (64, (11, 11, 10))
        assert len(model.mtp_layers) == 1 and model.norm.unit_offset

    def test_the_shared_expert_of_qwen3_5_has_a_gate(self) -> None:
        experts = spec("Qwen--Qwen3.5-122B-A10B").layers[0].feed_forward
        assert isinstance(experts, Experts)
        assert (experts.shared_intermediate, experts.shared_gate) == (1024, True)


class TestLatentAttention:
    def test_deepseek_v3(self) -> None:
        model = spec("deepseek-ai--DeepSeek-V3")
        mixer = one(layer.mixer for layer in model.layers)
        assert isinstance(mixer, LatentAttention)
        assert (mixer.kv_lora_rank, mixer.qk_rope_head_dim, mixer.q_lora_rank) == (512, 64, 1536)
        assert mixer.indexer is None
        assert sparse(model) == list(range(3, 61))
        experts = model.layers[-1].feed_forward
        assert isinstance(experts, Experts)
        assert experts.shared_intermediate == 2048 and experts.score_correction_bias
        assert len(model.mtp_layers) == 1

    def test_v3_2_adds_an_indexer(self) -> None:
        mixer = spec("deepseek-ai--DeepSeek-V3.2").layers[0].mixer
        assert isinstance(mixer, LatentAttention) and mixer.indexer is not None
        assert (mixer.indexer.num_heads, mixer.indexer.head_dim, mixer.indexer.topk) == (
            64,
            128,
            2048,
        )

    def test_glm_5_2_shares_its_indexers(self) -> None:
        own = [
            layer.index
            for layer in spec("zai-org--GLM-5.2").layers
            if isinstance(layer.mixer, LatentAttention)
            and layer.mixer.indexer is not None
            and not layer.mixer.indexer.shared
        ]
        assert own == [0, 1, 2, *range(6, 78, 4)]
        assert all(
            isinstance(x.mixer, LatentAttention) and x.mixer.indexer and not x.mixer.indexer.shared
            for x in spec("zai-org--GLM-5").layers
        )

    def test_kimi_k2_is_found_inside_kimi_k2_5(self) -> None:
        outer, inner = spec("moonshotai--Kimi-K2.5"), spec("moonshotai--Kimi-K2-Instruct")
        assert outer.family == inner.family == "deepseek_v3"
        assert [x.feed_forward for x in outer.layers] == [x.feed_forward for x in inner.layers]
        assert len(outer.towers) == 1 and not inner.towers


class TestDeepSeekV4:
    def test_ratios_windows_and_hash_layers(self) -> None:
        model = spec("deepseek-ai--DeepSeek-V4-Flash")
        ratios = [x.mixer.ratio for x in model.layers if isinstance(x.mixer, CompressedAttention)]
        assert ratios[:4] == [0, 0, 4, 128] and len(ratios) == 43
        indexed = [
            x.mixer.ratio
            for x in model.layers
            if isinstance(x.mixer, CompressedAttention) and x.mixer.indexer is not None
        ]
        assert set(indexed) == {4}
        hashed = [
            x.index
            for x in model.layers
            if isinstance(x.feed_forward, Experts) and x.feed_forward.hash_routed
        ]
        assert hashed == [0, 1, 2]
        assert model.residual_streams == 4
        assert len(model.mtp_layers) == 1

    def test_each_kind_of_layer_has_its_own_theta(self) -> None:
        model = spec("deepseek-ai--DeepSeek-V4-Flash")
        thetas = {
            x.mixer.ratio: x.mixer.rope.theta
            for x in model.layers
            if isinstance(x.mixer, CompressedAttention) and x.mixer.rope is not None
        }
        assert thetas == {0: 10_000.0, 4: 160_000.0, 128: 160_000.0}

    def test_absent_keys_are_answered_by_the_class(self) -> None:
        made = anatomy("sgl-project--DeepSeek-V4-Flash-FP8")
        assert made.spec.norm.eps == 1e-6
        sources = {s.field: s.source for s in made.sources}
        assert sources["norm_eps"].startswith("default: DeepseekV4Config (transformers ")


class TestHybrids:
    def test_nemotron_h_has_ten_attention_layers(self) -> None:
        model = spec("nvidia--Nemotron-H-56B-Base-8K")
        assert len(mixers(model, Attention)) == 10
        assert len(mixers(model, Mamba)) == 54
        assert len(mixers(model, NoMixer)) == 54
        mamba = model.layers[0].mixer
        assert isinstance(mamba, Mamba)
        assert (mamba.d_inner, mamba.num_heads, mamba.d_state, mamba.n_groups) == (
            256 * 64,
            256,
            256,
            8,
        )
        assert isinstance(model.layers[0].feed_forward, NoFeedForward)
        assert model.positions.kind == "none"

    @pytest.mark.parametrize("kind", ["FP8", "NVFP4"])
    def test_nemotron_3_ultra_works_in_a_latent(self, kind: str) -> None:
        model = spec(f"nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-{kind}")
        assert model.num_layers == 108
        experts = model.layers[1].feed_forward
        assert isinstance(experts, Experts)
        assert (experts.latent, experts.num_experts, experts.top_k) == (2048, 512, 22)
        assert experts.shared_intermediate == 10_240 and not experts.gated
        assert [type(x.mixer) for x in model.mtp_layers] == [Attention, NoMixer]


class TestWindowsAndChunks:
    def test_gpt_oss_alternates(self) -> None:
        model = spec("openai--gpt-oss-120b")
        windows = [x.mixer.window for x in model.layers if isinstance(x.mixer, Attention)]
        assert windows == [128, None] * 18
        mixer = model.layers[0].mixer
        assert isinstance(mixer, Attention)
        assert mixer.sinks and mixer.q_bias and mixer.kv_bias and mixer.o_bias
        experts = model.layers[0].feed_forward
        assert isinstance(experts, Experts) and experts.bias and experts.router_bias

    def test_gemma_4_has_two_head_sizes(self) -> None:
        model = spec("google--gemma-4-26B-A4B")
        local, wide = model.layers[0].mixer, model.layers[5].mixer
        assert isinstance(local, Attention) and isinstance(wide, Attention)
        assert (local.head_dim, local.num_kv_heads, local.window, local.k_eq_v) == (
            256,
            8,
            1024,
            False,
        )
        assert (wide.head_dim, wide.num_kv_heads, wide.window, wide.k_eq_v) == (512, 2, None, True)
        assert wide.rope is not None and local.rope is not None
        assert (wide.rope.scaling, wide.rope.rotary_dim) == ("proportional", 128)
        assert (wide.rope.theta, local.rope.theta) == (1e6, 1e4)
        assert one(layer.parallel_dense for layer in model.layers) == Dense(
            2112, "gelu_pytorch_tanh", True
        )
        assert model.logit_soft_cap == 30.0 and model.norm.place == "sandwich"

    def test_llama_4_rotates_where_it_is_chunked(self) -> None:
        model = spec("meta-llama--Llama-4-Scout-17B-16E-Instruct")
        full = [
            x.index for x in model.layers if isinstance(x.mixer, Attention) and not x.mixer.chunk
        ]
        still = [
            x.index for x in model.layers if isinstance(x.mixer, Attention) and not x.mixer.rope
        ]
        assert full == still == list(range(3, 48, 4))
        (tower,) = model.towers
        assert tower.hidden_size == 768  # the class's default: this file has no vision_config

    def test_step_3_7(self) -> None:
        model = spec("stepfun-ai--Step-3.7-Flash-FP8")
        windows = [x.mixer.window for x in model.layers if isinstance(x.mixer, Attention)]
        assert windows[:5] == [None, 512, 512, 512, None]
        assert sparse(model) == list(range(3, 45)) and len(model.mtp_layers) == 3

    def test_minimax_m3_indexes_blocks(self) -> None:
        model = spec("MiniMaxAI--MiniMax-M3")
        first, last = model.layers[0].mixer, model.layers[-1].mixer
        assert isinstance(first, Attention) and isinstance(last, Attention)
        assert first.sparse_index is None and last.sparse_index is not None
        assert (last.sparse_index.topk, last.sparse_index.block) == (16, 128)
        assert sparse(model) == list(range(3, 60))
        assert model.layers[0].feed_forward == Dense(12_288, "swigluoai", True)

    def test_keys_that_count_prediction_layers_differently_make_a_range(self) -> None:
        """MiniMax-M3 says 7 modules and 1 layer; vLLM 0.32 builds the modules."""
        found = anatomy("MiniMaxAI--MiniMax-M3")
        specs = (found.low, found.spec, found.high)
        assert [len(each.mtp_layers) for each in specs] == [1, 7, 7]
        (unknown,) = found.spec.unknowns
        assert unknown.field == "num_mtp_modules" and "7" in unknown.found
        low, high = (stored_bytes(each) for each in (found.low, found.high))
        assert 7 * low.mtp == high.mtp > 0 and low.total == high.total
        agreed = spec("MiniMaxAI--MiniMax-M2.5")
        assert len(agreed.mtp_layers) == 3 and not agreed.unknowns

    def test_a_window_that_is_switched_off_is_none(self) -> None:
        model = spec("XiaomiMiMo--MiMo-7B-Base")  # sliding_window 32768, use_sliding_window false
        assert all(isinstance(x.mixer, Attention) and x.mixer.window is None for x in model.layers)
        assert len(model.mtp_layers) == 1


def test_llama_3_1_scales_its_rope() -> None:
    mixer = spec("meta-llama--Meta-Llama-3.1-405B").layers[0].mixer
    assert isinstance(mixer, Attention) and mixer.rope is not None
    rope = mixer.rope
    assert (rope.scaling, rope.factor, rope.original_max_positions) == ("llama3", 8.0, 8192)
    assert dict(rope.parameters) == {"high_freq_factor": 4.0, "low_freq_factor": 1.0}
