"""The rules on pods in Prometheus' own hands: silent through a rollout, and each in its fault.

Series are written here by kube-state-metrics' own names, of a pod with one container.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.telemetry.prometheus_server import NEEDS_PROMTOOL
from tests.watch.code.promtool import Scenario, Values, counter, level, notation, run
from ullage.cli.main import main
from ullage.watch.code.pods import ALERTS, pod_rule_file
from ullage.watch.code.records import Spans
from ullage.watch.rules.pods import HOPELESS

pytestmark = NEEDS_PROMTOOL
P = "kube_pod_"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rules") / "pods.yml"
    place.write_text(pod_rule_file('namespace="llm"', Spans()))
    return place


def pod(minutes: float, **changed: Values) -> dict[str, Values]:
    """A pod that has been ready for long."""
    on = 'namespace="llm",pod="vllm-0",uid="1"'
    of = f'{on},container="vllm"'
    flat = {
        "ready": (f'{P}status_ready{{{on},condition="true"}}', level((1, minutes))),
        "scheduled": (f'{P}status_scheduled{{{on},condition="true"}}', level((1, minutes))),
        "running": (f'{P}status_phase{{{on},phase="Running"}}', level((1, minutes))),
        "pending": (f'{P}status_phase{{{on},phase="Pending"}}', level((0, minutes))),
        "failed": (f'{P}status_phase{{{on},phase="Failed"}}', level((0, minutes))),
        "created": (f"{P}created{{{on}}}", level((-1e6, minutes))),
        "restarts": (f"{P}container_status_restarts_total{{{of}}}", level((0, minutes))),
        "unschedulable": (f"{P}status_unschedulable{{{on}}}", [None]),
        "gone_by": (f"{P}deletion_timestamp{{{on}}}", [None]),
        "killed": (
            f'{P}container_status_last_terminated_reason{{{of},reason="OOMKilled"}}', [None]
        ),
    }  # fmt: skip
    series = {name: changed.pop(short, values) for short, (name, values) in flat.items()}
    for reason, values in changed.items():
        series[f'{P}container_status_waiting_reason{{{of},reason="{reason}"}}'] = values
    return series


def waits(before: float, during: float) -> Values:
    return level((None, before), (1, during))


def unready(before: float, during: float) -> Values:
    return level((1, before), (0, during))


KILLED, LOOP, FAILED = "UllagePodKilledForMemory", "UllagePodRestartsInALoop", "UllagePodFailed"
CANNOT, NO_NODE = "UllagePodCannotStart", "UllagePodWithoutNode"
UNREADY, THERE = "UllagePodNotReady", "UllagePodStillThere"

SCENARIOS: dict[str, Scenario] = {
    "nothing": Scenario(pod(60), {0.5: [], 30: [], 59: []}),
    "loads its weights": Scenario(
        pod(60, ready=level((0, 28), (1, 32)), created=level((0, 60)),
            ContainerCreating=level((1, 10), (None, 50))),
        {5: [], 27: [], 40: []},
    ),
    "a node comes": Scenario(
        pod(40, ready=level((0, 25), (1, 15)), scheduled=level((0, 12), (1, 28)),
            unschedulable=level((1, 12), (None, 28)), created=level((0, 40))),
        {11: [], 20: [], 35: []},
    ),
    "gated": Scenario(
        pod(60, ready=level((0, 60)), scheduled=level((0, 60)), running=level((0, 60)),
            pending=level((1, 60))),
        {50: []},
    ),
    "asked to end": Scenario(
        pod(12, ready=unready(2, 10), gone_by=level((None, 2), (600.0, 10))), {3: [], 11: []}
    ),
    "drains": Scenario(
        pod(60, ready=unready(2, 58), gone_by=level((None, 2), (7200.0, 58))), {40: [], 59: []}
    ),
    "one restart": Scenario(
        pod(70, restarts=level((0, 5), (1, 65)), ready=[*level((1, 5), (0, 5), (1, 60))]),
        {6: [], 60: []},
    ),
    "one failed pull": Scenario(pod(20, ready=level((0, 8), (1, 12)),
                                    ErrImagePull=level((1, 3), (None, 17))), {2.5: [], 15: []}),
    "killed": Scenario(
        pod(90, restarts=level((0, 5), (1, 85)), killed=waits(5, 85)),
        {4.5: [], 6: [KILLED], 60: [KILLED], 70: []},
    ),
    "killed long ago": Scenario(
        pod(70, restarts=level((4, 70)), killed=level((1, 70))), {0.5: [], 30: [], 65: []}
    ),
    "in a loop": Scenario(
        pod(90, restarts=[*level((0, 5)), *counter((0.25, 16)), *level((4, 69))]),
        {4.5: [], 21.5: [LOOP], 89: []},
    ),
    "in a loop since long": Scenario(
        pod(60, ready=level((0, 60)), restarts=level((40, 60)), CrashLoopBackOff=level((1, 60))),
        {1: [LOOP], 50: [LOOP]},
    ),
    "failed": Scenario(
        pod(60, failed=level((0, 5), (1, 55)), running=unready(5, 55), ready=unready(5, 55)),
        {4.5: [], 6: [FAILED], 19: [FAILED], 22: []},
    ),
    "failed at once": Scenario(
        pod(40, failed=level((1, 40)), running=level((0, 40)), ready=level((0, 40)),
            created=level((0, 40))),
        {1: [FAILED], 14: [FAILED], 20: []},
    ),
    "failed before anybody looked": Scenario(
        pod(40, failed=level((1, 40)), running=level((0, 40)), ready=level((0, 40))),
        {1: [], 30: []},
    ),
    **{
        reason: Scenario(
            pod(20, ready=level((0, 20)), running=level((0, 20)), pending=level((1, 20)),
                **{reason: level((1, 20))}),
            {4.5: [], 6: [CANNOT]},
        )
        for reason in sorted(HOPELESS)
    },
    "now this, now that": Scenario(
        pod(20, ready=level((0, 20)), ErrImagePull=[1.0, None] * 40,
            ImagePullBackOff=[None, 1.0] * 40),
        {4.5: [], 6: [CANNOT], 19: [CANNOT]},
    ),
    "no node": Scenario(
        pod(60, ready=level((0, 60)), scheduled=level((0, 60)), unschedulable=level((1, 60)),
            running=level((0, 60)), pending=level((1, 60))),
        {14: [], 16: [NO_NODE], 50: [NO_NODE]},
    ),
    "never ready": Scenario(pod(60, ready=unready(5, 55)), {34: [], 36: [UNREADY]}),
    "still there": Scenario(
        pod(20, gone_by=level((None, 2), (180.0, 18)), ready=unready(2, 18)), {7.5: [], 9: [THERE]}
    ),
}  # fmt: skip


def test_alerts_fire_in_their_faults_alone(rules: Path) -> None:
    series, tests = {}, []
    for what, scenario in SCENARIOS.items():
        cluster = f"cluster={json.dumps(what)}"
        for name, values in scenario.series.items():
            series[name.replace("{", f"{{{cluster},", 1)] = notation(values)
        for minute, names in scenario.firing.items():
            samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)]
            expr = f'group by (alertname) (ALERTS{{alertstate="firing",{cluster}}})'
            tests.append(
                {"expr": expr, "eval_time": f"{round(minute * 60)}s", "exp_samples": samples}
            )
    assert run(rules, series, tests) == ""


def test_a_file_for_no_pod_says_so(rules: Path) -> None:
    other = {name.replace('"llm"', '"web"'): notation(v) for name, v in pod(10).items()}
    expr = 'group by (alertname) (ALERTS{alertstate="firing"})'
    sample = {"labels": '{alertname="UllageNoPodSeen"}', "value": 1}
    assert run(rules, other, [{"expr": expr, "eval_time": "8m", "exp_samples": [sample]}]) == ""


def test_every_alert_is_seen_to_fire() -> None:
    firing = [names for one in SCENARIOS.values() for names in one.firing.values()]
    told = {name for names in firing for name in names}
    assert told | {"UllageNoPodSeen"} == {lasting.alert.name for lasting in ALERTS}


def test_promtool_takes_the_file(rules: Path) -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(rules)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_which_pods_are_meant_has_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "rules", "--engine", "kube-state-metrics"]) == 2
    assert "--selector" in capsys.readouterr().err
    assert main(["watch", "dashboard", "--engine", "kube-state-metrics"]) == 2
    assert "no dashboard" in capsys.readouterr().err
