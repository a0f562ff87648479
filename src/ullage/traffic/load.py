"""The load generator: streamed completions against an OpenAI-compatible server, open loop.

Holds the client and what it saw, request by request; every request that was planned is in the
result, failed ones with their reason. What to send is `trace.py`, what to make of it `summary.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx2

from ullage.errors import Unreachable
from ullage.telemetry.bounded import body_of, fetch, lines_of

# One event of a stream holds one or a few tokens; anything of this size is not a token stream.
MAX_EVENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when to send it (from the start), its prompt, how many tokens to ask for."""

    arrival_s: float
    prompt: tuple[int, ...] | str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of one request. Times are seconds on the client's monotonic clock.

    `sent_s` counts from the start of the load, `lag_s` is how late it left after its arrival (a
    busy client, not the server). `event_times_s` are arrivals of text events after `sent_s`.
    `output_tokens` and `prompt_tokens` are the server's own count (`usage`), None when it sent
    none. `error` is None only when the stream ended as streams end.
    """

    arrival_s: float
    sent_s: float
    lag_s: float
    planned_prompt_tokens: int
    planned_output_tokens: int
    prompt_tokens: int | None
    output_tokens: int | None
    event_times_s: tuple[float, ...]
    end_s: float
    finish_reason: str | None
    error: str | None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, as the client saw it; None when no token came."""
        return self.event_times_s[0] if self.event_times_s else None

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Gaps between text events. Equal to gaps between tokens where each event is one token."""
        return tuple(b - a for a, b in pairwise(self.event_times_s))


@dataclass(frozen=True, slots=True)
class Target:
    """Where completions go: base URL without /v1, the model's served name, the key if needed.

    `extras` are fields beyond OpenAI's own that this server was seen to accept (`ignore_eos`).
    """

    url: str
    model: str
    api_key: str | None = None
    extras: tuple[tuple[str, Any], ...] = ()

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: PlannedRequest) -> dict[str, Any]:
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extras),
        }


def client_for(target: Target, *, timeout_s: float, connections: int = 256) -> httpx2.AsyncClient:
    """A client that never queues requests of its own and takes no proxy from the environment."""
    return httpx2.AsyncClient(
        base_url=target.url,
        headers=target.headers(),
        timeout=httpx2.Timeout(timeout_s, connect=10.0),
        limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,
    )


async def run_load(
    target: Target,
    requests: Sequence[PlannedRequest],
    *,
    limit_s: float,
    request_timeout_s: float = 60.0,
    on_finish: Callable[[RequestResult], None] | None = None,
) -> tuple[RequestResult, ...]:
    """Send every request at its arrival, whatever became of the ones before (open loop).

    After `limit_s` seconds what still runs is cut off and reported as an error, never dropped:
    the result has one entry per planned request, in the order given.
    """
    async with client_for(target, timeout_s=request_timeout_s) as client:
        start = time.perf_counter()

        async def one(request: PlannedRequest) -> RequestResult:
            # The collector lives out here so that a request that is cut off keeps what it had seen.
            seen = _Collector(request, start)
            remaining = limit_s - (time.perf_counter() - start)
            try:
                async with asyncio.timeout(remaining):
                    await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
                    await seen.stream(client, target)
            except TimeoutError:
                seen.error = f"cut off: the load's limit of {limit_s:.0f} s was reached"
            result = seen.result()
            if on_finish is not None:
                on_finish(result)
            return result

        return tuple(await asyncio.gather(*(one(request) for request in requests)))


async def run_closed(
    target: Target,
    requests: Sequence[PlannedRequest],
    *,
    concurrency: int,
    limit_s: float,
    whole_groups: bool = False,
    request_timeout_s: float = 120.0,
) -> tuple[RequestResult, ...]:
    """Send the requests in order with at most `concurrency` at once (closed loop).

    All of them wait from the start, so `end_s` of each counts its wait for a place as well. With
    `whole_groups` the next ones leave only when the whole group before them has ended: static
    batching, on any server. Arrivals are ignored; results and `limit_s` are as in `run_load`.
    """
    async with client_for(target, timeout_s=request_timeout_s) as client:
        start = time.perf_counter()
        places = asyncio.Semaphore(concurrency)

        async def one(request: PlannedRequest) -> RequestResult:
            seen = _Collector(request, start)
            try:
                async with asyncio.timeout(limit_s - (time.perf_counter() - start)), places:
                    await seen.stream(client, target)
            except TimeoutError:
                seen.error = f"cut off: the load's limit of {limit_s:.0f} s was reached"
            return seen.result()

        if not whole_groups:
            return tuple(await asyncio.gather(*(one(request) for request in requests)))
        results: list[RequestResult] = []
        for first in range(0, len(requests), concurrency):
            group = requests[first : first + concurrency]
            results += await asyncio.gather(*(one(request) for request in group))
        return tuple(results)


class _Collector:
    """What one request has seen so far; turned into a RequestResult at its end."""

    def __init__(self, request: PlannedRequest, start: float) -> None:
        self.request = request
        self.start = start
        self.sent: float | None = None
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.closed_at: float | None = None
        self.done = False
        self.error: str | None = None

    async def stream(self, client: httpx2.AsyncClient, target: Target) -> None:
        self.sent = time.perf_counter()
        body = target.body(self.request)
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await body_of(response))[:300].decode("utf-8", "replace")
                    self.error = f"HTTP {response.status_code}: {_one_line(text)}"
                    return
                async for payload in _events(response):
                    self._take(payload)
                    if self.done or self.error:
                        break
        except httpx2.HTTPError as error:
            self.error = f"{type(error).__name__}: {_one_line(str(error)) or 'connection lost'}"
        if self.error is None and not self.done and self.finish_reason is None:
            self.error = "the stream ended without a finish reason or [DONE]"
        self._count_closing_event()
        if self.error is None and not self.times:
            self.error = "the stream ended without a single token"

    def _count_closing_event(self) -> None:
        """An empty last event may only close the stream, or carry a token whose text is empty.

        It carried one when the server counts more tokens than there were events before it.
        """
        counted = _count(self.usage.get("completion_tokens"))
        if self.closed_at is not None and counted is not None and counted > len(self.times):
            self.times.append(self.closed_at)

    def _take(self, payload: str) -> None:
        if payload == "[DONE]":
            self.done = True
            return
        now = time.perf_counter()
        try:
            event = json.loads(payload)
            choices = event.get("choices") or []
            usage = event.get("usage")
            failure = event.get("error")
            if failure:
                self.error = f"the server reported: {_one_line(str(failure))}"
            for choice in choices:
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                if choice.get("text") or choice.get("finish_reason") is None:
                    self.times.append(now)
                else:
                    self.closed_at = now
            if isinstance(usage, dict):
                self.usage = usage
        except (ValueError, AttributeError, TypeError):
            self.error = f"an event was not a completion: {_one_line(payload[:120])}"

    def result(self) -> RequestResult:
        now = time.perf_counter()
        sent = now if self.sent is None else self.sent
        return RequestResult(
            arrival_s=self.request.arrival_s,
            sent_s=sent - self.start,
            lag_s=max(0.0, sent - self.start - self.request.arrival_s),
            planned_prompt_tokens=self.request.prompt_tokens,
            planned_output_tokens=self.request.output_tokens,
            prompt_tokens=_count(self.usage.get("prompt_tokens")),
            output_tokens=_count(self.usage.get("completion_tokens")),
            event_times_s=tuple(moment - sent for moment in self.times),
            end_s=now - self.start,
            finish_reason=self.finish_reason,
            error=self.error,
        )


async def _events(response: httpx2.Response) -> AsyncIterator[str]:
    """The `data:` payloads of a server-sent event stream, one by one."""
    async for line in lines_of(response, MAX_EVENT_BYTES):
        if line.startswith("data:"):
            yield line[5:].strip()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:200]


# --- what the server is, before any load ---------------------------------------------------------


async def served_model(url: str, api_key: str | None) -> tuple[str, int | None]:
    """The first entry under /v1/models: its name, and max_model_len where the server tells it.

    Raises:
        Unreachable: nothing answers, or what answers is not an OpenAI-compatible server.
    """
    target = Target(url, "", api_key)
    try:
        async with client_for(target, timeout_s=10.0) as client:
            status, body = await fetch(client, "GET", "/v1/models", within_s=15.0)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unreachable(f"{url}: no answer from /v1/models ({type(error).__name__})") from error
    if status != 200:
        raise Unreachable(f"{url}: /v1/models answered HTTP {status}")
    try:
        first = json.loads(body)["data"][0]
        return str(first["id"]), _count(first.get("max_model_len"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreachable(f"{url}: /v1/models named no model") from error


async def tokenize(target: Target, text: str) -> tuple[int, ...] | None:
    """Token ids of `text` as the server makes them (/tokenize); None where it does not."""
    async with client_for(target, timeout_s=10.0) as client:
        try:
            asked = {"model": target.model, "prompt": text, "add_special_tokens": False}
            status, body = await fetch(client, "POST", "/tokenize", within_s=15.0, json=asked)
            tokens = json.loads(body)["tokens"] if status == 200 else None
        except (httpx2.HTTPError, ValueError, KeyError, TypeError, RecursionError):
            return None
    if not isinstance(tokens, list) or not tokens:
        return None
    if not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in tokens):
        return None
    return tuple(tokens)


async def accepted_extras(target: Target, probe: PlannedRequest) -> tuple[Target, RequestResult]:
    """Find out with one short request whether the server takes `ignore_eos`; the target that works.

    Without it answers end where the model ends them, and output lengths are not the trace's.
    """
    tries = (
        Target(target.url, target.model, target.api_key, (("ignore_eos", True),)),
        Target(target.url, target.model, target.api_key),
    )
    for attempt in tries:
        (result,) = await run_load(attempt, [probe], limit_s=120.0, request_timeout_s=120.0)
        if result.error is None or not result.error.startswith("HTTP 4"):
            break
    return attempt, result
