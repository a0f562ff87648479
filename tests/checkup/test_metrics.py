"""Reading /metrics over time: absence kept apart from 0, several engines, failed looks."""

from __future__ import annotations

import asyncio
import math

from tests.checkup.fake_server import FakeServer, serving
from ullage.checkup.metrics import (
    CacheInfo,
    Sampler,
    Series,
    cache_info_of,
    look_once,
    sample_of,
)
from ullage.telemetry.exposition import Page, page_of
from ullage.traffic.load import Target


def page(text: str) -> Page:
    return page_of(text.encode())


def test_absent_is_none_and_zero_is_zero() -> None:
    sample = sample_of(page("vllm:num_requests_waiting 0\n"), 1.5)
    assert sample.num_waiting == 0.0
    assert sample.num_running is None
    assert sample.kv_usage_ratio is None
    series = Series((sample,), 0, None)
    assert "vllm:num_requests_waiting" not in series.absent
    assert "vllm:kv_cache_usage_perc" in series.absent
    assert series.peak("num_running") is None
    assert series.rise("num_preemptions") is None


def test_several_engines_behind_one_page_are_summed_and_shares_averaged() -> None:
    several = page(
        'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
        "ullage_kv_page_utilization_ratio NaN\n"
    )
    sample = sample_of(several, 0.0)
    assert sample.num_running == 5
    assert sample.kv_usage_ratio is not None and math.isclose(sample.kv_usage_ratio, 0.3)


def test_the_caches_labels_are_numbers_or_not_known() -> None:
    labels = page(
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None",cache_dtype="auto"} 1\n'
    )
    assert cache_info_of(labels) == CacheInfo(None, 16, None, "auto")
    assert cache_info_of(page("")) is None


def test_a_series_samples_over_time_and_counts_looks_that_failed() -> None:
    async def watch(url: str) -> Series:
        async with Sampler(Target(url, "fake"), interval_s=0.01) as sampler:
            await asyncio.sleep(0.2)
        return sampler.series

    with serving(FakeServer()) as server:
        series = asyncio.run(watch(server.url))
        once = asyncio.run(look_once(Target(server.url, "fake")))
    times = [sample.time_s for sample in series.samples]
    assert len(times) >= 5
    assert times == sorted(times)
    assert series.cache == CacheInfo(200, 16, 3200, "auto")
    assert series.num_failed == 0
    assert "ullage_weights_bytes" in series.absent
    assert once.cache == series.cache
    with serving(FakeServer(metrics=False)) as server:
        blind = asyncio.run(watch(server.url))
    assert blind.samples == ()
    assert blind.num_failed >= 5
    assert "vllm:kv_cache_usage_perc" in blind.absent
