"""The JSON document of a round: its fields, and that nothing unknown is ever a number."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.watch import sights
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import Gpu
from ullage.watch.document import document
from ullage.watch.figures import FIELDS
from ullage.watch.rule import Judged

PROMISED = (
    "kv_used_bytes",
    "kv_total_bytes",
    "kv_used_tokens",
    "kv_total_tokens",
    "page_utilization_ratio",
    "running",
    "waiting",
    "waiting_by_reason",
    "preemptions_per_s",
)


def strict(value):
    """The document as a strict reader gets it."""
    return json.loads(json.dumps(value, allow_nan=False), parse_constant=pytest.fail)


def replica_of(*views, **more):
    return strict(document(sights.sight(*views, **more)))["replicas"][0]


def test_a_replica_that_says_everything():
    replica = replica_of(sights.view())
    assert (replica["url"], replica["error"]) == (sights.URL, None)
    assert (replica["engine"], replica["version"]) == ("vllm", "0.32.0")
    assert replica["kv_used_bytes"] == 60 * sights.GB
    assert replica["kv_free_bytes"] == 20 * sights.GB
    assert replica["kv_free_tokens"] == 250_000
    assert replica["page_utilization_ratio"] == 0.9375
    assert (replica["running"], replica["waiting"]) == (12, 5)
    assert replica["waiting_by_reason"] == {"capacity": 4, "deferred": 1}
    assert replica["preemptions_per_s"] == 2.0 / 5.0
    assert replica["prefix_hit_ratio"] == 0.41
    assert not set(PROMISED) & set(replica["absent"])
    assert replica["sources"]["kv_used_bytes"] == "engine:kv_used_bytes"


def test_quantiles_carry_their_buckets():
    """100 observations: the 50th lies in (0.25, 0.5], the 99th above the last finite bound."""
    ttft = replica_of(sights.view())["ttft_s"]
    assert (ttft["p50"]["low"], ttft["p50"]["high"]) == (0.25, 0.5)
    assert (ttft["p99"]["low"], ttft["p99"]["high"]) == (1.0, None)
    assert (ttft["num"], ttft["over_s"]) == (100, 100.0)


def test_time_to_full_is_between_the_growth_lately_and_recently():
    """A quarter is free; 0.2% a second lately, half of that over the recent span."""
    slower = sights.span(100.0, trends={"kv_used_ratio": sights.trend(0.65, 0.75, 100.0, 20)})
    replica = replica_of(sights.view(recent=slower))
    assert replica["time_to_full_s"]["low"] == pytest.approx(125.0)
    assert replica["time_to_full_s"]["high"] == pytest.approx(250.0)


def test_growth_in_one_span_only_has_no_upper_end():
    still = sights.span(100.0, trends={"kv_used_ratio": sights.trend(0.8, 0.75, 100.0, 20)})
    replica = replica_of(sights.view(recent=still))
    assert replica["time_to_full_s"] == {"low": pytest.approx(125.0), "high": None}


def test_an_engine_with_nothing_to_do_does_not_fill_whatever_it_did_before():
    idle = sights.snapshot(gauges={**sights.GAUGE_VALUES, "running": 0.0, "waiting": 0.0})
    replica = replica_of(sights.view(now=idle))
    assert replica["time_to_full_s"] is None
    assert replica["absent"]["time_to_full_s"] == "it is not filling: nothing runs"


def test_what_the_cache_was_before_a_restart_is_no_growth():
    recent = sights.span(100.0, resets=1, trends={"kv_used_ratio": sights.trend(0.0, 0.75, 100)})
    replica = replica_of(sights.view(recent=recent))
    assert replica["time_to_full_s"] == {"low": pytest.approx(125.0), "high": pytest.approx(125.0)}


def test_a_cache_that_does_not_fill_has_no_time_to_full_and_says_so():
    still = sights.span(trends={"kv_used_ratio": sights.trend(0.8, 0.75, 5.0)})
    replica = replica_of(sights.view(last=still, recent=still))
    assert replica["time_to_full_s"] is None
    assert "not filling" in replica["absent"]["time_to_full_s"]


def test_a_full_cache_is_full_now():
    now = sights.snapshot(gauges={**sights.GAUGE_VALUES, "kv_used_ratio": 1.0})
    assert replica_of(sights.view(now=now))["time_to_full_s"] == {"low": 0, "high": 0}


@pytest.mark.parametrize("name", sorted(sights.GAUGE_VALUES))
def test_a_gauge_that_is_missing_is_null_with_the_engines_reason(name):
    rest = {key: value for key, value in sights.GAUGE_VALUES.items() if key != name}
    replica = replica_of(sights.view(now=sights.snapshot(gauges=rest)))
    assert replica[name] is None
    assert replica["absent"][name] == sights.WHY


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_absent_not_shown(bad):
    gauges = {**sights.GAUGE_VALUES, "kv_used_bytes": bad}
    replica = replica_of(sights.view(now=sights.snapshot(gauges=gauges)))
    assert replica["kv_used_bytes"] is None
    assert replica["kv_free_bytes"] is None
    assert str(bad) in replica["absent"]["kv_used_bytes"]


@pytest.mark.parametrize(
    "view",
    [
        sights.view(),
        sights.view(once=True),
        sights.view(now=sights.snapshot(gauges={}, counters={}, labelled={}, histograms={})),
        sights.view(now=sights.snapshot(engine="", version="")),
        sights.view(error="timed out"),
        sights.view(last=sights.span(rises={}), recent=sights.span(rises={}, histograms={})),
        sights.down(),
    ],
    ids=["all", "one scrape", "nothing", "no engine", "stale", "nothing happened", "down"],
)
def test_every_field_is_known_or_named_in_absent_never_both(view):
    replica = replica_of(view)
    for name in (*FIELDS, *PROMISED):
        assert (replica[name] is None) == (name in replica["absent"]), name
        assert replica["absent"].get(name, "said") != ""
    nulls = {name for name, value in replica.items() if value is None}
    assert nulls - {"error", "pod", "dropped"} == set(replica["absent"])


def test_a_rate_takes_two_scrapes():
    replica = replica_of(sights.view(once=True))
    assert replica["preemptions_per_s"] is None
    assert "two scrapes" in replica["absent"]["preemptions_per_s"]
    assert replica["kv_used_bytes"] == 60 * sights.GB


def test_one_that_does_not_answer_is_a_replica_with_an_error():
    made = strict(document(sights.sight(sights.view(), sights.down(error="connection refused"))))
    assert [replica["error"] for replica in made["replicas"]] == [None, "connection refused"]
    assert "connection refused" in made["replicas"][1]["absent"]["running"]
    assert (made["totals"]["num_replicas"], made["totals"]["num_answering"]) == (2, 1)
    assert made["totals"]["running"] == {"value": 12, "num_replicas": 1}


def test_the_last_numbers_of_one_that_answers_no_more_are_not_its_numbers_now():
    replica = replica_of(sights.view(error="timed out"))
    assert replica["kv_used_bytes"] is None
    assert "timed out" in replica["absent"]["kv_used_bytes"]


def test_totals_add_up_over_those_that_know_both_used_and_total():
    """One replica says how much is used and not of how much: it is in no sum of KV."""
    half = {key: value for key, value in sights.GAUGE_VALUES.items() if key != "kv_total_bytes"}
    both = sights.view(), sights.view("http://b", now=sights.snapshot(gauges=half))
    totals = strict(document(sights.sight(*both)))["totals"]
    assert totals["kv_used_bytes"] == {"value": 60 * sights.GB, "num_replicas": 1}
    assert totals["kv_free_bytes"] == {"value": 20 * sights.GB, "num_replicas": 1}
    assert totals["kv_used_tokens"] == {"value": 1_500_000, "num_replicas": 2}
    assert totals["kv_used_ratio"] == {"value": 0.75, "num_replicas": 2, "by": "tokens"}
    assert totals["waiting_by_reason"] == {"capacity": 8, "deferred": 2}


def test_quantiles_of_all_are_of_all_observations_and_only_where_the_buckets_agree():
    other = Histogram((0.1, float("inf")), (5.0, 10.0), 3.0)
    one, two = sights.view(), sights.view("http://b")
    totals = strict(document(sights.sight(one, two)))["totals"]
    assert (totals["ttft_s"]["num"], totals["ttft_s"]["num_replicas"]) == (200, 2)
    odd = sights.view("http://b", recent=sights.span(histograms={"ttft_s": other}))
    assert "ttft_s" not in strict(document(sights.sight(one, odd)))["totals"]


def test_findings_and_incidents_name_their_replica():
    judged = (
        Judged(sights.URL, sights.fired()),
        Judged(sights.URL, sights.lacking()),
        Judged("", sights.clear()),
    )
    made = strict(document(sights.sight(judged=judged, incidents=(sights.incident(),))))
    first = made["findings"][0]
    assert (first["id"], first["state"], first["severity"]) == ("W001", "fired", "warning")
    assert first["url"] == sights.URL
    assert first["evidence"][0]["source"] == "vllm:kv_cache_usage_perc"
    assert first["cause"] and first["remedy"]
    assert made["findings"][1]["missing"] == ["page_utilization_ratio"]
    assert made["findings"][2]["url"] == ""
    assert made["counts"]["fired"] == 1
    (incident,) = made["incidents"]
    assert (incident["url"], incident["until_s"]) == (sights.URL, None)
    assert incident["changed"][0]["what"] == "version"


def test_gpus_say_null_for_what_they_do_not_say():
    gpu = Gpu("0", "H100", used_bytes=7e9, busy_ratio=0.97, throttled_because=("power",))
    (made,) = replica_of(sights.view(now=sights.snapshot(gpus=(gpu,))))["gpus"]
    assert made["busy_ratio"] == 0.97
    assert made["used_bytes"] == 7_000_000_000
    assert made["temperature_celsius"] is None
    assert made["throttled_because"] == ["power"]


def test_a_source_that_failed_and_what_was_dropped_are_said():
    now = replace(sights.snapshot(), dropped="2 lines that are no samples")
    made = strict(document(replace(sights.sight(sights.view(now=now)), error="no route")))
    assert made["error"] == "no route"
    assert made["replicas"][0]["dropped"] == "2 lines that are no samples"
    plain = strict(document(sights.sight()))
    assert (plain["error"], plain["replicas"][0]["dropped"]) == (None, None)


def test_gpus_in_total_are_those_that_say_it():
    gpus = (
        Gpu("0", busy_ratio=1.0, throttled_because=("power",)),
        Gpu("1", busy_ratio=0.5),
        Gpu("2"),
    )
    totals = strict(document(sights.sight(sights.view(now=sights.snapshot(gpus=gpus)))))["totals"]
    assert totals["gpus"] == {"num": 3, "num_throttled": 1, "busy_ratio": {"value": 0.75, "num": 2}}
    assert strict(document(sights.sight()))["totals"]["gpus"]["busy_ratio"] is None
