"""What the plugin answers over HTTP, and the requests that it refuses while the server drains.

One ASGI middleware inside vLLM's own, so that no web framework is imported. Routes, fields and
errors are those of the embedded engine's control routes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from ullage_vllm import engines as together
from ullage_vllm.draining import Draining
from ullage_vllm.engines import Engines, NoAnswer
from ullage_vllm.keys import OWN_KEY, Keys
from ullage_vllm.versions import PROBE_SWITCH

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PREFIX = "/ullage/"
RETRY_AFTER_S = 5
DRAINING = "the server is draining: what runs is finished, nothing new is taken"
COUNT_PATIENCE_S = 5.0
TOLD_S = 2.5
"""How long the other processes have to say how many requests they have; they look every second."""

NOT_WORK = frozenset(
    {
        *("/abort_requests", "/inference/v1/abort_requests"),
        *("/collective_rpc", "/fault_tolerance/apply", "/ping"),
        *("/pause", "/resume", "/sleep", "/wake_up", "/is_scaling_elastic_ep", "/scale_elastic_ep"),
        *("/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache"),
        *("/reset_prefix_cache", "/start_profile", "/stop_profile", "/weight_checker"),
        *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
        *("/start_weight_update", "/start_draft_weight_update", "/finish_weight_update"),
        *("/update_weights", "/update_weight_version"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
"""Posts that ask nothing of the model (vLLM 0.30 to 0.33); a drain refuses every other one."""


class Refusal(Exception):
    """An answer that is an error: HTTP status, sentence, the parameter that it is about."""

    def __init__(self, status: int, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param = status, param


class Site:
    """What the routes act on, in one API process. `missing`: why the engine cannot be asked."""

    def __init__(
        self,
        engines: Engines,
        draining: Draining | None,
        keys: Keys,
        count_cancelled: Callable[[int], None],
        missing: str = "",
    ) -> None:
        self.engines, self.draining, self.keys = engines, draining, keys
        self.count_cancelled, self.missing = count_cancelled, missing
        self.probing: Any = None
        """`probe.Probing`, where the probe is on."""
        self.no_probe = f"the probe is off: start vLLM with {PROBE_SWITCH}=1"

    # --- the routes ---

    async def kv(self, _: dict[str, str]) -> tuple[int, Any]:
        self._need_engines()
        return 200, together.together(await self.engines.ask("ullage_report"))

    async def cancel_oldest(self, query: dict[str, str]) -> tuple[int, Any]:
        percent, dry_run = cancel_query(query)
        self._need_engines()
        # Chosen where they run: between two calls whoever was chosen may be preempted, or done.
        # A share over several engines needs the number of each agreed; who that is, each decides.
        arrivals = await self.engines.ask("ullage_arrivals") if self.engines.several else None
        try:
            if arrivals is None:
                reports = await self.engines.ask("ullage_cancel_share", percent, dry_run)
            else:
                counts = together.oldest(arrivals, percent)
                asked = [(count, dry_run) for count in counts]
                reports = await self.engines.ask_each("ullage_cancel_oldest", asked)
        except NoAnswer as silence:
            # The question is on its way: a core that hangs will answer it once it goes on.
            raise NoAnswer(f"{silence}; the requests may still be ended") from None
        answer = together.cancelled(reports, dry_run)
        if not dry_run:
            self.count_cancelled(len(answer["request_ids"]))
        return 200, answer

    async def drain(self, _: dict[str, str]) -> tuple[int, Any]:
        """New requests get a 503 from here on; what runs is finished. The server does not end."""
        draining = self._need_draining()
        try:
            draining.begin()
        except OSError as error:
            raise Refusal(500, f"the other API processes cannot be told: {error}") from None
        end_s = time.monotonic() + TOLD_S
        while draining.in_flight().unknown_processes and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
        return 202, await self._drained(draining)

    async def drained(self, _: dict[str, str]) -> tuple[int, Any]:
        return 200, await self._drained(self._need_draining())

    async def _drained(self, draining: Draining) -> dict[str, Any]:
        """`in_flight` is 0 only when neither HTTP nor any engine has a request left; None: unknown.

        Both are counted: a response in the background has no connection, a parsed request no engine
        yet.
        """
        over_http = draining.in_flight()
        try:
            counts = await self.engines.ask("ullage_statistics", patience_s=COUNT_PATIENCE_S)
            in_engines: int | None = sum(count["unfinished"] for count in counts)
        except NoAnswer:
            in_engines = None
        in_flight: int | None = max(over_http.requests, in_engines or 0)
        if in_flight == 0 and (in_engines is None or over_http.unknown_processes):
            in_flight = None
        return {"draining": draining.asked, "in_flight": in_flight}

    async def entropy(self, query: dict[str, str]) -> tuple[int, Any]:
        return 200, await self._need_probing().entropy(query)

    async def sample(self, query: dict[str, str]) -> tuple[int, Any]:
        return 200, await self._need_probing().sample(query)

    async def attention(self, body: Callable[[], Awaitable[bytes]]) -> tuple[int, Any]:
        probing = self._need_probing()
        if self.draining is not None and self.draining.asked:
            raise Refusal(503, DRAINING)  # the prompt would be a request more
        return 200, await probing.attention(await body())

    def _need_probing(self) -> Any:
        if self.probing is None:
            raise Refusal(501, self.no_probe)
        return self.probing

    def _need_engines(self) -> None:
        if self.missing:
            raise Refusal(501, self.missing)

    def _need_draining(self) -> Draining:
        if self.draining is None:
            raise Refusal(501, "the API processes of this server share no folder")
        return self.draining


ROUTES: dict[tuple[str, str], Callable[[Site, Any], Awaitable[tuple[int, Any]]]] = {
    ("GET", "/ullage/kv"): Site.kv,
    ("POST", "/ullage/cancel_oldest"): Site.cancel_oldest,
    ("GET", "/ullage/drain"): Site.drained,
    ("POST", "/ullage/drain"): Site.drain,
    ("GET", "/ullage/entropy"): Site.entropy,
    ("POST", "/ullage/entropy"): Site.sample,
    ("POST", "/ullage/attention"): Site.attention,
}
WITH_BODY = frozenset({("POST", "/ullage/attention")})
"""Asked by what they are sent; all others by their query."""
MOST_BODY_BYTES = 4 << 20


def cancel_query(query: dict[str, str]) -> tuple[float, bool]:
    """(percent, dry_run). Raises Refusal where it is not clear what is meant."""
    for name in query:
        if name not in ("percent", "dry_run"):
            raise Refusal(400, f"{name[:80]!r} is not a parameter of this route", name[:80])
    try:
        percent = float(query.get("percent", ""))
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        found = query.get("percent", "nothing")[:80]
        raise Refusal(400, f"percent: found {found}, expected above 0, at most 100", "percent")
    dry_run = query.get("dry_run", "false")
    if dry_run not in ("true", "false"):
        raise Refusal(400, f"dry_run: found {dry_run[:80]}, expected true or false", "dry_run")
    return percent, dry_run == "true"


class Middleware:
    """Answers PREFIX itself, counts what asks the model, and refuses that while `site` drains.

    `holder.site` is None until the server's state is there; requests pass until then.
    """

    def __init__(self, app: App, holder: Any) -> None:
        self._app, self._holder = app, holder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site: Site | None = self._holder.site
        if site is None or scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path.startswith(PREFIX):
            return await _answer(site, path, scope, receive, send)
        if site.draining is None or not asks_the_model(scope, path):
            return await self._app(scope, receive, send)
        # Entered before the question whether to drain: whoever is let in is counted.
        ticket = site.draining.enter()
        try:
            if site.draining.asked:
                return await _refuse_new(scope, send)
            return await self._app(scope, receive, send)
        finally:
            site.draining.leave(ticket)


def asks_the_model(scope: Scope, path: str) -> bool:
    if scope["type"] == "websocket":
        return True
    ends_a_response = path.startswith("/v1/responses/") and path.endswith("/cancel")
    return scope["method"] == "POST" and path not in NOT_WORK and not ends_a_response


async def _answer(site: Site, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    headers: list[tuple[bytes, bytes]] = []
    try:
        _let_in(site.keys, scope)
        route = ROUTES.get((scope["method"], path))
        if route is None:
            allowed = [method for method, known in ROUTES if known == path]
            headers = [(b"allow", ", ".join(allowed).encode())] if allowed else []
            raise Refusal(405 if allowed else 404, f"no route {scope['method']} {path[:80]}")
        asked = _query(scope)
        if (scope["method"], path) in WITH_BODY:
            for name in asked:
                raise Refusal(400, f"{name[:80]!r} is not a parameter of this route", name[:80])
            status, content = await route(site, functools.partial(_body, receive))
        else:
            status, content = await route(site, asked)
    except Refusal as refusal:
        status, content = refusal.status, error(str(refusal), refusal.status, refusal.param)
    except NoAnswer as silence:
        status, content = 503, error(str(silence), 503)
        headers = [(b"retry-after", str(RETRY_AFTER_S).encode())]
    if status == 401:
        headers = [(b"www-authenticate", b"Bearer")]
    await _send_json(send, status, content, headers)


def _let_in(keys: Keys, scope: Scope) -> None:
    """Raises Refusal unless the request holds a key."""
    if not keys:
        raise Refusal(
            403, f"these routes want a key: give vLLM --api-key, or the plugin its own in {OWN_KEY}"
        )
    if not keys.admit(dict(scope["headers"]).get(b"authorization")):
        raise Refusal(401, "the API key is missing or wrong")


def _query(scope: Scope) -> dict[str, str]:
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise Refusal(400, f"{name[:80]!r} is given twice", name[:80])
        found[name] = value
    return found


async def _body(receive: Receive) -> bytes:
    found = bytearray()
    while True:
        message = await receive()
        found += message.get("body", b"")
        if len(found) > MOST_BODY_BYTES:
            raise Refusal(413, f"a body of more than {MOST_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return bytes(found)


async def _refuse_new(scope: Scope, send: Send) -> None:
    headers = [(b"retry-after", str(RETRY_AFTER_S).encode()), (b"connection", b"close")]
    if scope["type"] == "http":
        await _send_json(send, 503, error(DRAINING, 503), headers)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await _send_json(send, 503, error(DRAINING, 503), headers, "websocket.http.response")
    else:
        await send({"type": "websocket.close", "code": 1013, "reason": DRAINING})


def error(sentence: str, status: int, param: str | None = None) -> dict[str, Any]:
    kind = {400: "invalid_request_error", 401: "authentication_error"}.get(status, "server_error")
    return {"error": {"message": sentence, "type": kind, "param": param, "code": status}}


async def _send_json(
    send: Send,
    status: int,
    content: Any,
    headers: list[tuple[bytes, bytes]],
    kind: str = "http.response",
) -> None:
    body = json.dumps(content).encode()
    plain = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.start", "status": status, "headers": [*plain, *headers]})
    await send({"type": f"{kind}.body", "body": body})
