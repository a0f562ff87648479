"""Every route the server has, as a table: the application and the OpenAPI document are made of it.

Holds no handler: `routes` finds them by an operation's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ullage.serving import schemas
from ullage.serving.attention import ATTENTION
from ullage.serving.control import CANCEL
from ullage.serving.fields import Field, Json
from ullage.serving.protocol import DETOKENIZE, FIELDS, LOAD_LORA, TOKENIZE, UNLOAD_LORA

# What any route may say when it reads a body, and when it has to run something.
BODY = (400, 408, 413, 415)
BUSY = (404, 429, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `answers`: media type to schema, by status; `refusals`: statuses of error objects.

    `guarded` routes ask for the API key, if there is one.
    """

    name: str
    verb: str
    path: str
    text: str
    answers: Mapping[int, Mapping[str, Json]]
    body: tuple[Field, ...] | None = None
    query: tuple[Field, ...] = ()
    refusals: tuple[int, ...] = ()
    guarded: bool = True


def _json(schema: Json) -> Mapping[str, Json]:
    return {"application/json": schema}


EMPTY: Mapping[str, Json] = {}
TEXT: Mapping[str, Json] = {"text/plain": {"type": "string"}}
# Of a stream the schema is that of one event; OpenAPI 3.2 calls it itemSchema, 3.1 has no word.
EVENTS: Mapping[str, Json] = {
    "text/event-stream": {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string"}},
    }
}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "completions",
        "POST",
        "/v1/completions",
        "Continue a text.",
        {200: {**_json(schemas.COMPLETION), **EVENTS}},
        FIELDS["completion"],
        refusals=(*BODY, *BUSY),
    ),
    Operation(
        "chat",
        "POST",
        "/v1/chat/completions",
        "Answer a conversation.",
        {200: {**_json(schemas.CHAT), **EVENTS}},
        FIELDS["chat"],
        refusals=(*BODY, *BUSY),
    ),
    Operation(
        "models",
        "GET",
        "/v1/models",
        "The model and its adapters.",
        {200: _json(schemas.MODELS)},
    ),
    Operation(
        "model",
        "GET",
        "/v1/models/{model}",
        "One of them.",
        {200: _json(schemas.MODEL)},
        refusals=(404,),
    ),
    Operation(
        "tokenize",
        "POST",
        "/tokenize",
        "Token ids of a text or a conversation.",
        {200: _json(schemas.TOKENS)},
        TOKENIZE,
        refusals=(*BODY, 404),
    ),
    Operation(
        "detokenize",
        "POST",
        "/detokenize",
        "The text of token ids.",
        {200: _json(schemas.PROMPT)},
        DETOKENIZE,
        refusals=(*BODY, 404),
    ),
    Operation(
        "health",
        "GET",
        "/health",
        "Whether the process is worth keeping.",
        {200: EMPTY, 503: EMPTY},
        guarded=False,
    ),
    Operation(
        "ready",
        "GET",
        "/ready",
        "Whether to send requests here: warmed up, not draining.",
        {200: EMPTY, 503: EMPTY},
        guarded=False,
    ),
    Operation("version", "GET", "/version", "", {200: _json(schemas.VERSION)}, guarded=False),
    Operation("metrics", "GET", "/metrics", "For Prometheus.", {200: TEXT}, guarded=False),
    Operation(
        "openapi",
        "GET",
        "/openapi.json",
        "This document.",
        {200: _json({"type": "object"})},
        guarded=False,
    ),
)
LORA_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "load_lora",
        "POST",
        "/v1/load_lora_adapter",
        "Read an adapter and offer it as a model.",
        {200: TEXT},
        LOAD_LORA,
        refusals=BODY,
    ),
    Operation(
        "unload_lora",
        "POST",
        "/v1/unload_lora_adapter",
        "Stop offering an adapter.",
        {200: TEXT},
        UNLOAD_LORA,
        refusals=(*BODY, 404),
    ),
)
CONTROL_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "kv",
        "GET",
        "/ullage/kv",
        "What the KV cache holds, and for whom.",
        {200: _json({"type": "object"})},
        refusals=(500,),
    ),
    Operation(
        "quality",
        "GET",
        "/ullage/quality",
        "What recent answers are like, against those before them.",
        {200: _json({"type": "object"})},
        refusals=(500,),
    ),
    Operation(
        "entropy",
        "GET",
        "/ullage/entropy",
        "How each head attends in the steps that are read along, against a baseline if there is "
        "one; with --probe.",
        {200: _json(schemas.ENTROPY)},
        refusals=(404, 500),
    ),
    Operation(
        "attention",
        "POST",
        "/ullage/attention",
        "Run a prompt, answer nothing, and tell how each head attends.",
        {200: _json(schemas.ATTENTION)},
        ATTENTION,
        refusals=(*BODY, 429, 500, 503),
    ),
    Operation(
        "cancel_oldest",
        "POST",
        "/ullage/cancel_oldest",
        "End the oldest running requests.",
        {200: _json({"type": "object"})},
        query=CANCEL,
        refusals=(400, 500),
    ),
    Operation(
        "drain",
        "POST",
        "/ullage/drain",
        "Finish what runs, take nothing new, end.",
        {202: _json(schemas.DRAINING)},
    ),
)
