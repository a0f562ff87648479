"""Configurations of public releases: how many elements they store, and what a token's KV takes.

`releases.jsonl` holds them as they were published, old spellings and leftover keys included, with
the stated number of stored elements (`about`: within a thousandth, where buffers were counted or
the statement is rounded; LongCat's is added up by hand, without its prediction layer) and KV bytes
worked out by hand: layers × 2 × KV heads × head size × 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ullage.anatomy.config.read import read_config
from ullage.anatomy.parameters import count_parameters
from ullage.anatomy.spec import Attention
from ullage.costs.kv import kv_bytes_per_token

FILE = Path(__file__).with_name("releases.jsonl")
RELEASES = {row["name"]: row for row in map(json.loads, FILE.read_text().splitlines())}
# Only whether there is an output head is open: the release names no class.
OPEN = {"deberta-v3-base": {"architectures"}}


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_stores_what_it_states(name: str) -> None:
    release = RELEASES[name]
    made = read_config(release["config"], file=name)
    assert {u.field for u in made.spec.unknowns} == OPEN.get(name, set())
    if release["parameters"] is not None:
        wanted = release["parameters"]
        if release["about"]:
            wanted = pytest.approx(wanted, rel=1e-3)
        assert count_parameters(made.spec) == wanted
    if release["kv_bytes_per_token"] is not None:
        assert kv_bytes_per_token(made.spec, dtype="bfloat16") == release["kv_bytes_per_token"]


@pytest.mark.parametrize("name", RELEASES)
def test_nothing_of_a_release_stays_unread(name: str) -> None:
    made = read_config(RELEASES[name]["config"], file=name)
    assert set(made.unread) <= {"vocab_size", "projectors_bias"}


def rope(**changes: object) -> Any:
    made = read_config({"model_type": "gemma3_text", "dtype": "bfloat16", **changes}, file="f")
    mixers = [layer.mixer for layer in made.spec.layers[4:6]]
    assert all(isinstance(m, Attention) for m in mixers)
    return tuple(m.rope.theta for m in mixers)  # type: ignore[union-attr]


def test_a_flat_theta_wins_over_what_a_class_nests_by_kind_of_layer() -> None:
    assert rope() == (10_000, 1_000_000)
    assert rope(rope_theta=5e6) == (10_000, 5e6)
    assert rope(rope_theta=5e6, rope_local_base_freq=777.0) == (777, 5e6)
    assert rope(rope_theta=5e6, rope_scaling={"rope_type": "linear", "factor": 8.0})[0] == 10_000


@pytest.mark.parametrize("name", ["Baichuan2-13B", "falcon-rw-1b", "mpt-7b", "bloom-7b1"])
def test_slopes_stand_in_for_a_rotation(name: str) -> None:
    spec = read_config(RELEASES[name]["config"], file=name).spec
    assert spec.positions.kind == "alibi"
    assert all(x.mixer.rope is None for x in spec.layers if isinstance(x.mixer, Attention))


def test_layers_that_run_another_s_weights_store_none() -> None:
    """ALBERT with two groups: two layers' worth of weights, twelve layers' work."""
    config = RELEASES["albert-base-v2"]["config"]
    one = read_config(config, file="f").spec
    two = read_config({**config, "num_hidden_groups": 2}, file="f").spec
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert count_parameters(two) - count_parameters(one) == layer
    assert [x.weights_from for x in two.layers] == [None, *[0] * 5, None, *[6] * 5]


def test_parts_that_no_text_engine_loads_are_named_as_left_out() -> None:
    made = read_config(RELEASES["Qwen3-Omni-30B"]["config"], file="f")
    left = {s.field for s in made.sources if s.value == '"left out"'}
    assert left == {"talker_config", "code2wav_config"}


def test_layers_that_share_k_and_v_are_a_range_of_cache() -> None:
    """Hunyuan-Large's cross-layer attention: an engine may keep one cache for two layers."""
    config = {**RELEASES["Hunyuan-A13B"]["config"], "use_cla": True}
    made = read_config(config, file="f")
    low, high = (kv_bytes_per_token(s, dtype="bfloat16") for s in (made.low, made.high))
    assert high == 2 * low == 32 * 2 * 8 * 128 * 2


def test_queries_through_a_middle_are_two_matrices_and_a_norm() -> None:
    """Step-3's share_q_dim: 7168 → 2048 → 64 × 256, one key-value head of 256."""
    config = {
        "model_type": "step3_text", "architectures": ["Step3TextForCausalLM"], "hidden_size": 7168,
        "intermediate_size": 18432, "num_attention_heads": 64, "num_attention_groups": 1,
        "num_hidden_layers": 61, "max_seq_len": 65536, "vocab_size": 128815, "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 5120, "moe_num_experts": 48, "moe_top_k": 3, "rope_theta": 5e5,
        "share_expert_dim": 5120, "share_q_dim": 2048, "head_dim": 256, "torch_dtype": "bfloat16",
        "moe_layers_enum": ",".join(map(str, range(4, 60))),
    }  # fmt: skip
    made = read_config(config, file="f")
    attention = 7168 * (2048 + 2 * 256) + 2048 + 2048 * 64 * 256 + 64 * 256 * 7168
    experts = 49 * 3 * 7168 * 5120 + 48 * 7168
    layers = 61 * (attention + 2 * 7168) + 5 * 3 * 7168 * 18432 + 56 * experts
    assert not made.spec.unknowns and not made.unread
    assert count_parameters(made.spec) == layers + 2 * 128815 * 7168 + 7168
    assert kv_bytes_per_token(made.spec) == 61 * 2 * 256 * 2
