"""One request over a socket of its own, and the verdict: what a client may call an answer.

Speaks HTTP/1.1 by hand, so that it can go away at any byte. Nothing here knows the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any

from soak_plan import Ask

TIMEOUT_S = 120.0
WHOLE = ("length", "stop")


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and the key that opens it (empty: none)."""

    host: str
    port: int
    api_key: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. `kind` is one of KINDS; `status` HTTP's, 0 without any answer."""

    ask: Ask
    kind: str
    status: int = 0
    note: str = ""
    seconds: float = 0.0


# complete: all choices whole · cancelled: by the operator, and said so · expired: past its own
# deadline · refused: 429 or 503 with Retry-After · rejected: the 400 that was deserved ·
# left: by ourselves · unconnected: nobody listens · fault: anything else
KINDS = (
    *("complete", "cancelled", "expired", "refused", "rejected", "left"),
    *("unconnected", "fault"),
)


async def send(target: Target, ask: Ask) -> Outcome:
    """Send `ask`, read its answer to the end or leave, and judge. Never raises."""
    clock = asyncio.get_running_loop()
    started = clock.time()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            found = await _exchange(target, ask)
    except TimeoutError:
        found = Outcome(ask, "fault", note=f"no end within {TIMEOUT_S:.0f} s")
    except ConnectionRefusedError:
        found = Outcome(ask, "unconnected")
    except (OSError, EOFError, ValueError) as error:
        found = Outcome(ask, "fault", note=f"{type(error).__name__}: {error}")
    return replace(found, seconds=clock.time() - started)


async def _exchange(target: Target, ask: Ask) -> Outcome:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        body = json.dumps(ask.body).encode()
        headers = {
            "host": target.host,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **target.headers,
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"POST {ask.path} HTTP/1.1", *lines, "", ""]).encode()
        if ask.leaves == "half_body":
            writer.write(head + body[: len(body) // 2])
            await writer.drain()
            return Outcome(ask, "left")
        writer.write(head + body)
        await writer.drain()
        if ask.leaves == "at_once":
            return Outcome(ask, "left")
        if ask.leaves is None:
            return judge(ask, *await _read(reader))
        try:
            if ask.leaves == "mid_stream":
                async with asyncio.timeout(ask.leaves_after_s):
                    return judge(ask, *await _read(reader, stop_after=2))
            async with asyncio.timeout(ask.leaves_after_s):
                return judge(ask, *await _read(reader))
        except (TimeoutError, _Left):
            return Outcome(ask, "left")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class _Left(Exception):
    """The client has seen as much of a stream as it wanted."""


async def _read(
    reader: asyncio.StreamReader, stop_after: int | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body. Raises EOFError when the answer is cut, _Left after chunks."""
    status_line = await reader.readuntil(b"\r\n")
    status = int(status_line.split()[1])
    headers: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        return status, headers, await reader.readexactly(int(headers["content-length"]))
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
        if stop_after is not None and status == 200 and len(pieces) >= stop_after:
            raise _Left
    return status, headers, b"".join(pieces)


def judge(ask: Ask, status: int, headers: dict[str, str], body: bytes) -> Outcome:
    """What an answer that came to its end is."""
    try:
        if status != 200:
            error = json.loads(body)["error"]
            return _judge_error(ask, status, error, headers.get("retry-after", ""))
        if ask.refusable:
            return Outcome(ask, "fault", status, "a request that cannot fit was answered")
        if ask.stream:
            return _judge_stream(ask, body)
        return _judge_whole(ask, json.loads(body))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Outcome(ask, "fault", status, f"{error!r} in {body[-300:]!r}")


def _judge_error(ask: Ask, status: int, error: dict[str, Any], retry_after: str) -> Outcome:
    """An error object, of a whole answer or within a stream (`retry_after` "0" there)."""
    kind = "fault"
    if status == 408 and "deadline" in ask.features:
        kind = "expired"
    elif status == 400 and ask.refusable:
        kind = "rejected"
    elif status in (429, 503) and retry_after.isdigit():
        kind = "cancelled" if error["type"] == "Cancelled" else "refused"
    return Outcome(ask, kind, status, "" if kind != "fault" else f"{status}: {error}")


def _judge_whole(ask: Ask, answer: dict[str, Any]) -> Outcome:
    reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    if len(reasons) != len(answer["choices"]):
        raise ValueError("two choices with one index")
    return _judge_ends(ask, reasons, answer["usage"]["completion_tokens"])


def _judge_stream(ask: Ask, body: bytes) -> Outcome:
    events = [event for event in body.decode().split("\n\n") if event]
    if events[-1] != "data: [DONE]":
        raise ValueError("the stream does not end with [DONE]")
    reasons: dict[int, str] = {}
    num_tokens = -1
    for event in events[:-1]:
        chunk: dict[str, Any] = json.loads(event.removeprefix("data: "))
        if "error" in chunk:
            return _judge_error(ask, chunk["error"]["code"], chunk["error"], "0")
        if chunk.get("usage"):
            num_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            if choice["index"] in reasons:
                raise ValueError(f"choice {choice['index']} goes on after its end")
            if choice["finish_reason"] is not None:
                reasons[choice["index"]] = choice["finish_reason"]
    return _judge_ends(ask, reasons, num_tokens)


def _judge_ends(ask: Ask, reasons: dict[int, str], num_tokens: int) -> Outcome:
    note = ""
    if sorted(reasons) != list(range(ask.num_choices)):
        note = f"{ask.num_choices} choices asked for, {sorted(reasons)} ended"
    elif not all(reason in WHOLE for reason in reasons.values()):
        note = f"finish reasons {reasons}"
    elif num_tokens != ask.num_choices * ask.max_tokens:
        note = f"{num_tokens} tokens, {ask.num_choices} × {ask.max_tokens} asked for"
    return Outcome(ask, "fault" if note else "complete", 200, note)
