"""The plugin in one real vLLM 0.32 that each test leaves as it was: routes, key, bytes, metrics.

Numbers are held to vLLM's own (its gauges, its log of every step), to the model's configuration and
to what clients received, never to the plugin's.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from plugin_server import (
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    DEV,
    KEY,
    ON,
    Server,
    Servers,
    Stream,
    eventually,
    prompt_of,
)
from tests.plugins import vllm_posts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_BLOCKS = 1024
ROOMY = ("--num-gpu-blocks-override", str(NUM_BLOCKS + 1), "--max-num-seqs", "8")
ROOMY += ("--max-model-len", "8192")
"""Room for four requests of any length, and seconds until one is that long."""
LONG = 8000
"""Tokens of an answer that does not end while it is looked at."""


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
    server.resume()
    for stream in running:
        stream.leave()
    eventually(lambda: server.kv()["used_blocks"] == 0)


def frozen(server: Server, streams: list[Stream], prompts: list[list[int]]) -> list[int]:
    """Streams of these prompts, stopped between two steps; how many tokens each has received.

    By vLLM's own count that is all that it has produced.
    """
    before = server.metrics()["vllm:generation_tokens_total"]
    streams.extend(server.streams(prompts, LONG, first_tokens=2 * BLOCK_SIZE))

    def received() -> list[int] | None:
        tokens = [stream.tokens for stream in streams]
        produced = server.metrics()["vllm:generation_tokens_total"] - before
        return tokens if sum(tokens) == produced and all(tokens) else None

    told = None
    # Twice: vLLM's API process may still hold what its engine produced.
    while told != (told := eventually(received)):
        time.sleep(0.3)
    assert told is not None
    return told


def renewed(server: Server) -> dict[str, float]:
    """Metrics that were made after this was called, while a request is there: the age grows with
    each renewal, and is NaN, which differs from itself, in one from before the request."""
    name = "ullage_oldest_request_age_seconds"
    before = server.metrics()[name]

    def made_since() -> dict[str, float] | None:
        now = server.metrics()
        return None if math.isnan(now[name]) or now[name] == before else now

    return eventually(made_since)


def test_an_empty_pool_says_so(server: Server) -> None:
    report = server.kv()
    assert report["block_size"] == BLOCK_SIZE
    assert report["bytes_per_block"] == BYTES_PER_BLOCK
    assert (report["num_blocks"], report["used_blocks"], report["free_blocks"]) == (
        NUM_BLOCKS,
        0,
        NUM_BLOCKS,
    )
    assert report["total_bytes"] == NUM_BLOCKS * BYTES_PER_BLOCK
    assert report["used_bytes"] == 0
    assert report["page_utilization_ratio"] is None
    assert report["holders"] == []


def test_growth_and_the_time_until_full(server: Server, streams: list[Stream]) -> None:
    """Runs before the others: growth is over 30 s, and they fill and empty the pool."""

    def grows() -> dict[str, Any] | None:
        if all(stream.ended for stream in streams):  # a fast machine is done before it is asked
            streams.append(server.stream(prompt_of(len(streams), 20), LONG))
        now = server.kv()
        return now if (now["growth_bytes_per_s"] or 0) > 0 else None

    report = eventually(grows)
    expected = report["free_blocks"] * BYTES_PER_BLOCK / report["growth_bytes_per_s"]
    assert report["seconds_to_full"] == pytest.approx(expected)


def test_what_requests_hold_is_what_clients_received(server: Server, streams: list[Stream]) -> None:
    lengths = [10, 45, 100]
    received = frozen(server, streams, [prompt_of(n, many) for n, many in enumerate(lengths)])
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
    # The gauges say the same; vLLM's own was set in the last step.
    metrics = eventually(
        lambda: (
            (now := server.metrics())["ullage_kv_cache_used_bytes"] == report["used_bytes"] and now
        )
    )
    assert metrics["ullage_kv_cache_total_bytes"] == report["total_bytes"]
    assert metrics["vllm:kv_cache_usage_perc"] == pytest.approx(used / NUM_BLOCKS)
    # Page use is measured less often, so that it costs next to nothing.
    eventually(
        lambda: (
            server.metrics()["ullage_kv_page_utilization_ratio"]
            == pytest.approx(report["page_utilization_ratio"])
        )
    )


def test_a_shared_prefix_counts_once_and_is_promised_to_nobody_alone(
    server: Server, streams: list[Stream]
) -> None:
    prefix = prompt_of(40, 8 * BLOCK_SIZE)
    server.ask(prefix, 1).raise_for_status()
    frozen(server, streams, [[*prefix, *prompt_of(n, 10)] for n in range(3)])
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
    frozen(server, streams, [prompt_of(0, 10)])
    (first,) = server.kv()["holders"]
    found = renewed(server)["ullage_oldest_request_age_seconds"]
    assert first["age_s"] <= found < time.time() - began_s
    # A younger one changes nothing, however long it waits.
    streams.append(server.stream(prompt_of(1, 10), LONG))
    eventually(lambda: server.kv()["waiting"] == 1)
    (first,) = server.kv()["holders"]
    assert first["age_s"] <= renewed(server)["ullage_oldest_request_age_seconds"]
    server.resume()
    while streams:
        streams.pop().leave()
    eventually(lambda: math.isnan(server.metrics()["ullage_oldest_request_age_seconds"]))
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


def test_every_post_of_vllm_is_known_to_be_work_or_not(server: Server) -> None:
    """What a drain refuses goes by path: a path that nobody looked at might be lost work."""
    paths = server.http.get("/openapi.json").raise_for_status().json()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert "/v1/completions" in posts
    assert posts <= vllm_posts.WORK | vllm_posts.OPERATORS


def test_the_metrics_are_read_by_prometheus_own_rules(server: Server) -> None:
    text = server.http.get("/metrics").text
    for name in ("ullage_kv_cache_used_bytes", "ullage_kv_page_utilization_ratio"):
        assert f"# TYPE {name} gauge" in text
    for name in ("ullage_recomputed_tokens_total", "ullage_requests_cancelled_total"):
        assert f"# TYPE {name} counter" in text
    assert re.search(r'^ullage_kv_cache_total_bytes\{engine="0",model_name="tiny"\} ', text, re.M)
