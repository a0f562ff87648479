"""The plugin's series: values with their labels, NaN where nothing is known, ages that grow on."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from ullage_vllm import metrics
from ullage_vllm.draining import Draining
from ullage_vllm.engines import Engines

from tests.plugins.vllm_core import Client, EngineCore, Request, core_of
from ullage.serving.metric_table import COUNTERS, GAUGES


class Rounds:
    """A watching of these cores, second by second, and its registry."""

    def __init__(self, cores: list[EngineCore], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics, "_made", {})
        self.now_s = 1000.0
        clock = SimpleNamespace(time=lambda: self.now_s, monotonic=lambda: self.now_s)
        monkeypatch.setattr(metrics, "time", clock)
        monkeypatch.setattr(metrics, "EVERY_S", 0.01)
        self.registry = prometheus_client.CollectorRegistry()
        self.client = Client(cores)
        self.draining = Draining()

        def of(kind: Any) -> Any:
            return lambda name, documentation, labelnames, multiprocess_mode=None: kind(
                name, documentation, labelnames, registry=self.registry
            )

        engines = Engines(SimpleNamespace(engine_core=self.client))
        series = metrics.Metrics(
            "m", engines.indexes, of(prometheus_client.Gauge), of(prometheus_client.Counter)
        )
        self.watching = metrics.Watching(engines, self.draining, series)

    async def rounds(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now_s += seconds
            await self.watching.round()

    def value(self, name: str, engine: int = 0) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "m", "engine": str(engine)})


def test_names_are_the_embedded_engines() -> None:
    assert set(metrics.GAUGES) <= set(GAUGES)
    assert "ullage_recomputed_tokens" in COUNTERS
    from ullage.serving.metric_table import LABELLED_COUNTERS

    assert metrics.CANCELLED in LABELLED_COUNTERS


def test_bytes_pages_and_counts_of_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [core_of(65), core_of(65)]
    cores[0].scheduler.add(one := Request("a", 990.0))
    cores[0].scheduler.compute(one, 24)
    found = Rounds(cores, monkeypatch)
    asyncio.run(found.rounds())
    assert found.value("ullage_kv_cache_used_bytes") == 2 * 4096
    assert found.value("ullage_kv_cache_total_bytes") == 64 * 4096
    assert found.value("ullage_kv_page_utilization_ratio") == 24 / 32
    assert found.value("ullage_oldest_request_age_seconds") == 11.0
    assert found.value("ullage_kv_cache_used_bytes", 1) == 0
    for name in ("ullage_kv_page_utilization_ratio", "ullage_oldest_request_age_seconds"):
        assert math.isnan(found.value(name, 1) or 0)


def test_counters_rise_by_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(65)
    found = Rounds([core], monkeypatch)
    core.scheduler.add(one := Request("a", 990.0))

    def again() -> None:
        core.scheduler.compute(one, 32)
        core.scheduler.preempt(one)
        core.scheduler.resume(one)
        core.scheduler.compute(one, 32)

    async def story() -> None:
        again()
        await found.rounds(3)
        assert found.value("ullage_recomputed_tokens_total") == 32
        core.scheduler.preempt(one)
        core.scheduler.resume(one)
        core.scheduler.compute(one, 10)
        await found.rounds(2)
        assert found.value("ullage_recomputed_tokens_total") == 42
        assert found.value("ullage_recomputed_requests_total") == 2

    asyncio.run(story())


def test_bytes_that_cannot_be_told_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(65)
    core.scheduler.kv_cache_config.kv_cache_tensors = []
    found = Rounds([core], monkeypatch)
    asyncio.run(found.rounds())
    assert math.isnan(found.value("ullage_kv_cache_used_bytes") or 0)
    assert math.isnan(found.value("ullage_kv_cache_total_bytes") or 0)


def test_an_engine_that_hangs_grows_older_and_then_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_of(65)
    core.scheduler.add(one := Request("a", 990.0))
    core.scheduler.compute(one, 16)
    found = Rounds([core], monkeypatch)

    async def story() -> None:
        await found.rounds()
        found.client.silent = True
        await found.rounds(10)
        assert found.value("ullage_oldest_request_age_seconds") == 21.0
        assert found.value("ullage_kv_cache_used_bytes") == 4096
        await found.rounds(25)
        assert math.isnan(found.value("ullage_kv_cache_used_bytes") or 0)
        assert found.value("ullage_oldest_request_age_seconds") == 46.0
        # One question is out, not one each second.
        assert found.client.calls.count("ullage_statistics") == 2

    asyncio.run(story())


def test_an_engine_that_hangs_in_its_first_step_has_an_old_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Rounds([core_of(65)], monkeypatch)

    async def story() -> None:
        await found.rounds()
        found.client.silent = True
        monkeypatch.setattr("ullage_vllm.draining.time.time", lambda: found.now_s)
        found.draining.enter()
        await found.rounds(20)
        assert found.value("ullage_oldest_request_age_seconds") == 20.0

    asyncio.run(story())


def test_a_shutdown_is_not_asked_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Rounds([core_of(65)], monkeypatch)

    async def story() -> None:
        await found.rounds()
        found.client.failure = Exception("Server shutting down")
        await found.rounds(40)
        assert 4 <= found.client.calls.count("ullage_statistics") <= 6
        assert math.isnan(found.value("ullage_kv_cache_total_bytes") or 0)

    asyncio.run(story())


def test_a_process_without_series_still_tells_its_count(tmp_path: Any) -> None:
    draining = Draining(tmp_path / "shared", 1, 2)
    draining.enter()
    Draining(tmp_path / "shared", 0, 2).begin()
    watching = metrics.Watching(
        Engines(SimpleNamespace(engine_core=Client([core_of()]))), draining, None
    )
    asyncio.run(watching.round())
    assert (tmp_path / "shared" / "in_flight.1").read_text() == "1"


def test_engines_that_came_or_went_do_not_end_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Rounds([core_of(65), core_of(65)], monkeypatch)

    async def story() -> None:
        found.client.cores.append(core_of(65))
        await found.rounds()
        assert found.value("ullage_kv_cache_total_bytes", 1) == 64 * 4096
        del found.client.cores[1:]
        await found.rounds()
        assert found.value("ullage_kv_cache_total_bytes") == 64 * 4096
        assert math.isnan(found.value("ullage_kv_cache_total_bytes", 1) or 0)

    asyncio.run(story())


def test_before_the_first_answer_counters_are_0_and_gauges_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Rounds([core_of(65)], monkeypatch)
    for name in metrics.COUNTERS:
        assert found.value(f"{name}_total") == 0
    for name in metrics.GAUGES:
        assert math.isnan(found.value(name) or 0)
