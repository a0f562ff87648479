"""`serving(app, …)`: an application on a port of this process, in the loop that runs already.

Holds the socket and its rules. Signals stay with the verb: uvicorn's own handlers are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ullage.errors import BadUsage

SHUTDOWN_S = 2
READY_POLL_S = 0.01
MAX_PORT = 65535
MOST_CONNECTIONS = 256


def address_of(text: str, *, field: str) -> tuple[str, int]:
    """(host, port) of `:PORT`, `PORT`, `HOST:PORT` or `[V6]:PORT`; without a host 127.0.0.1.

    Raises BadUsage that names `field`.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT) or (
        ":" in host and not (host.startswith("[") and host.endswith("]"))
    ):
        raise BadUsage(
            repr(text[:200]), field=field, expected="[HOST]:PORT, with a port up to 65535"
        )
    del colon
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.asynccontextmanager
async def serving(
    app: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    field: str = "--web",
    before_stop: Callable[[], None] | None = None,
) -> AsyncIterator[str]:
    """Serve `app` until the block ends; gives its URL. Port 0 picks a free one.

    `api_key` is only looked at: off loopback there must be one. `before_stop` ends what would keep
    connections open. Raises BadUsage where the address cannot be had or a key is lacking.
    """
    import uvicorn

    from ullage.watch.web.connections import PromptProtocol

    if not is_loopback(host) and not api_key:
        raise BadUsage(
            f"{host} can be reached from elsewhere and there is no key",
            field=field,
            expected="a key (--listen-api-key), or 127.0.0.1",
        )

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    listening = _listen(host, port, field)
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ws="none",
        http=PromptProtocol,
        limit_concurrency=MOST_CONNECTIONS,
    )
    server = Quiet(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(READY_POLL_S)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listening.getsockname()[1]}"
    finally:
        if before_stop is not None:
            before_stop()
        server.should_exit = True
        await task
        listening.close()


def _listen(host: str, port: int, field: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadUsage(
            f"{host}: {error}", field=field, expected="an address of this machine"
        ) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise BadUsage(
            f"{host}:{port}: {error.strerror}", field=field, expected="a free port"
        ) from error
    return listening
