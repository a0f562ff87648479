"""`create_app(feed)`: the page's routes, read-only, as a Starlette application.

Holds routes and their parameters. What is told is `documents.py`, who may ask is `gate.py`, the
page itself lies in `static/`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ullage.watch.web import documents, numbers
from ullage.watch.web.attention import ENGINES, Attention
from ullage.watch.web.feed import Feed
from ullage.watch.web.gate import LOGIN, Gate, login_page

MOST_STREAMS = 64
HEARTBEAT_S = 15.0
STATIC = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/lists.js": ("lists.js", "text/javascript"),
    "/heat.js": ("heat.js", "text/javascript"),
    "/words.js": ("words.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def create_app(
    feed: Feed, *, api_key: str | None = None, attention: Attention | None = None
) -> Starlette:
    """The page of a feed. Without `api_key` it answers only to this machine's own names.

    `attention` asks the replica that is looked at how its heads attend; None: nobody is asked.

    GET /api/sight?search=&sort=&limit=, /api/replica?id=, /api/history?id=&since=,
    /api/attention?id=, /api/events (server-sent: one event per round).
    """
    routes = [
        *(Route(path, _static(path)) for path in STATIC),
        Route("/style.css", _style),
        Route(LOGIN, _login),
        Route("/api/sight", _sight),
        Route("/api/replica", _replica),
        Route("/api/history", _history),
        Route("/api/attention", _attention),
        Route("/api/events", _events),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(Gate, api_key=api_key, form=True)])
    app.state.feed = feed
    app.state.attention = attention
    app.state.num_streams = 0
    return app


def _text(name: str, room: str = "ullage.watch.web") -> str:
    return (files(room) / name).read_text(encoding="utf-8")


def _static(path: str) -> Callable[[Request], Awaitable[Response]]:
    name, media = STATIC[path]
    body = _text(f"static/{name}")

    async def answer(_: Request) -> Response:
        return Response(body, media_type=media)

    return answer


async def _style(_: Request) -> Response:
    body = _text("style.css", "ullage.pages") + _text("static/page.css")
    return Response(body, media_type="text/css")


async def _login(_: Request) -> Response:
    return login_page()


async def _sight(request: Request) -> Response:
    feed: Feed = request.app.state.feed
    if feed.round is None:
        return _json({"round": 0})
    asked = request.query_params
    sort = asked.get("sort", "worst")
    if sort not in documents.SORTS:
        return _bad(f"sort: one of {', '.join(documents.SORTS)}")
    limit = asked.get("limit", "50")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6):
        return _bad("limit: a whole number from 0")
    search = asked.get("search", "")[:200]
    return _json(documents.round_document(feed.round, search=search, sort=sort, limit=int(limit)))


async def _replica(request: Request) -> Response:
    feed: Feed = request.app.state.feed
    latest = feed.round
    replica = None if latest is None else latest.by_id.get(request.query_params.get("id", ""))
    if latest is None or replica is None:
        return _json({"error": "no such replica in the latest round"}, 404)
    return _json({"round": latest.num, **documents.replica_document(replica)})


async def _history(request: Request) -> Response:
    feed: Feed = request.app.state.feed
    try:
        since = float(request.query_params.get("since", "0"))
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        return _bad("since: Unix time in seconds")
    series = feed.past.fleet
    absent: dict[str, str] = {}
    partial = {} if feed.round is None else numbers.partial_columns(feed.round.totals)
    asked = request.query_params.get("id", "")
    if asked:
        replica = None if feed.round is None else feed.round.by_id.get(asked)
        found = None if replica is None else feed.past.of(replica.view.url)
        if found is None:
            return _json({"error": "no such replica in the latest round"}, 404)
        assert replica is not None
        series = found
        absent, partial = numbers.absent_columns(replica.figures), {}
    told = documents.history_document(series.since(since), absent, partial)
    return _json({"id": asked, **told})


async def _attention(request: Request) -> Response:
    feed: Feed = request.app.state.feed
    asker: Attention | None = request.app.state.attention
    latest = feed.round
    replica = None if latest is None else latest.by_id.get(request.query_params.get("id", ""))
    if replica is None:
        return _json({"error": "no such replica in the latest round"}, 404)
    # Of one that is down nothing is asked, nor of an engine that has no such route.
    who = replica.figures.identity
    asks = asker is not None and who is not None and who.engine in ENGINES
    told = await asker.of(replica.view.url) if asks and asker is not None else None
    return _json({"id": replica.id, "told": told is not None, **(told or {})})


async def _events(request: Request) -> Response:
    state = request.app.state
    if state.num_streams >= MOST_STREAMS:
        return _json({"error": f"{MOST_STREAMS} pages are open already; ask /api/sight"}, 503)
    return StreamingResponse(_stream(state), media_type="text/event-stream")


async def _stream(state: object) -> AsyncIterator[str]:
    """One event for the latest round and for each after it; a comment when there is none."""
    feed: Feed = state.feed  # type: ignore[attr-defined]
    state.num_streams += 1  # type: ignore[attr-defined]
    try:
        seen = 0
        yield "retry: 3000\n\n"
        while not feed.closed:
            latest = await feed.next_round(seen, HEARTBEAT_S)
            if latest is None:
                yield ": still here\n\n"
                continue
            seen = latest.num
            data = json.dumps({"round": seen, "time_s": latest.sight.time_s})
            yield f"id: {seen}\ndata: {data}\n\n"
    finally:
        state.num_streams -= 1  # type: ignore[attr-defined]


def _json(document: dict[str, object], status: int = 200) -> Response:
    return JSONResponse(document, status, {"X-Now": f"{time.time():.3f}"})


def _bad(message: str) -> Response:
    return _json({"error": message}, 400)
