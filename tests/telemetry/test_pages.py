"""Pages that real servers answered: each number is in the page, by another parser too."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ullage.telemetry.dialects.table import DIALECTS
from ullage.telemetry.exposition import Dropped, page_of
from ullage.telemetry.reading import VOCABULARY, snapshot_of
from ullage.telemetry.snapshot import Snapshot

PAGES = sorted((Path(__file__).parent / "pages").glob("*.prom"))
NAMED = {page.stem: page.read_bytes() for page in PAGES}


def theirs(body: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found = defaultdict(list)
    text = body.decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # It gives every counter the ending, also one (n_tokens_max) whose page has none.
            name = sample.name if f"\n{sample.name}" in text else sample.name.removesuffix("_total")
            found[name].append((sample.labels, sample.value))
    return found


def read(name: str) -> Snapshot:
    return snapshot_of(NAMED[name], time_s=0.0)


def test_every_dialect_that_says_recorded_has_a_page() -> None:
    recorded = {dialect.engine for dialect in DIALECTS if dialect.proof == "recorded"}
    assert {snapshot_of(body, time_s=0.0).identity.engine for body in NAMED.values()} == recorded


@pytest.mark.parametrize("name", NAMED)
def test_a_recorded_page_is_read_whole(name: str) -> None:
    body = NAMED[name]
    page = page_of(body)
    assert page.dropped == Dropped()
    expected = theirs(body)
    assert page.samples.keys() == expected.keys()
    for metric, samples in expected.items():
        ours = page.get(metric)
        assert len(ours) == len(samples)
        for labels, value in samples:
            got = ours[tuple(sorted(labels.items()))]
            assert got == value or (math.isnan(got) and math.isnan(value))


@pytest.mark.parametrize("name", NAMED)
def test_every_plain_field_is_the_sum_that_another_parser_finds(name: str) -> None:
    snapshot, samples = read(name), theirs(NAMED[name])
    assert snapshot.dropped == ""
    assert set(snapshot.sources) | set(snapshot.absent) == set(VOCABULARY)
    checked = 0
    for field, value in {**snapshot.gauges, **snapshot.counters}.items():
        metric = snapshot.sources[field]
        if metric in samples and "usage" not in metric and "ratio" not in metric:
            assert value == sum(number for _, number in samples[metric]), field
            checked += 1
    for field, histogram in snapshot.histograms.items():
        metric = snapshot.sources[field]
        assert histogram.count == sum(number for _, number in samples[f"{metric}_count"])
        assert histogram.sum == sum(number for _, number in samples[f"{metric}_sum"])
        checked += 1
    assert checked >= 10 or snapshot.identity.engine == "llamacpp"


def test_an_overloaded_vllm_shows_its_storm() -> None:
    idle, busy, after = (read(f"vllm-0.32-{name}") for name in ("idle", "overload", "after"))
    assert busy.identity.models == ("smol",)
    assert (busy.identity.num_blocks, busy.identity.block_size) == (14, 32)
    assert busy.gauges["kv_total_tokens"] == 448
    assert busy.gauges["waiting"] == 6 == sum(busy.labelled["waiting_by_reason"].values())
    assert busy.labelled["waiting_by_reason"]["capacity"] == 6
    # 12 of 13: one of the 14 blocks is never given out.
    assert math.isclose(busy.gauges["kv_used_ratio"], 12 / 13)
    assert idle.counters["preemptions"] == 0 < busy.counters["preemptions"]
    assert after.gauges["kv_used_ratio"] == after.gauges["running"] == 0
    assert after.labelled["finished_by_reason"]["length"] == 40
    assert after.histograms["request_preemptions"].sum == after.counters["preemptions"]
    assert after.histograms["request_generation_tokens"].sum == after.counters["generation_tokens"]
    for name in ("kv_used_bytes", "page_utilization_ratio", "oldest_request_age_s"):
        assert "plugin" in busy.absent[name]


def test_two_engines_of_a_real_vllm_are_one_replica() -> None:
    both = read("vllm-0.32-two-engines")
    assert both.identity.num_engines == 2
    # The label has the blocks of both and the tokens of each.
    assert both.identity.num_blocks == 28
    assert both.gauges["kv_total_tokens"] == 2 * 448
    assert both.gauges["running"] == 2
    assert both.gauges["waiting"] == 3
    assert both.counters["preemptions"] == 31 + 25
    assert math.isclose(both.gauges["kv_used_ratio"], 11 / 13 / 2)


def test_llama_cpp_says_its_slots_and_tokens_and_nothing_of_its_cache() -> None:
    busy, after = read("llamacpp-b11434-busy"), read("llamacpp-b11434-after")
    assert busy.gauges == {"running": 2.0, "waiting": 0.0}
    assert after.gauges == {"running": 0.0, "waiting": 0.0}
    # 24 of the prompts' tokens came from the cache and are not among the 234 computed.
    assert after.counters == {
        "prompt_tokens": 258.0,
        "prefix_queries_tokens": 258.0,
        "prefix_hits_tokens": 24.0,
        "generation_tokens": 144.0,
    }
    assert "13660" in after.absent["kv_used_ratio"]


def test_the_embedded_engine_says_all_but_what_holds_while_it_idles() -> None:
    busy, after = read("ullage-overload"), read("ullage-after")
    assert not busy.absent
    assert busy.approximate == {"kv_used_tokens", "kv_cached_tokens"}
    assert math.isclose(
        busy.gauges["kv_used_bytes"], busy.gauges["kv_used_ratio"] * busy.gauges["kv_total_bytes"]
    )
    assert after.absent.keys() == {"page_utilization_ratio", "oldest_request_age_s"}
    assert all("NaN" in reason for reason in after.absent.values())
