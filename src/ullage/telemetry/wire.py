"""One kept-alive HTTP/1.1 connection that asks GET and trusts nothing of what comes back.

Holds the client that scraping uses, bounded in bytes; time is bounded by the caller. Why not an
HTTP library: docs/decisions/0007-lean-scraping.md. What the answers mean is their readers'.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ullage.errors import BadUsage
from ullage.telemetry.bounded import MAX_BODY_BYTES

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_CHUNK_LINE_BYTES = 1 << 10
# A body that has come in is read in pieces of at most this, so that it is kept only once.
READ_BYTES = 256 << 10
UNAUTHORIZED = (401, 403)
DEFAULT_PORTS: Mapping[str, int] = {"http": 80, "https": 443}


class NoAnswer(Exception):
    """There is no whole, well-formed answer; `str()` says why in a few words."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens. `host` has no brackets; `header` is what goes into `Host:`."""

    scheme: str
    host: str
    port: int

    @property
    def header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.header}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers by lower-case name (the last of equal ones) and the decoded body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def origin_and_path(url: str) -> tuple[Origin, str]:
    """`host:port`, `http(s)://host[:port][/path]` → where it listens, and the path without its
    last slash. Raises BadUsage for what cannot be asked."""
    given = url.strip()
    whole = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(whole)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except (ValueError, UnicodeError):
        raise _bad_url(url) from None
    if parts.scheme not in DEFAULT_PORTS or not host or not _is_plain(host + parts.path):
        raise _bad_url(url)
    if parts.username is not None or parts.password is not None:
        raise BadUsage("a URL with a name or a password in it", expected="a key in --api-key")
    if parts.query or parts.fragment:
        raise BadUsage(f"{url} has a query or a fragment", expected="a URL that ends with its path")
    asked = DEFAULT_PORTS[parts.scheme] if port is None else port
    if asked == 0:
        raise _bad_url(url)
    return Origin(parts.scheme, host, asked), parts.path.rstrip("/")


def _bad_url(url: str) -> BadUsage:
    return BadUsage(f"{url!r} is not the URL of a server", expected="http://HOST:PORT or HOST:PORT")


def _is_plain(text: str) -> bool:
    return not any(char.isspace() or not char.isprintable() for char in text)


class Connection:
    """Asks one origin, one question at a time, over one connection that is kept open."""

    def __init__(self, origin: Origin, *, api_key: str | None = None) -> None:
        self._origin = origin
        headers = ["User-Agent: ullage", "Accept: text/plain, */*;q=0.5"]
        headers += ["Accept-Encoding: identity"]
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
                raise BadUsage("a key with characters that no header can hold", file="--api-key")
            headers.append(f"Authorization: Bearer {api_key}")
        self._fixed = "\r\n".join([f"Host: {_host_header(origin)}", *headers, "", ""])
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> Answer:
        """The answer to GET `path`. Raises NoAnswer; a cancelled or failed one closes.

        A connection that was kept open may have been closed at the other end in the meantime
        (uvicorn does so after 5 s): what breaks before a byte has come is asked once more.
        """
        kept = self._streams is not None
        try:
            try:
                return await self._ask(path)
            except _Unanswered:
                self.close()
                if not kept:
                    raise
                return await self._ask(path)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | EOFError):
                raise NoAnswer(in_words(error, self._origin.host)) from error
            raise

    def close(self) -> None:
        """Let the connection go; the next question opens one."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _ask(self, path: str) -> Answer:
        if self._streams is None:
            self._streams = await _open(self._origin)
        reader, writer = self._streams
        try:
            writer.write(f"GET {path} HTTP/1.1\r\n{self._fixed}".encode("ascii", "replace"))
            status, headers, newer = await _read_head(reader)
            while 100 <= status < 200:
                status, headers, newer = await _read_head(reader)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                raise _Unanswered from error
            raise NoAnswer("the connection was closed in the middle of the answer") from error
        except ConnectionError as error:
            raise _Unanswered from error
        try:
            body, ended_by_closing = await _read_body(reader, status, headers)
        except asyncio.IncompleteReadError as error:
            raise NoAnswer("the connection was closed in the middle of the answer") from error
        wanted = headers.get("connection", "keep-alive" if newer else "close").lower()
        if ended_by_closing or "close" in wanted or (not newer and "keep-alive" not in wanted):
            self.close()
        return Answer(status, headers, _decoded(body, headers.get("content-encoding", "")))


class _Unanswered(ConnectionError):
    """The connection ended before the first byte of an answer."""


def _host_header(origin: Origin) -> str:
    return origin.header.encode("idna").decode() if not origin.header.isascii() else origin.header


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _open(origin: Origin) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    tls = _tls() if origin.scheme == "https" else None
    return await asyncio.open_connection(
        origin.host, origin.port, ssl=tls, limit=READ_BYTES, happy_eyeballs_delay=0.25
    )


# --- reading an answer (RFC 9112) -----------------------------------------------------------------


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bool]:
    """Status, headers, and whether the server speaks HTTP/1.1 (which keeps connections open)."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise NoAnswer("it does not speak HTTP: no end of its headers") from error
    if len(head) > MAX_HEAD_BYTES:
        raise NoAnswer(f"its headers are larger than {MAX_HEAD_BYTES:,} bytes")
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()):
        raise NoAnswer("it does not speak HTTP/1.1")
    if len(lines) > MAX_HEADERS:
        raise NoAnswer(f"it sends more than {MAX_HEADERS} headers")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return int(code), headers, version == "HTTP/1.1"


async def _read_body(
    reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]
) -> tuple[bytes, bool]:
    """The body as sent, and whether the end of the connection was what ended it."""
    if status in (204, 304):
        return b"", False
    coding = headers.get("transfer-encoding", "").lower()
    if coding == "chunked":
        return await _read_chunks(reader), False
    if coding not in ("", "identity"):
        raise NoAnswer(f"a transfer encoding that is not known: {_short(coding)}")
    length = headers.get("content-length")
    if length is None:
        return await _read_to_end(reader), True
    if not (length.isascii() and length.isdigit()) or len(length) > 15:
        raise NoAnswer(f"a Content-Length that is no number: {_short(length)}")
    _check_size(int(length))
    return await reader.readexactly(int(length)), False


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := await _chunk_size(reader):
        _check_size(len(body) + size)
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise NoAnswer("a chunk that is longer than it says")
    for _ in range(MAX_HEADERS):
        if await _short_line(reader) == b"":
            return bytes(body)
    raise NoAnswer(f"it sends more than {MAX_HEADERS} headers after its chunks")


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    size = (await _short_line(reader)).partition(b";")[0].strip()
    if not size or len(size) > 8 or size.strip(b"0123456789abcdefABCDEF"):
        raise NoAnswer("a chunk whose size is no number")
    return int(size, 16)


async def _short_line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\r\n")
    except asyncio.LimitOverrunError as error:
        raise NoAnswer("a line between chunks that does not end") from error
    if len(line) > MAX_CHUNK_LINE_BYTES:
        raise NoAnswer("a line between chunks that does not end")
    return line[:-2]


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while piece := await reader.read(READ_BYTES):
        _check_size(len(body) + len(piece))
        body += piece
    return bytes(body)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise NoAnswer(f"the answer is larger than {MAX_BODY_BYTES:,} bytes")


def _decoded(body: bytes, coding: str) -> bytes:
    """The body without the compression that some proxies add unasked."""
    if coding.lower() in ("", "identity"):
        return body
    if coding.lower() not in ("gzip", "x-gzip", "deflate"):
        raise NoAnswer(f"a content encoding that was not asked for: {_short(coding)}")
    # 47: zlib's largest window, and its header or gzip's, whichever there is.
    inflater = zlib.decompressobj(47)
    try:
        plain = inflater.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise NoAnswer("a compressed body that is damaged") from error
    _check_size(len(plain))
    if not inflater.eof:
        raise NoAnswer("a compressed body that is cut short")
    return plain


def _short(text: str) -> str:
    return repr(text[:40])


def in_words(error: BaseException, host: str) -> str:
    """What became of a connection to `host`. An HTTP library's error is told by what caused it."""
    cause: BaseException | None = error
    while cause is not None and not _is_told(cause):
        within = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else None
        cause = within or cause.__cause__ or cause.__context__
    return _words_of(cause or error, host)


def _is_told(error: BaseException) -> bool:
    """Whether it is what happened, and not what a library made of it."""
    known = isinstance(error, _Unanswered | EOFError | ssl.SSLError)
    return known or (isinstance(error, OSError) and error.errno is not None)


def _words_of(error: BaseException, host: str) -> str:
    if isinstance(error, _Unanswered | EOFError):
        return "the connection was closed before an answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS there"
    if isinstance(error, OSError) and error.errno is not None and error.errno < 0:
        return f"{host} has no address"  # getaddrinfo's numbers are negative
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or "no connection"
