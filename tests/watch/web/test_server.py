"""The page over HTTP: who may read it, what fences it in, what is refused, that it stops."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from tests.watch import sights
from tests.watch.web import simulated
from tests.watch.web.served import served
from ullage.errors import BadUsage
from ullage.watch.web import connections, gate
from ullage.watch.web.app import STATIC, create_app
from ullage.watch.web.feed import Feed
from ullage.watch.web.gate import HEADERS
from ullage.watch.web.server import address_of, is_loopback, serving

KEY = "a key with ümlauts"


@pytest.fixture(scope="module")
def feed() -> Feed:
    feed = Feed()
    for sight in simulated.rounds(60):
        feed.take(sight)
    return feed


@pytest.fixture(scope="module")
def url(feed: Feed) -> Iterator[str]:
    with served(feed) as url:
        yield url


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    feed = Feed()
    feed.take(sights.sight(sights.view()))
    with served(feed, api_key=KEY) as url:
        yield url


def ask(
    url: str, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    where = urlsplit(url)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=10)
    try:
        sent = {name.replace("_", "-"): value.encode() for name, value in headers.items()}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def ask_json(url: str, path: str) -> tuple[int, Any]:
    status, _, body = ask(url, path)
    return status, json.loads(body)


def test_the_round_the_replica_and_the_past_are_json(url: str) -> None:
    _, told = ask_json(url, "/api/sight")
    assert told["fleet"]["num"] == 12
    row = told["replicas"]["rows"][1]
    status, replica = ask_json(url, f"/api/replica?id={row['id']}")
    assert (status, replica["name"]) == (200, row["name"])
    status, history = ask_json(url, f"/api/history?id={row['id']}")
    assert (status, len(history["times"])) == (200, 13)
    later = ask_json(url, f"/api/history?since={history['times'][-3]}")[1]
    assert later["times"] == history["times"][-2:]


def test_before_the_first_round_there_is_none() -> None:
    with served(Feed()) as url:
        assert ask_json(url, "/api/sight") == (200, {"round": 0})
        assert ask_json(url, "/api/replica?id=x")[0] == 404
        assert ask_json(url, "/api/history")[1]["times"] == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/sight?sort=nonsense", 400),
        ("/api/sight?limit=-1", 400),
        ("/api/sight?limit=1e9", 400),
        ("/api/sight?limit=٣", 400),
        ("/api/history?since=yesterday", 400),
        ("/api/history?since=nan", 400),
        ("/api/history?id=unknown", 404),
        ("/api/replica", 404),
        ("/api/nothing", 404),
        ("/../../etc/passwd", 404),
        ("/static/page.js", 404),
    ],
)
def test_what_cannot_be_answered_is_refused(url: str, path: str, status: int) -> None:
    assert ask(url, path.replace("٣", "%D9%A3"))[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(url: str, method: str) -> None:
    for path in ("/", "/api/sight", "/api/replica", "/api/history"):
        assert ask(url, path, method)[0] == 405


@pytest.mark.parametrize("path", [*STATIC, "/style.css", "/api/sight", "/nowhere"])
def test_every_answer_is_fenced_in(url: str, path: str) -> None:
    _, headers, _ = ask(url, path)
    for name, value in HEADERS.items():
        assert headers[name.lower()] == value
    assert "unsafe" not in headers["content-security-policy"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_name_that_leads_here_is_refused(url: str, host: str) -> None:
    assert ask(url, "/api/sight", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:9000"])
def test_this_machines_names_are_answered(url: str, host: str) -> None:
    assert ask(url, "/api/sight", Host=host)[0] == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/sight", "/api/events", "/nowhere"])
def test_with_a_key_nothing_is_told_without_it(locked: str, path: str) -> None:
    assert ask(locked, path)[0] == 401
    assert ask(locked, path, Authorization="Bearer wrong")[0] == 401
    assert ask(locked, path, Cookie="ullage_watch=wrong")[0] == 401
    status, headers, _ = ask(locked, path, Accept="text/html")
    assert (status, headers["location"]) == (303, "/login")


def test_the_key_opens_as_a_bearer(locked: str) -> None:
    assert ask(locked, "/api/sight", Authorization=f"Bearer {KEY}")[0] == 200
    assert ask(locked, "/api/sight", Authorization=f"bearer {KEY}", Host="other.example")[0] == 200


def test_the_form_gives_a_cookie_that_opens_and_does_not_hold_the_key(locked: str) -> None:
    assert ask(locked, "/login")[0] == 200
    assert ask(locked, "/login", "POST", urlencode({"key": "wrong"}))[0] == 401
    assert ask(locked, "/login", "POST", "key=" + "x" * 9999)[0] == 413
    status, headers, _ = ask(locked, "/login", "POST", urlencode({"key": KEY}))
    cookie = headers["set-cookie"]
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert KEY not in cookie
    assert ask(locked, "/", Cookie=cookie.partition(";")[0])[0] == 200


def test_each_round_is_told_to_those_who_listen(feed: Feed, url: str) -> None:
    where = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=10)
    connection.request("GET", "/api/events")
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")

    def next_event() -> int:
        while not (line := answer.readline()).startswith(b"data:"):
            assert line
        return int(json.loads(line[5:])["round"])

    first = next_event()
    feed.take(simulated.sight_at(simulated.START_S + 5))
    assert next_event() == first + 1
    answer.close()
    connection.close()


HALF = b"GET /api/sight HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET", HALF, HALF + b"\r\n" + HALF])
def test_who_asks_nothing_is_let_go(url: str, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a few hundred half requests keep everybody out, and need no key for it."""
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.3)
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as idle:
        idle.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while idle.recv(1 << 16):
                pass  # the answer to a request that was whole


def test_who_listens_is_not_let_go(feed: Feed, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.1)
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as listener:
        listener.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        told = listener.recv(1 << 16)
        for _ in range(8):  # several looks lie between the rounds
            time.sleep(0.1)
            feed.take(sights.sight(sights.view()))
            told += listener.recv(1 << 16)
    assert told.count(b"data:") >= 4


def test_a_form_that_does_not_end_is_refused(locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "FORM_WITHIN_S", 0.1)
    where = urlsplit(locked)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as slow:
        slow.sendall(b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\nkey")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_more_listeners_than_there_is_room_for_are_told_to_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ullage.watch.web.app.MOST_STREAMS", 0)
    with served(Feed()) as url:
        assert ask(url, "/api/events")[0] == 503


def test_it_stops_at_once_while_pages_listen() -> None:
    feed = Feed()
    with served(feed) as url:
        where = urlsplit(url)
        connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=10)
        connection.request("GET", "/api/events")
        answer = connection.getresponse()
        answer.readline()
    assert b"data:" not in answer.read()
    answer.close()
    connection.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9000", ("127.0.0.1", 9000)),
        ("9000", ("127.0.0.1", 9000)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
        ("host:0", ("host", 0)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert address_of(text, field="--web") == address


@pytest.mark.parametrize("text", ["", ":", "host", ":70000", ":-1", "::1:80", "a:b:1", ":٣"])
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(BadUsage, match="--web"):
        address_of(text, field="--web")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_what_leaves_loopback_needs_a_key(host: str) -> None:
    assert not is_loopback(host)

    async def serve() -> None:
        async with serving(create_app(Feed()), host=host):
            pass

    with pytest.raises(BadUsage, match="key"):
        asyncio.run(serve())


def test_the_page_holds_nothing_that_makes_markup_of_text_or_asks_elsewhere() -> None:
    folder = files("ullage.watch.web") / "static"
    for name in {name for name, _ in STATIC.values()} | {"page.css"}:
        text = (folder / name).read_text(encoding="utf-8")
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                          "eval(", "new Function", " style=", " onclick=", "javascript:",
                          "@import", "url("):  # fmt: skip
            assert forbidden not in text, (name, forbidden)
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}


def test_a_port_that_is_taken_is_named() -> None:
    async def serve(port: int) -> None:
        async with serving(create_app(Feed()), port=port):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadUsage, match="--web"):
        asyncio.run(serve(taken.getsockname()[1]))
