"""What every route shares: reading a body within limits, the API key, errors as OpenAI's objects.

Holds no route. A refusal that comes before the body is read lets the client finish sending for a
moment: closing at once would reset the connection and lose the answer.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ullage.engine.engine import RequestRefused
from ullage.errors import BadInput
from ullage.serving import answers
from ullage.serving.refusals import DeadlinePassed, EngineFailed, NotFinite, Refused

T = TypeVar("T")
MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0
LINGER_S = 5.0
CLIENT_CLOSED_REQUEST = 499
# ASCII is a part of it.
_UTF8 = ("utf-8", "utf8", "us-ascii", "ascii")


class BodyTooLarge(BadInput):
    """More bytes than a request may have; becomes a 413."""


class BodyTooSlow(BadInput):
    """The body did not arrive in time; becomes a 408."""


class WrongMediaType(BadInput):
    """The body says that it is not JSON, not UTF-8 or not plain; becomes a 415."""


class NotFound(BadInput):
    """A model or adapter that is not here; becomes a 404."""


async def read_body(request: Request, timeout_s: float) -> bytes:
    """The body, read only as far as it may reach. Raises the three above."""
    _require_json(request.headers)
    limit = f"at most {MAX_BODY_BYTES} bytes"
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or len(length) > 18 or int(length) > MAX_BODY_BYTES:
        raise BodyTooLarge("the body is too large", expected=limit)
    pieces = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_BODY_BYTES:
                    raise BodyTooLarge("the body is too large", expected=limit)
                pieces.append(piece)
    except TimeoutError as error:
        raise BodyTooSlow(
            f"{size} bytes in {timeout_s:g} s", expected="the whole body within that time"
        ) from error
    return b"".join(pieces)


def _require_json(headers: Headers) -> None:
    """Raise WrongMediaType for a body that says it is anything but JSON in UTF-8, as it is."""
    media, *parameters = headers.get("content-type", "application/json").split(";")
    if media.strip().lower() != "application/json":
        raise WrongMediaType(media.strip()[:80], field="Content-Type", expected="application/json")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in _UTF8:
            raise WrongMediaType(
                f"charset {charset[:80]}", field="Content-Type", expected="charset utf-8"
            )
    for coding in ",".join(headers.getlist("content-encoding")).split(","):
        if coding.strip().lower() not in ("", "identity"):
            raise WrongMediaType(coding.strip()[:80], field="Content-Encoding", expected="identity")


async def unless_disconnected(request: Request, answer: Awaitable[T]) -> T:
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


class ApiKey:
    """Demands `Authorization: Bearer KEY` everywhere but on the paths in `open_paths`."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._key = api_key.encode()
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                message = "the Authorization header does not hold this server's API key"
                body = answers.error(message, "AuthenticationError", 401)
                response = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Linger:
    """Lets a client that is refused early go on sending for LINGER_S, then closes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        unread = b"content-length" in names or b"transfer-encoding" in names

        async def watched_receive() -> Message:
            nonlocal unread
            message = await receive()
            if not message.get("more_body", False):
                unread = False
            return message

        async def watched_send(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if unread and last:
                await send({**message, "more_body": True})
                await _discard(watched_receive, lambda: unread)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, watched_receive, watched_send)


async def _discard(receive: Receive, unread: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LINGER_S
    try:
        async with asyncio.timeout(LINGER_S):
            while unread() and time.monotonic() < until_s:
                await receive()
    except TimeoutError:
        pass


# --- errors --------------------------------------------------------------------------------------


def _sentence(status: int, **headers: str) -> Callable[[Request, Exception], Response]:
    """A handler that answers with the exception's own sentence."""

    def handle(_: Request, error: Exception) -> Response:
        field = getattr(error, "field", None)
        body = answers.error(str(error), type(error).__name__, status, field)
        return JSONResponse(body, status, headers)

    return handle


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    status = error.status
    body = answers.error(str(error), type(error).__name__, status)
    return JSONResponse(body, status, {"Retry-After": str(error.retry_after_s)})


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not served here"
    body = answers.error(message[:200], "NotFound", error.status_code)
    return JSONResponse(body, error.status_code, error.headers)


def _gone(_: Request, __: Exception) -> Response:
    # Nobody reads this; the status is what access logs of proxies call a client that left.
    return Response(status_code=CLIENT_CLOSED_REQUEST)


ERRORS: dict[int | type[Exception], Callable[[Request, Exception], Response]] = {
    BadInput: _sentence(400),
    RequestRefused: _sentence(400),
    BodyTooLarge: _sentence(413),
    BodyTooSlow: _sentence(408),
    WrongMediaType: _sentence(415),
    NotFound: _sentence(404),
    # The sender's own limit: asking again would fail again (the openai client obeys this header).
    DeadlinePassed: _sentence(408, **{"x-should-retry": "false"}),
    Refused: _refused,
    EngineFailed: _sentence(500),
    NotFinite: _sentence(500),
    404: _no_route,
    405: _no_route,
    ClientDisconnect: _gone,
}
