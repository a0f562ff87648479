"""Sockets, threads and signals of a server: start in this process, or run until SIGTERM.

Holds no routes. SIGTERM, SIGINT and POST /ullage/drain do the same: nothing new is taken, what runs
is finished within the shutdown timeout, exit 0. A second signal cuts what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ullage.anatomy import load as load_anatomy
from ullage.anatomy.spec import ModelSpec
from ullage.engine.encoder.embedder import Embedder
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage, UllageError
from ullage.serving.embedding_loop import EmbeddingLoop
from ullage.serving.embeddings import create_embedding_app
from ullage.serving.loop import EngineLoop
from ullage.serving.routes import ServerSettings, create_app
from ullage.serving.trace import Trace, require_writable

if TYPE_CHECKING:
    from ullage.serving.live_probe import Asked as LiveAsked

log = logging.getLogger("ullage.serving")
READY_POLL_S = 0.02
SHUTDOWN_S = 5
HEADERS_TIMEOUT_S = 30.0
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve, with vLLM's names; `model_name` None: the model as given.

    `shutdown_timeout_s` None: as long as it takes. `lora_modules`: adapters to load, by name.
    `pooler_config`: how an encoder makes embeddings, where its files do not say it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    served_model_name: str | None = None
    max_num_queued_reqs: int = 256
    max_num_queued_tokens: int | None = None
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    enable_control_routes: bool = False
    shutdown_timeout_s: float | None = None
    trace: str | Path | None = None
    pooler_config: Mapping[str, object] | None = None
    probe_quality: bool = False
    probe: bool = False
    probe_every: int | None = None
    probe_baseline: str | Path | None = None


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request headers do not come in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEADERS_TIMEOUT_S, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        between = self.cycle is None or self.cycle.response_complete
        if between and self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)
        elif not between and self._late is not None:
            self._late.cancel()
            self._late = None

    def _should_upgrade(self) -> bool:
        # Never, and without uvicorn's advice on what to install: an upgrade is answered as the
        # plain request that it also is (RFC 9110, 7.8).
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class ServerHandle:
    """A server that runs in this process. `stop()` aborts what runs; `drain()` finishes it."""

    url: str
    served: Engine | Embedder
    _server: _Server
    _loop: EngineLoop | EmbeddingLoop
    _asyncio: asyncio.AbstractEventLoop
    _thread: threading.Thread

    @property
    def engine(self) -> Engine:
        """The engine of a model that generates; encoders have none."""
        assert isinstance(self.served, Engine)
        return self.served

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
    max_num_queued_tokens: int | None = None,
    lora_modules: Mapping[str, str] | None = None,
    enable_control_routes: bool = False,
    trace: str | Path | None = None,
    pooler_config: Mapping[str, object] | None = None,
    probe_quality: bool = False,
    probe: bool = False,
    probe_every: int | None = None,
    probe_baseline: str | Path | None = None,
) -> ServerHandle:
    """Load `model`, serve it from a thread of this process, return when it is warm.

    Port 0 picks a free one; `lora_modules` are adapters by name. Raises what Engine.load,
    load_lora and, for an encoder, Embedder.load raise, and BadUsage for an address that cannot be
    used or that leaves loopback without a key, and for control routes without a key.
    """
    serve = ServeOptions(
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        lora_modules=lora_modules or {},
        enable_control_routes=enable_control_routes,
        trace=trace,
        pooler_config=pooler_config,
        probe_quality=probe_quality,
        probe=probe,
        probe_every=probe_every,
        probe_baseline=probe_baseline,
    )
    listener = listening_socket(host, port, api_key)
    try:
        served, server, loop = _build(model, options, serve)
    except BaseException:
        listener.close()
        raise
    started: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        started.append(asyncio.get_running_loop())
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        asked = asyncio.ensure_future(loop.drain_asked.wait())
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await loop.drain()
            server.should_exit = True
        asked.cancel()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="ullage-http", daemon=True)
    thread.start()
    while not loop.ready:
        if loop.failure is not None or not thread.is_alive():
            server.should_exit = True
            thread.join()
            raise UllageError(f"the engine failed at its warm-up: {loop.failure!r}")
        thread.join(READY_POLL_S)
    return ServerHandle(address(listener), served, server, loop, started[0], thread)


def run_server(
    model: str | Path,
    options: EngineOptions,
    serve: ServeOptions,
    on_loaded: Callable[[Engine | Embedder], None],
    on_ready: Callable[[str, Engine | Embedder], None],
) -> None:
    """Serve until SIGTERM, SIGINT or a drain is asked for, then finish what runs.

    `on_loaded(engine or embedder)` is called before the warm-up, `on_ready(url, it)` once warm.
    """
    with listening_socket(serve.host, serve.port, serve.api_key) as listener:
        served, server, loop = _build(model, options, serve)
        on_loaded(served)

        async def main() -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, _signalled, loop)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            waiting = asyncio.ensure_future(_ready(loop))
            ended = asyncio.ensure_future(loop.drain_asked.wait())
            await asyncio.wait({serving, waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and loop.ready and not ended.done():
                on_ready(address(listener), served)
                await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            num_cut = await loop.drain(serve.shutdown_timeout_s)
            if num_cut:
                log.warning("%d requests were cut by the shutdown", num_cut)
            server.should_exit = True
            await serving
            ended.cancel()

        asyncio.run(main())
        if loop.failure is not None:
            raise UllageError(f"the engine failed: {loop.failure!r}")


def _signalled(loop: EngineLoop | EmbeddingLoop) -> None:
    """The first signal drains, the next one cuts."""
    if loop.drain_asked.is_set():
        loop.cut_asked = True
    loop.drain_asked.set()


def listening_socket(host: str, port: int, api_key: str | None) -> socket.socket:
    """A bound, listening socket.

    Raises BadUsage off loopback without a key, for an unknown name, or when taken.
    """
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise BadUsage(
            f"the name {host[:80]!r} is unknown here",
            field="--host",
            expected="an address of this machine",
        ) from error
    if not is_loopback(host) and not api_key:
        raise BadUsage(
            f"{host} can be reached from other machines",
            field="--host",
            expected="--api-key with it, or a loopback address",
        )
    if not 0 <= port <= MAX_PORT:
        raise BadUsage(str(port), field="--port", expected=f"0 to {MAX_PORT}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
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


async def _ready(loop: EngineLoop | EmbeddingLoop) -> None:
    while not loop.ready and loop.failure is None:
        await asyncio.sleep(READY_POLL_S)


def _build(
    model: str | Path, options: EngineOptions | None, serve: ServeOptions
) -> tuple[Engine | Embedder, _Server, EngineLoop | EmbeddingLoop]:
    if serve.enable_control_routes and not serve.api_key:
        # Without one any page in a browser on this machine could ask to drain.
        raise BadUsage(
            "the control routes end requests",
            field="--enable-control-routes",
            expected="--api-key with it",
        )
    found = load_anatomy(model)
    settings = ServerSettings(
        model_name=serve.served_model_name or str(model),
        model_path=str(model),
        api_key=serve.api_key,
        max_num_queued_reqs=serve.max_num_queued_reqs,
        max_num_queued_tokens=serve.max_num_queued_tokens,
        enable_control_routes=serve.enable_control_routes,
        probe_quality=serve.probe_quality,
    )
    served: Engine | Embedder
    if found.anatomy.spec.kind == "encoder":
        _require_none_of_a_decoder(serve)
        served = Embedder.of(found, options, serve.pooler_config)
        app = create_embedding_app(served, settings)
    else:
        if serve.pooler_config is not None:
            raise BadUsage("this model embeds nothing", field="--pooler-config")
        if serve.trace is not None:
            require_writable(serve.trace)  # said before the weights are read
        settings = replace(settings, live=_live(serve, found.anatomy.spec, options))
        served = Engine.load(model, options)
        for name, path in serve.lora_modules.items():
            served.load_lora(name, path)
        trace = None if serve.trace is None else Trace(serve.trace)
        app = create_app(served, replace(settings, trace=trace))
    # Logs go to stderr and only when something is wrong; the access log is the caller's proxy's.
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="on",
        # What the engine serves is finished by then; who keeps a connection must not keep us.
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return served, _Server(config), app.state.loop


def _live(serve: ServeOptions, spec: ModelSpec, options: EngineOptions | None) -> LiveAsked | None:
    """What to read along, if anything. Raises BadInput before the weights are read."""
    if not serve.probe and serve.probe_baseline is None:
        if serve.probe_every is not None:
            raise BadUsage(
                "no step is read along", field="--probe-every", expected="--probe with it"
            )
        return None
    if serve.probe_every is not None and serve.probe_every < 1:
        raise BadUsage(str(serve.probe_every), field="--probe-every", expected="1 or more steps")
    from ullage.serving.live_probe import asked_of

    file = None if serve.probe_baseline is None else str(serve.probe_baseline)
    return asked_of(serve.probe_every, file, spec, options or EngineOptions())


def _require_none_of_a_decoder(serve: ServeOptions) -> None:
    """Raises BadUsage for what an encoder's server would leave undone."""
    asked = {
        "--lora-modules": serve.lora_modules,
        "--enable-control-routes": serve.enable_control_routes,
        "--trace": serve.trace,
        "--max-num-queued-tokens": serve.max_num_queued_tokens,
        "--probe-quality": serve.probe_quality,
        "--probe": serve.probe,
        "--probe-every": serve.probe_every,
        "--probe-baseline": serve.probe_baseline,
    }
    for flag, value in asked.items():
        if value:
            raise BadUsage("an encoder's server has none", field=flag)
