"""KV bytes from a model: what a real vLLM allocated, and silence where it cannot be sure."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ullage.anatomy import read_config
from ullage.anatomy.spec import Anatomy
from ullage.costs.deployment import Deployment, Parallel
from ullage.telemetry.kv_bytes import ModelBytes, with_model
from ullage.telemetry.reading import Told, snapshot_of
from ullage.telemetry.snapshot import Snapshot

FIXTURES = Path(__file__).parents[1] / "planning" / "fixtures" / "vllm-0.32-cpu.jsonl"
RECORDED = [json.loads(line) for line in FIXTURES.read_text(encoding="utf-8").splitlines()]
SERVERS = [
    line
    for line in RECORDED
    if line["case"]["usage"] == "server"
    and line["answer"].get("groups")
    and "kv_cache_memory_bytes" in line["case"]["limits"]
]
PAGES = Path(__file__).parent / "pages"
# What vllm-0.32-*.prom served.
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "head_dim": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}
TINY_BLOCK_BYTES = 32 * 3 * 2 * 2 * 64 * 4  # tokens, layers, K and V, heads, elements, float32


def anatomy_of(config: dict[str, Any]) -> Anatomy:
    return read_config(config, file="config.json")


def page_of(line: dict[str, Any], *, ratio: float = 0.25, **other: object) -> bytes:
    answer, limits = line["answer"], line["case"]["limits"]
    labels = {
        "block_size": answer["block_size"],
        "cache_dtype": limits.get("kv_cache_dtype", "auto"),
        "enable_prefix_caching": answer["enable_prefix_caching"],
        "engine": 0,
        "kv_cache_memory_bytes": limits["kv_cache_memory_bytes"],
        "kv_cache_size_tokens": answer["kv_cache_size_tokens"],
        "num_gpu_blocks": answer["num_gpu_blocks"],
        "num_gpu_blocks_override": None,
        "user_specified_block_size": limits.get("block_size") is not None,
    } | other
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{text}}} 1\nvllm:kv_cache_usage_perc {ratio}\n".encode()


def read(line: dict[str, Any], **other: Any) -> Snapshot:
    told = Told(version="0.32.0", max_model_len=line["answer"]["max_model_len"])
    return snapshot_of(page_of(line, **other), time_s=0.0, told=told)


def flags(line: dict[str, Any]) -> Deployment:
    limits = line["case"]["limits"]
    return Deployment(
        platform="cpu",
        dtype=limits.get("dtype"),
        max_num_seqs=limits.get("max_num_seqs"),
        max_num_batched_tokens=limits.get("max_num_batched_tokens"),
    )


@pytest.mark.parametrize("line", SERVERS, ids=lambda line: line["case"]["name"])
def test_bytes_are_those_that_a_real_vllm_allocated(line: dict[str, Any]) -> None:
    snapshot = with_model(read(line), anatomy_of(line["case"]["config"]), deployment=flags(line))
    answer = line["answer"]
    assert snapshot.gauges["kv_total_bytes"] == answer["kv_cache_bytes"]
    # All but the null block.
    usable = answer["kv_cache_bytes"] / answer["num_gpu_blocks"] * (answer["num_gpu_blocks"] - 1)
    assert math.isclose(snapshot.gauges["kv_used_bytes"], 0.25 * usable)
    assert "kv_total_bytes" not in snapshot.approximate
    assert "bytes of a block of this model" in snapshot.sources["kv_total_bytes"]
    assert "kv_total_bytes" not in snapshot.absent and "kv_used_bytes" not in snapshot.absent
    assert snapshot.gauges["kv_total_tokens"] == answer["kv_cache_size_tokens"]
    assert snapshot.sources["kv_total_tokens"].startswith("vllm:cache_config_info")


PLAIN = next(line for line in SERVERS if len(line["answer"]["groups"]) == 1)
HYBRID = next(line for line in SERVERS if len(line["answer"]["groups"]) > 1)
STATES = next(
    line for line in SERVERS if any(g["kind"] == "MambaSpec" for g in line["answer"]["groups"])
)


def test_before_vllm_tells_its_tokens_they_follow_from_its_blocks() -> None:
    for line in (PLAIN, HYBRID):
        old = read(line, kv_cache_size_tokens=None)
        assert "kv_total_tokens" in old.absent
        snapshot = with_model(old, anatomy_of(line["case"]["config"]), deployment=flags(line))
        assert snapshot.gauges["kv_total_tokens"] == line["answer"]["kv_cache_size_tokens"]
        assert "kv_total_tokens" not in snapshot.absent
        assert "kv_used_tokens" in snapshot.approximate


def test_the_tokens_of_a_hybrid_wait_for_its_longest_request() -> None:
    page = page_of(HYBRID, kv_cache_size_tokens=None)
    snapshot = with_model(
        snapshot_of(page, time_s=0.0),
        anatomy_of(HYBRID["case"]["config"]),
        deployment=flags(HYBRID),
    )
    assert snapshot.gauges["kv_total_bytes"] == HYBRID["answer"]["kv_cache_bytes"]
    assert "kv_total_tokens" not in snapshot.gauges


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"num_gpu_blocks": "None"}, "does not tell how many KV blocks"),
        ({"num_gpu_blocks": 1000}, "it says"),
        ({"kv_cache_size_tokens": 1}, "another model or with other flags"),
        ({"block_size": 48, "user_specified_block_size": False}, "the server's has 48"),
        ({"kv_cache_memory_bytes": 1 << 20}, "another model, dtype or parallel size"),
        ({"cache_dtype": "fp4_of_tomorrow"}, "fp4_of_tomorrow"),
    ],
)
def test_a_server_that_contradicts_the_model_gets_no_bytes(other: dict[str, Any], why: str) -> None:
    before = read(PLAIN, **other)
    snapshot = with_model(before, anatomy_of(PLAIN["case"]["config"]), deployment=flags(PLAIN))
    assert "kv_total_bytes" not in snapshot.gauges
    for name in ("kv_total_bytes", "kv_used_bytes"):
        assert why in snapshot.absent[name]
        assert snapshot.absent[name].startswith(before.absent[name])


@pytest.mark.parametrize("line", SERVERS, ids=lambda line: line["case"]["name"])
@pytest.mark.parametrize("told", [True, False], ids=["told its memory", "not told"])
def test_bytes_are_right_without_any_flag(line: dict[str, Any], told: bool) -> None:
    """As `watch --model` knows a server: neither its batch nor its dtype nor parallel sizes."""
    said = read(line) if told else read(line, kv_cache_memory_bytes=None)
    snapshot = with_model(said, anatomy_of(line["case"]["config"]))
    assert snapshot.gauges["kv_total_bytes"] == line["answer"]["kv_cache_bytes"]
    assert "kv_total_bytes" not in snapshot.absent
    source = snapshot.sources["kv_total_bytes"]
    auto = line["case"]["limits"]["kv_cache_dtype"] == "auto"
    assert ("the dtype of the model's configuration" in source) == auto
    assert "--tensor-parallel-size 1" in source
    if told:
        sure = "which its memory and blocks bear out" in source
        assert sure == ("kv_total_bytes" not in snapshot.approximate)
    else:
        assert "which the server does not tell" in source
        assert {"kv_total_bytes", "kv_used_bytes"} <= snapshot.approximate


def test_a_dtype_that_was_overridden_follows_from_memory_and_blocks() -> None:
    """Of a real vLLM that was started with --dtype float32 on a model of bfloat16."""
    (line,) = (one for one in RECORDED if one["answer"].get("dtype") == "float32")
    assert line["case"]["config"].get("dtype", "bfloat16") == "bfloat16"
    model = anatomy_of(line["case"]["config"])
    snapshot = with_model(read(line), model)
    assert snapshot.gauges["kv_total_bytes"] == line["answer"]["kv_cache_bytes"]
    assert "taken: --dtype float32" in snapshot.sources["kv_total_bytes"]
    # Told nothing of its memory, the dtype is only supposed, and that is said.
    snapshot = with_model(read(line, kv_cache_memory_bytes=None), model)
    if "kv_total_bytes" in snapshot.gauges:
        assert "the dtype of the model's configuration" in snapshot.sources["kv_total_bytes"]
        assert "kv_total_bytes" in snapshot.approximate


def heads_of(num: int, **other: object) -> Anatomy:
    return anatomy_of({**TINY, "dtype": "bfloat16", "num_key_value_heads": num, **other})


def test_ranks_follow_from_memory_and_blocks() -> None:
    """Each of two ranks holds half of each token's heads, so that its memory has twice the
    blocks: together they hold twice the memory that each was given."""
    each = 32 * 3 * 2 * 64 * 2  # of a block: tokens, layers, K and V, one of two heads, bfloat16
    page = (
        'vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="100",'
        f'kv_cache_memory_bytes="{100 * each}",user_specified_block_size="True"}} 1\n'
        "vllm:kv_cache_usage_perc 0.5\n"
    )
    snapshot = with_model(snapshot_of(page.encode(), time_s=0.0), heads_of(2))
    assert snapshot.gauges["kv_total_bytes"] == 2 * 100 * each
    assert "--tensor-parallel-size 2" in snapshot.sources["kv_total_bytes"]
    # float32 on four ranks, a head on each of them twice, comes to the same on each.
    assert "kv_total_bytes" in snapshot.approximate


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (heads_of(4), "up to 4 ranks hold as many bytes together"),
        (heads_of(1), "each further rank holds as many again"),
    ],
    ids=["heads that are dealt", "one head"],
)
def test_what_more_ranks_would_mean_is_said(model: Anatomy, words: str) -> None:
    page = (
        b'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1\n'
        b"vllm:kv_cache_usage_perc 0.5\n"
    )
    snapshot = with_model(snapshot_of(page, time_s=0.0), model)
    assert words in snapshot.sources["kv_total_bytes"]
    assert "kv_total_bytes" in snapshot.approximate


@pytest.mark.parametrize(
    ("line", "other", "why"),
    [
        (PLAIN, {"kv_cache_dtype_skip_layers": "['0', 'sliding_window']"}, "another format"),
        (STATES, {"mamba_ssm_cache_dtype": "float32"}, "states are kept in float32"),
        (STATES, {"mamba_cache_dtype": "float16"}, "states are kept in float16"),
    ],
)
def test_formats_that_no_rule_covers_get_no_bytes(
    line: dict[str, Any], other: dict[str, str], why: str
) -> None:
    snapshot = with_model(read(line, **other), anatomy_of(line["case"]["config"]))
    assert "kv_total_bytes" not in snapshot.gauges and why in snapshot.absent["kv_total_bytes"]


@pytest.mark.parametrize("nothing", ["[]", "None", "auto"])
def test_formats_that_are_the_usual_ones_change_nothing(nothing: str) -> None:
    names = ["mamba_cache_dtype", "mamba_ssm_cache_dtype"]
    names += ["kv_cache_dtype_skip_layers"] if nothing != "auto" else []
    said = read(STATES, **dict.fromkeys(names, nothing))
    snapshot = with_model(said, anatomy_of(STATES["case"]["config"]))
    assert snapshot.gauges["kv_total_bytes"] == STATES["answer"]["kv_cache_bytes"]


def test_another_model_is_noticed() -> None:
    other = {**PLAIN["case"]["config"], "num_hidden_layers": 5}
    snapshot = with_model(read(PLAIN), anatomy_of(other), deployment=flags(PLAIN))
    assert "another model" in snapshot.absent["kv_total_bytes"]


@pytest.mark.parametrize("name", ["idle", "overload", "after"])
def test_of_a_recorded_vllm_the_blocks_that_are_held_are_whole(name: str) -> None:
    page = (PAGES / f"vllm-0.32-{name}.prom").read_bytes()
    snapshot = snapshot_of(page, time_s=0.0, told=Told(version="0.32.0", max_model_len=256))
    given = Deployment(platform="cpu", dtype="float32")
    snapshot = with_model(snapshot, anatomy_of(TINY), deployment=given)
    blocks = snapshot.identity.num_blocks or 0
    assert snapshot.gauges["kv_total_bytes"] == blocks * TINY_BLOCK_BYTES
    held = snapshot.gauges["kv_used_bytes"] / TINY_BLOCK_BYTES
    assert math.isclose(held, round(held), abs_tol=1e-9)
    assert (held > 0) == (name == "overload")


def test_of_two_engines_both_pools_count() -> None:
    page = (PAGES / "vllm-0.32-two-engines.prom").read_bytes()
    snapshot = snapshot_of(page, time_s=0.0, told=Told(version="0.32.0", max_model_len=256))
    given = Deployment(platform="cpu", dtype="float32")
    snapshot = with_model(snapshot, anatomy_of(TINY), deployment=given)
    assert snapshot.gauges["kv_total_bytes"] == 28 * TINY_BLOCK_BYTES
    # One engine holds 11 of its 13 blocks, the other none.
    assert math.isclose(snapshot.gauges["kv_used_bytes"], 11 * TINY_BLOCK_BYTES)


def test_an_override_of_the_blocks_leaves_the_dtype_unproven() -> None:
    page = (PAGES / "vllm-0.32-overload.prom").read_bytes()
    snapshot = snapshot_of(page, time_s=0.0, told=Told(version="0.32.0", max_model_len=256))
    snapshot = with_model(snapshot, anatomy_of(TINY))
    assert "kv_total_bytes" in snapshot.approximate
    assert "bfloat16" in snapshot.sources["kv_total_bytes"]


def test_the_embedded_engines_own_bytes_are_what_its_model_gives() -> None:
    page = (PAGES / "ullage-overload.prom").read_bytes()
    said = snapshot_of(page, time_s=0.0)
    assert with_model(said, anatomy_of(TINY)) is said
    lines = [line for line in page.splitlines(True) if not line.startswith(b"ullage_kv_cache_")]
    mute = snapshot_of(b"".join(lines), time_s=0.0)
    assert "kv_total_bytes" not in mute.gauges
    served = {**TINY, "head_dim": 16}
    snapshot = with_model(mute, anatomy_of(served))
    for name in ("kv_total_bytes", "kv_used_bytes"):
        assert math.isclose(snapshot.gauges[name], said.gauges[name])
        assert name in snapshot.approximate


def sglang(**settings: str) -> Snapshot:
    page = b"sglang:token_usage 0.5\nsglang:max_total_num_tokens 1000\n"
    return snapshot_of(page, time_s=0.0, told=Told(settings=settings))


def test_engines_that_count_tokens_get_bytes_when_they_tell_the_format() -> None:
    each = 3 * 2 * 2 * 64
    snapshot = with_model(sglang(kv_cache_dtype="fp8_e5m2"), anatomy_of(TINY))
    assert snapshot.gauges["kv_total_bytes"] == 1000 * each
    assert snapshot.gauges["kv_used_bytes"] == 500 * each
    snapshot = with_model(sglang(), anatomy_of(TINY))
    assert "in which format" in snapshot.absent["kv_total_bytes"]
    # Two ranks hold a head each.
    two = Deployment(parallel=Parallel(tensor=2), kv_cache_dtype="fp8_e5m2")
    assert with_model(sglang(), anatomy_of(TINY), deployment=two).gauges["kv_total_bytes"] == (
        1000 * each
    )
    # Four ranks hold two heads twice.
    four = replace(two, parallel=Parallel(tensor=4))
    assert with_model(sglang(), anatomy_of(TINY), deployment=four).gauges["kv_total_bytes"] == (
        2000 * each
    )


def test_sglang_tells_its_dtype_and_ranks() -> None:
    """Numbers by hand: 3 layers, K and V, 2 heads of 64, two bytes; a head needs a rank."""
    one = 3 * 2 * 2 * 64 * 2
    for told, each in (
        ({"kv_cache_dtype": "auto", "dtype": "bfloat16"}, one),
        ({"kv_cache_dtype": "auto", "dtype": "float32"}, 2 * one),
        ({"kv_cache_dtype": "bfloat16", "tp_size": "2"}, one),
        ({"kv_cache_dtype": "bfloat16", "tp_size": "8"}, 4 * one),
        # Eight ranks in four groups of two: each group has requests of its own.
        ({"kv_cache_dtype": "bfloat16", "tp_size": "8", "dp_size": "4",
          "enable_dp_attention": "true"}, one),
        ({"kv_cache_dtype": "bfloat16", "tp_size": "8", "dp_size": "4",
          "enable_dp_attention": "false"}, 4 * one),
    ):  # fmt: skip
        snapshot = with_model(sglang(**told), anatomy_of({**TINY, "dtype": "bfloat16"}))
        assert snapshot.gauges["kv_total_bytes"] == 1000 * each, told
    assert "on 8 ranks together" in snapshot.sources["kv_total_bytes"]
    half = {**TINY, "dtype": "bfloat16"}
    snapshot = with_model(sglang(kv_cache_dtype="auto", dtype="auto"), anatomy_of(half))
    assert "(bfloat16, as its configuration has it)" in snapshot.sources["kv_total_bytes"]
    snapshot = with_model(sglang(kv_cache_dtype="auto", dtype="auto"), anatomy_of(TINY))
    assert snapshot.gauges["kv_total_bytes"] == 1000 * one
    assert "(float16)" in snapshot.sources["kv_total_bytes"]


def test_tokens_of_windows_tell_no_bytes() -> None:
    mistral = {**TINY, "model_type": "mistral", "sliding_window": 64}
    mistral["architectures"] = ["MistralForCausalLM"]
    snapshot = with_model(sglang(kv_cache_dtype="bfloat16"), anatomy_of(mistral))
    assert "windows or states" in snapshot.absent["kv_total_bytes"]


def test_an_engine_without_tokens_gets_none() -> None:
    snapshot = snapshot_of(b"lmdeploy:gpu_cache_usage_perc 0.5\n", time_s=0.0)
    snapshot = with_model(snapshot, anatomy_of(TINY))
    assert "how many tokens" in snapshot.absent["kv_total_bytes"]
    nobody = with_model(snapshot_of(b"x 1\n", time_s=0.0), anatomy_of(TINY))
    assert "how many tokens" in nobody.absent["kv_total_bytes"]


def test_a_model_that_is_not_wholly_understood_leaves_it_open() -> None:
    known = anatomy_of(TINY)
    wider = anatomy_of({**TINY, "num_key_value_heads": 4}).spec
    snapshot = with_model(sglang(kv_cache_dtype="bfloat16"), replace(known, high=wider))
    assert "leaves open whether 1,536,000 or 3,072,000" in snapshot.absent["kv_total_bytes"]


def test_a_pool_is_derived_once_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelBytes(anatomy_of(TINY))
    snapshot = sglang(kv_cache_dtype="bfloat16")
    first = model.of(snapshot)
    monkeypatch.setattr("ullage.telemetry.kv_bytes._pool_of", None)
    assert model.of(snapshot) == first
