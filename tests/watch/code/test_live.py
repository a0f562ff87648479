"""A real Prometheus with ullage's rules over a real engine in a real overload: alerts come and go.

Slow: an engine, a Prometheus, and spans of many scrapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.engine.driving import slow_steps
from tests.engine.families import write_model
from tests.telemetry.prometheus_server import NEEDS_PROMETHEUS, Prometheus, prometheus
from ullage.cli.main import main
from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server
from ullage.telemetry.promql import PrometheusSource
from ullage.telemetry.reading import snapshot_of
from ullage.telemetry.scrape import Look

pytestmark = [pytest.mark.slow, NEEDS_PROMETHEUS]

# Many short requests: the pool stays full when one of them is preempted.
SMALL_POOL_BYTES = 160 * 12_288
CLIENTS = 96
STEP_S = 0.05
"""Clients share this process with the engine: where machine code outran them, they left the pool
half empty between an answer and the next question, and no one waited."""
PRESSURE = '{__name__=~"up|ullage:(kv_used_ratio|running|waiting|preemptions:rate10s)"}'


@dataclass(frozen=True)
class Live:
    engine: ServerHandle
    prom: Prometheus
    model_dir: Path

    def firing(self) -> set[str]:
        rows = self.prom.query('ALERTS{alertstate="firing"}')
        return {row["metric"]["alertname"] for row in rows}


def options() -> EngineOptions:
    return EngineOptions(
        kv_cache_memory_bytes=SMALL_POOL_BYTES, max_num_seqs=CLIENTS, max_num_batched_tokens=128
    )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    place = tmp_path_factory.mktemp("live")
    model_dir = write_model("llama", place)
    rules = place / "rules.yml"
    # Prometheus scrapes twice a second, so spans are of seconds.
    asked = ["watch", "rules", "--engine", "ullage", "--scrape-interval", "500ms"]
    assert main([*asked, "--out", str(rules)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        slow_steps(patch, STEP_S)
        engine = start_server(model_dir, options(), served_model_name="tiny")
        target = engine.url.removeprefix("http://")
        try:
            jobs = {"ullage": [{"targets": [target]}]}
            with prometheus(place / "prom", jobs, scrape="500ms", rules=[rules]) as prom:
                prom.until(lambda: bool(prom.query("ullage:spoken")), 60.0, "it is recorded")
                yield Live(engine, prom, model_dir)
        finally:
            engine.stop()


def test_health_is_silent(live: Live) -> None:
    with httpx2.Client(base_url=live.engine.url, timeout=60, trust_env=False) as http:
        for _ in range(8):
            body = {"prompt": "a few words", "max_tokens": 16}
            assert http.post("/v1/completions", json=body).status_code == 200
    rates = "ullage:generation_tokens:rate10s"
    live.prom.until(lambda: bool(live.prom.query(rates)), 60.0, "two scrapes, and a rate of them")
    recorded = live.prom.query(rates)
    assert [row["metric"]["ullage_engine"] for row in recorded] == ["ullage"]
    assert live.firing() == set()


def test_the_same_numbers_as_direct_scraping(live: Live) -> None:
    async def look() -> Look:
        source = PrometheusSource(live.prom.url)
        try:
            (one,) = await source.look()
            return one
        finally:
            await source.close()

    live.prom.until(
        lambda: bool(live.prom.query("changes(vllm:generation_tokens_total[3s]) == 0")),
        60.0,
        "calm",
    )
    through = asyncio.run(look())
    body = httpx2.get(f"{live.engine.url}/metrics", trust_env=False).content
    direct = snapshot_of(body, time_s=through.time_s)
    assert through.error == ""
    assert through.snapshot is not None
    for part in ("identity", "gauges", "labelled", "histograms", "sources", "absent"):
        assert getattr(through.snapshot, part) == getattr(direct, part), part
    counters = dict(through.snapshot.counters)
    # To be asked costs time.
    assert counters.pop("process_cpu_s") <= direct.counters["process_cpu_s"]
    assert counters == {k: v for k, v in direct.counters.items() if k != "process_cpu_s"}


def test_an_overload_fires_and_its_end_ends_it(live: Live) -> None:
    stop = threading.Event()

    async def client(http: httpx2.AsyncClient, number: int) -> None:
        length = 32 + number  # else all end at once and leave the pool empty
        body = {"prompt": "hello", "max_tokens": length, "ignore_eos": True, "temperature": 0}
        while not stop.is_set():
            await http.post("/v1/completions", json=body)

    async def clients() -> None:
        most = httpx2.Limits(max_connections=CLIENTS)
        async with httpx2.AsyncClient(
            base_url=live.engine.url, timeout=120, trust_env=False, limits=most
        ) as http:
            await asyncio.gather(*(client(http, number) for number in range(CLIENTS)))

    load = threading.Thread(target=lambda: asyncio.run(clients()))
    load.start()
    expected = {"UllageKVCacheNearFull", "UllagePreemptionStorm"}
    seen: set[str] = set()

    def all_seen() -> bool:
        seen.update(live.firing())
        return expected <= seen

    try:
        with contextlib.suppress(AssertionError):
            live.prom.until(all_seen, 90.0, "")
        assert expected <= seen, live.prom.query(PRESSURE)
    finally:
        stop.set()
        load.join()
    # What it is not: stuck, held by nobody, without numbers.
    explained = {
        "UllageQueueWhileKVFull",
        "UllageKVPagesHalfEmpty",
        "UllageKVCacheFilling",
        "UllageFirstTokensLate",
        "UllageTokensLate",
        "UllageOtherPromptLengths",
        "UllageOtherAnswerLengths",
    }
    if live.prom.query("min_over_time(up[5m]) == 0"):
        # A machine that is busy elsewhere kept the answer from Prometheus: told, and rightly.
        explained |= {"UllageReplicaDown", "UllageNothingToWatch"}
    assert seen <= expected | explained
    live.prom.until(lambda: not live.firing(), 60.0, "silence again")


def test_an_engine_that_is_gone_fires_and_its_return_ends_it(live: Live) -> None:
    port = int(live.engine.url.rpartition(":")[2])
    live.engine.stop()
    live.prom.until(lambda: "UllageReplicaDown" in live.firing(), 60.0, "down is told")
    again = start_server(live.model_dir, options(), served_model_name="tiny", port=port)
    try:
        live.prom.until(lambda: "UllageRestarted" in live.firing(), 60.0, "the restart is told")
        live.prom.until(lambda: not live.firing(), 60.0, "silence again")
    finally:
        again.stop()
