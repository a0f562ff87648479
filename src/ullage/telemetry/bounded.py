"""Answers of a server that is not trusted: read up to a size and within a time, never further.

Holds `fetch` for whole bodies and `lines_of` for streams. What the answers mean is their readers'.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2

MAX_BODY_BYTES = 8 << 20
"""A page of metrics of a large fleet has about one MiB; nothing that is asked for has more."""


async def fetch(
    client: httpx2.AsyncClient, method: str, path: str, *, within_s: float, **send: Any
) -> tuple[int, bytes]:
    """(status, body) of one request.

    Raises httpx2.HTTPError, also for a body above MAX_BODY_BYTES or one that is not over
    `within_s` seconds after the request: a timeout for each read would let it drip forever.
    """
    try:
        async with asyncio.timeout(within_s), client.stream(method, path, **send) as response:
            return response.status_code, await body_of(response)
    except TimeoutError as error:
        raise httpx2.ReadTimeout(f"no whole answer within {within_s:g} s") from error


async def body_of(response: httpx2.Response, most: int = MAX_BODY_BYTES) -> bytes:
    """The body of a streamed response. Raises RemoteProtocolError beyond `most` bytes."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > most:
            raise httpx2.RemoteProtocolError(f"the answer is larger than {most:,} bytes")
    return bytes(body)


async def lines_of(response: httpx2.Response, most: int) -> AsyncIterator[str]:
    """Lines of a streamed response, as they come. Raises RemoteProtocolError for one that is
    longer than `most` bytes, before all of it has been kept."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in (*lines, rest):
            if len(line) > most:
                raise httpx2.RemoteProtocolError(f"a line is longer than {most:,} bytes")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")
