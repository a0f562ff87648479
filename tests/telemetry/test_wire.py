"""One connection: well-formed answers come back whole, all others as a few words, in bounds."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import zlib
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.telemetry.rude_server import (
    PAGE,
    Answer,
    Rude,
    chunked,
    page,
    raw,
    reset,
    rude_server,
)
from ullage.errors import BadUsage
from ullage.telemetry import wire
from ullage.telemetry.bounded import MAX_BODY_BYTES
from ullage.telemetry.wire import Connection, NoAnswer, Origin, origin_and_path

OK = b"HTTP/1.1 200 OK\r\n"
T = TypeVar("T")


def asked(answer: Answer, within_s: float = 5.0) -> wire.Answer:
    """What comes of GET / where it is answered like this."""

    async def run() -> wire.Answer:
        async with rude_server({"/": answer}) as rude:
            connection = Connection(Origin("http", "127.0.0.1", rude.port))
            try:
                async with asyncio.timeout(within_s):
                    return await connection.get("/")
            finally:
                connection.close()

    return asyncio.run(run())


GOOD: dict[str, tuple[Answer, bytes]] = {
    "a length": (page(), PAGE),
    "no body": (page(b""), b""),
    "pieces": (raw(OK + b"Content-Len", b"gth: 4\r\n", b"\r\nab", b"cd", pause_s=0.01), b"abcd"),
    "chunks": (chunked(b"one ", b"two"), b"one two"),
    "no chunk": (chunked(), b""),
    "a trailer after chunks": (chunked(b"x", trailer=b"Sum: 1\r\n"), b"x"),
    "the end of the connection": (raw(OK + b"\r\n" + PAGE, close=True), PAGE),
    "HTTP/1.0": (raw(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE, close=True), PAGE),
    "early hints": (
        raw(b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nx"),
        b"x",
    ),
    "gzip": (page(gzip.compress(PAGE), headers=b"Content-Encoding: gzip\r\n"), PAGE),
    "deflate": (page(zlib.compress(PAGE), headers=b"Content-Encoding: deflate\r\n"), PAGE),
}


@pytest.mark.parametrize("way", GOOD)
def test_a_body_comes_back_however_its_end_is_told(way: str) -> None:
    answer, body = GOOD[way]
    got = asked(answer)
    assert (got.status, got.body) == (200, body)


BAD: dict[str, tuple[Answer, str]] = {
    "garbage": (raw(b"\x00\xff\r\n\r\n"), "does not speak HTTP"),
    "another protocol": (raw(b"SSH-2.0-OpenSSH_9.2\r\n", close=True), "closed in the middle"),
    "HTTP/2": (raw(b"HTTP/2 200\r\n\r\n"), "does not speak HTTP/1.1"),
    "a status that is none": (raw(b"HTTP/1.1 2x0 OK\r\n\r\n"), "does not speak HTTP/1.1"),
    "headers without end": (raw(b"a" * 70_000, endless=True), "no end of its headers"),
    "headers too large": (raw(OK + b"a: " + b"b" * 40_000 + b"\r\n\r\n"), "headers are larger"),
    "too many headers": (raw(OK + b"a: b\r\n" * 200 + b"\r\n"), "more than 100 headers"),
    "a giant length": (raw(OK + b"Content-Length: 99999999999\r\n\r\n"), "larger than"),
    "no length but words": (raw(OK + b"Content-Length: many\r\n\r\n"), "no number: 'many'"),
    "a negative length": (raw(OK + b"Content-Length: -1\r\n\r\n"), "no number: '-1'"),
    "a body without end": (raw(OK + b"\r\n", b"x" * 262_144, endless=True), "larger than"),
    "chunks without end": (
        raw(
            OK + b"Transfer-Encoding: chunked\r\n\r\n",
            (b"40000\r\n" + b"x" * 262_144 + b"\r\n") * 4,
            endless=True,
        ),
        "larger than",
    ),
    "a chunk that lies": (
        raw(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n"),
        "longer than it says",
    ),
    "a chunk of no size": (
        raw(OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n"),
        "size is no number",
    ),
    "a chunk line without end": (
        raw(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1" * 65_536, endless=True),
        "does not end",
    ),
    "a trailer without end": (
        raw(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 200),
        "after its chunks",
    ),
    "another transfer encoding": (raw(OK + b"Transfer-Encoding: br\r\n\r\n"), "'br'"),
    "another content encoding": (page(headers=b"Content-Encoding: zstd\r\n"), "'zstd'"),
    "gzip that is none": (page(headers=b"Content-Encoding: gzip\r\n"), "damaged"),
    "gzip cut short": (
        page(gzip.compress(PAGE)[:-12], headers=b"Content-Encoding: gzip\r\n"),
        "cut short",
    ),
    "gzip of too much": (
        page(gzip.compress(bytes(MAX_BODY_BYTES + 1)), headers=b"Content-Encoding: gzip\r\n"),
        "larger than",
    ),
    "a body cut short": (raw(OK + b"Content-Length: 9\r\n\r\nabc", close=True), "in the middle"),
    "headers cut short": (raw(OK, close=True), "in the middle"),
    "no answer": (reset(), "closed before an answer"),
}


@pytest.mark.parametrize("way", BAD)
def test_what_is_no_answer_is_said_in_a_few_words(way: str) -> None:
    answer, words = BAD[way]
    with pytest.raises(NoAnswer, match=words):
        asked(answer)


def test_an_answer_that_drips_is_the_callers_to_time() -> None:
    with pytest.raises(TimeoutError):
        asked(raw(OK + b"\r\n", b"x", pause_s=0.02, endless=True), within_s=0.2)


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_no_bytes_at_all_make_anything_but_an_answer_or_its_refusal(sent: bytes) -> None:
    try:
        got = asked(raw(sent, close=True))
    except NoAnswer:
        return
    assert got.body in sent or b"chunked" in sent.lower()


# --- connections ----------------------------------------------------------------------------------


async def ask_twice(rude: Rude, between: str) -> list[bytes]:
    connection = Connection(Origin("http", "127.0.0.1", rude.port))
    first = await connection.get("/")
    if between == "drop":
        rude.drop_all()
        await asyncio.sleep(0.02)
    second = await connection.get("/")
    connection.close()
    await asyncio.sleep(0)
    return [first.body, second.body]


@pytest.mark.parametrize(
    ("headers", "between", "num"),
    [(b"", "", 1), (b"Connection: close\r\n", "", 2), (b"", "drop", 2)],
)
def test_a_connection_is_kept_as_long_as_the_server_keeps_it(
    headers: bytes, between: str, num: int
) -> None:
    async def run() -> int:
        async with rude_server({"/": page(headers=headers)}) as rude:
            assert await ask_twice(rude, between) == [PAGE, PAGE]
            return rude.num_connections

    assert asyncio.run(run()) == num


def test_a_kept_connection_that_breaks_is_tried_anew_once_and_a_new_one_not() -> None:
    async def run() -> list[str]:
        async with rude_server({"/": page(), "/gone": reset()}) as rude:
            connection = Connection(Origin("http", "127.0.0.1", rude.port))
            await connection.get("/")
            with pytest.raises(NoAnswer, match="closed before an answer"):
                await connection.get("/gone")
            with pytest.raises(NoAnswer, match="closed before an answer"):
                await connection.get("/gone")
            return rude.paths

    assert asyncio.run(run()) == ["/", "/gone", "/gone", "/gone"]


def test_after_a_timeout_the_late_answer_is_not_taken_for_the_next_one() -> None:
    async def run() -> bytes:
        late = raw(OK + b"Content-Length: 4\r\n\r\nlate", pause_s=0.15)
        async with rude_server({"/late": late, "/": page()}) as rude:
            connection = Connection(Origin("http", "127.0.0.1", rude.port))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await connection.get("/late")
            await asyncio.sleep(0.15)
            body = (await connection.get("/")).body
            connection.close()
            return body

    assert asyncio.run(run()) == PAGE


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_host_and_the_key_are_sent_as_they_should_be(host: str) -> None:
    async def run() -> tuple[int, dict[str, str]]:
        try:
            async with rude_server({"/": page()}, host=host) as rude:
                connection = Connection(Origin("http", host, rude.port), api_key="k1")
                await connection.get("/")
                connection.close()
                return rude.port, rude.requests[0][1]
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")

    port, headers = asyncio.run(run())
    assert headers["host"] == (f"[::1]:{port}" if host == "::1" else f"127.0.0.1:{port}")
    assert headers["authorization"] == "bearer k1"
    assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("key", ["", " ", "a\r\nX: y", "ключ"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(BadUsage, match="--api-key"):
        Connection(Origin("http", "h", 1), api_key=key)


def test_why_there_is_no_connection_is_said(tmp_path: Path) -> None:
    async def why(origin: Origin) -> str:
        with pytest.raises(NoAnswer) as refused:
            await Connection(origin).get("/")
        return str(refused.value)

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def run() -> list[str]:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            plain = await why(Origin("https", "127.0.0.1", port))
        closed = await why(Origin("http", "127.0.0.1", port))
        return [plain, closed, await why(Origin("http", "no.invalid", 1))]

    assert asyncio.run(run()) == [
        "it does not speak TLS there",
        "connection refused",
        "no.invalid has no address",
    ]


def test_tls_is_spoken_and_a_certificate_of_nobody_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def run() -> bytes:
        async with rude_server({"/": page()}, tls=tls) as rude:
            connection = Connection(Origin("https", "localhost", rude.port))
            body = (await connection.get("/")).body
            connection.close()
            await asyncio.sleep(0.01)
            return body

    wire._tls.cache_clear()
    with pytest.raises(NoAnswer, match="certificate is not trusted"):
        asyncio.run(run())
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    wire._tls.cache_clear()
    assert asyncio.run(run()) == PAGE
    wire._tls.cache_clear()


# --- URLs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("host:8000", Origin("http", "host", 8000), ""),
        ("http://host", Origin("http", "host", 80), ""),
        ("https://host/", Origin("https", "host", 443), ""),
        ("http://[::1]:8000/metrics", Origin("http", "::1", 8000), "/metrics"),
        ("[::1]:8000", Origin("http", "::1", 8000), ""),
        ("HTTP://Host:1/a/b/", Origin("http", "host", 1), "/a/b"),
        ("10.0.0.1:9", Origin("http", "10.0.0.1", 9), ""),
    ],
)
def test_a_url_is_read(url: str, origin: Origin, path: str) -> None:
    assert origin_and_path(url) == (origin, path)


@pytest.mark.parametrize(
    "url",
    ["", "http://", "ftp://h", "h:port", "h:0", "h:99999", "http://h h", "http://h/a b", "://h",
     "http://h/?q=1", "http://h/#f", "http://me:secret@h", "http://[::1", "h\r\nX: y", "/metrics"],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(BadUsage) as refused:
        origin_and_path(url)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text(max_size=40))
@settings(max_examples=300)
def test_any_text_is_a_url_or_refused(text: str) -> None:
    try:
        origin, path = origin_and_path(text)
    except BadUsage:
        return
    assert origin.host and 0 < origin.port < 65536
    assert path == "" or path.startswith("/")
