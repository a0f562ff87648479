"""What is watched while the soak runs: the server's memory, its gauges, whether they come to rest.

Reads /proc and /metrics; knows no requests.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soak_client import Target

# Gauges that must be zero when nobody is served.
AT_REST = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
REST_S = 20.0


def resident_bytes(pid: int) -> int:
    """VmRSS of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    if found is None:
        raise ValueError(f"process {pid} has no VmRSS: it has ended")
    return int(found[1]) * 1024


def get(target: Target, path: str) -> tuple[int, str]:
    """Status and text of a GET; loopback only, so no proxy is asked."""
    return _call(urllib.request.Request(target.url + path, headers=target.headers))  # noqa: S310


def post(target: Target, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of a POST with a JSON body."""
    data = json.dumps(body).encode() if body is not None else b""
    headers = {"content-type": "application/json", **target.headers}
    return _call(
        urllib.request.Request(target.url + path, data, headers, method="POST")  # noqa: S310
    )


def _call(request: urllib.request.Request) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def gauges(text: str) -> dict[str, float]:
    """Metric name → value, summed over its labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = re.sub(r"\{.*\}", "", line).partition(" ")
            values[name] = values.get(name, 0.0) + float(value)
    return values


async def come_to_rest(target: Target) -> dict[str, float]:
    """Wait until nobody runs or waits and no block is held; the gauges then. Raises TimeoutError.

    Clients that went away are noticed a little later.
    """
    deadline = time.monotonic() + REST_S
    while True:
        _, text = await asyncio.to_thread(get, target, "/metrics")
        values = gauges(text)
        held = {name: values[name] for name in AT_REST if values[name] != 0}
        if not held:
            return values
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {REST_S:.0f} s without requests: {held}")
        await asyncio.sleep(0.1)


class MemoryLog:
    """Resident bytes at a regular beat, with how many requests had ended by then."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.samples: list[tuple[int, int]] = []

    def sample(self, num_ended: int) -> None:
        self.samples.append((num_ended, resident_bytes(self._pid)))

    def slope_bytes_per_request(self, warm_after: int) -> float:
        """Growth per request after the first `warm_after`: the median of all pairs' slopes.

        (Theil–Sen: single jumps of an allocator do not carry it.) Raises ValueError without
        enough samples.
        """
        warm = [(x, y) for x, y in self.samples if x >= warm_after]
        slopes = [
            (later[1] - earlier[1]) / (later[0] - earlier[0])
            for index, earlier in enumerate(warm)
            for later in warm[index + 1 :]
            if later[0] > earlier[0]
        ]
        if len(slopes) < 3:
            raise ValueError(f"{len(warm)} samples after {warm_after} requests tell no slope")
        return statistics.median(slopes)

    def growth_bytes(self, warm_after: int) -> int:
        """Median of the last third less the median of the first third after `warm_after`."""
        warm = [size for count, size in self.samples if count >= warm_after]
        third = max(1, len(warm) // 3)
        return round(statistics.median(warm[-third:]) - statistics.median(warm[:third]))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, by rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
