"""The exporter's page: valid for Prometheus, silent on what is unknown, bounded in its labels."""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.watch import sights
from ullage.findings.finding import Severity
from ullage.telemetry.gpus import REASONS, throttled_because
from ullage.telemetry.snapshot import Gpu
from ullage.watch.exporter import CONTENT_TYPE, METRICS, Exporter, create_app, exposition
from ullage.watch.rule import Judged

JUDGED = (
    Judged(sights.URL, sights.fired()),
    Judged(sights.URL, sights.clear()),
    Judged(sights.URL, sights.lacking()),
    Judged("", sights.fired("W010", "balance", Severity.info)),
)
HELD = ("hw_thermal_slowdown", "sw_power_cap")
GPU = Gpu("0", "H200", 7e10, 1.5e11, 0.97, 1.41e9, 1.98e9, 690, 81, HELD, 79.0, xid_s=1.7e9)


def whole():
    gauges = {**sights.GAUGE_VALUES, "kv_cached_tokens": 9.0, "oldest_request_age_s": 3.5}
    slow = sights.span(5.0, rises=dict.fromkeys(RISES, 2.0))
    spreads = dict.fromkeys(("ttft_s", "itl_s", "e2e_s", "queue_s"), sights.TTFT)
    now = sights.snapshot(
        gauges=gauges,
        counters=dict.fromkeys(RISES, 9.0),
        histograms=spreads,
        gpus=(GPU,),
    )
    return sights.sight(
        sights.view(now=now, last=slow, recent=replace(slow, histograms=spreads)),
        sights.down(),
        judged=JUDGED,
        incidents=(sights.incident(),),
    )


RISES = (
    "preemptions",
    "recomputed_tokens",
    "prompt_tokens",
    "generation_tokens",
    "rejected_requests",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
)


def test_whether_it_is_up_is_not_known_of_one_that_nobody_could_ask() -> None:
    unasked = sights.view(url="http://b", error="http://prometheus: HTTP 502", asked=False)
    exporter = Exporter()
    exporter.take(sights.sight(sights.view(), unasked, judged=()))
    found = {key for key in samples(exporter.page()) if key[0] == "ullage_watch_up"}
    assert found == {("ullage_watch_up", (("url", sights.URL),))}


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample as Prometheus' own parser reads it; a series twice is a failure."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(page: bytes, name: str, **labels: str) -> float | None:
    return samples(page).get((f"ullage_watch_{name}", tuple(sorted(labels.items()))))


def test_the_page_says_what_is_known():
    page = exposition(whole(), 7)
    assert value(page, "rounds_total") == 7
    assert value(page, "up", url=sights.URL) == 1
    assert value(page, "up", url="http://127.0.0.1:8001") == 0
    assert value(page, "kv_used_bytes", url=sights.URL) == 60e9
    assert value(page, "requests_waiting_by_reason", url=sights.URL, reason="capacity") == 4
    assert value(page, "preemptions_per_second", url=sights.URL) == 0.4
    assert value(page, "ttft_seconds", url=sights.URL, q="0.5", bound="low") == 0.25
    assert value(page, "ttft_seconds", url=sights.URL, q="0.99", bound="high") == math.inf
    assert value(page, "gpu_busy_ratio", url=sights.URL, gpu="0") == 0.97
    assert value(page, "gpu_clock_reasons", url=sights.URL, gpu="0") == 2
    for reason in HELD:
        assert value(page, "gpu_clock_held", url=sights.URL, gpu="0", reason=reason) == 1
    assert value(page, "gpu_last_xid", url=sights.URL, gpu="0") == 79
    assert value(page, "gpu_last_xid_timestamp_seconds", url=sights.URL, gpu="0") == 1.7e9
    info = {"engine": "vllm", "version": "0.32.0", "model": "acme/seven-b"}
    assert value(page, "replica_info", url=sights.URL, **info) == 1
    began = {"url": sights.URL, "rule": "W001"}
    assert value(page, "incident_start_timestamp_seconds", **began) == sights.NOW_S - 60


def test_every_metric_of_the_table_is_on_a_whole_page():
    names = {name for name, _ in samples(exposition(whole(), 1))}
    assert {f"ullage_watch_{metric.name}" for metric in METRICS} <= names


def test_a_rule_has_three_states_also_here():
    page = exposition(whole(), 1)
    assert value(page, "rule_fired", url=sights.URL, rule="W001", severity="warning") == 1
    assert value(page, "rule_fired", url=sights.URL, rule="W003", severity="error") == 0
    assert value(page, "rule_fired", url="", rule="W010", severity="info") == 1
    assert not any("W002" in str(key) for key in samples(page))
    assert value(page, "rules_not_evaluable", url=sights.URL) == 1


def test_what_is_absent_has_no_series():
    silent = sights.snapshot(gauges={}, counters={}, labelled={}, histograms={})
    view = sights.view(now=silent, once=True)
    names = {name.removeprefix("ullage_watch_") for name, _ in samples(
        exposition(sights.sight(view), 1)
    )}  # fmt: skip
    assert names == {
        "rounds_total",
        "last_round_timestamp_seconds",
        "interval_seconds",
        "replicas",
        "source_up",
        "up",
        "replica_info",
    }


def test_before_the_first_round_there_is_a_count_of_none():
    assert samples(Exporter().page()) == {("ullage_watch_rounds_total", ()): 0}


def test_labels_from_outside_stay_labels_and_few():
    evil = 'x"} 1\nullage_watch_up{url="\\'
    labelled = {"waiting_by_reason": {f"{evil}{n}": float(n) for n in range(500)}}
    long = "http://h/" + "a" * 5000
    views = (
        sights.view(evil, now=sights.snapshot(labelled=labelled, version=evil, models=(evil,))),
        sights.view(long + "1"),
        sights.view(long + "2"),
    )
    page = exposition(sights.sight(*views), 1)
    found = samples(page)
    assert value(page, "up", url=evil) == 1
    by_reason = [at for name, at in found if name.endswith("by_reason") and evil in str(dict(at))]
    assert len(by_reason) <= 9
    assert sum(
        v for (n, at), v in found.items() if n.endswith("by_reason") and ("url", evil) in at
    ) == sum(range(500))
    assert all(len(text) <= 200 for _, at in found for _, text in at)
    assert sum(1 for name, _ in found if name == "ullage_watch_up") == 3


def on_gpus(*gpus: Gpu) -> dict[tuple[str, str, str], float]:
    """(Name, GPU, reason) → value, of every series about clocks and Xids."""
    page = exposition(sights.sight(sights.view(now=sights.snapshot(gpus=gpus))), 1)
    return {
        (name.removeprefix("ullage_watch_gpu_"), dict(at)["gpu"], dict(at).get("reason", "")): v
        for (name, at), v in samples(page).items()
        if "clock_held" in name or "clock_reasons" in name or "xid" in name
    }


def test_a_gpu_that_is_well_says_0_and_one_that_says_nothing_has_no_series():
    well = Gpu("0", throttled_because=(), xid_errors=0.0)
    assert on_gpus(well, Gpu("1")) == {
        ("clock_reasons", "0", ""): 0,
        ("last_xid", "0", ""): 0,
    }


def test_every_bit_of_the_driver_has_a_name_or_is_other():
    everything = throttled_because(2.0**53 - 1)
    assert everything is not None and len(everything) > 40
    found = on_gpus(Gpu("3", throttled_because=everything))
    reasons = {reason for name, _, reason in found if name == "clock_held"}
    assert reasons == {*REASONS.values(), "other"}
    assert found["clock_reasons", "3", ""] == len(everything)


def test_two_gpus_of_one_index_are_no_series_twice():
    """A replica on two hosts: `samples` fails on a series that is there twice."""
    one = Gpu("0", throttled_because=HELD[:1], xid_errors=0.0)
    other = Gpu("0", throttled_because=HELD[1:], xid_errors=79.0)
    assert ("clock_held", "0", HELD[0]) in on_gpus(one, other)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say():
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=exposition(whole(), 3),
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_page_is_served_and_made_once_a_round():
    exporter = Exporter()
    exporter.take(whole())
    assert exporter.page() is exporter.page()

    async def asked() -> tuple[int, dict[bytes, bytes], bytes]:
        sent: list[dict] = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/metrics",
            "root_path": "",
            "query_string": b"",
            "headers": [],
        }
        await create_app(exporter)(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]

    status, headers, body = asyncio.run(asked())
    assert (status, headers[b"content-type"]) == (200, CONTENT_TYPE.encode())
    assert body == exporter.page()
