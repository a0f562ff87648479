"""The server's conduct: limits, keys, disconnects, overload, drain, metrics that add up."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.clients import eventually, metrics
from tests.serving.conftest import MODEL
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage
from ullage.serving.app import ServerHandle, is_loopback, start_server

LONG = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def http(server: ServerHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_probes(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    assert set(http.get("/version").json()) == {"version"}
    assert http.get("/nowhere").status_code == 404
    assert http.get("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "max_tokens": 1e9}',
        b'{"prompt": "a", "max_tokens": 0}',
        b'{"prompt": "a", "max_tokens": true}',
        b'{"prompt": "a", "seed": ' + b"9" * 3000 + b"}",
        b'{"prompt": "a", "top_p": 0}',
        b'{"prompt": "a", "stop": [""]}',
        b'{"prompt": "a", "stop": 5}',
        b'{"prompt": "a", "stream": "yes"}',
        b'{"prompt": "a", "stream_options": {"include_usage": true}}',
        b'{"prompt": "a", "logprobs": 21}',
        b'{"prompt": "a", "model": 5}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": []}',
        b'{"prompt": ""}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [1.5]}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"{}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_bad_bodies_get_a_400_and_one_sentence(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert 5 < len(message) < 400
    assert "\n" not in message
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [1], [{"role": "user"}], [{"content": "x"}], [{"role": "u", "content": [1]}]],
)
def test_bad_messages_get_a_400(http: httpx.Client, messages: object) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


def test_a_body_that_is_too_large_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt": "' + b"a" * (9 << 20) + b'"}')
    assert answer.status_code == 413


def test_metrics_add_up(model_dir: Path, options: EngineOptions) -> None:
    server = start_server(model_dir, options, served_model_name=MODEL)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            before = metrics(http)
            # The warm-up is not counted.
            assert before["vllm:generation_tokens_total"] == 0
            for _ in range(3):
                body = {"prompt": "hello", "max_tokens": 7, "ignore_eos": True}
                http.post("/v1/completions", json=body).raise_for_status()
            after = metrics(http)
    finally:
        server.stop()
    assert after["vllm:prompt_tokens_total"] == 15
    assert after["vllm:generation_tokens_total"] == 21
    assert after["vllm:request_success_total|length"] == 3
    assert after["vllm:request_success_total|stop"] == 0
    assert after["vllm:time_to_first_token_seconds_count"] == 3
    assert after["vllm:inter_token_latency_seconds_count"] == 3 * 6
    assert after["vllm:e2e_request_latency_seconds_count"] == 3
    assert after["vllm:request_queue_time_seconds_count"] == 3
    assert after["vllm:request_prompt_tokens_sum"] == 15
    assert after["vllm:request_generation_tokens_sum"] == 21
    assert after["vllm:iteration_tokens_total_sum"] == 15 + 3 * 6
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    e2e, ttft, itl = (
        after[f"vllm:{name}_seconds_sum"]
        for name in ("e2e_request_latency", "time_to_first_token", "inter_token_latency")
    )
    assert e2e == pytest.approx(ttft + itl, abs=1e-6)
    assert after["ullage_kv_cache_total_bytes"] == server.engine.kv.num_bytes
    assert after["ullage_kv_cache_used_bytes"] == 0


def test_the_cache_configuration_is_exported(http: httpx.Client, server: ServerHandle) -> None:
    families = text_string_to_metric_families(http.get("/metrics").text)
    (sample,) = next(f for f in families if f.name == "vllm:cache_config_info").samples
    pool = server.engine.pool
    assert sample.labels["num_gpu_blocks"] == str(pool.num_blocks)
    assert sample.labels["block_size"] == "16"
    assert sample.labels["kv_cache_size_tokens"] == str(pool.num_blocks * 16)
    assert float(sample.labels["kv_cache_max_concurrency"]) == pool.num_blocks / (512 / 16)


def test_kv_in_use_shows_while_a_request_runs(http: httpx.Client, server: ServerHandle) -> None:
    seen: dict[str, float] = {}
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        for count, _ in enumerate(answer.iter_lines()):
            if count == 20:
                with httpx.Client(base_url=server.url) as other:
                    seen = metrics(other)
    assert seen["vllm:num_requests_running"] == 1
    blocks = seen["vllm:kv_cache_usage_perc"] * server.engine.pool.num_blocks
    assert blocks == pytest.approx(round(blocks))
    assert blocks >= 1
    assert seen["ullage_kv_cache_used_bytes"] == round(blocks) * server.engine.kv.bytes_per_block
    assert 0 < seen["ullage_kv_page_utilization_ratio"] <= 1


def test_the_queue_is_bounded(server: ServerHandle) -> None:
    """4 run, 4 wait, the rest is told to come back; everybody gets an answer."""

    def ask(_: int) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            return http.post("/v1/completions", json={**LONG, "max_tokens": 200})

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert "no more may wait" in answer.json()["error"]["message"]
        else:
            assert answer.json()["usage"]["completion_tokens"] == 200
    with httpx.Client(base_url=server.url) as http:
        refused = metrics(http)["vllm:admission_rejections_total|max_num_queued_reqs"]
    assert refused >= statuses.count(429)


def test_an_api_key_guards_what_costs_something(model_dir: Path, options: EngineOptions) -> None:
    server = start_server(model_dir, options, served_model_name=MODEL, api_key="sésame")
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                assert http.post(path, json={"prompt": "a"}).status_code == 401
            assert http.get("/v1/models").status_code == 401
            wrong = {"Authorization": "Bearer wrong"}
            assert http.get("/v1/models", headers=wrong).status_code == 401
            right = {"Authorization": "Bearer sésame".encode()}
            assert http.get("/v1/models", headers=right).status_code == 200
            for path in ("/health", "/ready", "/metrics", "/version"):
                assert http.get(path).status_code == 200
    finally:
        server.stop()


def test_drain_finishes_what_runs_and_takes_nothing_new(
    model_dir: Path, options: EngineOptions
) -> None:
    server = start_server(model_dir, options, served_model_name=MODEL)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/ready").status_code == 200
        lines: list[str] = []

        def stream() -> None:
            body = {**LONG, "stream": True}
            with (
                httpx.Client(base_url=server.url, timeout=60) as other,
                other.stream("POST", "/v1/completions", json=body) as answer,
            ):
                lines.extend(line for line in answer.iter_lines() if line)

        streaming = threading.Thread(target=stream)
        streaming.start()
        eventually(lambda: metrics(http)["vllm:num_requests_running"] == 1)
        draining = threading.Thread(target=server.drain)
        draining.start()
        eventually(lambda: http.get("/ready").status_code == 503)
        refused = http.post("/v1/completions", json={"prompt": "late"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        streaming.join()
        draining.join()
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 401
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_an_engine_that_fails_tells_everybody(
    model_dir: Path,
    options: EngineOptions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = start_server(model_dir, options, served_model_name=MODEL)
    try:

        def broken(*_: object) -> object:
            raise RuntimeError("out of luck")

        monkeypatch.setattr(server.engine._decoder, "forward", broken)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            answer = http.post("/v1/completions", json=LONG)
            assert answer.status_code == 500
            assert "the engine ended" in answer.json()["error"]["message"]
            assert "out of luck" not in answer.text
            assert http.get("/health").status_code == 503
            assert http.get("/ready").status_code == 503
            assert http.post("/v1/completions", json=LONG).status_code == 500
    finally:
        server.stop()
    assert "out of luck" in caplog.text


def test_stop_ends_what_runs_with_an_error_not_a_hang(
    model_dir: Path, options: EngineOptions
) -> None:
    before = set(threading.enumerate())
    server = start_server(model_dir, options, served_model_name=MODEL)
    lines: list[str] = []
    started = threading.Event()

    def stream() -> None:
        body = {**LONG, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                started.set()

    streaming = threading.Thread(target=stream)
    streaming.start()
    assert started.wait(30)
    server.stop()
    streaming.join(30)
    assert not streaming.is_alive()
    said = [line for line in lines if line]
    assert said[-1] == "data: [DONE]"
    assert len(said) == 401 or "the engine ended before this request did" in said[-2]
    assert server.engine.pool.num_used == 0
    server.stop()  # again changes nothing
    left = [t.name for t in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith("ullage-")]


def test_off_loopback_needs_a_key(model_dir: Path, options: EngineOptions) -> None:
    with pytest.raises(BadUsage, match="--api-key"):
        start_server(model_dir, options, host="0.0.0.0")
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_port_that_is_taken_is_a_sentence(model_dir: Path, server: ServerHandle) -> None:
    with pytest.raises(BadUsage, match="cannot listen"):
        start_server(model_dir, port=int(server.url.rpartition(":")[2]))


def test_clients_that_break_off_leave_nothing_on_stderr(
    server: ServerHandle, caplog: pytest.LogCaptureFixture
) -> None:
    """Each resets its connection while tokens come: what is written then goes nowhere, silently."""
    host, port = server.url.removeprefix("http://").split(":")
    wish = {"prompt": "hi", "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    body = json.dumps(wish)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"

    def break_off(_: int) -> None:
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(f"{head}\r\n{body}".encode())
            assert client.recv(16).startswith(b"HTTP/1.1 ")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(break_off, range(40)))
    eventually(lambda: server.engine.pool.num_used == 0)
    assert caplog.text == ""
