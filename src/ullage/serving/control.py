"""The control routes: what the KV cache holds, ending the oldest requests, going away.

Served only with --enable-control-routes and only to those who hold the API key.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ullage.serving.fields import BadRequest, Boolean, Field, Number, read_fields
from ullage.serving.loop import EngineLoop
from ullage.serving.quality import AnswerWatch

CANCEL: tuple[Field, ...] = (
    Field(
        "percent",
        Number(0, 100, above=True),
        "of the running requests by arrival, rounded up",
        required=True,
    ),
    Field("dry_run", Boolean(), "say what would be ended, end nothing", False),
)


@dataclass(frozen=True, slots=True)
class Control:
    """The handlers, over one engine's loop."""

    loop: EngineLoop
    answers: AnswerWatch | None = None

    async def kv(self, _: Request) -> Response:
        return JSONResponse(_plain(await self.loop.call(lambda engine: engine.kv_report())))

    async def quality(self, _: Request) -> Response:
        answers = self.answers
        assert answers is not None, "served only where answers are watched"
        return JSONResponse(await self.loop.call(lambda _: answers.document()))

    async def cancel_oldest(self, request: Request) -> Response:
        ask = read_fields(CANCEL, _query(request))
        report = await self.loop.cancel_oldest(ask["percent"], ask["dry_run"])
        return JSONResponse(_plain(report))

    async def drain(self, _: Request) -> Response:
        """As SIGTERM does: new requests get a 503, what runs is finished, the process ends."""
        self.loop.draining = True
        self.loop.drain_asked.set()
        return JSONResponse({"draining": True, "in_flight": self.loop.num_in_flight}, 202)


def _query(request: Request) -> dict[str, Any]:
    """The query as JSON values: numbers, true, false; else the text itself. Raises BadRequest."""
    pairs = request.query_params.multi_items()
    found: dict[str, Any] = {}
    for name, text in pairs:
        if name in found:
            raise BadRequest("it is given twice", field=name[:80], expected="each once")
        found[name] = _value(text)
    return found


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    """Dataclasses as JSON objects."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
