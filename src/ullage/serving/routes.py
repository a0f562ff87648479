"""The HTTP routes: OpenAI's, the probes of an orchestrator, the metrics.

Holds the mapping between HTTP and `EngineLoop`: status codes, streaming, keys, limits. What bodies
mean is `protocol`, what answers look like `answers`, sockets and signals `app`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ullage import __version__
from ullage.engine.engine import Engine, Output, RequestRefused
from ullage.engine.lora import LoraAdapter
from ullage.engine.tokenizer import Tokenizer
from ullage.errors import BadInput
from ullage.serving import answers
from ullage.serving.loop import EngineFailed, EngineLoop, Refused, Ticket
from ullage.serving.metrics import EngineMetrics
from ullage.serving.protocol import (
    Ask,
    Kind,
    parse_ask,
    parse_body,
    parse_load_lora,
    parse_tokenize,
    parse_unload_lora,
)

MAX_BODY_BYTES = 8 << 20
# As in vLLM the key guards what costs something; probes and scrapers need none.
GUARDED_PREFIXES = ("/v1/", "/tokenize")
PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the HTTP side is told. `model_path` is shown as the served model's root."""

    model_name: str
    model_path: str
    api_key: str | None = None
    max_num_queued_reqs: int = 256


class BodyTooLarge(BadInput):
    """More bytes than a request may have; becomes a 413."""


class ModelNotFound(BadInput):
    """Another model was asked for; becomes a 404."""


def create_app(engine: Engine, settings: ServerSettings) -> Starlette:
    """An ASGI application that runs `engine` while its lifespan lasts.

    `app.state.loop` is the EngineLoop, for those who drain it.
    """
    if engine.tokenizer is None:
        raise ValueError("serving needs an engine with a tokenizer")
    metrics = EngineMetrics(engine, settings.model_name)
    routes = _Routes(engine, engine.tokenizer, metrics, settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        routes.loop.start()
        try:
            yield
        finally:
            await run_in_threadpool(routes.loop.stop)

    paths: Mapping[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
        "/v1/models": ("GET", routes.models),
        "/v1/completions": ("POST", routes.completions),
        "/v1/chat/completions": ("POST", routes.chat),
        "/tokenize": ("POST", routes.tokenize),
        "/health": ("GET", routes.health),
        "/ready": ("GET", routes.ready),
        "/version": ("GET", routes.version),
        "/metrics": ("GET", routes.render_metrics),
    }
    if engine.options.enable_lora:
        paths = {
            **paths,
            "/v1/load_lora_adapter": ("POST", routes.load_lora),
            "/v1/unload_lora_adapter": ("POST", routes.unload_lora),
        }
    app = Starlette(
        routes=[Route(path, handler, methods=[verb]) for path, (verb, handler) in paths.items()],
        middleware=[Middleware(_ApiKey, api_key=settings.api_key)] if settings.api_key else [],
        exception_handlers={
            BadInput: _sentence(400),
            RequestRefused: _sentence(400),
            BodyTooLarge: _sentence(413),
            ModelNotFound: _sentence(404),
            Refused: _refused,
            EngineFailed: _sentence(500),
            404: _no_route,
            405: _no_route,
            ClientDisconnect: _gone,
        },
        lifespan=lifespan,
    )
    app.state.loop = routes.loop
    return app


class _Routes:
    """The handlers, over one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        settings: ServerSettings,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._settings = settings
        self._started = int(time.time())
        self._loading = asyncio.Lock()
        self.loop = EngineLoop(engine, metrics, settings.max_num_queued_reqs)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completion")

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def models(self, _: Request) -> Response:
        model = {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "ullage",
            "root": self._settings.model_path,
            "max_model_len": self._engine.max_model_len,
        }
        adapters = [
            {**model, "id": name, "root": adapter.path, "parent": self._settings.model_name}
            for name, adapter in self._engine.loras.items()
        ]
        return JSONResponse({"object": "list", "data": [model, *adapters]})

    async def load_lora(self, request: Request) -> Response:
        """Read an adapter and offer it as a model, while others run."""
        ask = parse_load_lora(parse_body(await _body(request)))
        if ask.name == self._settings.model_name:
            raise BadInput("the model itself has this name", field="lora_name")
        async with self._loading:
            await run_in_threadpool(
                self._engine.load_lora, ask.name, ask.path, allow_partial=ask.allow_partial
            )
        return Response(f"Success: LoRA adapter '{ask.name}' added successfully.")

    async def unload_lora(self, request: Request) -> Response:
        """Stop offering an adapter; requests that run with it are finished."""
        name = parse_unload_lora(parse_body(await _body(request)))
        if name not in self._engine.loras:
            raise ModelNotFound(f"The lora adapter '{name}' cannot be found.")
        self._engine.unload_lora(name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(self, request: Request) -> Response:
        text, messages = parse_tokenize(parse_body(await _body(request)))
        tokens = await run_in_threadpool(self._encode, text, messages, True)
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self._engine.max_model_len,
                "tokens": tokens,
            }
        )

    async def health(self, _: Request) -> Response:
        """Whether the process is worth keeping: 503 once the engine's thread has died."""
        return Response(status_code=200 if self.loop.failure is None else 503)

    async def ready(self, _: Request) -> Response:
        """Whether to send requests here: warmed up, not draining."""
        ready = self.loop.ready and not self.loop.draining
        return Response(status_code=200 if ready else 503)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def render_metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type=PROMETHEUS_TYPE)

    async def _generate(self, request: Request, kind: Kind) -> Response:
        ask = parse_ask(parse_body(await _body(request)), kind)
        lora = self._adapter(ask.model)
        prompt_ids = await run_in_threadpool(self._prompt_ids, ask)
        params = replace(ask.params, max_tokens=self._max_tokens(ask, prompt_ids))
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        ticket = self.loop.submit(prompt_ids, params, prefix, lora)
        name = self._settings.model_name if lora is None else lora.name
        envelope = answers.Envelope(kind, ticket.id, name, int(time.time()))
        if ask.stream:
            return _EventStream(self.loop, ticket, self._events(ask, ticket, envelope))
        try:
            outputs = await _unless_disconnected(request, self._collect(ticket))
        finally:
            self.loop.close(ticket)
        return JSONResponse(
            answers.whole(envelope, outputs, len(prompt_ids), self._tokenizer.token_text)
        )

    def _adapter(self, model: str | None) -> LoraAdapter | None:
        """The adapter that `model` names, None for the model itself. Raises ModelNotFound."""
        name = self._settings.model_name
        if model is None or model == name:
            return None
        adapter = self._engine.loras.get(model)
        if adapter is None:
            raise ModelNotFound(
                f"there is no model {model!r} here",
                field="model",
                expected=" or ".join((name, *self._engine.loras)),
            )
        return adapter

    async def _collect(self, ticket: Ticket) -> list[Output]:
        return [output async for output in self.loop.outputs(ticket)]

    async def _events(
        self, ask: Ask, ticket: Ticket, envelope: answers.Envelope
    ) -> AsyncIterator[bytes]:
        """The server-sent events of one answer. Headers are gone: a failure is an event too."""
        if ask.kind == "chat":
            yield _event(answers.first_chunk(envelope))
        num_chars = num_generated = 0
        try:
            async for output in self.loop.outputs(ticket):
                token_text = self._tokenizer.token_text
                yield _event(answers.chunk(envelope, output, num_chars, token_text))
                num_chars += len(output.text)
                num_generated += output.token_id is not None
        except EngineFailed as failure:
            yield _event(answers.error(str(failure), "EngineFailed", 500))
        else:
            if ask.include_usage:
                num_prompt = len(ticket.prompt_ids)
                yield _event(answers.usage_chunk(envelope, num_prompt, num_generated))
        yield b"data: [DONE]\n\n"

    def _prompt_ids(self, ask: Ask) -> tuple[int, ...]:
        if isinstance(ask.prompt, tuple):
            return ask.prompt
        return tuple(self._encode(ask.prompt, ask.messages, ask.add_special))

    def _encode(
        self, text: str | None, messages: tuple[Mapping[str, Any], ...], add_special: bool
    ) -> list[int]:
        if messages:
            # The template writes the special tokens itself.
            text, add_special = self._tokenizer.apply_chat_template(messages), False
        assert text is not None
        return self._tokenizer.encode(text, add_special)

    def _max_tokens(self, ask: Ask, prompt_ids: tuple[int, ...]) -> int:
        if ask.max_tokens is not None:
            return ask.max_tokens
        return max(1, self._engine.max_model_len - len(prompt_ids))


class _EventStream(StreamingResponse):
    """A stream that lets go of its request however it ends, begun or not."""

    def __init__(self, loop: EngineLoop, ticket: Ticket, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._loop = loop
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._loop.close(self._ticket)


class _ApiKey:
    """Demands `Authorization: Bearer KEY` on the guarded routes."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GUARDED_PREFIXES):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                message = "the Authorization header does not hold this server's API key"
                body = answers.error(message, "AuthenticationError", 401)
                await JSONResponse(body, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request) -> bytes:
    """The body, read only as far as it may reach. Raises BodyTooLarge."""
    pieces = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge("the body is too large", expected=f"at most {MAX_BODY_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def _unless_disconnected(request: Request, answer: Awaitable[list[Output]]) -> list[Output]:
    """The answer, or ClientDisconnect as soon as the client goes away."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: Mapping[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


# --- errors --------------------------------------------------------------------------------------


def _sentence(status: int) -> Callable[[Request, Exception], Response]:
    """A handler that answers with the exception's own sentence."""

    def handle(_: Request, error: Exception) -> Response:
        field = getattr(error, "field", None)
        body = answers.error(str(error), type(error).__name__, status, field)
        return JSONResponse(body, status)

    return handle


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    status = error.status
    body = answers.error(str(error), type(error).__name__, status)
    return JSONResponse(body, status, {"Retry-After": str(error.retry_after_s)})


def _no_route(request: Request, error: Exception) -> Response:
    status: int = getattr(error, "status_code", 404)
    message = f"{request.method} {request.url.path} is not served here"
    return JSONResponse(answers.error(message[:200], "NotFound", status), status)


def _gone(_: Request, __: Exception) -> Response:
    # Nobody reads this; the status is what access logs of proxies call a client that left.
    return Response(status_code=CLIENT_CLOSED_REQUEST)
