"""What a pod's life may look like in order, and in which state of it somebody must be told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.watch.rules.cases import NOW_S, World
from ullage.findings.finding import Finding
from ullage.telemetry.pods import iso
from ullage.watch.rule import Subject, judge
from ullage.watch.rules.pods import (
    AGO_S,
    HOPELESS,
    HOPELESS_S,
    LOADING_S,
    LOST_S,
    OVERDUE_S,
    UNSCHEDULED_S,
)
from ullage.watch.rules.table import RULES
from ullage.watch.view import GONE, Change, View

BY_ID = {rule.id: rule for rule in RULES}
MINUTE = 60.0


def ago(seconds: float) -> str:
    return iso(NOW_S - seconds)


def pod(phase: str = "Running", age_s: float = 1e6, **facts: str) -> dict[str, str]:
    """A pod of that age which is not ready since it is there, unless `facts` say else."""
    since = ago(age_s)
    found = {"name": "a", "namespace": "llm", "uid": "1", "phase": phase, "ready": "false",
             "unready_since": since, "created": since, "restarts": "0"}  # fmt: skip
    if facts.get("ready") == "true":
        del found["unready_since"]
    return found | facts


def judged(
    facts: Mapping[str, str] | None, *, answers: bool = False, changes: tuple[Change, ...] = ()
) -> dict[str, Finding]:
    """What W017 and W025 say of a replica in such a pod."""
    world = World(pod=None if facts is None else dict(facts), changes=changes)
    if not answers:
        world.error = "connection refused"
    subject = world.subject()
    if not answers:
        view = View("llm/a", None, world.error, None, None, None, changes=changes, pod=world.pod)
        subject = Subject(view, (view,), NOW_S, subject.peers)
    return {rule_id: judge(BY_ID[rule_id], subject).finding for rule_id in ("W017", "W025")}


def w025(facts: Mapping[str, str] | None, **how: object) -> Finding:
    return judged(facts, **how)["W025"]  # type: ignore[arg-type]


# --- a normal life --------------------------------------------------------------------------------

CREATING = "container vllm: ContainerCreating"
ROLLOUT: dict[str, dict[str, str]] = {
    "just made": pod("Pending", 2),
    "no node yet": pod("Pending", 14 * MINUTE, reason="Unschedulable: 0/3 nodes are available"),
    "gated": pod("Pending", 1e6, reason="SchedulingGated: Scheduling is blocked"),
    "pulls its image": pod("Pending", 20 * MINUTE, reason=CREATING),
    "one pull failed": pod("Pending", 2 * MINUTE, reason="container vllm: ErrImagePull: 503"),
    "loads its weights": pod("Running", 29 * MINUTE, reason="ContainersNotReady"),
    "is asked to end": pod(terminating_since=ago(20), gone_by=ago(-10)),
    "drains for long": pod(terminating_since=ago(3000), gone_by=ago(-600)),
}


@pytest.mark.parametrize("state", ROLLOUT)
@pytest.mark.parametrize("answers", [False, True])
def test_a_rollout_is_no_finding(state: str, answers: bool) -> None:
    found = judged(ROLLOUT[state], answers=answers)
    assert found["W025"].state == "clear"
    if not answers and state != "gated":
        assert found["W017"].state == "not_evaluable"
        assert found["W017"].missing[0].startswith("an engine that ")


def test_who_was_taken_away_is_not_silent() -> None:
    world = World(pod=None, error=GONE)
    found = judge(BY_ID["W017"], world.subject()).finding
    assert found.state == "not_evaluable" and "names it" in found.missing[0]


def test_who_answered_and_does_not_now_is_silent_whatever_its_pod_says() -> None:
    world = World(pod=pod(age_s=600.0), error="connection refused")
    assert judge(BY_ID["W017"], world.subject()).finding.state == "fired"


def test_who_answered_before_it_was_replaced_begins() -> None:
    world = World(pod=pod("Pending", -1.0, reason=CREATING), error="the pod is Pending")
    assert judge(BY_ID["W017"], world.subject()).finding.state == "not_evaluable"


def test_an_engine_that_fell_at_its_start_is_silent() -> None:
    crashed = pod(age_s=300.0, restarts="1", last_termination=f"v: Error, exit code 1 at {ago(9)}")
    found = judged(crashed)
    assert (found["W017"].state, found["W025"].state) == ("fired", "clear")


# --- what is told ---------------------------------------------------------------------------------

BACK_OFF = "container vllm: CrashLoopBackOff: back-off 5m0s"
OOM = f"vllm: OOMKilled, exit code 137 at {ago(240)}"
TOLD: dict[str, tuple[dict[str, str], str]] = {
    "killed for memory": (pod(ready="true", restarts="1", last_termination=OOM), "vllm was killed"),
    "in a loop": (pod(age_s=900, restarts="5", reason=BACK_OFF), "again and again"),
    "failed": (pod("Failed", 90, reason="Evicted: The node was low on memory."), "low on memory"),
    "no node": (pod("Pending", 960, reason="Unschedulable: 0/3 nodes"), "No node has room"),
    "never ready": (pod(age_s=2400, reason="ContainersNotReady"), "no engine answers in it"),
    "still there": (pod(terminating_since=ago(700), gone_by=ago(600)), "gone 10 min ago"),
} | {
    reason: (pod("Pending", 360, reason=f"container vllm: {reason}: why"), "cannot be started")
    for reason in sorted(HOPELESS)
}  # fmt: skip


@pytest.mark.parametrize("state", TOLD)
def test_a_pod_that_will_not_come_right_by_itself_is_told(state: str) -> None:
    facts, words = TOLD[state]
    found = w025(facts, answers=facts["ready"] == "true")
    assert found.state == "fired" and words in found.cause
    assert found.severity.name == ("warning" if state == "still there" else "error")
    assert {item.source for item in found.evidence} == {"Kubernetes"}


def test_what_explains_a_pod_is_told_without_that_it_is_not_ready() -> None:
    old = pod(age_s=9000, restarts="5", reason=BACK_OFF, last_termination=OOM)
    cause = w025(old).cause
    assert "was killed" in cause and "again and again" in cause and "not been ready" not in cause


def test_a_replica_that_lost_its_readiness_is_told_sooner() -> None:
    facts = pod(unready_since=ago(LOST_S + 30), reason="ContainersNotReady: unready")
    lost = (Change(NOW_S - LOST_S - 20, "pod ready", "true", "false"),)
    assert w025(facts, answers=True).state == "clear"
    found = w025(facts, answers=True, changes=lost)
    assert found.state == "fired" and found.severity.name == "warning"
    assert "no service sends it requests: ContainersNotReady" in found.cause
    # Another pod under the same name was never ready.
    other = (*lost, Change(NOW_S - 100, "pod uid", "0", "1"))
    assert w025(facts, answers=True, changes=other).state == "clear"


def test_restarts_that_were_seen_are_a_loop_even_while_it_runs() -> None:
    def changes(*times_s: float) -> tuple[Change, ...]:
        return tuple(
            Change(NOW_S - at, "pod restarts", str(num), str(num + 1))
            for num, at in enumerate(sorted(times_s, reverse=True), 7)
        )

    facts = pod(ready="true", restarts="10")
    assert "3 restarts within" in w025(facts, answers=True, changes=changes(60, 900, 1800)).cause
    assert w025(facts, answers=True, changes=changes(60, 900)).state == "clear"
    assert w025(facts, answers=True, changes=changes(60, 900, AGO_S + 1)).state == "clear"


def test_an_end_of_long_ago_is_no_news() -> None:
    old = f"vllm: OOMKilled, exit code 137 at {ago(AGO_S + 60)}"
    for told in (old, "vllm: OOMKilled, exit code 137", f"vllm: Error, exit code 1 at {ago(9)}"):
        assert w025(pod(ready="true", last_termination=told), answers=True).state == "clear"


LINES = {
    LOADING_S: pod(reason="ContainersNotReady"),
    UNSCHEDULED_S: pod("Pending", reason="Unschedulable: 0/3 nodes"),
    HOPELESS_S: pod("Pending", reason="container vllm: ImagePullBackOff"),
}


@pytest.mark.parametrize("line_s", LINES)
def test_each_state_has_its_line(line_s: float) -> None:
    for off_s, state in ((-1.0, "clear"), (1.0, "fired")):
        assert w025(LINES[line_s] | {"unready_since": ago(line_s + off_s)}).state == state


def test_what_should_be_gone_has_its_line_too() -> None:
    for off_s, state in ((-1.0, "clear"), (1.0, "fired")):
        facts = pod(terminating_since=ago(900), gone_by=ago(OVERDUE_S + off_s))
        assert w025(facts, answers=True).state == state


def test_while_kubernetes_is_silent_nothing_grows_old() -> None:
    facts = pod(age_s=2400, reason="ContainersNotReady", as_of=ago(1800))
    assert w025(facts, answers=True).state == "clear"


# --- what is not known ----------------------------------------------------------------------------


def test_without_a_pod_nothing_is_said_of_one() -> None:
    found = w025(None, answers=True)
    assert found.state == "not_evaluable" and "--k8s" in found.missing[0]


@pytest.mark.parametrize("lost", ["ready", "unready_since", "phase"])
def test_what_kubernetes_does_not_say_is_named(lost: str) -> None:
    facts = pod(age_s=60)
    del facts[lost]
    found = w025(facts, answers=True)
    assert found.state == "not_evaluable"
    assert found.missing == (f"the pod's {lost} (Kubernetes does not say)",)


@pytest.mark.parametrize("text", ["", "x", "99999-01-01T00:00:00Z", "2026-11-30"])
def test_times_that_are_none_are_not_known(text: str) -> None:
    assert w025(pod(unready_since=text), answers=True).state in ("not_evaluable", "fired")
    assert w025(pod(ready="true", last_termination=f"v: OOMKilled, exit code 1 at {text}"),
                answers=True).state == "clear"  # fmt: skip
