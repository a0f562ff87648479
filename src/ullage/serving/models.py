"""What can be asked for by name: the model and its adapters; listing, loading, unloading, tokens.

Holds the routes that say what the model is and none that generate.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ullage.anatomy.spec import ModelSpec
from ullage.engine.engine import Engine
from ullage.engine.lora import LoraAdapter
from ullage.engine.text.tokenizer import Tokenizer
from ullage.errors import BadInput
from ullage.serving.fields import BadRequest, read_fields
from ullage.serving.http import NotFound, read_body
from ullage.serving.protocol import (
    DETOKENIZE,
    LOAD_LORA,
    UNLOAD_LORA,
    TokenizeAsk,
    parse_body,
    parse_tokenize,
)

# Of one /tokenize: megabytes take many seconds and gigabytes.
MIN_TOKENIZE_CHARS = 1 << 18
TOKENIZE_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Models:
    """The served model `name`, whose files are at `path`, and the adapters on it."""

    engine: Engine
    name: str
    path: str
    created: int
    body_timeout_s: float
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def adapter(self, model: str | None) -> LoraAdapter | None:
        """The adapter that `model` names, None for the model itself. Raises NotFound."""
        if model is None or model == self.name:
            return None
        adapter = self.engine.loras.get(model)
        if adapter is None:
            raise NotFound(
                f"there is no model {model[:80]!r} here",
                field="model",
                expected=" or ".join((self.name, *self.engine.loras)),
            )
        return adapter

    async def list(self, _: Request) -> Response:
        cards = [self._card(None), *map(self._card, self.engine.loras.values())]
        return JSONResponse({"object": "list", "data": cards})

    async def one(self, request: Request) -> Response:
        adapter = self.adapter(request.path_params["model"])
        return JSONResponse(self._card(adapter))

    async def load_lora(self, request: Request) -> Response:
        """Read an adapter and offer it as a model, while others run."""
        ask = read_fields(LOAD_LORA, await self._body(request))
        name = ask["lora_name"]
        if name == self.name:
            raise BadInput("the model itself has this name", field="lora_name")
        async with self._loading:
            await run_in_threadpool(
                self.engine.load_lora, name, ask["lora_path"], allow_partial=ask["allow_partial"]
            )
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora(self, request: Request) -> Response:
        """Stop offering an adapter; requests that run with it are finished."""
        name = read_fields(UNLOAD_LORA, await self._body(request))["lora_name"]
        if name not in self.engine.loras:
            raise NotFound(f"The lora adapter '{name}' cannot be found.")
        self.engine.unload_lora(name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    def _card(self, adapter: LoraAdapter | None) -> dict[str, Any]:
        return {
            "id": self.name if adapter is None else adapter.name,
            "object": "model",
            "created": self.created,
            "owned_by": "ullage",
            "root": self.path if adapter is None else adapter.path,
            "parent": None if adapter is None else self.name,
            "max_model_len": self.engine.max_model_len,
        }

    async def _body(self, request: Request) -> dict[str, Any]:
        return parse_body(await read_body(request, self.body_timeout_s))


class Served(Protocol):
    """What runs: an engine or an embedder."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def max_model_len(self) -> int: ...


class Catalogue(Protocol):
    """What can be asked for by name; `adapter` raises NotFound for what cannot."""

    @property
    def engine(self) -> Served: ...

    @property
    def body_timeout_s(self) -> float: ...

    def adapter(self, model: str | None) -> object: ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text to token ids and back, as vLLM serves them."""

    models: Catalogue
    tokenizer: Tokenizer

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(await read_body(request, self.models.body_timeout_s))
        ask = parse_tokenize(body)
        self.models.adapter(body.get("model"))
        tokens = await run_in_threadpool(self.encode, ask)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self.models.engine.max_model_len,
            "tokens": tokens,
        }
        if ask.with_texts:
            answer["token_strs"] = [self.tokenizer.fast.id_to_token(token) for token in tokens]
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(await read_body(request, self.models.body_timeout_s))
        ask = read_fields(DETOKENIZE, body)
        self.models.adapter(ask["model"])
        size = self.models.engine.spec.vocab_size
        for token in ask["tokens"]:
            if token >= size:
                raise BadRequest(f"token {token}", field="tokens", expected=f"ids below {size}")
        text = await run_in_threadpool(self.tokenizer.decode, ask["tokens"], False)
        return JSONResponse({"prompt": text})

    def _require_short(self, text: str, field: str) -> None:
        """Raise BadRequest for a text that no model of this length could take, and then some."""
        most = max(MIN_TOKENIZE_CHARS, TOKENIZE_CHARS_PER_TOKEN * self.models.engine.max_model_len)
        if len(text) > most:
            raise BadRequest(
                f"{len(text)} characters", field=field, expected=f"at most {most} in one request"
            )

    def encode(self, ask: TokenizeAsk) -> list[int]:
        """Token ids of what was asked about."""
        text = ask.text
        if text is None:
            text = self.tokenizer.apply_chat_template(ask.messages, ask.add_generation_prompt)
        self._require_short(text, "prompt" if ask.text is not None else "messages")
        return self.tokenizer.encode(text, ask.add_special)
