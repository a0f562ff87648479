"""Finding the text model, falling back to classes, and bracketing what is not known."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import Anatomy, Attention, Dense, Experts, LatentAttention
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.errors import MalformedConfig, UnsupportedModel

PLAIN: dict[str, Any] = {
    "model_type": "newcomer",
    "architectures": ["NewcomerForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def read(**changes: object) -> Anatomy:
    return read_config({**PLAIN, **changes}, file="config.json")


def attention(made: Anatomy, layer: int = 0) -> Attention:
    mixer = made.spec.layers[layer].mixer
    assert isinstance(mixer, Attention)
    return mixer


def parameters(spec: Any) -> int:
    return sum(t.num_elements for t in expected_tensors(spec))


class TestAnUnknownFamily:
    def test_is_read_by_its_standard_keys(self) -> None:
        made = read()
        assert made.spec.family == "generic"
        assert (attention(made).num_kv_heads, attention(made).head_dim) == (2, 64)

    def test_what_no_key_says_is_bracketed_and_listed(self) -> None:
        made = read()
        assert {u.field for u in made.spec.unknowns} == {"attention_bias", "qk_norm", "mlp_bias"}
        assert parameters(made.low) < parameters(made.high)
        assert parameters(made.low) <= parameters(made.spec) <= parameters(made.high)

    def test_keys_that_say_it_leave_less_unknown(self) -> None:
        made = read(attention_bias=False, mlp_bias=False, use_qk_norm=False)
        assert not made.spec.unknowns
        assert made.low is made.spec is made.high

    def test_a_gelu_mlp_may_or_may_not_have_a_gate(self) -> None:
        made = read(hidden_act="gelu")
        low, high = made.low.layers[0].feed_forward, made.high.layers[0].feed_forward
        assert isinstance(low, Dense) and isinstance(high, Dense)
        assert (low.gated, high.gated) == (False, True)

    def test_a_window_may_limit_every_layer_or_none(self) -> None:
        made = read(sliding_window=128)
        low, high = made.low.layers[0].mixer, made.high.layers[0].mixer
        assert isinstance(low, Attention) and isinstance(high, Attention)
        assert (low.window, high.window) == (128, None)
        (unknown,) = [u for u in made.spec.unknowns if u.field == "sliding_window"]
        assert "kv" in unknown.widens

    def test_layer_types_settle_the_windows(self) -> None:
        made = read(sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2)
        assert [attention(made, i).window for i in range(4)] == [128, None, 128, None]
        assert "sliding_window" not in {u.field for u in made.spec.unknowns}

    def test_latent_attention_is_recognised_by_its_keys(self) -> None:
        made = read(
            kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, q_lora_rank=96
        )
        assert isinstance(made.spec.layers[0].mixer, LatentAttention)

    def test_experts_are_recognised_by_their_keys(self) -> None:
        made = read(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
        assert all(isinstance(x.feed_forward, Experts) for x in made.spec.layers)

    @pytest.mark.parametrize(
        "key",
        ["ssm_cfg", "mamba_d_inner", "conv_width", "linear_width", "state_rank", "kv_lora_rank"],
    )
    def test_a_hint_of_another_cache_is_refused_by_name(self, key: str) -> None:
        with pytest.raises(UnsupportedModel, match=key):
            read(**{key: 16})

    def test_a_hint_that_is_switched_off_is_not(self) -> None:
        assert read(use_ssm_cache=False).spec.num_layers == 4

    def test_unread_keys_are_listed(self) -> None:
        assert read(gearbox_ratio=3).unread == ("gearbox_ratio",)

    def test_an_absent_dtype_is_a_range(self) -> None:
        config = {k: v for k, v in PLAIN.items() if k != "torch_dtype"}
        made = read_config(config, file="f")
        assert (made.low.dtype, made.high.dtype) == ("bfloat16", "float32")

    def test_an_encoder_of_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(UnsupportedModel, match="encoder"):
            read(type_vocab_size=2)
        with pytest.raises(UnsupportedModel, match="encoder-decoder"):
            read(is_encoder_decoder=True)


class TestFindingTheTextModel:
    @pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
    def test_under_any_of_its_names(self, key: str) -> None:
        inner = {**PLAIN, "model_type": "llama"}
        made = read_config({"model_type": "some_vl", key: inner}, file="f")
        assert (made.spec.family, made.spec.hidden_size) == ("llama", 512)

    def test_two_levels_down(self) -> None:
        inner = {**PLAIN, "model_type": "qwen3"}
        made = read_config({"thinker_config": {"text_config": inner}}, file="f")
        assert made.spec.family == "qwen3"
        assert any(
            s.source == "config: thinker_config.text_config.hidden_size" for s in made.sources
        )

    def test_an_absent_text_config_is_the_class_s_own(self) -> None:
        made = read_config({"model_type": "llava", "torch_dtype": "float16"}, file="f")
        assert (made.spec.family, made.spec.hidden_size) == ("llama", 4096)
        assert len(made.spec.towers) == 1

    def test_tying_is_decided_by_the_outer_configuration(self) -> None:
        inner = {**PLAIN, "model_type": "llama", "tie_word_embeddings": False}
        made = read_config({"text_config": inner, "tie_word_embeddings": True}, file="f")
        assert made.spec.tie_embeddings

    def test_the_architecture_helps_where_the_type_does_not(self) -> None:
        assert read(architectures=["LlamaForCausalLM"]).spec.family == "llama"

    def test_nothing_to_find_is_an_error_that_names_the_field(self) -> None:
        with pytest.raises(MalformedConfig, match="hidden_size: missing"):
            read_config({"model_type": "newcomer"}, file="config.json")

    def test_a_model_without_words_for_it_is_refused(self) -> None:
        with pytest.raises(UnsupportedModel, match="RWKV"):
            read_config({"model_type": "rwkv"}, file="f")


class TestTowers:
    def test_one_of_an_unknown_type_is_a_range(self) -> None:
        made = read_config(
            {
                "text_config": {**PLAIN, "model_type": "llama"},
                "vision_config": {"model_type": "eye", "hidden_size": 64, "num_hidden_layers": 2},
            },
            file="f",
        )
        assert [u.field for u in made.spec.unknowns] == ["vision_config"]
        low, high = made.low.towers[0].parameters, made.high.towers[0].parameters
        assert low is not None and high is not None and 2 * 12 * 64 * 64 <= low < high

    def test_one_without_any_size_is_refused(self) -> None:
        with pytest.raises(UnsupportedModel, match="vision_config"):
            read_config(
                {
                    "text_config": {**PLAIN, "model_type": "llama"},
                    "vision_config": {"model_type": "eye"},
                },
                file="f",
            )


ROPE = {"rope_type": "linear"}


class TestStretching:
    @pytest.mark.parametrize("factor", [0, -1, 0.0, 1e300, 1_000_001])
    def test_a_factor_that_stretches_nothing_or_without_end_is_refused(self, factor: float) -> None:
        with pytest.raises(MalformedConfig, match=r"rope_scaling\.factor.*above 0"):
            read(rope_scaling={**ROPE, "factor": factor})

    @pytest.mark.parametrize(("factor", "taken"), [(None, 1.0), (0.5, 0.5), (1e6, 1e6)])
    def test_any_other_is_taken(self, factor: float | None, taken: float) -> None:
        rope = attention(read(rope_scaling={**ROPE, "factor": factor})).rope
        assert rope is not None and rope.factor == taken


class TestALengthThatNothingSays:
    def test_is_none_and_not_a_guess(self) -> None:
        unsaid = {k: v for k, v in PLAIN.items() if k != "max_position_embeddings"}
        assert read_config(unsaid, file="config.json").spec.max_positions == 0

    def test_of_a_class_with_a_default_is_that_default(self) -> None:
        config = {k: v for k, v in PLAIN.items() if k != "max_position_embeddings"}
        made = read_config({**config, "model_type": "llama"}, file="config.json")
        source = {s.field: s.source for s in made.sources}["max_position_embeddings"]
        assert made.spec.max_positions == 2048 and source.startswith("default")
