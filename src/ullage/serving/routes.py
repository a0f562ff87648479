"""The application: handlers bound to the table of operations, limits and keys around them.

What bodies mean is `protocol`, what answers look like `answers`, sockets and signals `app`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ullage.engine.engine import Engine
from ullage.serving.absent import EMBEDDING, not_served
from ullage.serving.attention import Attention
from ullage.serving.completions import Completions
from ullage.serving.control import Control
from ullage.serving.http import BODY_TIMEOUT_S, ERRORS, ApiKey, Linger
from ullage.serving.loop import EngineLoop
from ullage.serving.metrics import EngineMetrics
from ullage.serving.models import Models, Tokens
from ullage.serving.openapi import document
from ullage.serving.operations import (
    CONTROL_OPERATIONS,
    LORA_OPERATIONS,
    OPERATIONS,
    Operation,
)
from ullage.serving.probes import Probes
from ullage.serving.quality import AnswerWatch
from ullage.serving.trace import Trace

if TYPE_CHECKING:
    from ullage.serving.live_probe import Asked as LiveAsked

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the HTTP side is told. `model_path` is shown as the served model's root."""

    model_name: str
    model_path: str
    api_key: str | None = None
    max_num_queued_reqs: int = 256
    max_num_queued_tokens: int | None = None
    enable_control_routes: bool = False
    body_timeout_s: float = BODY_TIMEOUT_S
    trace: Trace | None = None
    probe_quality: bool = False
    live: LiveAsked | None = None


def create_app(engine: Engine, settings: ServerSettings) -> Starlette:
    """An ASGI application that runs `engine` while its lifespan lasts.

    `app.state.loop` is the EngineLoop, for those who drain it.
    """
    if engine.tokenizer is None:
        raise ValueError("serving needs an engine with a tokenizer")
    metrics = EngineMetrics(engine, settings.model_name)
    if settings.probe_quality:
        metrics.answers = AnswerWatch(engine, metrics.registry, metrics.labels)
    if settings.live is not None:
        from ullage.serving.live_probe import LiveProbe

        metrics.live = LiveProbe(engine, settings.live, metrics.registry, metrics.labels)
    loop = EngineLoop(
        engine,
        metrics,
        settings.max_num_queued_reqs,
        settings.max_num_queued_tokens,
        settings.trace,
    )
    models = Models(
        engine,
        settings.model_name,
        settings.model_path,
        int(time.time()),
        settings.body_timeout_s,
    )
    completions = Completions(loop, engine.tokenizer, models, settings.body_timeout_s)
    tokens = Tokens(models, engine.tokenizer)
    control = Control(loop, metrics.answers)
    attention = Attention(loop, completions, settings.model_name, metrics.live, asyncio.Lock())
    probes = Probes(loop, metrics)
    operations = (
        *OPERATIONS,
        *(LORA_OPERATIONS if engine.options.enable_lora else ()),
        *(
            operation
            for operation in CONTROL_OPERATIONS
            if settings.enable_control_routes
            and (settings.probe_quality or operation.name != "quality")
        ),
    )
    described = document(operations, with_key=settings.api_key is not None)

    async def openapi(_: Request) -> Response:
        return JSONResponse(described)

    handlers: Mapping[str, Handler] = {
        "completions": completions.completions,
        "chat": completions.chat,
        "models": models.list,
        "model": models.one,
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
        "health": probes.health,
        "ready": probes.ready,
        "version": probes.version,
        "metrics": probes.metrics,
        "openapi": openapi,
        "load_lora": models.load_lora,
        "unload_lora": models.unload_lora,
        "kv": control.kv,
        "quality": control.quality,
        "entropy": attention.entropy,
        "attention": attention.attention,
        "cancel_oldest": control.cancel_oldest,
        "drain": control.drain,
    }

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop.start()
        try:
            yield
        finally:
            await run_in_threadpool(loop.stop)

    app = Starlette(
        routes=[
            *(_route(operation, handlers[operation.name]) for operation in operations),
            *not_served(EMBEDDING, f"{settings.model_name} generates text and embeds none"),
        ],
        middleware=middleware(settings, operations),
        exception_handlers=ERRORS,
        lifespan=lifespan,
    )
    app.state.loop = loop
    return app


def _route(operation: Operation, handler: Handler) -> Route:
    # A model's name may hold slashes.
    path = operation.path.replace("{model}", "{model:path}")
    return Route(path, handler, methods=[operation.verb], name=operation.name)


def middleware(settings: ServerSettings, operations: tuple[Operation, ...]) -> list[Middleware]:
    """What lies around every application: lingering, and the key where there is one."""
    around = [Middleware(Linger)]
    if settings.api_key:
        # As in vLLM the key guards what costs something; probes and scrapers need none.
        open_paths = [operation.path for operation in operations if not operation.guarded]
        around.append(Middleware(ApiKey, api_key=settings.api_key, open_paths=open_paths))
    return around
