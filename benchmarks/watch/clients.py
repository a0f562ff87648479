"""What one scrape costs by HTTP client: httpx2 and `telemetry/wire.py`, processor ms per request.

Twenty kept-alive connections to `thousand_pages.py`, the same bodies; parsing is not in it.

    python benchmarks/watch/clients.py [--page FILE] [--copies 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2

from ullage.telemetry.bounded import fetch
from ullage.telemetry.wire import Connection, Origin

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "tests" / "telemetry" / "pages" / "vllm-0.32-overload.prom"
NUM_CONNECTIONS = 20
NUM_ROUNDS = 20
NUM_RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--copies", type=int, default=2, help="of the page in one body")
    args = parser.parse_args()
    body = args.page.read_bytes() * args.copies
    with tempfile.NamedTemporaryFile() as page:
        page.write(body)
        page.flush()
        with subprocess.Popen(
            [sys.executable, str(HERE / "thousand_pages.py"), str(NUM_CONNECTIONS), page.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as fleet:
            assert fleet.stdin and fleet.stdout
            ports = json.loads(fleet.stdout.readline())
            try:
                print(f"| client | ms per request, {len(body) / 1e3:.0f} kB each |\n|---|---|")
                for name, run in (("httpx2 " + httpx2.__version__, _httpx2), ("wire", _wire)):
                    times = sorted(asyncio.run(run(ports)) for _ in range(NUM_RUNS))
                    print(f"| {name} | {times[0]:.2f} to {times[-1]:.2f} |")
            finally:
                fleet.stdin.close()


async def _httpx2(ports: list[int]) -> float:
    async with httpx2.AsyncClient() as client:

        async def ask(port: int) -> int:
            url = f"http://127.0.0.1:{port}/metrics"
            return len((await fetch(client, "GET", url, within_s=10))[1])

        return await _timed(ask, ports)


async def _wire(ports: list[int]) -> float:
    connections = {port: Connection(Origin("http", "127.0.0.1", port)) for port in ports}

    async def ask(port: int) -> int:
        return len((await connections[port].get("/metrics")).body)

    ms = await _timed(ask, ports)
    for connection in connections.values():
        connection.close()
    return ms


async def _timed(ask: Callable[[int], Awaitable[int]], ports: list[int]) -> float:
    """Processor milliseconds of one request, connections open already."""
    await asyncio.gather(*map(ask, ports))
    before_s = time.process_time()
    for _ in range(NUM_ROUNDS):
        assert all(await asyncio.gather(*map(ask, ports)))
    return (time.process_time() - before_s) / NUM_ROUNDS / len(ports) * 1e3


if __name__ == "__main__":
    main()
