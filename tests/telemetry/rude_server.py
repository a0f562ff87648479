"""A small server that answers each path as a test tells it to, well or badly, on any address.

Holds the server; what is asked of it, and what must come of that, are the tests'.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import chain, repeat

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
PAGE = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"


@dataclass
class Rude:
    """Path → how it answers; every request that came, with its headers; connections so far."""

    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    num_connections: int = 0
    at_once: int = 0
    most_at_once: int = 0
    port: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head[:-4].split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                path = first.split(" ")[1]
                self.requests.append((path, headers))
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                try:
                    await self.answers.get(path, status(404))(writer)
                finally:
                    self.at_once -= 1
                await writer.drain()
        writer.close()

    def drop_all(self) -> None:
        """Close every connection that is open, as a server does after its keep-alive time."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@contextlib.asynccontextmanager
async def rude_server(
    answers: dict[str, Answer], *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Rude]:
    rude = Rude(answers)
    server = await asyncio.start_server(rude.serve, host, 0, ssl=tls)
    rude.port = server.sockets[0].getsockname()[1]
    try:
        yield rude
    finally:
        server.close()
        rude.drop_all()
        await asyncio.sleep(0)


# --- ways to answer -------------------------------------------------------------------------------


def raw(*pieces: bytes, pause_s: float = 0.0, close: bool = False, endless: bool = False) -> Answer:
    """Exactly these bytes, with a pause before each; the last for ever where it is `endless`."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in chain(pieces, repeat(pieces[-1]) if endless else ()):
            await asyncio.sleep(pause_s)
            writer.write(piece)
            await writer.drain()
        if close:
            writer.close()

    return answer


def page(body: bytes = PAGE, *, headers: bytes = b"") -> Answer:
    """200 with a Content-Length."""
    return raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n" % (len(body), headers) + body)


def status(code: int, *, headers: bytes = b"", body: bytes = b"{}") -> Answer:
    """Another status than 200."""
    head = b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n%b\r\n" % (code, len(body), headers)
    return raw(head + body)


def chunked(*chunks: bytes, trailer: bytes = b"") -> Answer:
    """200 in chunks."""
    body = b"".join(b"%x;note=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return raw(head + body + b"0\r\n" + trailer + b"\r\n")


def reset() -> Answer:
    """The connection is broken off, without an answer."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    return answer
