"""Sockets, threads and signals of a server: start in this process, or run until SIGTERM.

Holds no routes. SIGTERM and SIGINT drain: nothing new is taken, what runs is finished, exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage, UllageError
from ullage.serving.loop import EngineLoop
from ullage.serving.routes import ServerSettings, create_app

READY_POLL_S = 0.02
SHUTDOWN_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class ServerHandle:
    """A server that runs in this process. `stop()` aborts what runs; `drain()` finishes it."""

    url: str
    engine: Engine
    _server: _Server
    _loop: EngineLoop
    _asyncio: asyncio.AbstractEventLoop
    _thread: threading.Thread

    def drain(self) -> None:
        """Take nothing new, wait for what runs, then stop."""
        asyncio.run_coroutine_threadsafe(self._loop.drain(), self._asyncio).result()
        self.stop()

    def stop(self) -> None:
        """Stop now. Safe to repeat."""
        # The engine first: requests that wait for it then end, and with them their connections.
        self._loop.stop()
        self._server.should_exit = True
        self._thread.join()


def start_server(
    model: str | Path,
    options: EngineOptions | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    served_model_name: str | None = None,
    max_num_queued_reqs: int = 256,
    lora_modules: Mapping[str, str] | None = None,
) -> ServerHandle:
    """Load `model`, serve it from a thread of this process, return when it is warm.

    Port 0 picks a free one; `lora_modules` are adapters by name. Raises what Engine.load and
    load_lora raise, and BadUsage for an address that
    cannot be used or that leaves loopback without a key.
    """
    listener = listening_socket(host, port, api_key)
    try:
        engine = _load(model, options, lora_modules or {})
    except BaseException:
        listener.close()
        raise
    server, loop = _build(engine, model, api_key, served_model_name, max_num_queued_reqs)
    started: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        started.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="ullage-http", daemon=True)
    thread.start()
    while not loop.ready:
        if loop.failure is not None or not thread.is_alive():
            server.should_exit = True
            thread.join()
            raise UllageError(f"the engine failed at its warm-up: {loop.failure!r}")
        thread.join(READY_POLL_S)
    return ServerHandle(address(listener), engine, server, loop, started[0], thread)


def run_server(
    model: str | Path,
    options: EngineOptions,
    *,
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    max_num_queued_reqs: int,
    lora_modules: Mapping[str, str],
    on_ready: Callable[[str, Engine], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs. `on_ready(url, engine)` once warm."""
    with listening_socket(host, port, api_key) as listener:
        engine = _load(model, options, lora_modules)
        server, loop = _build(engine, model, api_key, served_model_name, max_num_queued_reqs)

        async def main() -> None:
            ending = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, ending.set)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            waiting = asyncio.ensure_future(_ready(loop))
            ended = asyncio.ensure_future(ending.wait())
            await asyncio.wait({serving, waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and loop.ready:
                on_ready(address(listener), engine)
                await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await loop.drain()
            server.should_exit = True
            await serving
            ended.cancel()

        asyncio.run(main())
        if loop.failure is not None:
            raise UllageError(f"the engine failed: {loop.failure!r}")


def listening_socket(host: str, port: int, api_key: str | None) -> socket.socket:
    """A bound, listening socket. Raises BadUsage off loopback without a key, or when taken."""
    if not is_loopback(host) and not api_key:
        raise BadUsage(
            f"{host} can be reached from other machines",
            field="--host",
            expected="--api-key with it, or a loopback address",
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise BadUsage(f"cannot listen on {host} port {port}: {error}", field="--port") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; names other than localhost are taken as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(listener: socket.socket) -> str:
    """http://host:port of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _load(
    model: str | Path, options: EngineOptions | None, lora_modules: Mapping[str, str]
) -> Engine:
    engine = Engine.load(model, options)
    for name, path in lora_modules.items():
        engine.load_lora(name, path)
    return engine


async def _ready(loop: EngineLoop) -> None:
    while not loop.ready and loop.failure is None:
        await asyncio.sleep(READY_POLL_S)


def _build(
    engine: Engine,
    model: str | Path,
    api_key: str | None,
    served_model_name: str | None,
    max_num_queued_reqs: int,
) -> tuple[_Server, EngineLoop]:
    settings = ServerSettings(
        model_name=served_model_name or str(model),
        model_path=str(model),
        api_key=api_key,
        max_num_queued_reqs=max_num_queued_reqs,
    )
    app = create_app(engine, settings)
    # Logs go to stderr and only when something is wrong; the access log is the caller's proxy's.
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        # What the engine serves is finished by then; who keeps a connection must not keep us.
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return _Server(config), app.state.loop
