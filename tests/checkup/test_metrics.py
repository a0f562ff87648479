"""Reading /metrics: the parser against prometheus_client's own, and absence kept apart from 0."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.checkup.fake_server import FakeServer, serving
from ullage.checkup.metrics import (
    CacheInfo,
    Sampler,
    Series,
    cache_info_of,
    look_once,
    parse_page,
    sample_of,
)
from ullage.traffic.load import Target

VALUES = st.floats(allow_nan=False) | st.integers(-(10**12), 10**12)
# Line breaks other than \n would end a line for `splitlines`, and engines do not put them in names.
TEXTS = st.text(
    st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"), include_characters='\\"\n{},= '),
    max_size=20,
)


@given(st.lists(st.tuples(TEXTS, TEXTS, VALUES), max_size=6))
def test_a_page_reads_as_prometheus_own_client_reads_it(
    rows: list[tuple[str, str, float]],
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("vllm:thing", "help with \\ and \n", ("a", "b"), registry=registry)
    counter = Counter("other_things", "help", registry=registry)
    counter.inc(3)
    for a, b, value in rows:
        gauge.labels(a, b).set(value)
    text = generate_latest(registry).decode()
    expected = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    ours = {
        (name, labels): value
        for name, series in parse_page(text).items()
        for labels, value in series.items()
    }
    assert ours == expected


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error(text: str) -> None:
    parse_page(text)


def test_absent_is_none_and_zero_is_zero() -> None:
    page = parse_page("vllm:num_requests_waiting 0\n")
    sample = sample_of(page, 1.5)
    assert sample.num_waiting == 0.0
    assert sample.num_running is None
    assert sample.kv_usage_ratio is None
    series = Series((sample,), 0, None)
    assert "vllm:num_requests_waiting" not in series.absent
    assert "vllm:kv_cache_usage_perc" in series.absent
    assert series.peak("num_running") is None
    assert series.rise("num_preemptions") is None


def test_several_engines_behind_one_page_are_summed_and_shares_averaged() -> None:
    page = parse_page(
        'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
        "ullage_kv_page_utilization_ratio NaN\n"
    )
    sample = sample_of(page, 0.0)
    assert sample.num_running == 5
    assert sample.kv_usage_ratio is not None and math.isclose(sample.kv_usage_ratio, 0.3)


def test_the_caches_labels_are_numbers_or_not_known() -> None:
    page = parse_page(
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None",cache_dtype="auto"} 1\n'
    )
    assert cache_info_of(page) == CacheInfo(None, 16, None, "auto")
    assert cache_info_of({}) is None


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
