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


def test_vllm_0_30_says_all_that_0_32_does_but_its_refusals() -> None:
    old, new = read("vllm-0.30-busy"), read("vllm-0.32-overload")
    assert new.sources.keys() - old.sources.keys() == {"rejected_requests"}
    assert "0.30 counts no refusals" in old.absent["rejected_requests"]
    assert old.gauges["kv_total_tokens"] == 448
    assert math.isclose(old.gauges["kv_used_ratio"], 11 / 13)
    assert old.counters["preemptions"] == 12


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
    unasked = {"probe_findings"}  # it was started without --probe-baseline
    assert busy.absent.keys() == unasked
    assert busy.approximate == {"kv_used_tokens", "kv_cached_tokens"}
    assert math.isclose(
        busy.gauges["kv_used_bytes"], busy.gauges["kv_used_ratio"] * busy.gauges["kv_total_bytes"]
    )
    idle = {"page_utilization_ratio", "oldest_request_age_s"}
    assert after.absent.keys() == idle | unasked
    assert all("NaN" in after.absent[name] for name in idle)


# --- written from published names: no server of these ran here ---

PUBLISHED = {
    path.stem: path.read_bytes()
    for path in sorted((Path(__file__).parent / "pages" / "published").glob("*.prom"))
}


def test_every_dialect_that_is_only_published_has_a_page_marked_so() -> None:
    published = {dialect.engine for dialect in DIALECTS if dialect.proof == "published"}
    pages = {snapshot_of(body, time_s=0.0).identity.engine for body in PUBLISHED.values()}
    assert pages == published


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "sglang-0.5.23",
            {
                "kv_used_ratio": 61 / 128,
                "kv_used_tokens": 61_000.0,
                "kv_total_tokens": 128_000.0,
                "kv_cached_tokens": 21_000.0,
                "kv_total_bytes": 2 * 7.8 * 2**30,
                "kv_used_bytes": 61 / 128 * 2 * 7.8 * 2**30,
                "running": 12.0,
                "waiting": 3.0,
                "preemptions": 4.0,
                "recomputed_tokens": 5810.0,
                "prompt_tokens": 1200.0,
                "generation_tokens": 200.0,
                "prefix_queries_tokens": 1200.0,
                "prefix_hits_tokens": 256.0,
                "process_cpu_s": 0.0,
            },
        ),
        (
            "lmdeploy-0.18",
            {
                "kv_used_ratio": 0.625,
                "running": 4.0,
                "waiting": 3.0,
                "prompt_tokens": 700.0,
                "generation_tokens": 90.0,
                "prefix_queries_tokens": 700.0,
                "prefix_hits_tokens": 128.0,
            },
        ),
        (
            "trtllm-serve",
            {
                "kv_used_ratio": 0.4375,
                "kv_used_tokens": 22_400.0,
                "kv_total_tokens": 51_200.0,
                "running": 6.0,
                "waiting": 2.0,
                "prompt_tokens": 5400.0,
                "generation_tokens": 2100.0,
                "prefix_queries_tokens": 5400.0,
                "prefix_hits_tokens": 960.0,
            },
        ),
        (
            "triton-trtllm",
            {
                "kv_used_ratio": 0.5,
                "kv_used_tokens": 32_000.0,
                "kv_total_tokens": 64_000.0,
                "running": 8.0,
                "waiting": 3.0,
            },
        ),
        (
            "tgi-3",
            {
                "kv_used_ratio": 0.4,
                "kv_used_tokens": 6400.0,
                "kv_total_tokens": 16_000.0,
                "running": 5.0,
                "waiting": 2.0,
                "prompt_tokens": 7100.0,
                "generation_tokens": 2400.0,
                "rejected_requests": 2.0,
            },
        ),
    ],
)
def test_a_page_of_published_names_is_read(name: str, expected: dict[str, float]) -> None:
    snapshot = snapshot_of(PUBLISHED[name], time_s=0.0)
    numbers = {**snapshot.gauges, **snapshot.counters}
    numbers.pop("process_cpu_s", None) if "process_cpu_s" not in expected else None
    assert numbers.keys() == expected.keys()
    assert all(math.isclose(numbers[field], expected[field]) for field in expected)
    assert snapshot.identity.models == (() if name == "tgi-3" else ("m",)) or name.startswith("tri")


def test_a_page_of_published_names_has_its_histograms() -> None:
    counts = {
        "sglang-0.5.23": {"ttft_s": 2, "itl_s": 40, "e2e_s": 2, "queue_s": 6},
        "lmdeploy-0.18": {"ttft_s": 1, "itl_s": 1, "e2e_s": 2, "queue_s": 2, "prefill_s": 2},
        "trtllm-serve": {"ttft_s": 20, "itl_s": 20, "queue_s": 20, "decode_s": 20},
        "triton-trtllm": {"request_prompt_tokens": 41, "request_generation_tokens": 41},
        "tgi-3": {"itl_s": 27, "queue_s": 27, "request_max_tokens": 27},
    }
    for name, expected in counts.items():
        histograms = snapshot_of(PUBLISHED[name], time_s=0.0).histograms
        for field, count in expected.items():
            assert histograms[field].count == count, (name, field)
