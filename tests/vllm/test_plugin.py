"""The plugin inside a real vLLM 0.32: routes, key, bytes, cancels, metrics; off, it is not there.

Numbers are held to vLLM's own (its gauges, its log of every step), to the model's configuration and
to what clients received, never to the plugin's.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from plugin_server import (
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    KEY,
    ON,
    Server,
    Servers,
    Stream,
    eventually,
    prompt_of,
    save_model,
    servers,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_BLOCKS = 256
ROOMY = ("--num-gpu-blocks-override", str(NUM_BLOCKS + 1), "--max-num-seqs", "8")
"""Room for four requests of any length."""
TIGHT = ("--num-gpu-blocks-override", "65", "--max-num-seqs", "8")
"""Room for one."""
DEV = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def launched(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(vllm_python, save_model(tmp_path_factory.mktemp("plugin") / "model")) as started:
        yield started


@pytest.fixture(scope="module")
def server(launched: Servers) -> Iterator[Server]:
    """One server for every test that leaves it as it was."""
    yield launched.start(ROOMY, {**ON, **DEV})
    launched.stop()


@pytest.fixture
def streams(server: Server) -> Iterator[list[Stream]]:
    """What is put in here is left at the end, and the engine empty."""
    running: list[Stream] = []
    yield running
    server.http.post("/resume").raise_for_status()
    for stream in running:
        stream.leave()
    eventually(lambda: server.kv()["used_blocks"] == 0)


def run(server: Server, streams: list[Stream], lengths: list[int], max_tokens: int) -> None:
    """Streams with prompts of these lengths, all of them running."""
    streams.extend(server.stream(prompt_of(n, many), max_tokens) for n, many in enumerate(lengths))
    eventually(lambda: all_run(server, streams))


def all_run(server: Server, streams: list[Stream]) -> bool:
    """Raises AssertionError, with what is known, once one of them has ended."""
    report = server.kv()
    ended = [(s.status, s.reason, s.tokens) for s in streams if s.ended]
    assert not ended, (ended, [s.tokens for s in streams], report)
    return bool(report["running"] == len(streams))


def frozen(server: Server, streams: list[Stream]) -> list[int]:
    """Stop the engine between two steps; how many tokens each stream has received until then."""
    server.http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
    eventually(lambda: all(stream.tokens for stream in streams))
    before = None
    while before != (before := [stream.tokens for stream in streams]):
        time.sleep(0.3)
    return before


def test_an_empty_pool_says_so(server: Server) -> None:
    report = server.kv()
    assert report["block_size"] == BLOCK_SIZE
    assert report["bytes_per_block"] == BYTES_PER_BLOCK
    assert (report["num_blocks"], report["used_blocks"], report["free_blocks"]) == (256, 0, 256)
    assert report["total_bytes"] == NUM_BLOCKS * BYTES_PER_BLOCK
    assert report["used_bytes"] == 0
    assert report["page_utilization_ratio"] is None
    assert report["holders"] == []


def test_growth_and_the_time_until_full(server: Server, streams: list[Stream]) -> None:
    """Runs before the others: growth is over 30 s, and they fill and empty the pool."""
    run(server, streams, [20], 1800)
    time.sleep(2.5)
    report = server.kv()
    assert report["growth_bytes_per_s"] > 0
    expected = report["free_blocks"] * BYTES_PER_BLOCK / report["growth_bytes_per_s"]
    assert report["seconds_to_full"] == pytest.approx(expected)


def test_what_requests_hold_is_what_clients_received(server: Server, streams: list[Stream]) -> None:
    lengths = [10, 45, 100]
    run(server, streams, lengths, 1900)
    received = frozen(server, streams)
    report = server.kv()
    # The last token that a client has is not in the cache yet: the next step computes it.
    held = sorted(length + tokens - 1 for length, tokens in zip(lengths, received, strict=True))
    holders = sorted(report["holders"], key=lambda holder: holder["num_tokens"])
    assert [holder["num_tokens"] for holder in holders] == held
    blocks = [math.ceil(tokens / BLOCK_SIZE) for tokens in held]
    # A step that begins a block allocates it a moment before.
    for holder, least in zip(holders, blocks, strict=True):
        assert least <= holder["num_blocks"] <= least + 1
        assert holder["own_bytes"] == holder["num_bytes"] == holder["num_blocks"] * BYTES_PER_BLOCK
    used = sum(holder["num_blocks"] for holder in report["holders"])
    assert report["used_blocks"] == used
    assert report["page_utilization_ratio"] == pytest.approx(sum(held) / (used * BLOCK_SIZE))
    ages = [holder["age_s"] for holder in report["holders"]]
    assert ages == sorted(ages, reverse=True)
    # The gauges come once a second and say the same; vLLM's own was set in the last step.
    time.sleep(1.6)
    metrics = server.metrics()
    assert metrics["ullage_kv_cache_used_bytes"] == report["used_bytes"]
    assert metrics["ullage_kv_cache_total_bytes"] == report["total_bytes"]
    assert metrics["vllm:kv_cache_usage_perc"] == pytest.approx(used / NUM_BLOCKS)
    assert metrics["ullage_kv_page_utilization_ratio"] == pytest.approx(
        report["page_utilization_ratio"]
    )
    assert 0 <= metrics["ullage_oldest_request_age_seconds"] - ages[0] < 3.5


def test_a_shared_prefix_counts_once_and_is_promised_to_nobody_alone(
    server: Server, streams: list[Stream]
) -> None:
    prefix = prompt_of(40, 8 * BLOCK_SIZE)
    server.ask(prefix, 1).raise_for_status()
    streams.extend(server.stream([*prefix, *prompt_of(n, 10)], 1700) for n in range(3))
    eventually(lambda: all_run(server, streams))
    frozen(server, streams)
    report = server.kv()
    alone = [holder["own_bytes"] // BYTES_PER_BLOCK for holder in report["holders"]]
    for holder, own in zip(report["holders"], alone, strict=True):
        assert holder["num_blocks"] == own + 8
    assert report["used_blocks"] == 8 + sum(alone)
    promised = [
        server.http.post(
            "/ullage/cancel_oldest", params={"percent": percent, "dry_run": "true"}
        ).json()["promised_bytes"]
        // BYTES_PER_BLOCK
        for percent in (30, 60, 100)
    ]
    # One, two, and all three: only then nobody holds the prefix any more.
    assert promised == [alone[0], alone[0] + alone[1], 8 + sum(alone)]


def test_the_age_is_that_of_the_oldest_request_and_of_none_when_there_is_none(
    server: Server, streams: list[Stream]
) -> None:
    began_s = time.time()
    run(server, streams, [10], 1900)
    run_s = time.time() - began_s
    time.sleep(1.5)
    found = server.metrics()["ullage_oldest_request_age_seconds"]
    assert 0.2 < found < run_s + 3
    streams.pop().leave()
    eventually(lambda: math.isnan(server.metrics()["ullage_oldest_request_age_seconds"]), limit_s=5)
    assert math.isnan(server.metrics()["ullage_kv_page_utilization_ratio"])


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/ullage/kv"), ("POST", "/ullage/cancel_oldest?percent=100"),
     ("POST", "/ullage/drain"), ("GET", "/ullage/drain"), ("GET", "/ullage/other")],
)  # fmt: skip
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", f"Basic {KEY}", KEY, "Bearer \xff"]
)
def test_nobody_without_the_key_is_told_or_does_anything(
    server: Server, method: str, path: str, header: str | None
) -> None:
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    answer = httpx.request(method, server.url + path, headers=headers, trust_env=False)
    assert answer.status_code == 401
    assert "holders" not in answer.text
    assert server.http.get("/ullage/drain").json() == {"draining": False, "in_flight": 0}


@pytest.mark.parametrize(
    "query", ["", "percent=0", "percent=101", "percent=nan", "percent=5&dry_run=perhaps",
              "percent=5&force=1", "percent=5&percent=6", "percent=many"]
)  # fmt: skip
def test_a_cancel_that_is_not_clear_ends_nobody(server: Server, query: str) -> None:
    answer = server.http.post(f"/ullage/cancel_oldest?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("percent", "dry_run", "force")


def test_routes_that_are_not_there(server: Server) -> None:
    assert server.http.get("/ullage/other").status_code == 404
    wrong = server.http.get("/ullage/cancel_oldest")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert server.http.post("/ullage/kv").headers["allow"] == "GET"
    assert server.http.get("/version").status_code == 200


def test_the_metrics_are_read_by_prometheus_own_rules(server: Server) -> None:
    text = server.http.get("/metrics").text
    for name in ("ullage_kv_cache_used_bytes", "ullage_kv_page_utilization_ratio"):
        assert f"# TYPE {name} gauge" in text
    for name in ("ullage_recomputed_tokens_total", "ullage_requests_cancelled_total"):
        assert f"# TYPE {name} counter" in text
    assert re.search(r'^ullage_kv_cache_total_bytes\{engine="0",model_name="tiny"\} ', text, re.M)


# --- servers of their own ---


def test_cancelling_under_overload_frees_what_was_promised(launched: Servers) -> None:
    """Twelve requests of up to 600 tokens want 240 blocks; there are 64."""
    server = launched.start(TIGHT, ON)
    before = server.metrics()
    streams = [server.stream(prompt_of(number, 20), 600) for number in range(12)]
    eventually(
        lambda: (
            server.metrics()["vllm:num_preemptions_total"]
            >= before["vllm:num_preemptions_total"] + 3
        )
    )
    answer = server.http.post("/ullage/cancel_oldest", params={"percent": 40})
    report = answer.raise_for_status().json()
    assert len(report["request_ids"]) >= 1
    assert report["freed_bytes"] == report["promised_bytes"] > 0
    cut = eventually(
        lambda: (
            (gone := [s for s in streams if s.reason == "abort"])
            and len(gone) == len(report["request_ids"])
            and gone
        )
    )
    # The oldest, in the order in which they came: those that were sent first.
    assert all(stream.ended and stream.tokens < 600 for stream in cut)
    after = server.metrics()
    assert after['ullage_requests_cancelled_total{by="operator"}'] - before[
        'ullage_requests_cancelled_total{by="operator"}'
    ] == len(report["request_ids"])
    for stream in streams:
        stream.wait()
    assert [stream.tokens for stream in streams if stream.reason == "length"] == [600] * (
        12 - len(cut)
    )


def test_every_token_that_was_computed_is_some_requests_or_recomputed(launched: Servers) -> None:
    """vLLM logs the tokens of every step: more than clients got were recomputed, to the token."""
    server = launched.start((*TIGHT, "--enable-logging-iteration-details"), ON)

    def computed() -> int:
        # By vLLM's own log, whose lines come after the answer.
        time.sleep(1.0)
        said = re.findall(
            r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, "
            r"\d+ generation requests, (\d+) generation tokens",
            server.said(),
        )
        return sum(int(context) + int(generation) for context, generation in said)

    before, computed_before = server.metrics(), computed()
    lengths = [5 + 3 * number for number in range(12)]
    running = [server.stream(prompt_of(60 + n, length), 400) for n, length in enumerate(lengths)]
    for stream in running:
        stream.wait()
    time.sleep(1.2)
    after = server.metrics()
    rise = {name: after[name] - before[name] for name in after if name in before}
    assert rise["vllm:num_preemptions_total"] > 0
    needed = sum(length + 400 - 1 for length in lengths)
    assert rise["ullage_recomputed_tokens_total"] == computed() - computed_before - needed
    assert rise["ullage_recomputed_tokens_total"] > 0
    assert 0 < rise["ullage_recomputed_requests_total"] <= rise["vllm:num_preemptions_total"]


def test_a_drain_under_load_loses_nothing(launched: Servers) -> None:
    server = launched.start((*TIGHT, "--max-num-seqs", "4"), ON)
    # Four run, four wait for a seat, and all of it is preempted now and then.
    running = [server.stream(prompt_of(number, 20), 500) for number in range(8)]
    eventually(lambda: (now := server.kv())["running"] + now["waiting"] == 8)
    answer = server.http.post("/ullage/drain")
    assert answer.status_code == 202
    assert answer.json() == {"draining": True, "in_flight": 8}
    late = server.ask(prompt_of(9, 5), 5)
    assert late.status_code == 503
    assert int(late.headers["retry-after"]) >= 1
    assert "draining" in late.json()["error"]["message"]
    for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize", "/pooling"):
        assert server.http.post(path, json={}).status_code == 503
    # The engine runs, and probes and operators are answered as before.
    for path in ("/health", "/metrics", "/v1/models", "/ullage/kv"):
        assert server.http.get(path).status_code == 200
    for stream in running:
        stream.wait()
        assert (stream.status, stream.reason, stream.tokens) == (200, "length", 500)
    assert server.http.get("/ullage/drain").json() == {"draining": True, "in_flight": 0}
    assert server.http.post("/ullage/drain").json() == {"draining": True, "in_flight": 0}


def test_a_drain_reaches_every_api_process_and_every_engine(launched: Servers) -> None:
    """Two API processes before two data-parallel engines; connections meet either process."""
    flags = ("--api-server-count", "2", "--data-parallel-size", "2", "--max-num-seqs", "8")
    flags += ("--max-model-len", "8192", "--num-gpu-blocks-override", "1025")
    server = launched.start(flags, ON)
    eventually(lambda: server.said().count("Application startup complete") == 2, limit_s=60)
    running = [server.stream(prompt_of(number, 20), 3000) for number in range(8)]
    eventually(lambda: {holder["engine"] for holder in server.kv()["holders"]} == {0, 1})
    assert server.kv()["num_blocks"] == 2 * 1024
    eventually(lambda: all(stream.tokens for stream in running))
    answer = server.http.post("/ullage/drain").json()
    assert answer["draining"]
    assert 1 <= answer["in_flight"] <= 8
    for _ in range(20):
        # A new connection each: the kernel spreads them over the processes.
        with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {KEY}"}) as stranger:
            body = {"model": "tiny", "prompt": [5], "max_tokens": 1}
            assert stranger.post(f"{server.url}/v1/completions", json=body).status_code == 503
    for stream in running:
        stream.wait()
        assert (stream.reason, stream.tokens) == ("length", 3000)
    eventually(lambda: server.http.get("/ullage/drain").json()["in_flight"] == 0)
    text = server.http.get("/metrics").text
    for engine in (0, 1):
        found = re.search(
            rf'^ullage_kv_cache_total_bytes{{engine="{engine}",model_name="tiny"}} (\S+)',
            text,
            re.M,
        )
        assert found is not None and float(found[1]) == 1024 * BYTES_PER_BLOCK


def test_it_needs_a_key_even_where_vllm_has_none(launched: Servers) -> None:
    server = launched.start((*TIGHT, "--api-key", ""), ON)
    stranger = httpx.get(f"{server.url}/ullage/kv", trust_env=False)
    assert stranger.status_code == 403
    assert "--api-key" in stranger.json()["error"]["message"]
    assert server.ask([5], 1).status_code == 200


@pytest.mark.parametrize("environment", [{}, {"ULLAGE_VLLM": "1"}, {"VLLM_PLUGINS": "ullage"}])
def test_without_being_asked_for_nothing_is_there(
    launched: Servers, environment: dict[str, str]
) -> None:
    server = launched.start(TIGHT, environment)
    assert server.http.get("/ullage/kv").status_code == 404
    assert server.http.post("/ullage/drain").status_code == 404
    assert server.ask([5, 6], 3).status_code == 200
    assert not [name for name in server.metrics() if "ullage" in name]
    assert "ullage_vllm" not in server.said().replace("ullage_vllm.plugin:", "")


def test_tokens_are_the_same_with_it_and_without(launched: Servers) -> None:
    said = []
    for environment in ({}, ON):
        server = launched.start(TIGHT, environment)
        answers = [server.ask(prompt_of(n, 30), 50).json()["choices"][0]["text"] for n in range(4)]
        said.append(answers)
    assert said[0] == said[1]
    assert statistics.mean(len(text) for text in said[0]) > 50
