"""Rotary angles of every scaling kind against transformers' own, tables, rotation, fingerprints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.families import COMMON, write_byte_tokenizer
from ullage.anatomy.spec import Attention, Dense, LayerSpec, ModelSpec, Norm, Positions, Rope
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.positions.rope import RotaryTables, rotary_tables
from ullage.engine.positions.scaling import (
    Reach,
    length_note,
    model_rope_fingerprint,
    rope_angles,
    rope_fingerprint,
)
from ullage.errors import UnsupportedModel

LLAMA3 = Rope(
    500_000.0,
    128,
    scaling="llama3",
    factor=8.0,
    original_max_positions=8192,
    parameters=(("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
)
SHORT = tuple(1.0 + 0.01 * pair for pair in range(32))
LONG = tuple(1.0 + 0.75 * pair for pair in range(32))
LONGROPE = Rope(
    10_000.0,
    64,
    scaling="longrope",
    original_max_positions=4096,
    parameters=(("long_factor", LONG), ("short_factor", SHORT)),
)
MAX_POSITIONS = 131_072
# Name → the rope, the share of head_dim that turns.
ROPES = {
    "default": (Rope(10_000.0, 64), 1.0),
    "default, partial": (Rope(10_000.0, 16), 0.25),
    "linear": (Rope(10_000.0, 64, scaling="linear", factor=4.0), 1.0),
    "dynamic": (Rope(10_000.0, 64, scaling="dynamic", factor=4.0), 1.0),
    "llama3": (LLAMA3, 1.0),
    "yarn": (Rope(1e6, 128, scaling="yarn", factor=4.0, original_max_positions=32_768), 1.0),
    "yarn, gpt-oss": (
        Rope(
            150_000.0,
            64,
            scaling="yarn",
            factor=32.0,
            original_max_positions=4096,
            parameters=(("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", False)),
        ),
        1.0,
    ),
    "yarn, DeepSeek": (
        Rope(
            10_000.0,
            64,
            scaling="yarn",
            factor=40.0,
            original_max_positions=4096,
            parameters=(
                *(("beta_fast", 32.0), ("beta_slow", 1.0)),
                *(("mscale", 1.0), ("mscale_all_dim", 0.7)),
            ),
        ),
        1.0,
    ),
    "yarn, attention factor": (
        Rope(
            10_000.0,
            64,
            scaling="yarn",
            factor=8.0,
            original_max_positions=2048,
            parameters=(("attention_factor", 0.75),),
        ),
        1.0,
    ),
    "longrope": (LONGROPE, 1.0),
    "longrope, partial": (replace(LONGROPE, theta=1e5), 0.5),
    "proportional": (Rope(1e6, 32, scaling="proportional"), 0.25),
    "proportional, factor": (Rope(1e6, 32, scaling="proportional", factor=8.0), 0.25),
}


def _theirs(rope: Rope, share: float, num_positions: int) -> tuple[np.ndarray, float]:
    """Frequencies (float32) and attention factor as transformers computes them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    head_dim = round(rope.rotary_dim / share)
    parameters = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    parameters |= {
        key: list(value) if isinstance(value, tuple) else value for key, value in rope.parameters
    }
    if rope.scaling in ("linear", "dynamic", "yarn", "llama3") or rope.factor != 1.0:
        parameters["factor"] = rope.factor
    if rope.original_max_positions is not None:
        parameters["original_max_position_embeddings"] = rope.original_max_positions
    if share != 1.0:
        parameters["partial_rotary_factor"] = share
    if rope.scaling == "default":  # Llama's own function knows no partial rotation
        head_dim = rope.rotary_dim
        del parameters["rope_type"]
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=parameters,
    )
    if rope.scaling == "default":
        return LlamaRotaryEmbedding(config).inv_freq.double().numpy(), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu", num_positions)
    return frequencies.double().numpy(), factor


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("num_positions", [2048, MAX_POSITIONS])
def test_angles_equal_those_of_transformers(name: str, num_positions: int) -> None:
    rope, share = ROPES[name]
    frequencies, factor = _theirs(rope, share, num_positions)
    reach = Reach(num_positions, MAX_POSITIONS, round(rope.rotary_dim / share))
    ours = rope_angles(rope, reach)
    # Theirs are float32, the powers too: a few units in the last place.
    np.testing.assert_allclose(ours.frequencies, frequencies, rtol=3e-6)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_a_dynamic_base_grows_beyond_what_the_model_was_made_for() -> None:
    rope, share = ROPES["dynamic"]
    frequencies, _ = _theirs(rope, share, 4 * MAX_POSITIONS)
    ours = rope_angles(rope, Reach(4 * MAX_POSITIONS, MAX_POSITIONS, 64)).frequencies
    np.testing.assert_allclose(ours, frequencies, rtol=3e-6)
    assert ours[-1] < rope_angles(rope, Reach(64, MAX_POSITIONS, 64)).frequencies[-1] / 3


def test_alpha_stretches_a_dynamic_base_at_any_length() -> None:
    """Hunyuan: theta · alpha^(dim / (dim − 2)), as vLLM 0.32's dynamic_ntk_alpha_rope.py has it."""
    rope = Rope(10_000.0, 128, scaling="dynamic", parameters=(("alpha", 1000.0),))
    stretched = 10_000.0 * 1000.0 ** (128 / 126)
    ours = rope_angles(rope, Reach(16, 0, 128)).frequencies
    np.testing.assert_allclose(ours, stretched ** (-np.arange(64) / 64), rtol=1e-12)


def test_longrope_takes_the_long_factors_at_once_when_the_limit_lies_above_the_original() -> None:
    """One set for a whole server: keys that are cached keep their angles while a request grows."""
    plain = 10_000.0 ** (-np.arange(32) / 32)
    for limit, divisors in ((4096, SHORT), (4097, LONG)):
        angles = rope_angles(LONGROPE, Reach(limit, MAX_POSITIONS, 64))
        np.testing.assert_allclose(angles.frequencies, plain / np.array(divisors), rtol=1e-12)
        grown = math.sqrt(1 + math.log(MAX_POSITIONS / 4096) / math.log(4096))
        assert angles.attention_factor == pytest.approx(grown, rel=1e-12)


def _tables(rope: Rope, num_positions: int) -> RotaryTables:
    return rotary_tables(rope_angles(rope, Reach(num_positions, 0, 64)), num_positions)


def test_angles_are_exact_at_the_last_of_many_positions() -> None:
    rope = Rope(10_000.0, 8)
    tables = _tables(rope, 131_072)
    position = 131_071
    for pair in range(4):
        angle = math.fmod(position * 10_000.0 ** (-2 * pair / 8), 2 * math.pi)
        assert tables.cos_ND[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert tables.sin_ND[position, pair + 4].item() == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_pairs_as_complex_numbers(interleaved: bool) -> None:
    x = torch.randn(5, 3, 8)
    rope = Rope(100.0, 8, interleaved=interleaved)
    tables = rotary_tables(rope_angles(rope, Reach(9, 0, 8)), 9)
    positions = torch.tensor([8, 0, 3, 3, 1])
    turned = tables.at(positions)(x)
    angles = positions[:, None] * 100.0 ** (-torch.arange(4) / 4)
    turns = torch.polar(torch.ones(5, 4), angles)[:, None]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :4], x[..., 4:])
    expected = torch.complex(first, second) * turns
    ours = (
        (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :4], turned[..., 4:])
    )
    torch.testing.assert_close(ours[0], expected.real)
    torch.testing.assert_close(ours[1], expected.imag)


def test_the_attention_factor_lengthens_what_turns() -> None:
    rope, _ = ROPES["yarn"]
    tables = rotary_tables(rope_angles(rope, Reach(3, MAX_POSITIONS, 128)), 3)
    x = torch.randn(3, 2, 128)
    turned = tables.at(torch.arange(3))(x)
    factor = 0.1 * math.log(4.0) + 1.0
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1) * factor)


def test_partial_rotation_leaves_the_rest() -> None:
    x = torch.randn(5, 3, 12)
    turn = _tables(Rope(100.0, 8), 5).at(torch.arange(5))
    turned = turn(x)
    torch.testing.assert_close(turned[..., :8], turn(x[..., :8].contiguous()))
    assert torch.equal(turned[..., 8:], x[..., 8:])


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        (Rope(1e4, 64, scaling="made-up"), "rope_scaling"),
        (Rope(1e4, 64, sections=(8, 12, 12)), "mrope_section"),
        (Rope(1e4, 64, scaling="llama3"), "low_freq_factor"),
        (Rope(1e4, 64, scaling="yarn"), "original_max_position_embeddings"),
        (
            Rope(1e4, 64, scaling="yarn", parameters=(("llama_4_scaling_beta", 0.1),)),
            "rope_scaling",
        ),
        (Rope(1e4, 64, scaling="dynamic", factor=2.0), "max_position_embeddings"),
        (replace(LONGROPE, rotary_dim=32), "short_factor"),
        (replace(LONGROPE, parameters=()), "short_factor"),
        (Rope(1e4, 7), "rotary_dim"),
        (Rope(1e4, 0), "rotary_dim"),
    ],
)
def test_what_is_not_known_is_refused_by_name(rope: Rope, field: str) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        rope_angles(rope, Reach(4, 0, 64))


def test_a_limit_that_chooses_the_angles_is_said() -> None:
    def spec(rope: Rope | None) -> ModelSpec:
        mixer = Attention(2, 2, 64, 64, rope=rope)
        layers = (LayerSpec(0, mixer, Dense(8, "silu", True)),)
        return ModelSpec(
            *("llama", "LlamaForCausalLM", "llama", "decoder", 128, 16, MAX_POSITIONS, layers),
            *(Norm("rms", 1e-5), Positions("rope"), True, "float32"),
        )

    assert "long factors" in str(length_note(spec(LONGROPE), 4097))
    assert "short factors" in str(length_note(spec(LONGROPE), 4096))
    for rope in (None, Rope(1e4, 64), ROPES["yarn"][0]):
        assert length_note(spec(rope), 4097) is None
    # One fingerprint over all layers, none where nothing turns.
    assert model_rope_fingerprint(spec(None), 64) is None
    assert model_rope_fingerprint(spec(LONGROPE), 64) != model_rope_fingerprint(
        spec(LONGROPE), 8192
    )


def test_fingerprints_tell_apart_what_turns_otherwise() -> None:
    def fingerprint(rope: Rope, limit: int = 4096) -> str:
        return rope_fingerprint([rope_angles(rope, Reach(limit, MAX_POSITIONS, 64))])

    base = Rope(10_000.0, 64)
    others = [
        replace(base, theta=10_001.0),
        replace(base, rotary_dim=32),
        replace(base, interleaved=True),
        replace(base, scaling="linear", factor=1.000_000_1),
        ROPES["yarn"][0],
        LONGROPE,
    ]
    prints = [fingerprint(rope) for rope in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(replace(base, scaling="linear", factor=1.0)) == fingerprint(base)
    # The same model served with two limits turns otherwise, and only for such kinds.
    assert fingerprint(LONGROPE, 4096) != fingerprint(LONGROPE, 8192)
    assert fingerprint(base, 4096) == fingerprint(base, 8192)


def test_fingerprints_forgive_the_last_bits_of_a_power_function() -> None:
    angles = rope_angles(Rope(500_000.0, 128), Reach(16, 16, 128))
    nudged = replace(angles, frequencies=np.nextafter(angles.frequencies, 1.0))
    rough = replace(angles, frequencies=angles.frequencies.astype(np.float32).astype(np.float64))
    assert rope_fingerprint([nudged]) == rope_fingerprint([angles])
    assert rope_fingerprint([rough]) != rope_fingerprint([angles])
    assert rope_fingerprint([angles, None]) != rope_fingerprint([None, angles])


WHOLE = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope-short": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 16 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("name", WHOLE)
@torch.inference_mode()
def test_a_whole_model_turns_as_that_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    parameters = {**WHOLE[name], "rope_theta": 10_000.0}
    model = LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters=parameters)).eval()
    model.save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    prompt = tuple(torch.randint(3, 250, (90,)).tolist())
    engine = Engine.load(tmp_path, EngineOptions(kv_cache_memory_bytes=1 << 22, max_model_len=100))
    theirs = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(engine.prompt_logits(prompt), theirs, rtol=1e-4, atol=1e-4)
    # Without the scaling it is another model.
    plain = LlamaForCausalLM(LlamaConfig(**COMMON)).eval()
    plain.load_state_dict(model.state_dict())
    differs = (plain(torch.tensor([prompt])).logits[0] - theirs).abs().max().item() > 0.01
    assert differs == (name != "dynamic")  # which changes nothing within the model's own length
