"""Answers of a server are read up to a size and within a time, whatever it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.telemetry.bounded import MAX_BODY_BYTES, body_of, fetch, lines_of

CHUNK = b"x" * 65536


class Sent(httpx2.AsyncByteStream):
    """A body of these chunks; `taken` counts the bytes that the reader asked for."""

    def __init__(self, chunks: Sequence[bytes], *, endless: bool = False, pause_s: float = 0.0):
        self.chunks, self.endless, self.pause_s = chunks, endless, pause_s
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            for chunk in self.chunks:
                await asyncio.sleep(self.pause_s)
                self.taken += len(chunk)
                yield chunk
            if not self.endless:
                return


def fetched(body: Sent, within_s: float = 20.0) -> tuple[int, bytes]:
    async def run() -> tuple[int, bytes]:
        transport = httpx2.MockTransport(lambda _: httpx2.Response(200, stream=body))
        async with httpx2.AsyncClient(transport=transport, base_url="http://fake") as client:
            return await fetch(client, "GET", "/v1/models", within_s=within_s)

    return asyncio.run(run())


def test_a_whole_answer_comes_back_as_it_was_sent() -> None:
    assert fetched(Sent([b"one ", b"two"])) == (200, b"one two")


def test_a_body_without_end_is_left_soon_after_the_limit() -> None:
    body = Sent([CHUNK], endless=True)
    with pytest.raises(httpx2.RemoteProtocolError, match="larger than"):
        fetched(body)
    assert body.taken <= MAX_BODY_BYTES + 2 * len(CHUNK)


def test_a_body_that_drips_for_ever_is_left_after_the_time() -> None:
    with pytest.raises(httpx2.ReadTimeout):
        fetched(Sent([b"x"], endless=True, pause_s=0.01), within_s=0.1)


def test_a_line_without_end_is_left_soon_after_the_limit() -> None:
    body = Sent([CHUNK], endless=True)

    async def run() -> None:
        async for _ in lines_of(httpx2.Response(200, stream=body), 1 << 20):
            raise AssertionError("there is no line")

    with pytest.raises(httpx2.RemoteProtocolError, match="longer than"):
        asyncio.run(run())
    assert body.taken <= (1 << 20) + 2 * len(CHUNK)


@given(
    st.lists(st.text("ab\u00e9 :"), max_size=6), st.integers(1, 9), st.sampled_from(["\n", "\r\n"])
)
def test_lines_do_not_depend_on_how_the_bytes_are_cut(
    lines: list[str], size: int, ending: str
) -> None:
    data = "".join(f"{line}{ending}" for line in lines).encode()
    chunks = [data[i : i + size] for i in range(0, len(data), size)]

    async def run() -> list[str]:
        response = httpx2.Response(200, stream=Sent(chunks))
        return [line async for line in lines_of(response, 100)]

    assert asyncio.run(run()) == lines


def test_a_body_at_the_limit_is_kept() -> None:
    response = httpx2.Response(200, stream=Sent([b"1234", b"56"]))
    assert asyncio.run(body_of(response, most=6)) == b"123456"
