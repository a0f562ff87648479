"""Every alert, in Prometheus' own hands: silent in health, firing in its fault, over afterwards.

Series are written here by the engines' own names, not taken from ullage's tables, so that a wrong
name in a table is an alert that never fires.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from tests.telemetry.prometheus_server import NEEDS_PROMTOOL
from tests.watch.code.promtool import Scenario, Values, counter, level, notation, outcome, ramp, run
from ullage.telemetry.dialects.table import DIALECTS
from ullage.watch.code.alerts import ABSENT, ALERTS, IMPOSSIBLE
from ullage.watch.code.ruleset import rule_file, ruleset_of

pytestmark = NEEDS_PROMTOOL

MODEL = 'model_name="m"'


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    place = tmp_path_factory.mktemp("rules")
    for dialect in DIALECTS:
        (place / f"{dialect.engine}.yml").write_text(rule_file(ruleset_of(dialect)))
    return {dialect.engine: place / f"{dialect.engine}.yml" for dialect in DIALECTS}


# --- vLLM's page of a healthy replica -------------------------------------------------------------


def histogram(name: str, labels: str, buckets: Mapping[str, Values]) -> dict[str, Values]:
    """Cumulative buckets; what the last has is the count."""
    found = {f'{name}_bucket{{{labels},le="{le}"}}': values for le, values in buckets.items()}
    return {**found, f"{name}_count{{{labels}}}": list(buckets.values())[-1]}


def vllm(minutes: float, host: str = "a:1", **changed: Values) -> dict[str, Values]:
    """A replica that works: 4 run, none waits, 60 requests a minute; `changed` by short names."""
    on = f'job="llm",instance="{host}"'
    mine = f'{on},engine="0",{MODEL}'
    flat = {
        "up": (f"up{{{on}}}", level((1, minutes))),
        "started": (f"process_start_time_seconds{{{on}}}", level((-1e6, minutes))),
        "running": (f"vllm:num_requests_running{{{mine}}}", level((4, minutes))),
        "waiting": (f"vllm:num_requests_waiting{{{mine}}}", level((0, minutes))),
        "deferred": (
            f'vllm:num_requests_waiting_by_reason{{{mine},reason="deferred"}}',
            level((0, minutes)),
        ),
        "kv": (f"vllm:kv_cache_usage_perc{{{mine}}}", level((0.6, minutes))),
        "info": (
            f'vllm:cache_config_info{{{on},engine="0",block_size="16",'
            'kv_cache_max_concurrency="12.5"}',
            level((1, minutes)),
        ),
        "preemptions": (f"vllm:num_preemptions_total{{{mine}}}", counter((0.2, minutes))),
        "prompts": (f"vllm:prompt_tokens_total{{{mine}}}", counter((9000, minutes))),
        "generated": (f"vllm:generation_tokens_total{{{mine}}}", counter((6000, minutes))),
        "asked": (f"vllm:prefix_cache_queries_total{{{mine}}}", counter((9000, minutes))),
        "hits": (f"vllm:prefix_cache_hits_total{{{mine}}}", counter((4500, minutes))),
        "stop": (f'vllm:request_success_total{{{mine},finished_reason="stop"}}',
                 counter((55, minutes))),
        "length": (f'vllm:request_success_total{{{mine},finished_reason="length"}}',
                   counter((5, minutes))),
        "error": (f'vllm:request_success_total{{{mine},finished_reason="error"}}',
                  counter((0, minutes))),
        "abort": (f'vllm:request_success_total{{{mine},finished_reason="abort"}}',
                  counter((0, minutes))),  # whom it never counts (vLLM 0.32)
        "rejected": (f'vllm:admission_rejections_total{{{on},{MODEL},reason="x"}}',
                     counter((0, minutes))),
        "offloaded": (f'vllm:engine_sleep_state{{{mine},sleep_state="weights_offloaded"}}',
                      level((0, minutes))),
    }  # fmt: skip
    series = {name: changed.pop(short, values) for short, (name, values) in flat.items()}
    fast, slow = counter((55, minutes)), counter((60, minutes))
    for short, name in (
        ("ttft", "vllm:time_to_first_token_seconds"),
        ("itl", "vllm:inter_token_latency_seconds"),
        ("prompt_lengths", "vllm:request_prompt_tokens"),
        ("answer_lengths", "vllm:request_generation_tokens"),
    ):
        low = changed.pop(f"{short}_low", fast)
        high = changed.pop(f"{short}_high", slow)
        every = changed.pop(f"{short}_all", slow)
        series |= histogram(name, mine, {"0.1": low, "1": high, "10": every, "+Inf": every})
    assert not changed, changed
    return series


def fault(before: float, during: float, after: float) -> float:
    return before + during + after


HEALTHY: list[str] = []


def on_off(
    usual: float, faulty: float, before: float = 6, during: float = 8, after: float = 8
) -> Values:
    return level((usual, before), (faulty, during), (usual, after))


def gains(
    usual: float, faulty: float, before: float = 6, during: float = 8, after: float = 8
) -> Values:
    return counter((usual, before), (faulty, during), (usual, after))


def restarted(usual: float, last: float) -> Values:
    """A counter that gains `last` in the five minutes before it begins anew, at minute 34."""
    return [*counter((usual, 29), (last, 5)), *counter((usual, 18))]


def seen(
    name: str, before: float = 6, during: float = 8, after: float = 8
) -> dict[float, list[str]]:
    """Silent at the end of the first part, firing at that of the second, silent in the end."""
    return {before - 0.5: [], before + during - 0.5: [name], before + during + after - 0.5: []}


LONG = (34.0, 10.0, 8.0)
"""Those that compare with the hour before."""

VLLM: dict[str, Scenario] = {
    "nothing": Scenario(vllm(52), {0.5: [], 5: [], 20: [], 44.5: []}),
    "UllageKVCacheNearFull": Scenario(
        vllm(22, kv=on_off(0.6, 0.97)), seen("UllageKVCacheNearFull")
    ),
    "UllageKVCacheFilling": Scenario(
        vllm(22, kv=[*level((0.5, 6)), *ramp(0.5, 0.92, 8), *level((0.6, 8))]),
        {5.5: [], 13.5: ["UllageKVCacheFilling"], 21.5: []},
    ),
    "UllagePreemptionStorm": Scenario(
        vllm(22, preemptions=gains(0.2, 30)), seen("UllagePreemptionStorm")
    ),
    "UllageQueueWhileKVFree": Scenario(
        vllm(22, waiting=on_off(0, 40)), seen("UllageQueueWhileKVFree")
    ),
    "UllageQueueWhileKVFull": Scenario(
        vllm(22, waiting=on_off(0, 40), kv=on_off(0.6, 0.93)), seen("UllageQueueWhileKVFull")
    ),
    "a queue under a preemption storm": Scenario(
        vllm(22, waiting=on_off(0, 40), preemptions=gains(0.2, 30)),
        {5.5: [], 13.5: ["UllageQueueWhileKVFull", "UllagePreemptionStorm"], 21.5: []},
    ),
    "deferred under a preemption storm": Scenario(
        vllm(22, waiting=on_off(0, 40), deferred=on_off(0, 38), preemptions=gains(0.2, 30)),
        {5.5: [], 13.5: ["UllageDeferredWaits", "UllagePreemptionStorm"], 21.5: []},
    ),
    "a queue that drains at once": Scenario(vllm(22, waiting=on_off(0, 5)), {13.5: [], 21.5: []}),
    "UllageDeferredWaits": Scenario(
        vllm(22, waiting=on_off(0, 40), deferred=on_off(0, 38)), seen("UllageDeferredWaits")
    ),
    "UllageEngineStuck": Scenario(
        vllm(22,
            generated=gains(6000, 0),
            prompts=gains(9000, 0),
            stop=gains(55, 0),
            length=gains(5, 0),
        ),
        seen("UllageEngineStuck"),
    ),
    "one very long prompt": Scenario(
        vllm(22,
            generated=gains(6000, 0),
            prompts=gains(9000, 0),
            kv=[*level((0.2, 6)), *ramp(0.2, 0.6, 8), *level((0.3, 8))],
        ),
        {13.5: []},
    ),
    "an idle engine": Scenario(
        vllm(22, running=on_off(4, 0), generated=gains(6000, 0), prompts=gains(9000, 0),
             kv=on_off(0.6, 0.0)),
        {13.5: []},
    ),
    "UllageKVUseNeverSet": Scenario(
        vllm(22, kv=on_off(0.6, 0.0)), seen("UllageKVUseNeverSet")
    ),
    "UllageRestarted": Scenario(
        vllm(22,
            started=level((-1e6, 6), (600, 16)),
            generated=[*counter((6000, 6)), *counter((6000, 16))],
        ),
        {5.5: [], 8: ["UllageRestarted"], 21.5: []},
    ),
    "UllageCrashLoop": Scenario(
        vllm(22, started=level((-1e6, 6), (600, 1), (660, 1), (720, 14))),
        {5.5: [], 9: ["UllageCrashLoop", "UllageRestarted"], 21.5: []},
    ),
    "UllageBehindABalancer": Scenario(
        vllm(22,
            started=[*level((-1e6, 6)), *[-1e6, -9e5] * 16, *level((-1e6, 8))],
            generated=[*counter((6000, 6)),
                       *(value for at in range(16) for value in (36e3 + 3e3 * at, 1e3 * at)),
                       *counter((6000, 8), start=90e3)],
        ),
        seen("UllageBehindABalancer"),
    ),
    "UllageReplicaDown": Scenario(
        {
            name: [1.0 if value is not None else 0.0 for value in values]
            if name.startswith("up{")
            else values
            for name, values in (
                (name, [*values[:24], *[None] * 32, *values[56:]])
                for name, values in vllm(22).items()
            )
        },
        seen("UllageReplicaDown"),
    ),
    "UllageKVHeldWhileIdle": Scenario(
        vllm(22, running=on_off(4, 0), generated=gains(6000, 0), prompts=gains(9000, 0),
             kv=on_off(0.6, 0.3)),
        seen("UllageKVHeldWhileIdle"),
    ),
    "UllageAsleep": Scenario(
        vllm(22, offloaded=on_off(0, 1), waiting=on_off(0, 1)), seen("UllageAsleep")
    ),
    "asleep and left alone": Scenario(
        vllm(22, offloaded=on_off(0, 1), running=on_off(4, 0), kv=on_off(0.6, 0),
             generated=gains(6000, 0), prompts=gains(9000, 0)),
        {13.5: []},
    ),
    "UllageRequestsFail": Scenario(
        vllm(22, error=gains(0, 12), stop=gains(55, 43)), seen("UllageRequestsFail")
    ),
    "UllageRequestsRejected": Scenario(
        vllm(22, rejected=gains(0, 12)), seen("UllageRequestsRejected")
    ),
    "UllageAnswersCutShort": Scenario(
        vllm(52, length=gains(5, 50, *LONG), stop=gains(55, 10, *LONG)),
        seen("UllageAnswersCutShort", *LONG),
    ),
    "UllageRequestsGivenUp": Scenario(
        vllm(52, stop=gains(55, 5, *LONG)), seen("UllageRequestsGivenUp", *LONG)
    ),
    "as many given up as ever": Scenario(vllm(52, stop=counter((5, 52))), {43.5: [], 51.5: []}),
    # Of 2,500 in flight at first, who were gone without an end, none is counted: all may have left.
    "as many may have left before": Scenario(
        vllm(52, stop=gains(55, 5, *LONG), running=level((2500, 10), (4, 42))),
        {43.5: [], 51.5: []},
    ),
    "answers that take long and end late": Scenario(
        vllm(52, stop=gains(55, 5, 34, 10, 8),
             running=[*level((4, 34)), *ramp(4, 504, 10), *level((504, 8))]),
        {43.5: [], 51.5: []},
    ),
    "a restart while many are answered": Scenario(
        vllm(52,
            started=level((-1e6, 34), (2040, 18)),
            generated=restarted(60_000, 60_000),
            prompts=restarted(90_000, 90_000),
            ttft_low=restarted(550, 550),
            ttft_high=restarted(600, 600),
            ttft_all=restarted(600, 600),
            stop=restarted(595, 55),
            running=[*level((40, 29)), *ramp(40, 2740, 5), *level((40, 18))],
        ),
        {33.5: [], **{at: ["UllageRestarted"] for at in (35, 36.5, 37, 38)}, 40.5: [], 51.5: []},
    ),
    "UllageFirstTokensLate": Scenario(
        vllm(52, ttft_low=gains(55, 0, *LONG), ttft_high=gains(60, 3, *LONG)),
        seen("UllageFirstTokensLate", *LONG),
    ),
    "UllageTokensLate": Scenario(
        vllm(52, itl_low=gains(55, 0, *LONG), itl_high=gains(60, 3, *LONG)),
        seen("UllageTokensLate", *LONG),
    ),
    "late tokens under more load": Scenario(
        vllm(52, itl_low=gains(55, 0, *LONG), itl_high=gains(60, 3, *LONG),
             generated=gains(6000, 12000, *LONG)),
        {43.5: []},
    ),
    "UllageOtherPromptLengths": Scenario(
        vllm(52, prompt_lengths_low=gains(55, 0, *LONG), prompt_lengths_high=gains(60, 3, *LONG)),
        seen("UllageOtherPromptLengths", *LONG),
    ),
    "UllageOtherAnswerLengths": Scenario(
        vllm(52, answer_lengths_low=gains(5, 55, *LONG), answer_lengths_high=gains(20, 60, *LONG)),
        seen("UllageOtherAnswerLengths", *LONG),
    ),
    "UllagePrefixCacheThrash": Scenario(
        vllm(52, hits=gains(4500, 500, *LONG), kv=on_off(0.6, 0.85, *LONG)),
        seen("UllagePrefixCacheThrash", *LONG),
    ),
}  # fmt: skip


def renamed(minutes: float, at: float, old: str, new: str) -> dict[str, Values]:
    """A healthy replica of which one label's text becomes another."""
    num = round(at * 4)
    found: dict[str, Values] = {}
    for name, values in vllm(minutes).items():
        if old not in name:
            found[name] = values
            continue
        found[name] = [*values[:num], *[None] * (len(values) - num)]
        found[name.replace(old, new)] = [*[None] * num, *values[num:]]
    return found


def without(metric: str, minutes: float) -> dict[str, Values]:
    """A healthy replica that stops to export one metric for ten minutes."""
    return {
        name: [*values[:24], *[None] * 32, *values[56:]] if name.startswith(metric) else values
        for name, values in vllm(minutes).items()
    }


NAN = float("nan")
VLLM |= {
    "UllageOtherModel": Scenario(
        renamed(22, 6, MODEL, 'model_name="other"'), {5.5: [], 8: ["UllageOtherModel"], 21.5: []}
    ),
    "UllageOtherFlags": Scenario(
        renamed(22, 6, 'block_size="16"', 'block_size="32"'),
        {5.5: [], 8: ["UllageOtherFlags"], 21.5: []},
    ),
    "a little more room after a start": Scenario(
        renamed(22, 6, 'concurrency="12.5"', 'concurrency="12.6"'), {5.5: [], 8: [], 21.5: []}
    ),
    "UllagePoolSmallerThanARequest": Scenario(
        renamed(22, 6, 'concurrency="12.5"', 'concurrency="0.83"'),
        {5.5: [], 8: ["UllagePoolSmallerThanARequest"], 21.5: ["UllagePoolSmallerThanARequest"]},
    ),
    "UllageNumberAbsent": Scenario(
        without("vllm:num_requests_waiting{", 22), seen("UllageNumberAbsent")
    ),
    "UllageNumberImpossible: NaN": Scenario(
        vllm(22, kv=on_off(0.6, NAN)), seen("UllageNumberImpossible")
    ),
    "UllageNumberImpossible: percent": Scenario(
        vllm(22, kv=on_off(0.6, 60.0)),
        {5.5: [], 13.5: ["UllageKVCacheNearFull", "UllageNumberImpossible"], 21.5: []},
    ),
    "UllageReplicaOverloaded": Scenario(
        {**vllm(22, waiting=on_off(0, 8)), **vllm(22, "b:1"), **vllm(22, "c:1")},
        seen("UllageReplicaOverloaded"),
    ),
    "an even queue": Scenario(
        {**vllm(22, waiting=on_off(0, 8)), **vllm(22, "b:1", waiting=on_off(0, 8))}, {13.5: []}
    ),
    "UllageReplicaStarved": Scenario(
        {
            **vllm(22, "b:1"),
            **vllm(
                22,
                running=on_off(4, 0),
                kv=on_off(0.6, 0),
                generated=gains(6000, 0),
                prompts=gains(9000, 0),
                stop=gains(55, 0),
                length=gains(5, 0),
            ),
        },
        seen("UllageReplicaStarved"),
    ),
    "UllagePrefixHitsBelowPeers": Scenario(
        {
            **vllm(22, "b:1"),
            **vllm(22, "c:1"),
            **vllm(22, hits=gains(4500, 400)),
        },
        seen("UllagePrefixHitsBelowPeers"),
    ),
    "UllageKVPagesHalfEmpty": Scenario(
        {
            **vllm(22),
            f'ullage_kv_page_utilization_ratio{{job="llm",instance="a:1",engine="0",{MODEL}}}': (
                on_off(0.9, 0.4)
            ),
            f'ullage_kv_cache_used_bytes{{job="llm",instance="a:1",engine="0",{MODEL}}}': (
                level((1e9, 35))
            ),
        },
        seen("UllageKVPagesHalfEmpty"),
    ),
}


QUICK = (
    "UllagePreemptionStorm",
    "UllageQueueWhileKVFull",
    "UllageEngineStuck",
    "UllageReplicaDown",
)


def test_the_gravest_of_vllm(rules: Mapping[str, Path]) -> None:
    assert outcome(rules["vllm"], {what: VLLM[what] for what in QUICK}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
def test_vllm(rules: Mapping[str, Path], long: bool) -> None:
    chosen = {
        what: scenario
        for what, scenario in VLLM.items()
        if (max(map(len, scenario.series.values())) > 22 * 4) == long
    }
    assert outcome(rules["vllm"], chosen) == ""


@pytest.mark.slow
def test_who_counts_those_who_left_is_asked_for_them(rules: Mapping[str, Path]) -> None:
    """The embedded engine exports vLLM's names and counts aborts, which end there."""
    leaving = {
        **vllm(52, abort=gains(1, 50, *LONG), stop=gains(54, 5, *LONG)),
        'ullage_engine_info{job="llm",instance="a:1"}': level((1, 52)),
    }
    scenarios = {"left": Scenario(leaving, seen("UllageRequestsGivenUp", *LONG))}
    assert outcome(rules["ullage"], scenarios) == ""


PROBED = 'job="llm",instance="a:1",engine="0",id="{}",kind="{}",layer="{}"'
QUIET = PROBED.format("{}", "", "")
ULLAGE: dict[str, Scenario] = {
    what: Scenario(
        {
            **vllm(22),
            'ullage_engine_info{job="llm",instance="a:1"}': level((1, 22)),
            f"ullage_probe_findings{{{QUIET.format('P002')}}}": level((0, 22)),
            f"ullage_probe_findings{{{QUIET.format('P006')}}}": level((NAN, 22)),
            f"ullage_probe_findings{{{PROBED.format(*place)}}}": level(
                (None, 6), (1, 8), (None, 8)
            ),
        },
        seen(alert),
    )
    for what, place, alert in (
        ("a layer", ("P001", "q", "12"), "UllageModelNotItself"),
        ("several layers", ("P003", "rope", "many"), "UllageModelNotItself"),
        ("a rule of a newer server", ("P010", "new", ""), "UllageModelNotItself"),
        ("texts of another sort", ("P008", "entropy", "3"), "UllageActivationsUnusual"),
        ("sizes of another sort", ("P009", "size", "many"), "UllageActivationsUnusual"),
    )
}


def test_what_the_servers_own_probe_says(rules: Mapping[str, Path]) -> None:
    assert outcome(rules["ullage"], ULLAGE) == ""


def test_the_alert_names_rule_kind_and_layer(rules: Mapping[str, Path]) -> None:
    series = {name: notation(values) for name, values in ULLAGE["a layer"].series.items()}
    labels = (
        'ALERTS{alertname="UllageModelNotItself",alertstate="firing",id="P001",instance="a:1",'
        'job="llm",kind="q",layer="12",rule="W026",severity="critical",ullage_engine="ullage"}'
    )
    expected = [{"labels": labels, "value": 1}]
    firing = 'ALERTS{alertstate="firing"}'
    tests = [{"expr": firing, "eval_time": "13m30s", "exp_samples": expected}]
    assert run(rules["ullage"], series, tests) == ""


def test_a_file_for_nobody_says_so(rules: Mapping[str, Path]) -> None:
    firing = 'ALERTS{alertstate="firing"}'
    labels = (
        'ALERTS{alertname="UllageNothingToWatch",alertstate="firing",rule="W011",'
        'severity="critical",ullage_engine="vllm"}'
    )
    expected = [{"labels": labels, "value": 1}]
    tests = [
        {"expr": firing, "eval_time": "4m", "exp_samples": []},
        {"expr": firing, "eval_time": "8m", "exp_samples": expected},
        # Until the engine comes.
        {"expr": firing, "eval_time": "12m", "exp_samples": []},
    ]
    late = {name: notation([None] * 40 + values[40:]) for name, values in vllm(13).items()}
    assert run(rules["vllm"], late, tests) == ""


def test_every_alert_is_seen_to_fire_and_to_end() -> None:
    fired, ended = set[str](), set[str]()
    for scenario in (*VLLM.values(), *ULLAGE.values()):
        times = sorted(scenario.firing)
        for earlier, later in pairwise(times):
            fired |= set(scenario.firing[later])
            ended |= set(scenario.firing[earlier]) - set(scenario.firing[later])
        fired |= set(scenario.firing[times[-1]])
    names = {alert.name for alert in (*ALERTS, ABSENT, IMPOSSIBLE)}
    of_nobody = {"UllageNothingToWatch"}  # has a test of its own
    assert fired == names - of_nobody
    # A pool stays what it is until the next start.
    assert names - of_nobody - ended == {"UllagePoolSmallerThanARequest"}
