"""Fleet mode: what Prometheus scraped is read as if it had been scraped here, or says why not."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.telemetry.prometheus_server import (
    NEEDS_PROMETHEUS,
    Pages,
    Prometheus,
    page_server,
    prometheus,
)
from ullage.errors import BadUsage
from ullage.telemetry.prometheus_api import QueryFailed
from ullage.telemetry.promql import PrometheusSource, name_of
from ullage.telemetry.promql_text import any_of, page_names, quoted, selector_of
from ullage.telemetry.reading import snapshot_of
from ullage.telemetry.scrape import Look

PAGES = Path(__file__).parent / "pages"
VLLM = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m\\"od\\\\el"} 3
vllm:num_requests_running{engine="1",model_name="m\\"od\\\\el"} 1
vllm:num_requests_waiting{engine="0",model_name="m\\"od\\\\el"} 2
vllm:num_requests_waiting{engine="1",model_name="m\\"od\\\\el"} 0
vllm:kv_cache_usage_perc{engine="0",model_name="m\\"od\\\\el"} 0.123456789012345
vllm:kv_cache_usage_perc{engine="1",model_name="m\\"od\\\\el"} 0.5
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="4096"} 1
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="4096"} 1
vllm:num_preemptions_total{engine="0",model_name="m\\"od\\\\el"} 1e+06
vllm:num_preemptions_total{engine="1",model_name="m\\"od\\\\el"} 7
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m\\"od\\\\el"} 5
vllm:request_success_total{engine="0",finished_reason="length",model_name="m\\"od\\\\el"} 6
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m\\"od\\\\el"} 1
vllm:time_to_first_token_seconds_bucket{engine="0",le="2.5",model_name="m\\"od\\\\el"} 4
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m\\"od\\\\el"} 5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m\\"od\\\\el"} 5
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m\\"od\\\\el"} 12.75
process_start_time_seconds 1.7e+09
process_cpu_seconds_total 12.5
"""
NAN = VLLM.replace(b"0.123456789012345", b"NaN")
EMPTY = b"go_goroutines 5\n"


@dataclass(frozen=True)
class Fleet:
    """One Prometheus over servers of every condition, and the pages that they show."""

    prom: Prometheus
    pages: Pages

    def look(self, selector: str = "", times: int = 1) -> list[Look]:
        return list(self.looks(selector, times)[-1])

    def answer(self, beginning: str, selector: str = "") -> Look:
        """That replica's look once it answered: a busy machine may miss a scrape."""
        for _ in range(40):
            (look,) = [look for look in self.look(selector) if look.url.startswith(beginning)]
            if not look.error:
                return look
            time.sleep(0.25)
        raise AssertionError(look.error)

    def looks(self, selector: str, times: int) -> list[tuple[Look, ...]]:
        async def looking() -> list[tuple[Look, ...]]:
            source = PrometheusSource(self.prom.url, selector=selector)
            try:
                found = []
                for _ in range(times):
                    found.append(await source.look())
                    await asyncio.sleep(0.05)
                return found
            finally:
                await source.close()

        return asyncio.run(looking())


RECORDED = {path.name: path.read_bytes() for path in sorted(PAGES.glob("*.prom"))}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    shown = {"/metrics": VLLM, "/spoilt": NAN, "/node": EMPTY}
    shown |= {f"/{name}": page for name, page in RECORDED.items()}
    with page_server(shown) as pages:
        # `engine` and `model_name` are the engine's own labels too.
        labels = {"pod": "a-0", "namespace": "prod", "engine": "x", "tier": "gold"}
        jobs = {
            **{job: [{"targets": [pages.target]}] for job in ("vllm", "spoilt", "node", *RECORDED)},
            "pods": [{"targets": [f"localhost:{pages.port}"], "labels": labels}],
            "down": [{"targets": ["127.0.0.1:1"]}],
        }
        paths = {job: f"/{job}" for job in ("spoilt", "node", *RECORDED)}
        with prometheus(tmp_path_factory.mktemp("fleet"), jobs, paths=paths) as prom:
            up = "count(up == 1) or vector(0)"
            prom.until(
                lambda: float(prom.query(up)[0]["value"][1]) == len(jobs) - 1, 20.0, "all up"
            )
            yield Fleet(prom, pages)


@NEEDS_PROMETHEUS
class TestOnARealServer:
    def test_what_is_no_engine_is_no_replica(self, fleet: Fleet) -> None:
        jobs = [look.url.partition("/")[0] for look in fleet.look()]
        assert sorted(jobs) == sorted(["prod", "spoilt", "vllm", *RECORDED])

    def test_the_snapshot_is_the_one_of_a_direct_scrape(self, fleet: Fleet) -> None:
        for page, url in ((VLLM, "vllm/"), (NAN, "spoilt/"), (VLLM, "prod/a-0/")):
            look = fleet.answer(url)
            assert look.snapshot == snapshot_of(page, time_s=look.time_s)
        assert look.snapshot is not None
        assert look.snapshot.identity.models == ('m"od\\el',)
        assert look.snapshot.identity.num_engines == 2
        assert look.snapshot.gauges["running"] == 4

    @pytest.mark.parametrize("name", RECORDED)
    def test_a_recorded_page_reads_as_it_does_directly(self, fleet: Fleet, name: str) -> None:
        look = fleet.answer(f"{name}/", f'job="{name}"')
        assert look.snapshot == snapshot_of(RECORDED[name], time_s=look.time_s)

    def test_time_is_of_the_scrape(self, fleet: Fleet) -> None:
        look = fleet.answer("vllm/")
        ((_, at),) = [row["value"] for row in fleet.prom.query('timestamp(up{job="vllm"})')]
        assert abs(float(at) - look.time_s) < 2.0
        assert abs(time.time() - look.time_s) < 5.0

    def test_a_replica_that_was_not_scraped_anew_gives_the_same_look(self, fleet: Fleet) -> None:
        looks = fleet.looks('job="vllm"', 40)
        by_time: dict[float, Look] = {}
        for (look,) in looks:
            if look.error:  # a scrape that a busy machine missed
                continue
            assert by_time.setdefault(look.time_s, look) is look
        assert 1 < len(by_time) < len(looks)

    def test_a_selector_makes_every_target_a_replica(self, fleet: Fleet) -> None:
        (look,) = fleet.look('{job="down"}')
        assert (look.url, look.snapshot) == ("down/127.0.0.1:1", None)
        assert look.error == "Prometheus could not scrape it (up is 0)"
        look = fleet.answer("node/", 'job="node"')
        assert look.snapshot is not None
        assert look.snapshot.identity.engine == ""

    def test_a_selector_that_matches_nothing_says_so(self, fleet: Fleet) -> None:
        with pytest.raises(QueryFailed, match=r'no target that matches \{job="nobody"\}'):
            fleet.look('job="nobody"')

    def test_a_replica_that_stops_is_told_and_comes_back(self, fleet: Fleet) -> None:
        page = fleet.pages.pages.pop("/metrics")  # of the jobs vllm and pods
        down = '(up{job="vllm"} == 0)'
        try:
            fleet.prom.until(lambda: bool(fleet.prom.query(down)), 20.0, "down")
            # A new source: it knows only that the target spoke within the hour.
            looks = {look.url.partition("/")[0]: look for look in fleet.look()}
            assert looks["vllm"].snapshot is None
            assert "up is 0" in looks["vllm"].error
        finally:
            fleet.pages.pages["/metrics"] = page
        fleet.prom.until(
            lambda: {look.error for look in fleet.look()} == {""}, 30.0, "all of them again"
        )


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "matchers"),
    [
        ("", ""),
        ("  { } ", ""),
        ('job="a"', 'job="a"'),
        ('{job="a", pod=~"b.*",c!="d" , e!~"f"}', 'job="a",pod=~"b.*",c!="d",e!~"f"'),
        ('a="x,y{}\\"z"', 'a="x,y{}\\"z"'),
        ('a="b",', 'a="b"'),
    ],
)
def test_a_selector_is_a_list_of_matchers(text: str, matchers: str) -> None:
    assert selector_of(text) == matchers


@pytest.mark.parametrize(
    "text", ["job", "job=a", 'job="a"} or up{', 'a="b"c="d"', '__name__="x"', 'a="', '{a="b"', "}"]
)
def test_what_is_no_selector_is_bad_usage(text: str) -> None:
    with pytest.raises(BadUsage, match="--prometheus-selector"):
        selector_of(text)


@given(st.lists(st.text(min_size=1), min_size=1), st.text())
def test_a_pattern_of_values_matches_those_alone(values: list[str], other: str) -> None:
    text = any_of(values)
    inner = re.sub(r"\\([\\\"n])", lambda m: "\n" if m[1] == "n" else m[1], text[1:-1])
    assert quoted(inner) == text
    pattern = re.compile(inner)
    assert all(pattern.fullmatch(value) for value in values)
    assert bool(pattern.fullmatch(other)) == (other in values)


def test_every_name_that_tells_engines_apart_is_asked_for() -> None:
    pattern = re.compile(page_names()[1:-1].replace("\\\\", "\\"))
    for name in ("ullage_engine_info", "vllm:time_to_first_token_seconds_bucket"):
        assert pattern.fullmatch(name), name
    assert not pattern.fullmatch("node_cpu_seconds_total")


def test_a_replica_is_named_by_what_tells_it_apart() -> None:
    assert name_of({"job": "j", "instance": "h:1", "tier": "gold"}) == "j/h:1"
    pod = {"cluster": "c", "namespace": "n", "pod": "p", "job": "j", "instance": "h:1"}
    assert name_of(pod) == "c/n/p/h:1"
