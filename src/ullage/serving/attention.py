"""The routes on attention: what sampled steps showed, and a prompt read on request.

Holds the two handlers and what a body may ask. What is read is `probes`', imported once somebody
asks; served with the control routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ullage.serving.completions import Completions
from ullage.serving.fields import Field, Integer, Json, ListOf, Record, Text, read_fields
from ullage.serving.http import NotFound, read_body, unless_disconnected
from ullage.serving.loop import EngineLoop
from ullage.serving.protocol import PROMPT_IDS, parse_body
from ullage.serving.refusals import Draining

if TYPE_CHECKING:
    from ullage.serving.live_probe import LiveProbe

ROWS = 64
MOST_ROWS = 1024
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class OnePrompt:
    """A string or a list of token ids."""

    def read(self, value: Any, field: str) -> str | tuple[int, ...]:
        if isinstance(value, list):
            return PROMPT_IDS.read(value, field)
        return Text(1).read(value, field)

    def schema(self) -> Json:
        return {"anyOf": [Text(1).schema(), PROMPT_IDS.schema()]}


ATTENTION: tuple[Field, ...] = (
    Field("prompt", OnePrompt(), "text or token ids", required=True),
    Field("rows", Integer(1, MOST_ROWS), "positions to read, at even distances", ROWS),
    Field("layers", ListOf(Integer(0), 1, what="layers, not empty"), "all unless given"),
    Field(
        "weights",
        Record(
            (
                Field("layer", Integer(0), "from 0", required=True),
                Field("head", Integer(0), "from 0", required=True),
                Field("row", Integer(0), "a position of the prompt", required=True),
            )
        ),
        "one row of one head, whose weights are told: 4,096 at most, the largest",
    ),
)


@dataclass(frozen=True, slots=True)
class Attention:
    """The handlers, over one engine's loop."""

    loop: EngineLoop
    completions: Completions
    model: str
    live: LiveProbe | None
    one: asyncio.Lock

    async def entropy(self, _: Request) -> Response:
        live = self.live
        if live is None:
            raise NotFound("no step is read along here: start the server with --probe")
        seen = await self.loop.call(lambda _: live.seen())
        return JSONResponse(await run_in_threadpool(live.document, seen, self.model))

    async def attention(self, request: Request) -> Response:
        body = parse_body(await read_body(request, self.completions.body_timeout_s))
        asked = read_fields(ATTENTION, body)
        if self.loop.draining:
            raise Draining("the server is shutting down and reads no prompts", 5)
        return JSONResponse(await unless_disconnected(request, self._read(asked)))

    async def _read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        from ullage.probes.attention.served_prompt import AskedPrompt, OneRow, read_prompt

        prompt, of = asked["prompt"], asked["weights"]
        if isinstance(prompt, str):
            prompt = await run_in_threadpool(self.completions.ids, prompt, True)
        wanted = AskedPrompt(
            prompt, asked["rows"], asked["layers"], None if of is None else OneRow(**of)
        )
        # One at a time: each holds up everybody's next step, and blocks of its own.
        async with self.one:
            found = await self.loop.call_with_room(
                partial(read_prompt, asked=wanted), time.monotonic() + WAIT_S, "the prompt"
            )
        return await run_in_threadpool(found.to_json, self.model)
