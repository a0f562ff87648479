"""Who may read the page: the key, the host by which it was asked, and headers that fence it in.

Holds ASGI middleware. Without a key the page is for this machine only, so a Host that is not this
machine's name is refused: else any web site could have its own name lead here (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "ullage_watch"
LOGIN = "/login"
OPEN_PATHS = frozenset((LOGIN, "/style.css", "/icon.svg"))
LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "[::1]"))
MAX_FORM_BYTES = 4096
FORM_WITHIN_S = 10.0
WRONG_KEY_PAUSE_S = 0.5
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Gate:
    """Lets through who has the key; where there is none, who asks this machine by its own name.

    The key comes as `Authorization: Bearer KEY`; with `form` also once through the form at /login,
    which answers with a cookie: a page cannot add headers to what the browser itself asks for.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, *, form: bool = False) -> None:
        self._app = app
        self._form = form
        self._key = None if api_key is None else api_key.encode()
        self._session = "" if self._key is None else _session_of(self._key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fenced = _with_headers(send)
        refusal = await self._refusal(Request(scope, receive))
        if refusal is None:
            await self._app(scope, receive, fenced)
        else:
            await refusal(scope, receive, fenced)

    async def _refusal(self, request: Request) -> Response | None:
        if self._key is None:
            if _name_of(request.headers.get("host", "")) in LOOPBACK_NAMES:
                return None
            return _said(421, "this page answers only to 127.0.0.1, localhost and [::1]")
        path = request.url.path
        if self._form and path == LOGIN and request.method == "POST":
            return await self._log_in(request)
        if (self._form and path in OPEN_PATHS) or self._has_key(request):
            return None
        if self._form and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(LOGIN, 303)
        return _said(401, "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"})

    def _has_key(self, request: Request) -> bool:
        assert self._key is not None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Starlette reads headers as Latin-1: this gives the bytes that were sent.
        sent = given.strip().encode("latin-1")
        if kind.lower() == "bearer" and hmac.compare_digest(sent, self._key):
            return True
        try:
            morsel = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        given = "" if morsel is None else morsel.value
        return hmac.compare_digest(given.encode(), self._session.encode())

    async def _log_in(self, request: Request) -> Response:
        assert self._key is not None
        body = b""
        try:
            async with asyncio.timeout(FORM_WITHIN_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MAX_FORM_BYTES:
                        return _said(413, f"the form has more than {MAX_FORM_BYTES} bytes")
        except TimeoutError:
            return _said(408, "the form did not come to its end", {"Connection": "close"})
        given = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0]
        if not hmac.compare_digest(given.encode(), self._key):
            await asyncio.sleep(WRONG_KEY_PAUSE_S)
            return login_page("That is not the key.", 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, self._session, httponly=True, samesite="strict")
        return answer


def login_page(said: str = "", status: int = 200) -> Response:
    """The form that asks for the key. `said` is ours, never from outside."""
    alarm = f'<p role="alert">{said}</p>' if said else ""
    return HTMLResponse(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<title>ullage watch</title><link rel="icon" href="/icon.svg">'
        '<link rel="stylesheet" href="/style.css"></head>'
        '<body><main class="login"><p class="kicker">ullage watch</p><h1>The key, please</h1>'
        f'{alarm}<form method="post" action="{LOGIN}"><label for="key">API key</label>'
        '<input id="key" name="key" type="password" autocomplete="current-password" required '
        'autofocus><button>Open</button></form><p class="note">It is what was given to '
        "<code>ullage watch</code> as the page’s key.</p></main></body></html>\n",
        status,
    )


def _session_of(key: bytes) -> str:
    return hmac.new(key, b"ullage watch session", hashlib.sha256).hexdigest()


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _said(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


def _with_headers(send: Send) -> Send:
    async def fenced(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return fenced
