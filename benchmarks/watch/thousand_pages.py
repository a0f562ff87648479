"""Recorded pages of vLLM whose numbers go on, and a server that gives them to a thousand ports.

Holds the stand-in for a fleet: what it costs is its own process's. Who watches it is
`thousand.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

NUM_STEPS = 60
NUM_MODELS = 10
RECORDED_NAME = b'model_name="smol"'
STILL = (b"_created", b"_info", b"process_start_time_seconds")
# What a healthy fleet does not count up.
ILL = (b"preemption", b"rejection", b"corrupted", b'"abort"', b'"error"')


def name_of(which: int) -> str:
    """A served name as long as people's are."""
    return f"meta-llama/Llama-3.1-{which}B-Instruct"


def pages_of(recorded: bytes, model: bytes, seed: int) -> list[bytes]:
    """NUM_STEPS pages in a row: every counter and bucket goes on as under load, gauges move."""
    rng = random.Random(seed)  # noqa: S311 (numbers of a benchmark)
    lines = recorded.replace(RECORDED_NAME, b'model_name="%b"' % model).splitlines()
    gauges = {line.split()[2] for line in lines if line.startswith(b"# TYPE") and b"gauge" in line}
    values: dict[int, float] = {}
    steps: dict[int, float] = {}
    grown = 0.0
    for at, line in enumerate(lines):
        if line.startswith(b"#") or any(part in line for part in (*STILL, *ILL)):
            continue
        name = line.partition(b"{")[0].partition(b" ")[0]
        values[at] = float(line.rsplit(b" ", 1)[1])
        grown = (
            grown + rng.randrange(9) if b"_bucket" in name and b'le="+Inf"' not in line else grown
        )
        steps[at] = 0.0 if name in gauges else float(grown if b"_bucket" in name else 200)
        if b"_count" in name:
            steps[at], grown = grown, 0.0
    found = []
    for step in range(NUM_STEPS):
        out = list(lines)
        for at, value in values.items():
            line = lines[at]
            now = value + step * steps[at]
            if b"kv_cache_usage_perc" in line:
                now = 0.4 + 0.2 * rng.random()
            elif b"num_requests_running" in line:
                now = float(20 + rng.randrange(20))
            out[at] = line.rsplit(b" ", 1)[0] + b" " + repr(now).encode()
        found.append(b"\n".join(out) + b"\n")
    return found


def answer_of(body: bytes, kind: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


class Replica(asyncio.Protocol):
    """One engine's port: each scrape gets the next page; the other routes tell who it is."""

    def __init__(self, place: int, models: list[list[bytes]]) -> None:
        self._pages = models[place % NUM_MODELS]
        self._model = name_of(place % NUM_MODELS)
        self._step = place % 20  # replicas of a model are not alike

    def __call__(self) -> Replica:
        return self  # its connections go on where the last one was

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *asked, self._rest = (self._rest + data).split(b"\r\n\r\n")
        for head in asked:
            path = head.split(b" ", 2)[1]
            if path == b"/metrics":
                self._transport.write(self._pages[min(self._step, NUM_STEPS - 1)])
                self._step += 1
                continue
            told = {"version": "0.32.0"} if path == b"/version" else {"data": [{"id": self._model}]}
            self._transport.write(answer_of(json.dumps(told).encode(), b"application/json"))


async def serve(num: int, recorded: bytes) -> None:
    """Listen on `num` ports, print them as one line of JSON, and answer until stdin ends."""
    models = [
        [answer_of(page, b"text/plain; version=0.0.4") for page in pages]
        for pages in (
            pages_of(recorded, name_of(which).encode(), which) for which in range(NUM_MODELS)
        )
    ]
    loop = asyncio.get_running_loop()
    ports = []
    for place in range(num):
        server = await loop.create_server(Replica(place, models), "127.0.0.1", 0, backlog=8)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]).read_bytes()))
