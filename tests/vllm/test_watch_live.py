"""`ullage watch --once` over a real vLLM 0.32, as it is run, with the plugin and without.

Figures are held to vLLM's own page of the same moment and to the model's configuration. Overload is
test_watch_overload.py's, peace test_watch_healthy.py's.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_server import (
    ATTEMPTS,
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    DEV,
    KEY,
    ON,
    TIGHT,
    Server,
    Servers,
    eventually,
    prompt_of,
)
from watched import command

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FLAGS = ("--max-num-seqs", "8", "--max-model-len", "8192")
MEMORY_BYTES = 1 << 30
"""VLLM_CPU_KVCACHE_SPACE of these servers: blocks are as many as fit, as they are by default."""
NUM_BLOCKS = MEMORY_BYTES // BYTES_PER_BLOCK - 1
"""Those that can be held: vLLM keeps one for itself."""
LONG = 7000
"""Tokens of an answer that is not over before somebody looks, on any machine."""
PROMISED = (
    *("kv_used_bytes", "kv_total_bytes", "kv_used_tokens", "kv_total_tokens"),
    *("page_utilization_ratio", "running", "waiting", "preemptions_per_s"),
)
"""The figures that every replica has, or says why not."""
ONLY_BY_THE_PLUGIN = {"page_utilization_ratio"}
ONLY_BY_THE_MODEL = {"kv_used_bytes", "kv_total_bytes"}
"""What of them plain vLLM does not export; the latter follow from --model."""


def once(*arguments: str) -> subprocess.CompletedProcess[str]:
    asked = command(*arguments, "--once", "--interval", "0.5")
    return subprocess.run(asked, capture_output=True, text=True, timeout=180, check=False)


def replicas(*arguments: str) -> list[dict[str, Any]]:
    """What `--once --output json` tells of each, in one document and nothing beside it."""
    done = once(*arguments, "--output", "json")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    (line,) = done.stdout.splitlines()
    return list(json.loads(line)["replicas"])


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_where_blocks_were_set_by_hand_bytes_are_not_called_exact(launched: Servers) -> None:
    """Nothing on the page ties them to memory then, so that --dtype could be anything."""
    server = launched.start(TIGHT, {})
    (replica,) = replicas(server.url, "--model", str(launched.model))
    launched.stop()
    if replica["kv_total_bytes"] is None:
        assert replica["absent"]["kv_total_bytes"]
    elif replica["kv_total_bytes"] not in (64 * BYTES_PER_BLOCK, 65 * BYTES_PER_BLOCK):
        assert "kv_total_bytes" in replica["approximate"]
        assert "dtype" in replica["sources"]["kv_total_bytes"]


@pytest.fixture(scope="module", params=[{}, ON], ids=["plain", "plugin"])
def stopped(launched: Servers, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A vLLM that was paused while it ran three requests: its numbers stand still."""
    server = launched.start(FLAGS, {**request.param, **DEV})
    for _ in range(ATTEMPTS):
        streams = [server.stream(prompt_of(n, 40 + 30 * n), LONG) for n in range(3)]
        eventually(lambda now=streams: all(stream.tokens > 2 * BLOCK_SIZE for stream in now))
        server.pause()
        if server.unfinished() == len(streams):
            break
        # The engine had the processors and its readers had not: they begin again.
        server.resume()
        eventually(lambda now=streams: all(stream.ended for stream in now))
    else:
        raise AssertionError(f"in {ATTEMPTS} attempts a request had ended before it was paused")
    yield server
    server.resume()
    for stream in streams:
        stream.leave()
    launched.stop()


def has_plugin(server: Server) -> bool:
    return "ullage_kv_cache_used_bytes" in server.metrics()


def test_every_promised_figure_is_a_number_or_says_why_not(stopped: Server) -> None:
    (replica,) = replicas(stopped.url)
    assert (replica["engine"], replica["version"], replica["error"]) == ("vllm", "0.32.0", None)
    lacking = set() if has_plugin(stopped) else ONLY_BY_THE_PLUGIN | ONLY_BY_THE_MODEL
    for name in PROMISED:
        if name in lacking:
            assert replica[name] is None, name
            assert replica["absent"][name], name
        else:
            assert isinstance(replica[name], int | float), name
            assert replica["sources"][name], name
            assert name not in replica["absent"]
    assert set(replica["waiting_by_reason"]) == {"capacity", "deferred"}


def test_the_figures_are_vllms_own(stopped: Server) -> None:
    page = stopped.metrics()
    used = page["vllm:kv_cache_usage_perc"] * NUM_BLOCKS
    assert used == pytest.approx(round(used)) and used >= 9
    (replica,) = replicas(stopped.url)
    assert replica["running"] == page["vllm:num_requests_running"] == 3
    assert replica["waiting"] == page["vllm:num_requests_waiting"] == 0
    assert replica["kv_used_ratio"] == page["vllm:kv_cache_usage_perc"]
    (said,) = re.findall(r'kv_cache_size_tokens="(\d+)"', stopped.http.get("/metrics").text)
    assert replica["kv_total_tokens"] == int(said)
    # vLLM counts a block that nobody can hold among them, so the product is off by its share.
    assert replica["kv_used_tokens"] == pytest.approx(round(used) * BLOCK_SIZE, abs=BLOCK_SIZE)
    assert "kv_used_tokens" in replica["approximate"]
    assert replica["preemptions_per_s"] == 0
    assert (replica["block_size"], replica["max_model_len"]) == (BLOCK_SIZE, 8192)


def test_bytes_are_exact_by_the_model_and_by_the_plugin(stopped: Server, launched: Servers) -> None:
    """A block's bytes follow from the configuration and --dtype; how many are held vLLM says."""
    used = round(stopped.metrics()["vllm:kv_cache_usage_perc"] * NUM_BLOCKS)
    (replica,) = replicas(stopped.url, "--model", str(launched.model))
    assert replica["kv_used_bytes"] == pytest.approx(used * BYTES_PER_BLOCK)
    blocks = replica["kv_total_bytes"] / BYTES_PER_BLOCK
    assert blocks in ((NUM_BLOCKS,) if has_plugin(stopped) else (NUM_BLOCKS, NUM_BLOCKS + 1))
    assert not {"kv_used_bytes", "kv_total_bytes"} & set(replica["approximate"])
    if has_plugin(stopped):
        assert replica["kv_used_bytes"] == stopped.kv()["used_bytes"] == used * BYTES_PER_BLOCK
        # Measured twice, of an engine that stands still.
        use = stopped.kv()["page_utilization_ratio"]
        assert replica["page_utilization_ratio"] == pytest.approx(use)


def test_of_another_model_than_is_served_no_bytes_are_said(
    stopped: Server, tmp_path: Path, launched: Servers
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((launched.model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (replica,) = replicas(stopped.url, "--model", str(other))
    for name in ONLY_BY_THE_MODEL:
        assert (replica[name] is None) is not has_plugin(stopped)
        assert (name in replica["absent"]) is not has_plugin(stopped)


def test_as_a_table(stopped: Server) -> None:
    done = once(stopped.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert stopped.url in done.stdout
    for said in ("vllm 0.32.0", "running 3", "waiting 0"):
        assert said in done.stdout
    assert ("KV bytes –" in done.stdout) is not has_plugin(stopped)


def test_one_that_is_down_is_a_replica_with_an_error(stopped: Server) -> None:
    down = nobody()
    up, gone = replicas(stopped.url, down)
    assert (up["url"], up["error"]) == (stopped.url, None)
    assert (gone["url"], gone["running"]) == (down, None)
    assert gone["error"] and gone["absent"]["running"]


def test_when_all_are_down_it_is_3(stopped: Server) -> None:
    down = nobody()
    done = once(down, "--output", "json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["replicas"][0]["error"]
    assert done.stderr.count("\n") == 1
    assert down in done.stderr


def test_a_wrong_key_is_said(stopped: Server) -> None:
    """vLLM's /metrics asks for none, so the figures are there; what it guards is not."""
    asked = command(stopped.url, "--once", "--interval", "1", "--output", "json")
    asked[asked.index(KEY)] = "wrong"
    done = subprocess.run(asked, capture_output=True, text=True, timeout=180, check=False)
    (replica,) = json.loads(done.stdout)["replicas"]
    assert (done.returncode, replica["running"]) == (0, 3)
    assert "wrong" not in done.stdout + done.stderr
