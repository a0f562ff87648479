"""The control routes: what the pool holds and for whom, ending the oldest, draining; keys first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.engine.driving import slow_steps
from tests.serving.clients import eventually, metrics
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage
from ullage.serving.app import ServerHandle, start_server

KEY = "secret"
LONG = {"prompt": "hello" * 4, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(
    model_dir: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServerHandle]:
    slow_steps(monkeypatch)
    handle = start_server(
        model_dir, options, served_model_name="tiny", api_key=KEY, enable_control_routes=True
    )
    yield handle
    handle.stop()
    assert handle.engine.pool.num_used == 0


@pytest.fixture
def http(server: ServerHandle) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def running(http: httpx.Client, pool: ThreadPoolExecutor, count: int) -> list[Future[Any]]:
    """`count` long requests that all run, in the order of their arrival."""
    asked = []
    for number in range(count):
        asked.append(pool.submit(http.post, "/v1/completions", json=LONG))
        eventually(lambda n=number: metrics(http)["vllm:num_requests_running"] == n + 1)  # type: ignore[misc]
    return asked


def test_the_report_adds_up(
    http: httpx.Client, server: ServerHandle, pool: ThreadPoolExecutor
) -> None:
    running(http, pool, 3)
    report = http.get("/ullage/kv").json()
    assert report["running"] == 3
    assert report["used_blocks"] + report["free_blocks"] == report["num_blocks"]
    assert report["used_bytes"] == report["used_blocks"] * report["bytes_per_block"]
    assert report["total_bytes"] == server.engine.kv.num_bytes
    assert len(report["holders"]) == 3
    ages = [holder["age_s"] for holder in report["holders"]]
    assert ages == sorted(ages, reverse=True)
    for holder in report["holders"]:
        assert holder["request_id"].startswith("cmpl-")
        assert holder["num_bytes"] == holder["num_blocks"] * report["bytes_per_block"]
        # The prompt's first block is everybody's, and nobody's alone.
        assert 0 < holder["own_bytes"] < holder["num_bytes"]
    assert 0 < report["page_utilization_ratio"] <= 1


def test_cancelling_half_of_three_ends_the_two_oldest_and_frees_what_was_promised(
    http: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    asked = running(http, pool, 3)
    dry = http.post("/ullage/cancel_oldest", params={"percent": 50, "dry_run": "true"}).json()
    assert len(dry["request_ids"]) == 2
    assert dry["freed_bytes"] == 0
    assert dry["promised_bytes"] > 0
    assert metrics(http)["vllm:num_requests_running"] == 3
    done = http.post("/ullage/cancel_oldest", params={"percent": 50}).json()
    assert done["request_ids"] == dry["request_ids"]
    # At least: they may have grown since the question.
    assert done["freed_bytes"] == done["promised_bytes"] >= dry["promised_bytes"]
    first, second, third = (future.result() for future in asked)
    for cut in (first, second):
        assert cut.status_code == 503
        assert int(cut.headers["retry-after"]) >= 1
        assert "cancelled by the operator" in cut.json()["error"]["message"]
    assert third.json()["usage"]["completion_tokens"] == 400
    assert metrics(http)["ullage_requests_cancelled_total|operator"] == 2


def test_a_cancelled_stream_ends_with_an_error(http: httpx.Client, server: ServerHandle) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        http.post("/ullage/cancel_oldest", params={"percent": 100}).raise_for_status()
        with pytest.raises(openai.APIError, match="cancelled by the operator"):
            list(stream)


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"percent": "0"},
        {"percent": "-5"},
        {"percent": "101"},
        {"percent": "nan"},
        {"percent": "many"},
        {"percent": "50", "dry_run": "perhaps"},
        {"percent": "50", "force": "true"},
        [("percent", "50"), ("percent", "60")],
    ],
)
def test_a_cancel_that_is_not_clear_ends_nobody(http: httpx.Client, query: Any) -> None:
    answer = http.post("/ullage/cancel_oldest", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("percent", "dry_run", "force")


def test_nobody_without_the_key_controls_anything(server: ServerHandle) -> None:
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/ullage/kv").status_code == 401
        assert stranger.post("/ullage/cancel_oldest?percent=100").status_code == 401
        assert stranger.post("/ullage/drain").status_code == 401
        assert stranger.get("/ready").status_code == 200
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.models.list()


def test_control_routes_want_a_key_and_a_flag(model_dir: Path, options: EngineOptions) -> None:
    with pytest.raises(BadUsage, match=r"--enable-control-routes.*--api-key"):
        start_server(model_dir, options, enable_control_routes=True)
    handle = start_server(model_dir, options, api_key=KEY)
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=handle.url, headers=headers) as client:
            assert client.get("/ullage/kv").status_code == 404
            assert client.post("/ullage/drain").status_code == 404
    finally:
        handle.stop()


def test_drain_over_http_finishes_what_runs_and_then_goes_away(
    http: httpx.Client, server: ServerHandle, pool: ThreadPoolExecutor
) -> None:
    asked = running(http, pool, 2)
    answer = http.post("/ullage/drain")
    assert (answer.status_code, answer.json()) == (202, {"draining": True, "in_flight": 2})
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 200
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="shutting down") as refused,
    ):
        client.completions.create(model="tiny", prompt="late")
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    for future in asked:
        assert future.result().json()["usage"]["completion_tokens"] == 400
    gone = threading.Event()

    def until_gone() -> None:
        while not gone.is_set():
            try:
                httpx.get(f"{server.url}/health")
            except httpx.TransportError:
                gone.set()

    pool.submit(until_gone).result(30)


def test_a_full_queue_is_a_rate_limit_error(model_dir: Path) -> None:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_seqs=1)
    handle = start_server(model_dir, options, max_num_queued_reqs=0, served_model_name="tiny")
    try:
        with (
            openai.OpenAI(base_url=f"{handle.url}/v1", api_key="unused", max_retries=0) as client,
            httpx.Client(base_url=handle.url) as http,
        ):
            ask = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}
            stream = client.completions.create(**ask, extra_body={"ignore_eos": True})
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="no more may wait") as refused:
                client.completions.create(model="tiny", prompt="b")
            assert int(refused.value.response.headers["retry-after"]) >= 1
            stream.close()
            eventually(lambda: metrics(http)["vllm:num_requests_running"] == 0)
            client.completions.create(model="tiny", prompt="b")
    finally:
        handle.stop()


def test_prompts_without_an_answer_may_be_bounded_in_tokens(model_dir: Path) -> None:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_seqs=1)
    handle = start_server(
        model_dir, options, max_num_queued_tokens=10, max_num_queued_reqs=9, served_model_name="me"
    )
    try:
        with (
            openai.OpenAI(base_url=f"{handle.url}/v1", api_key="unused", max_retries=0) as client,
            httpx.Client(base_url=handle.url, timeout=60) as http,
            ThreadPoolExecutor(1) as pool,
        ):
            ask = {"model": "me", "prompt": "a", "max_tokens": 400, "stream": True}
            stream = client.completions.create(**ask, extra_body={"ignore_eos": True})
            next(iter(stream))
            body = {"prompt": "b" * 20, "max_tokens": 1}
            waiting = pool.submit(http.post, "/v1/completions", json=body)
            eventually(lambda: metrics(http)["vllm:num_requests_waiting"] == 1)
            with pytest.raises(openai.RateLimitError, match="20 prompt tokens wait"):
                client.completions.create(model="me", prompt="c")
            assert metrics(http)["vllm:admission_rejections_total|max_num_queued_tokens"] == 1
            stream.close()
            assert waiting.result().status_code == 200
            client.completions.create(model="me", prompt="c")
    finally:
        handle.stop()
