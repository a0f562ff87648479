"""Each rule in its three states: it fires on its case, is clear on a healthy replica, and without
what it needs it is not evaluable and says what that is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.watch.rules.cases import CASES, NOW_S, WHY, Case, World, changed, level, ramp, seen_as
from ullage.findings.finding import Finding
from ullage.telemetry.snapshot import Gpu, Identity
from ullage.watch.rule import judge
from ullage.watch.rules.settings import NAMES, PLAIN, setting
from ullage.watch.rules.table import RULES, judge_all
from ullage.watch.view import Change, Trend, View

BY_ID = {rule.id: rule for rule in RULES}
EACH = [pytest.param(i, case, id=f"{i}-{case.fires.__name__}") for i, case in CASES]
NEEDS = [
    pytest.param(i, case, missing, id=f"{i}-{case.fires.__name__}-{'-'.join(missing)}")
    for i, case in CASES
    for missing in case.needs
]


def finding(rule_id: str, world: World) -> Finding:
    return judge(BY_ID[rule_id], world.subject()).finding


def findings(world: World) -> dict[str, Finding]:
    return {rule.id: finding(rule.id, world) for rule in RULES}


def test_every_rule_has_its_case_and_every_case_a_rule():
    assert list(dict.fromkeys(rule_id for rule_id, _ in CASES)) == list(BY_ID)


def test_a_healthy_replica_is_clear_of_every_rule():
    found = {i: (f.state, f.missing) for i, f in findings(World()).items()}
    assert found == dict.fromkeys(BY_ID, ("clear", ()))


@pytest.mark.parametrize(("rule_id", "case"), EACH)
def test_a_rule_fires_on_its_case(rule_id: str, case: Case):
    found = finding(rule_id, changed(case))
    assert found.state == "fired", found
    assert case.says in found.cause
    assert found.severity.name == (case.severity or BY_ID[rule_id].severity.name)
    assert found.cause.endswith(".") and found.remedy.endswith(".")
    assert found.evidence and all(item.source for item in found.evidence)


@pytest.mark.parametrize(("rule_id", "case"), EACH)
def test_no_other_rule_fires_on_it(rule_id: str, case: Case):
    fired = {i for i, f in findings(changed(case)).items() if f.state == "fired"}
    assert fired - {rule_id} <= case.also


@pytest.mark.parametrize(("rule_id", "case", "missing"), NEEDS)
def test_without_what_it_needs_it_is_not_evaluable_and_says_so(
    rule_id: str, case: Case, missing: tuple[str, ...]
):
    world = changed(case)
    world.without = frozenset(missing)
    found = finding(rule_id, world)
    assert found.state == "not_evaluable", found
    for name in missing:
        assert any(text.startswith(name) and WHY in text for text in found.missing), found.missing


@pytest.mark.parametrize(("rule_id", "case"), EACH)
def test_of_a_replica_that_does_not_answer_nothing_is_judged(rule_id: str, case: Case):
    if rule_id in ("W017", "W025"):
        pytest.skip("it is about that, or about its pod")
    world = changed(case)
    world.error = "timed out"
    found = finding(rule_id, world)
    assert (found.state, found.missing) == ("not_evaluable", ("an answer (timed out)",))


@pytest.mark.parametrize(("rule_id", "case"), [p for p in EACH if p.values[1].needs_past])
def test_without_a_past_nothing_is_compared_with_it(rule_id: str, case: Case):
    world = changed(case)
    world.past = None
    found = finding(rule_id, world)
    assert found.state == "not_evaluable" and "own past" in found.missing[0]


@pytest.mark.parametrize(("rule_id", "case"), [p for p in EACH if p.values[1].needs_peers])
def test_alone_a_replica_is_not_compared(rule_id: str, case: Case):
    world = changed(case)
    world.alone = True
    found = finding(rule_id, world)
    assert found.state == "not_evaluable" and "replica" in found.missing[0]


@pytest.mark.parametrize(("rule_id", "case"), [p for p in EACH if p.values[1].needs_recent])
def test_of_one_scrape_nothing_is_told_over_time(rule_id: str, case: Case):
    world = changed(case)
    world.last = world.recent = world.past = None
    world.still_s = {}
    assert finding(rule_id, world).state == "not_evaluable"


def test_of_what_was_never_seen_everything_is_unknown():
    nothing = View("http://new:8000", None, "", None, None, None)
    found = judge_all((nothing,), NOW_S)
    assert {one.finding.state for one in found} == {"not_evaluable"}
    assert len(found) == len(RULES)


@pytest.mark.parametrize("rule_id", ["W013", "W014", "W015", "W024"])
def test_few_requests_tell_nothing(rule_id: str):
    world = changed(next(case for i, case in CASES if i == rule_id))
    world.recent.ended = {name: number / 20 for name, number in world.recent.ended.items()}
    world.recent.histograms = {
        name: replace(h, counts=tuple(c / 20 for c in h.counts), sum=h.sum / 20)
        for name, h in world.recent.histograms.items()
    }
    found = finding(rule_id, world)
    assert found.state == "not_evaluable" and "enough requests" in found.missing[0]


# --- where a rule must hold its tongue ------------------------------------------------------------


def test_a_pool_that_was_full_for_one_scrape_is_not_told():
    world = World()
    world.trend("kv_used_ratio", ramp(0.6, 0.97))
    world.last.trends["kv_used_ratio"] = ramp(0.6, 0.97, 5.0, 2)
    world.recent.trends["kv_used_ratio"] = replace(ramp(0.6, 0.97), slope_per_s=0.0)
    assert finding("W001", world).state == "clear"


def test_time_to_full_is_what_is_left_over_the_slope():
    world = World()
    world.trend("kv_used_ratio", ramp(0.5, 0.8))
    told = {item.name: item for item in finding("W001", world).evidence}
    assert told["time to full"].value == pytest.approx(0.2 / (0.3 / 300.0), rel=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        replace(ramp(0.5, 0.8), mean=0.75),  # it levels off
        replace(ramp(0.5, 0.8), mean=0.55),  # a burst, just now
        replace(ramp(0.5, 0.8), most=0.9),  # it is past its height
        replace(ramp(0.5, 0.8), slope_per_s=0.1 / 300),
        ramp(0.1, 0.4),
    ],
)
def test_a_pool_that_breathes_is_not_filling(shape: Trend):
    world = World()
    world.trend("kv_used_ratio", shape)
    assert finding("W001", world).state == "clear"


def test_a_height_that_the_past_knew_is_not_filling():
    world = World()
    world.trend("kv_used_ratio", ramp(0.5, 0.8))
    world.past.trends["kv_used_ratio"] = replace(level(0.6), most=0.9)
    assert finding("W001", world).state == "clear"


def test_a_pool_that_fills_until_the_first_requests_end_is_not_filling():
    world = World()
    world.trend("kv_used_ratio", ramp(0.5, 0.8))
    world.recent.histograms["e2e_s"] = seen_as("e2e_s", (200.0, 300))
    assert finding("W001", world).state == "clear"


def test_pages_that_are_empty_in_an_empty_pool_do_no_harm():
    world = World()
    world.trend("page_utilization_ratio", level(0.3))
    world.trend("kv_used_ratio", level(0.2))
    assert finding("W002", world).state == "clear"


def test_lengths_alone_tell_of_large_blocks_and_name_a_better_size():
    world = World(without=frozenset({"page_utilization_ratio"}))
    world.who = replace(world.who, block_size=8192)
    found = finding("W002", world)
    assert found.state == "fired"
    assert "Set --block-size to 64." in found.remedy


def test_without_the_utilisation_and_lengths_fragmentation_is_unknown():
    lost = {"page_utilization_ratio", "request_prompt_tokens"}
    found = finding("W002", World(without=frozenset(lost)))
    assert found.state == "not_evaluable"
    assert any(text.startswith("page_utilization_ratio") for text in found.missing)


def test_a_few_preemptions_among_many_requests_are_no_storm():
    world = World()
    world.recent.rises["preemptions"] = 12.0
    assert finding("W003", world).state == "clear"


@pytest.mark.parametrize(("pool_tokens", "told"), [(4_080.0, True), (400_000.0, False)])
def test_a_storm_is_put_down_to_too_many_at_once_only_where_they_are(pool_tokens, told):
    """Six run, of 1,020 tokens each; what the means do not explain is not claimed."""
    world = changed(next(case for i, case in CASES if i == "W003"))
    world.gauges["kv_total_tokens"] = pool_tokens
    found = finding("W003", world)
    facts = {fact.name: fact.value for fact in found.evidence}
    assert facts["mean length"] == 1_020
    assert facts["requests that fit"] == pytest.approx(pool_tokens / 1_020, abs=0.05)
    assert facts["running mean"] == 6
    assert ("6 run at once and the pool has room for 4 of" in found.cause) is told
    assert ("run at once" in found.cause) is told


def test_a_storm_of_unknown_lengths_has_no_reason_that_is_made_up():
    world = changed(next(case for i, case in CASES if i == "W003"))
    world.gauges["kv_total_tokens"] = 4_080.0
    world.without = frozenset({"request_prompt_tokens"})
    assert "run at once" not in finding("W003", world).cause


def test_hits_that_fall_in_an_empty_pool_are_other_traffic_and_no_thrash():
    world = World()
    world.recent.rises["prefix_hits_tokens"] = 10_000.0
    assert finding("W004", world).state == "clear"


def test_a_queue_behind_a_stuck_engine_is_not_called_compute_or_memory():
    world = World()
    world.trend("waiting", ramp(0.0, 60.0))
    world.still_s |= {"generation_tokens": 20.0, "prompt_tokens": 20.0}
    for rule_id in ("W005", "W006"):
        found = finding(rule_id, world)
        assert (found.state, found.missing) == (
            "not_evaluable", ("an engine that moves (see W009)",),
        )  # fmt: skip


def test_a_prompt_that_does_not_fit_what_is_free_makes_the_queue_memorys():
    world = World()
    world.trend("waiting", ramp(0.0, 60.0))
    world.trend("kv_used_ratio", level(0.8))
    world.gauges |= {"kv_used_tokens": 3_600.0, "kv_total_tokens": 4_500.0}
    assert finding("W006", world).state == "fired"  # 900 are free, one prompt in ten takes 1,000
    assert finding("W005", world).state == "clear"


@pytest.mark.parametrize("held", [0.2, 0.5, 0.89])
def test_a_queue_under_a_preemption_storm_is_memorys_whatever_is_free_just_now(held: float):
    world = changed(next(case for i, case in CASES if i == "W003"))
    world.trend("waiting", ramp(0.0, 60.0))
    world.trend("kv_used_ratio", level(held))
    memorys = finding("W006", world)
    assert memorys.state == "fired" and "ran out" in memorys.cause
    assert finding("W005", world).state == "clear"


def test_what_a_server_refuses_to_say_is_asked_for():
    world = World(who=Identity("vllm", unsaid="/v1/models: HTTP 401: it wants a key (--api-key)"))
    for rule_id, name in (("W002", "block_size"), ("W008", "max_model_len")):
        (missing,) = finding(rule_id, world).missing
        assert missing == f"{name} (/v1/models: HTTP 401: it wants a key (--api-key))"


def test_pages_that_are_known_and_not_measured_for_long_are_not_called_absent():
    world = World(without=frozenset({"request_prompt_tokens"}))
    world.recent.trends["page_utilization_ratio"] = level(0.9, num=2)
    missing, _ = finding("W002", world).missing
    assert missing == "page_utilization_ratio in 4 scrapes, with requests that run"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("connection refused", "Nothing listens there"),
        ("nowhere.example has no address", "Check the name"),
        ("/metrics: HTTP 401: it wants a key (--api-key)", "--api-key"),
        ("/metrics: HTTP 403: it wants another key", "--api-key"),
        ("/metrics and /prometheus/metrics: HTTP 404", "Check the path"),
        ("/metrics: it sends elsewhere, to 'https://x/'", "Give the address"),
        ("its certificate is not trusted: self-signed", "SSL_CERT_FILE"),
        ("Prometheus could not scrape it (up is 0)", "/targets"),
        ("no whole answer within 10 s", "the event loop is blocked"),
    ],
)
def test_the_remedy_for_silence_is_that_of_its_kind(error: str, remedy: str):
    found = finding("W017", World(error=error))
    assert found.state == "fired" and remedy in found.remedy and found.remedy.endswith(".")


def test_an_approximate_pool_is_not_compared_where_that_could_decide():
    world = World(approximate=frozenset({"kv_total_tokens"}))
    world.gauges["kv_total_tokens"] = 20_000.0
    assert "exactly" in finding("W008", world).missing[0]
    world.gauges["kv_total_tokens"] = 9_000.0
    assert finding("W008", world).state == "fired"


def test_data_parallel_engines_have_a_part_of_the_pool_each():
    world = World()
    world.gauges["kv_total_tokens"] = 60_000.0
    assert finding("W008", world).state == "clear"
    world.who = replace(world.who, num_engines=2)
    assert finding("W008", world).state == "fired"


def test_an_idle_engine_is_not_stuck_however_long():
    world = World()
    world.still_s |= {"generation_tokens": 9000.0, "prompt_tokens": 9000.0}
    world.busy_s = 5.0  # a request has come just now
    assert finding("W009", world).state == "clear"


def test_a_slow_engine_is_given_the_time_that_its_prefills_take():
    world = changed(next(case for i, case in CASES if i == "W009"))
    slow = World.snapshot

    class Slow(World):
        def snapshot(self):
            seen = slow(self)
            prefills = seen_as("prefill_s", (35.0, 10.0))
            return replace(seen, histograms={**seen.histograms, "prefill_s": prefills})

    world.__class__ = Slow
    assert finding("W009", world).state == "clear"
    world.still_s |= {"generation_tokens": 125.0, "prompt_tokens": 125.0}
    assert finding("W009", world).state == "fired"


def test_requests_that_end_without_tokens_are_no_stuck_engine():
    """As embeddings do."""
    world = changed(next(case for i, case in CASES if i == "W009"))
    world.recent.rises |= {"generation_tokens": 0.0, "prompt_tokens": 0.0}
    assert "300 requests ended without any" in finding("W009", world).missing[0]


def test_a_sleeping_engine_is_not_stuck():
    world = changed(next(case for i, case in CASES if i == "W009"))
    world.sleep = {"awake": 0.0, "discard_all": 1.0}
    assert finding("W009", world).missing == ("an engine that is awake (see W021)",)


def test_a_stuck_page_is_not_called_a_stuck_engine_nor_the_other_way_round():
    copied = changed(next(case for i, case in CASES if i == "W011"))
    assert "W011" in finding("W009", copied).missing[0]
    copied.without = frozenset({"process_cpu_s"})
    assert finding("W009", copied).state == "fired"
    assert "or the page is an old copy" in finding("W009", copied).cause
    assert finding("W011", copied).missing[0].startswith("process_cpu_s")


@pytest.mark.parametrize("name", ["running", "waiting", "kv_used_ratio"])
def test_a_page_without_a_number_that_decides_is_inert(name: str):
    found = finding("W011", World(without=frozenset({name})))
    assert found.state == "fired" and name in found.cause and WHY in found.cause


def test_an_engine_that_never_tells_kv_use_is_not_inert_for_that():
    world = World(without=frozenset({"kv_used_ratio"}))
    world.who = replace(world.who, engine="llamacpp")
    assert finding("W011", world).state == "clear"


def test_an_idle_replica_whose_process_moves_is_not_frozen():
    world = World(unchanged_s=3600.0)
    world.gauges |= {"running": 0.0, "kv_used_ratio": 0.0}
    assert finding("W011", world).state == "clear"


def test_kv_use_that_stays_zero_while_tokens_are_made_is_dead():
    world = World()
    world.trend("kv_used_ratio", level(0.0))
    assert "kv_used_ratio stays 0" in finding("W011", world).cause


def test_load_explains_latency():
    world = changed(next(case for i, case in CASES if i == "W014"))
    world.recent.rises["generation_tokens"] *= 3
    assert finding("W014", world).state == "clear"


def test_a_queue_explains_late_first_tokens():
    world = changed([case for i, case in CASES if i == "W014"][1])
    world.trend("waiting", level(5.0))
    assert finding("W014", world).state == "clear"


@pytest.mark.parametrize("what", ["adapters", "num_blocks"])
def test_what_changes_every_day_is_no_swap(what: str):
    world = World(changes=(Change(NOW_S - 20, what, "1", "2"),))
    assert finding("W016", world).state == "clear"


def test_an_adapter_among_the_models_is_no_swap():
    world = World(changes=(Change(NOW_S - 20, "models", "acme/seven-b", "acme/seven-b, poet"),))
    assert finding("W016", world).state == "clear"


def test_an_old_change_is_no_swap():
    world = World(changes=(Change(NOW_S - 4000, "version", "0.31.0", "0.32.0"),))
    assert finding("W016", world).state == "clear"


def test_a_power_cap_and_idle_clocks_are_how_devices_are_meant_to_run():
    capped = Gpu("0", throttled_because=("sw_power_cap",), busy_ratio=1.0)
    idle = Gpu("1", busy_ratio=0.0, sm_clock_hz=3e8, max_sm_clock_hz=1.98e9)
    assert finding("W018", World(gpus=(capped, idle))).state == "clear"


@pytest.mark.parametrize("code", [0.0, 13.0, 31.0, 43.0, 45.0])
def test_an_applications_own_xid_is_not_the_devices(code: float):
    assert finding("W019", World(gpus=(Gpu("0", xid_errors=code),))).state == "clear"


def test_without_devices_their_rules_say_what_they_lack():
    world = World(gpus=())
    for rule_id in ("W018", "W019"):
        assert "GPU metrics" in finding(rule_id, world).missing[0]


FAR = 1e9
"""Beyond the last bucket of every histogram of lengths."""


def test_a_median_beyond_the_last_bucket_is_said_to_be_above_it():
    """No number without an end is shown, neither as evidence nor in a sentence."""
    world = changed(next(case for i, case in CASES if case.fires.__name__ == "_asked_less"))
    world.past.histograms["request_max_tokens"] = seen_as("request_max_tokens", (FAR, 1000))
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        world.recent.histograms[name] = seen_as(name, (FAR, 300))
    asked, lengths = finding("W013", world), finding("W015", world)
    assert (asked.state, lengths.state) == ("fired", "fired")
    facts = {fact.name: fact.value for fact in asked.evidence}
    last = world.past.histograms["request_max_tokens"].bounds[-2]
    assert facts["max_tokens median above, past"] == last
    assert facts["max_tokens median below, recent"] < last
    assert f"→ above {last:,.0f} tokens" in lengths.cause
    for found in (asked, lengths):
        assert "inf" not in found.cause
        assert math.inf not in [fact.value for fact in found.evidence]


def test_who_began_and_is_still_served_was_not_given_up():
    """300 began and 100 ended, and the other 200 run or wait again after a preemption."""
    world = changed(next(case for i, case in CASES if i == "W024"))
    world.trend("running", ramp(6.0, 150.0))
    world.trend("waiting", ramp(0.0, 50.0))
    assert finding("W024", world).state == "clear"


def test_who_was_given_up_as_often_before_is_no_news():
    """A third of what began in the past did not end either."""
    world = changed(next(case for i, case in CASES if i == "W024"))
    world.past.ended = {name: number / 3 for name, number in world.past.ended.items()}
    assert finding("W024", world).state == "clear"


def test_whom_a_restart_ended_nobody_gave_up():
    world = changed(next(case for i, case in CASES if i == "W024"))
    world.recent.resets = 1
    found = finding("W024", world)
    assert found.state == "not_evaluable"
    assert "restart" in found.missing[0]


def test_a_cold_cache_is_not_compared_with_warm_ones():
    world = changed(next(case for i, case in CASES if i == "W022"))
    world.who = replace(world.who, started_s=NOW_S - 60)
    assert finding("W022", world).state == "clear"


def test_a_starved_replica_that_sleeps_is_left_alone():
    world = changed([case for i, case in CASES if i == "W010"][1])
    world.sleep = {"awake": 0.0, "weights_offloaded": 1.0}
    assert finding("W010", world).state == "clear"


# --- words ----------------------------------------------------------------------------------------


def test_remedies_name_the_flags_of_the_engine():
    world = changed(next(case for i, case in CASES if i == "W003"))
    assert "--max-num-seqs" in finding("W003", world).remedy
    world.who = replace(world.who, engine="sglang")
    assert "--max-running-requests" in finding("W003", world).remedy


def test_an_unknown_engines_settings_are_named_in_words():
    assert setting("vllm", "max_length") == "--max-model-len"
    assert setting("other", "max_length") == PLAIN["max_length"]
    assert all(set(names) <= set(PLAIN) for names in NAMES.values())
