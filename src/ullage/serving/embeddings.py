"""`/v1/embeddings`: OpenAI's body with vLLM's additions, and the application around it.

`create_embedding_app` is the application of a model that embeds. Batches and threads are
`embedding_loop`, what such a model does not serve is `absent`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ullage.engine.encoder.embedder import Embedder
from ullage.serving import schemas
from ullage.serving.absent import GENERATING, not_served
from ullage.serving.embedding_loop import EmbeddingLoop
from ullage.serving.embedding_metrics import EmbeddingMetrics
from ullage.serving.fields import (
    Anything,
    BadRequest,
    Boolean,
    Field,
    Integer,
    Json,
    ListOf,
    Only,
    Text,
    read_fields,
    show,
)
from ullage.serving.http import ERRORS, NotFound, read_body, unless_disconnected
from ullage.serving.models import Tokens
from ullage.serving.openapi import document
from ullage.serving.operations import BODY, BUSY, OPERATIONS, Operation
from ullage.serving.probes import Probes
from ullage.serving.protocol import TOKEN_IDS, TokenizeAsk, parse_body
from ullage.serving.routes import Handler, ServerSettings, middleware

# OpenAI's limit on the texts of one request.
MAX_INPUTS = 2048
Input = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A string, a list of token ids, or a list of either; read to a tuple of inputs."""

    def read(self, value: Any, field: str) -> tuple[Input, ...]:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not value:
            raise BadRequest(show(value), field=field, expected="text or token ids, not empty")
        item = Text() if isinstance(value[0], str) else TOKEN_IDS
        if isinstance(value[0], str | list):
            return ListOf(item, 1, MAX_INPUTS, "inputs of one kind").read(value, field)
        return (TOKEN_IDS.read(value, field),)

    def schema(self) -> Json:
        ids = ListOf(Integer(0), 1)
        forms = (Text(), ids, ListOf(Text(), 1, MAX_INPUTS), ListOf(ids, 1, MAX_INPUTS))
        return {"anyOf": [form.schema() for form in forms]}


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, value: Any, field: str) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise BadRequest(show(value), field=field, expected=" or ".join(self.words))
        return value

    def schema(self) -> Json:
        return {"enum": list(self.words)}


FIELDS: tuple[Field, ...] = (
    Field("input", Inputs(), "texts or token ids, one or many", required=True),
    Field("model", Text(), "the served model"),
    Field("encoding_format", Word(("float", "base64")), "base64: little-endian float32", "float"),
    Field("dimensions", Integer(1), "leading numbers to keep, for models made for that"),
    Field("add_special_tokens", Boolean(), "put the model's own tokens around a text", True),
    Field("truncate_prompt_tokens", Integer(-1), "cut to so many tokens; -1: to the limit"),
    Field("truncation_side", Word(("left", "right")), "which end is cut off", "right"),
    *(
        Field(name, Anything(), "changes nothing here")
        for name in ("user", "request_id", "metadata", "cache_salt")
    ),
    Field("priority", Only((0,)), "texts are taken in turns"),
    Field("embed_dtype", Only(("float32",)), "always so"),
    Field("endianness", Only(("native", "little")), "always so"),
    Field("padding", Only(("do_not_pad",)), "not needed"),
    Field("use_activation", Only(()), "the model's files say whether vectors have length 1"),
)
_VECTOR: Json = {"anyOf": [schemas.listed({"type": "number"}), schemas.TEXT]}
ANSWER = schemas.record(
    {
        "id": schemas.TEXT,
        "object": {"const": "list"},
        "created": schemas.COUNT,
        "model": schemas.TEXT,
        "data": schemas.listed(
            schemas.record(
                {"object": {"const": "embedding"}, "index": schemas.COUNT, "embedding": _VECTOR}
            )
        ),
        "usage": schemas.record({"prompt_tokens": schemas.COUNT, "total_tokens": schemas.COUNT}),
    }
)
OPERATION = Operation(
    "embeddings",
    "POST",
    "/v1/embeddings",
    "Embed texts.",
    {200: {"application/json": ANSWER}},
    FIELDS,
    refusals=(*BODY, *BUSY),
)
_MODELS = ("models", "model")
_PROBES = ("health", "ready", "version", "metrics")
_TOKENS = ("tokenize", "detokenize")
_SHARED = (*_MODELS, *_PROBES, *_TOKENS, "openapi")


def create_embedding_app(embedder: Embedder, settings: ServerSettings) -> Starlette:
    """An ASGI application that runs `embedder` while its lifespan lasts.

    `app.state.loop` is the EmbeddingLoop, for those who drain it.
    """
    metrics = EmbeddingMetrics(embedder, settings.model_name)
    loop = EmbeddingLoop(embedder, metrics, settings.max_num_queued_reqs)
    operations = (OPERATION, *(each for each in OPERATIONS if each.name in _SHARED))
    catalogue = _Catalogue(embedder, settings)
    routes = _Routes(loop, settings, catalogue, int(time.time()))
    described = document(operations, with_key=settings.api_key is not None)

    async def openapi(_: Request) -> Response:
        return JSONResponse(described)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop.start()
        try:
            yield
        finally:
            await run_in_threadpool(loop.stop)

    probes = Probes(loop, metrics)
    tokens = _Tokens(catalogue, embedder.tokenizer)
    handlers: dict[str, Handler] = {
        "openapi": openapi,
        **{name: getattr(routes, name) for name in ("embeddings", *_MODELS)},
        **{name: getattr(probes, name) for name in _PROBES},
        **{name: getattr(tokens, name) for name in _TOKENS},
    }
    app = Starlette(
        routes=[
            *(
                Route(
                    each.path.replace("{model}", "{model:path}"),
                    handlers[each.name],
                    methods=[each.verb],
                    name=each.name,
                )
                for each in operations
            ),
            *not_served(GENERATING, f"{settings.model_name} embeds texts and generates none"),
        ],
        middleware=middleware(settings, operations),
        exception_handlers=ERRORS,
        lifespan=lifespan,
    )
    app.state.loop = loop
    return app


@dataclass(frozen=True, slots=True)
class _Catalogue:
    """The served model, and nothing beside it."""

    engine: Embedder
    settings: ServerSettings

    @property
    def body_timeout_s(self) -> float:
        return self.settings.body_timeout_s

    def adapter(self, model: str | None) -> None:
        """Raises NotFound for any other name."""
        if model not in (None, self.settings.model_name):
            raise NotFound(
                f"there is no model {show(model)} here",
                field="model",
                expected=self.settings.model_name,
            )


class _Tokens(Tokens):
    """As of any model, in the case that this one's texts are put in."""

    def encode(self, ask: TokenizeAsk) -> list[int]:
        if ask.text is None:
            return super().encode(ask)
        self._require_short(ask.text, "prompt")
        embedder = self.models.engine
        assert isinstance(embedder, Embedder)
        return self.tokenizer.encode(embedder.cased(ask.text), ask.add_special)


@dataclass(frozen=True, slots=True)
class _Routes:
    """The handlers, over one embedder's loop."""

    loop: EmbeddingLoop
    settings: ServerSettings
    catalogue: _Catalogue
    created: int

    async def embeddings(self, request: Request) -> Response:
        body = parse_body(await read_body(request, self.settings.body_timeout_s))
        ask = read_fields(FIELDS, body)
        self.catalogue.adapter(ask["model"])
        embedder = self.loop.embedder
        size = embedder.dimensions(ask["dimensions"])
        texts = await run_in_threadpool(self._texts, ask)
        ticket = self.loop.submit(texts)
        try:
            vectors = await unless_disconnected(request, ticket.answer)
        finally:
            self.loop.close(ticket)
        num_tokens = sum(map(len, texts))

        def render() -> Response:
            # Thousands of vectors take long to write down, and others wait for the HTTP loop.
            whole = torch.stack(vectors)
            shown = embedder.shortened(whole, size)
            return JSONResponse(
                {
                    "id": ticket.id,
                    "object": "list",
                    "created": int(time.time()),
                    "model": self.settings.model_name,
                    "data": [
                        {"object": "embedding", "index": index, "embedding": vector}
                        for index, vector in enumerate(_written(shown, ask["encoding_format"]))
                    ],
                    "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                }
            )

        return await run_in_threadpool(render)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self.catalogue.adapter(request.path_params["model"])
        return JSONResponse(self._card())

    def _card(self) -> Json:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "ullage",
            "root": self.settings.model_path,
            "parent": None,
            "max_model_len": self.loop.embedder.max_model_len,
        }

    def _texts(self, ask: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Token ids of every input, cut only where that was asked for."""
        embedder = self.loop.embedder
        limit = ask["truncate_prompt_tokens"]
        if limit is not None and not -1 <= limit <= embedder.max_model_len:
            raise BadRequest(
                str(limit),
                field="truncate_prompt_tokens",
                expected=f"-1, or up to {embedder.max_model_len}",
            )
        limit = embedder.max_model_len if limit == -1 else limit
        return [
            embedder.tokens(
                each,
                add_special=ask["add_special_tokens"],
                limit=limit,
                keep_end=ask["truncation_side"] == "left",
            )
            for each in ask["input"]
        ]


def _written(vectors_ND: torch.Tensor, encoding: str) -> list[list[float]] | list[str]:
    """As JSON takes them: numbers, or base64 of little-endian float32."""
    if encoding == "float":
        numbers: list[list[float]] = vectors_ND.tolist()
        return numbers
    raw = vectors_ND.numpy().astype("<f4")
    return [base64.b64encode(vector.tobytes()).decode("ascii") for vector in raw]
