"""The plugin inside an older vLLM that it knows, started as an operator starts it: a smoke test.

0.30, the oldest, unless ULLAGE_VLLM_OLD says 0.31. What the numbers are held to is in
test_plugin.py; here, that this vLLM has what the plugin reads.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_server import (
    BYTES_PER_BLOCK,
    ON,
    Server,
    Stream,
    eventually,
    prompt_of,
    save_model,
    spawned,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SETUP = Path(__file__).parents[2] / "tools" / "vllm_setup.sh"
VERSION = os.environ.get("ULLAGE_VLLM_OLD") or "0.30"
NUM_REQUESTS = 12
"""At a time; two of them fit to their ends."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    subprocess.run(["bash", str(SETUP), VERSION], check=True)
    home = os.environ.get("ULLAGE_VLLM_OLD_VENV") or f"~/.cache/ullage/vllm-{VERSION}"
    python = Path(home).expanduser() / "bin" / "python"
    model = save_model(tmp_path_factory.mktemp("plugin") / "model")
    flags = ("--num-gpu-blocks-override", "65", "--max-num-seqs", "8")
    with spawned(python, model, flags, ON) as started:
        yield started


def test_every_route_and_metric(server: Server) -> None:
    assert server.http.get("/version").json()["version"].startswith(f"{VERSION}.")
    assert "steps aside" not in server.said()
    assert server.kv()["total_bytes"] == 64 * BYTES_PER_BLOCK
    streams: list[Stream] = []
    reports: list[dict[str, Any]] = []

    def fill() -> None:
        """An answer may take so long that all who ran at the question have ended."""
        while sum(not stream.ended for stream in streams) < NUM_REQUESTS:
            streams.append(server.stream(prompt_of(len(streams) % 140, 20), 1500))

    def preempts() -> bool:
        fill()
        return server.metrics()["vllm:num_preemptions_total"] >= 1

    def frees() -> bool:
        """What a step in flight still writes is freed after it, and is not promised."""
        fill()
        answer = server.http.post("/ullage/cancel_oldest", params={"percent": 40})
        reports.append(answer.raise_for_status().json())
        return reports[-1]["freed_bytes"] > 0

    eventually(preempts)
    eventually(frees)
    eventually(lambda: _received(server) == len(streams))
    assert all(one["freed_bytes"] == one["promised_bytes"] for one in reports), reports
    num_ended = sum(len(one["request_ids"]) for one in reports)
    answer = server.http.post("/ullage/drain")
    assert answer.status_code == 202
    assert server.ask([5], 1).status_code == 503
    for stream in streams:
        stream.wait()
    ends = [stream.reason for stream in streams]
    assert ends.count("abort") == num_ended
    assert ends.count("length") == len(streams) - num_ended
    assert all(stream.tokens == 1500 for stream in streams if stream.reason == "length")
    metrics = eventually(
        lambda: (now := server.metrics())["ullage_kv_cache_used_bytes"] == 0 and now
    )
    assert metrics["ullage_recomputed_tokens_total"] > 0
    assert metrics["ullage_kv_cache_total_bytes"] == 64 * BYTES_PER_BLOCK
    assert server.http.get("/ullage/drain").json() == {"draining": True, "in_flight": 0}


def _received(server: Server) -> float:
    """How many requests vLLM knows of, or has answered."""
    metrics = server.metrics()
    ended = sum(
        value for name, value in metrics.items() if name.startswith("vllm:request_success_total")
    )
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] + ended
