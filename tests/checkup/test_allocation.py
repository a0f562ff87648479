"""The server's own word on its KV cache beside the prediction, on recorded answers of vLLM 0.32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ullage.anatomy import read_config
from ullage.anatomy.spec import ModelSpec
from ullage.checkup.allocation import Server, compare_with_embedded, compare_with_vllm
from ullage.checkup.metrics import CacheInfo, cache_info_of
from ullage.costs.deployment import Deployment
from ullage.costs.kv import kv_bytes_per_token
from ullage.telemetry.exposition import page_of

FIXTURES = Path(__file__).parents[1] / "planning" / "fixtures" / "vllm-0.32-cpu.jsonl"
RECORDED = [json.loads(line) for line in FIXTURES.read_text(encoding="utf-8").splitlines()]
SERVERS = [
    line
    for line in RECORDED
    if line["case"]["usage"] == "server"
    and line["answer"].get("groups")
    and "kv_cache_memory_bytes" in line["case"]["limits"]
]


def exposed(line: dict[str, Any], **other: object) -> CacheInfo:
    """The labels that this server exports, read back from a page of metrics."""
    answer, limits = line["answer"], line["case"]["limits"]
    labels = {
        "block_size": answer["block_size"],
        "cache_dtype": limits.get("kv_cache_dtype", "auto"),
        "enable_prefix_caching": answer["enable_prefix_caching"],
        "engine": 0,
        "kv_cache_max_concurrency": answer["kv_cache_max_concurrency"],
        "kv_cache_memory_bytes": limits["kv_cache_memory_bytes"],
        "kv_cache_size_tokens": answer["kv_cache_size_tokens"],
        "num_gpu_blocks": answer["num_gpu_blocks"],
        "num_gpu_blocks_override": None,
        "user_specified_block_size": limits.get("block_size") is not None,
    } | other
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    info = cache_info_of(page_of(f"vllm:cache_config_info{{{text}}} 1.0\n".encode()))
    assert info is not None
    return info


def asked(line: dict[str, Any], cache: CacheInfo) -> Server:
    limits = line["case"]["limits"]
    return Server(
        cache=cache,
        deployment=Deployment(
            dtype=limits.get("dtype"),
            max_num_seqs=limits.get("max_num_seqs"),
            max_num_batched_tokens=limits.get("max_num_batched_tokens"),
            block_size=limits.get("block_size"),
        ),
        max_model_len=line["answer"]["max_model_len"],
        platform="cpu",
        hardware=None,
    )


def spec_of(line: dict[str, Any]) -> ModelSpec:
    return read_config(line["case"]["config"], file="config.json").spec


def plain() -> dict[str, Any]:
    """A server of full attention only, whose block was its own choice: what vLLM 0.32 on a CPU
    exported for this configuration under --dtype float32 --max-model-len 480 --max-num-seqs 8."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 320,
    }
    return {
        "case": {
            "config": config,
            "limits": {"kv_cache_memory_bytes": 1 << 30, "dtype": "float32", "max_num_seqs": 8},
        },
        "answer": {
            "block_size": 128,
            "enable_prefix_caching": True,
            "kv_cache_max_concurrency": 1365.25,
            "kv_cache_size_tokens": 655_320,
            "max_model_len": 480,
            "num_gpu_blocks": 5461,
        },
    }


def test_there_are_servers_enough_to_compare_with() -> None:
    assert len(SERVERS) >= 15
    assert any(len(line["answer"]["groups"]) > 1 for line in SERVERS)


@pytest.mark.parametrize("line", SERVERS, ids=lambda line: line["case"]["name"])
def test_every_recorded_server_is_found_equal_to_its_prediction(line: dict[str, Any]) -> None:
    got = compare_with_vllm(spec_of(line), asked(line, exposed(line)))
    assert got.missing == ()
    assert got.state == "equal"
    labels = [row["note"] for row in got.rows]
    assert labels[0] == "num_gpu_blocks" and "kv_cache_size_tokens" in labels
    assert all(row["error"]["value"] == 0 for row in got.rows)


@pytest.mark.parametrize("line", SERVERS, ids=lambda line: line["case"]["name"])
def test_without_bytes_tokens_and_concurrency_follow_from_the_blocks(line: dict[str, Any]) -> None:
    cache = exposed(line, kv_cache_memory_bytes=None)
    got = compare_with_vllm(spec_of(line), asked(line, cache))
    assert got.derived and got.state == "equal"
    assert "num_gpu_blocks" not in [row["note"] for row in got.rows]
    assert [what for what, _ in got.missing] == ["num_gpu_blocks of the server"]


@pytest.mark.parametrize(
    "label", ["num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "block_size"]
)
def test_one_number_that_is_off_by_the_least_is_seen(label: str) -> None:
    line = plain()
    wrong = line["answer"].get(label) + (0.001 if "concurrency" in label else 1)
    got = compare_with_vllm(spec_of(line), asked(line, exposed(line, **{label: wrong})))
    assert got.state == "differs"
    off = [r["note"] for r in got.rows if r["predicted"]["value"] != r["actual"]["value"]]
    assert off == [label]


def test_bytes_that_only_the_user_knows_serve_as_well() -> None:
    line = plain()
    server = asked(line, exposed(line, kv_cache_memory_bytes=None))
    given = line["case"]["limits"]["kv_cache_memory_bytes"]
    got = compare_with_vllm(spec_of(line), replace(server, kv_bytes_named=given))
    assert got.state == "equal" and not got.derived
    assert got.rows[0]["note"] == "num_gpu_blocks"


def test_several_engines_sum_their_blocks_and_nothing_else() -> None:
    line = plain()
    blocks = line["answer"]["num_gpu_blocks"]
    cache = replace(exposed(line, num_gpu_blocks=2 * blocks), num_engines=2)
    assert compare_with_vllm(spec_of(line), asked(line, cache)).state == "equal"


def test_a_platform_that_nobody_named_is_told_by_the_block_or_not_at_all() -> None:
    line = plain()
    server = replace(asked(line, exposed(line)), platform=None)
    got = compare_with_vllm(spec_of(line), server)
    assert got.state == "equal"
    assert "block_size" not in [row["note"] for row in got.rows]
    odd = compare_with_vllm(spec_of(line), replace(server, cache=exposed(line, block_size=48)))
    assert odd.state == "not_evaluable"
    assert "--gpu" in odd.missing[0][1]


@pytest.mark.parametrize(
    ("labels", "length", "why"),
    [
        ({}, None, "--max-model-len"),
        ({"num_gpu_blocks_override": 77}, 2048, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": None, "num_gpu_blocks": None}, 2048, "exports neither"),
        ({"cache_dtype": "of_tomorrow"}, 2048, "of_tomorrow"),
    ],
)
def test_what_cannot_be_compared_is_named_and_never_equal(
    labels: dict[str, object], length: int | None, why: str
) -> None:
    line = plain()
    server = replace(asked(line, exposed(line, **labels)), max_model_len=length)
    got = compare_with_vllm(spec_of(line), server)
    assert got.state == "not_evaluable" and got.rows == ()
    assert why in got.missing[0][1]


def test_a_default_that_the_server_may_not_have_is_said() -> None:
    line = plain()
    server = asked(line, exposed(line))
    hidden = replace(server, deployment=replace(server.deployment, dtype=None))
    got = compare_with_vllm(spec_of(line), hidden)
    assert got.assumed == ("--dtype",)
    assert all("--dtype" in row["note"] for row in got.rows)


def test_the_embedded_pool_is_compared_in_blocks_and_in_bytes() -> None:
    spec = spec_of(plain())
    each = kv_bytes_per_token(spec, kv_cache_dtype="float32", dtype="float32")
    cache = CacheInfo(10, 16, 160, "float32", kv_cache_memory_bytes=10 * 16 * each + 5)
    right = compare_with_embedded(spec, cache, 160.0 * each, "float32")
    assert right.state == "equal"
    assert [row["predicted"]["value"] for row in right.rows] == [10, 160 * each]
    assert compare_with_embedded(spec, cache, 160.0 * each - 1, "float32").state == "differs"
    untold = compare_with_embedded(
        spec, replace(cache, kv_cache_memory_bytes=None), None, "float32"
    )
    assert untold.state == "not_evaluable" and len(untold.missing) == 2
    little = compare_with_embedded(spec, replace(cache, kv_cache_memory_bytes=1), None, "float32")
    assert little.state == "not_evaluable" and "hold a block" in little.missing[0][1]


@pytest.mark.parametrize("label", ["9" * 5000, "-3", "1e9", "", "٣", "None"])
def test_a_label_that_is_no_sane_number_is_no_number(label: str) -> None:
    line = plain()
    cache = exposed(line, num_gpu_blocks=label, kv_cache_memory_bytes=label)
    assert cache.num_blocks is None and cache.kv_cache_memory_bytes is None
    assert compare_with_vllm(spec_of(line), asked(line, cache)).state == "not_evaluable"
