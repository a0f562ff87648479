"""What a client may not do: bodies too large or too slow, headers without end, streams unread."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx2 as httpx
import pytest

from tests.engine.driving import slow_steps
from tests.serving.clients import answer_of, connect, eventually, metrics, raw_post
from ullage.serving import app, http
from ullage.serving.app import ServerHandle

LONG = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
HUGE = "abcd efg" * 1_000_000
USER = {"role": "user", "content": HUGE}


@pytest.fixture
def client(server: ServerHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_a_body_of_100_megabytes_is_refused_and_not_read(
    server: ServerHandle, client: httpx.Client
) -> None:
    """With its length said beforehand the answer comes before the first byte."""
    before = metrics(client)["process_resident_memory_bytes"]
    with connect(server.url) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n"
        )
        started = time.monotonic()
        head = connection.recv(1 << 16)
        assert time.monotonic() - started < 2
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in head.lower()
    answer = client.post("/v1/completions", content=b'{"prompt": "' + b"a" * (100 << 20) + b'"}')
    assert answer.status_code == 413
    assert "at most 8388608 bytes" in answer.json()["error"]["message"]
    after = metrics(client)["process_resident_memory_bytes"]
    # The test itself, in this process, holds the 100 MB once or twice; the server adds none.
    assert after - before < 260 << 20


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": HUGE}, "prompt: more than 512 tokens in 8000000 characters"),
        ("/v1/completions", {"prompt": ["a", HUGE]}, "prompt: more than 512 tokens in 8000000"),
        ("/v1/chat/completions", {"messages": [USER]}, "prompt: more than 512 tokens in 80000"),
        ("/tokenize", {"prompt": HUGE}, "prompt: 8000000 characters; expected at most 262144"),
        ("/tokenize", {"messages": [USER]}, "messages: 80000"),
    ],
)
def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(
    client: httpx.Client, path: str, body: dict[str, object], said: str
) -> None:
    """Of 8 MB tokenized whole the sentence would say how many tokens they are, much later."""
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_more_prompts_than_may_ever_wait_are_refused_by_their_field(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": ["a"] * 300})
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert said.startswith("prompt: 300 choices in one request (300 prompts, n 1); expected at ")


def test_a_body_of_unknown_length_is_refused_once_it_is_too_long(client: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * (1 << 20)
        yield b'"}'

    answer = client.post("/v1/completions", content=pieces())
    assert answer.status_code == 413


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 30, "9" * 5000, ""])
def test_a_nonsensical_length_is_a_4xx(server: ServerHandle, length: str) -> None:
    with connect(server.url) as connection:
        connection.sendall(
            f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}".encode()
        )
        connection.shutdown(socket.SHUT_WR)
        assert answer_of(connection).startswith(b"HTTP/1.1 4")


def test_a_slow_body_is_given_up(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_S", 0.2)
    routes = server._server.config.app.routes
    (route,) = [route for route in routes if route.path == "/v1/completions"]
    handlers = route.endpoint.__self__
    hasty = replace(handlers, body_timeout_s=0.3)
    monkeypatch.setattr(route, "app", _asgi(hasty.completions))
    with connect(server.url) as connection:
        connection.sendall(raw_post("/v1/completions", LONG)[:-5])
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"0.3 s; expected the whole body" in answer


def test_slow_headers_are_given_up(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new connection and of one that was used before."""
    monkeypatch.setattr(app, "HEADERS_TIMEOUT_S", 0.3)
    with connect(server.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHos")
        assert answer_of(connection) == b""
    with connect(server.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /health HTTP/1.1\r\nHos")
        assert answer_of(connection) == b""


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"a" * (1 << 20),
        b"GET /health HTTP/1.1\r\n" + b"X-Y: z\r\n" * 50_000,
        b"GET " + b"/a" * (1 << 18) + b" HTTP/1.1\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
    ],
    ids=["long", "many", "path", "binary", "two-lengths", "no-colon"],
)
def test_header_abuse_ends_the_connection(server: ServerHandle, raw: bytes) -> None:
    with connect(server.url) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = answer_of(connection)
        except OSError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_another_media_type_is_a_415(client: httpx.Client) -> None:
    headers = {"Content-Type": "text/plain"}
    answer = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 415
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("Content-Type", "application/json; charset=utf-16", 415),
        ("Content-Type", "application/json;charset=latin-1", 415),
        ("Content-Type", 'Application/JSON; Charset="UTF-8"', 200),
        ("Content-Encoding", "gzip", 415),
        ("Content-Encoding", "identity, br", 415),
        ("Content-Encoding", "Identity", 200),
    ],
)
def test_a_body_is_read_as_it_says_it_is_written_or_not_at_all(
    client: httpx.Client, name: str, value: str, status: int
) -> None:
    headers = {"Content-Type": "application/json", name: value}
    body = b'{"prompt": "a", "max_tokens": 1}'
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert name in answer.json()["error"]["message"]


def test_an_upgrade_is_answered_as_a_plain_request(
    server: ServerHandle, caplog: pytest.LogCaptureFixture
) -> None:
    """And says nothing in the log, least of all what else to install."""
    with connect(server.url) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert caplog.text == ""


def test_an_early_refusal_reaches_a_client_that_still_sends(client: httpx.Client) -> None:
    """The route does not exist; the body is larger than what the kernel buffers."""
    for _ in range(5):
        assert client.post("/v1/nothing", content=b"x" * (16 << 20)).status_code == 404


def test_a_wrong_verb_names_the_right_one(client: httpx.Client) -> None:
    answer = client.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_at_once(
    server: ServerHandle,
    client: httpx.Client,
    stream: bool,
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_steps(monkeypatch)
    before = metrics(client)
    with connect(server.url) as connection:
        connection.sendall(raw_post("/v1/completions", {**LONG, "stream": stream, "n": n}))
        eventually(lambda: metrics(client)["vllm:num_requests_running"] == n)
    name = "vllm:request_success_total|abort"
    eventually(lambda: metrics(client)[name] == before[name] + n)
    after = metrics(client)
    assert after["ullage_kv_cache_used_bytes"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    by = "ullage_requests_cancelled_total|client"
    assert after[by] == before[by] + n


def test_a_client_that_stops_reading_does_not_stop_the_others(
    server: ServerHandle, client: httpx.Client
) -> None:
    with connect(server.url) as connection:
        connection.sendall(raw_post("/v1/completions", {**LONG, "stream": True}))
        assert connection.recv(1000)
        for _ in range(3):
            answer = client.post("/v1/completions", json={**LONG, "max_tokens": 5})
            assert answer.json()["usage"]["completion_tokens"] == 5


def _asgi(endpoint: object) -> object:
    from starlette.routing import Route

    return Route("/x", endpoint, methods=["POST"]).app  # type: ignore[arg-type]
