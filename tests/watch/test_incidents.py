"""Incidents begin when a rule goes on firing, end when it has been clear, and say what changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.watch.rules.cases import NOW_S, URL, Past, World
from ullage.findings.finding import Evidence, Finding, Severity
from ullage.watch.incidents import CLOSES_S, KEPT_S, MOST_KEPT, OPENS_S, Incidents
from ullage.watch.rule import Judged
from ullage.watch.sight import Incident
from ullage.watch.view import Change, View

SEEN = (Evidence("x", 1, "", "measured"),)
F, C, N = "fired", "clear", "not_evaluable"


def judged(state: str, severity: Severity = Severity.warning, cause: str = "x.", url: str = URL):
    parts = {"evidence": SEEN, "cause": cause if state == F else ""} if state != N else {}
    missing = ("an answer",) if state == N else ()
    return Judged(url, Finding("W001", "t", severity, state, missing=missing, **parts))


VIEW = View(URL, None, "", None, None, None)


def course(
    states: str | list[str], severity: Severity = Severity.warning, step_s: float = 5.0
) -> list[tuple[Incident, ...]]:
    """What is told after each round; F fired, C clear, N not evaluable."""
    incidents = Incidents()
    return [
        incidents.take((judged({"F": F, "C": C, "N": N}[s], severity),), (VIEW,), step_s * at)
        for at, s in enumerate(states)
    ]


@pytest.mark.parametrize("severity", list(Severity))
def test_one_round_is_no_incident_whatever_its_severity(severity: Severity):
    assert course("CFC", severity)[-1] == ()


@pytest.mark.parametrize(("severity", "rounds"), [(3, 2), (2, 4), (1, 7)])
def test_graver_ones_are_told_sooner(severity: int, rounds: int):
    told = course("F" * 10, Severity(severity))
    assert [bool(now) for now in told] == [at + 1 >= rounds for at in range(10)]
    assert told[-1][0].since_s == 0.0 and told[-1][0].until_s is None


def test_a_clear_round_before_it_is_one_begins_the_count_anew():
    assert course("FFFCFFF")[-1] == ()


def test_it_ends_after_a_clear_minute_and_then_when_it_was_first_clear():
    told = course("FFFF" + "C" * 13)
    assert told[15][0].until_s is None  # 55 s
    assert told[16][0].until_s == 20.0


def test_what_comes_back_within_a_minute_is_the_same_incident():
    told = course("FFFF" + "C" * 11 + "F" + "C" * 13)
    assert len(told[-1]) == 1 and told[-1][0].since_s == 0.0 and told[-1][0].until_s == 80.0


def test_not_knowing_neither_begins_nor_ends():
    assert course("FNNNNNNNNNNNN")[-1] == ()
    told = course("FFFF" + "N" * 100)
    assert told[-1][0].until_s is None


def test_what_fired_long_before_is_not_one_with_what_fires_now():
    told = course("F" + "N" * 20 + "FFFF")
    assert told[-1][0].since_s == 105.0


def test_rounds_that_are_minutes_apart_open_incidents_too():
    told = course("CFF", step_s=300.0)
    assert told[-1][0].since_s == 300.0


def test_it_shows_the_latest_finding():
    incidents = Incidents()
    for at, cause in enumerate("abcdef"):
        told = incidents.take((judged(F, cause=cause),), (VIEW,), 10.0 * at)
    assert told[0].finding.cause == "f"


def test_a_replica_that_is_no_longer_watched_says_so():
    incidents = Incidents()
    for at in range(4):
        incidents.take((judged(F),), (VIEW,), 5.0 * at)
    (told,) = incidents.take((), (), 20.0)
    assert told.until_s == 20.0
    assert told.changed[-1] == Change(20.0, "replica", "watched", "no longer there")


def test_accepted_findings_are_no_incidents():
    accepted = replace(judged(F), finding=replace(judged(F).finding, accepted=True))
    incidents = Incidents()
    told = [incidents.take((accepted,), (VIEW,), 5.0 * at) for at in range(20)]
    assert told[-1] == ()


def test_the_ended_are_kept_for_a_day_and_only_so_many():
    incidents = Incidents()
    many = [f"http://{n}" for n in range(MOST_KEPT + 50)]
    views = [replace(VIEW, url=url) for url in many]
    for at in range(4):
        incidents.take([judged(F, url=url) for url in many], views, 5.0 * at)
    assert len(incidents.take((), (), 20.0)) == MOST_KEPT
    assert incidents.take((), (), 20.0 + KEPT_S + 1) == ()


@given(st.lists(st.sampled_from("FCN"), max_size=120), st.sampled_from(list(Severity)),
       st.sampled_from((1.0, 5.0, 30.0, 90.0)))  # fmt: skip
def test_whatever_happens_incidents_of_a_rule_follow_one_another(
    states: list[str], severity: Severity, step_s: float
):
    for at, told in enumerate(course(states, severity, step_s)):
        fired = [step_s * n for n in range(at + 1) if states[n] == "F"]
        clear = [step_s * n for n in range(at + 1) if states[n] == "C"]
        assert sum(one.until_s is None for one in told) <= 1
        assert [one.since_s for one in told] == sorted((i.since_s for i in told), reverse=True)
        for one in told:
            assert one.since_s in fired
            end_s = one.until_s if one.until_s is not None else step_s * at
            assert one.until_s is None or one.until_s in clear
            inside = [s for s in fired if one.since_s <= s <= end_s]
            assert len(inside) >= 2 and inside[-1] - inside[0] >= OPENS_S[severity]
        for after, before in pairwise(told):
            assert before.until_s is not None and after.since_s >= before.until_s + CLOSES_S


# --- what had changed -----------------------------------------------------------------------------


def told_of(world: World, rounds: int = 4, **more: list[View]) -> tuple[Change, ...]:
    """What an incident of the world's replica says, which begins at NOW_S."""
    incidents = Incidents()
    before = more.get("before")
    if before is not None:
        incidents.take((), before, NOW_S - 300.0)
    views = (world.view(), *more.get("beside", ()))
    told: tuple[Incident, ...] = ()
    for at in range(rounds):
        told = incidents.take((judged(F),), views, NOW_S + 10.0 * at)
    return told[0].changed


def test_nothing_changed_where_nothing_did():
    assert told_of(World()) == ()


def test_flags_and_versions_are_told_first_adapters_last():
    world = World(
        changes=(
            Change(NOW_S - 4000, "block_size", "16", "32"),
            Change(NOW_S - 200, "version", "0.31.0", "0.32.0"),
            Change(NOW_S - 100, "adapters", "", "poet"),
            Change(NOW_S - 150, "max_num_seqs", "64", "256"),
        )
    )
    assert [change.what for change in told_of(world)] == ["max_num_seqs", "version", "adapters"]


def test_traffic_is_told_with_its_numbers_what_moved_most_first():
    world = World(recent=Past(300.0, 900.0, 60))  # 1 → 3 requests a second
    usual = world.recent.histograms["request_prompt_tokens"]
    world.recent.histograms["request_prompt_tokens"] = replace(usual, sum=usual.sum * 1.8)
    told = told_of(world)
    assert [(c.what, c.before, c.after) for c in told] == [
        ("requests per second", "1", "3"),
        ("prompt tokens per request", "900", "1.62e+03"),
    ]
    assert all(c.time_s == NOW_S - 300.0 for c in told)


def test_of_few_requests_nothing_is_told():
    assert told_of(World(recent=Past(300.0, 15.0, 60))) == ()


def test_shares_are_told_in_points():
    world = World()
    world.recent.ended = {"stop": 150.0, "length": 150.0}
    world.recent.rises["prefix_hits_tokens"] = 0.0
    assert [(c.what, c.before, c.after) for c in told_of(world)] == [
        ("prefix cache hits", "44%", "0%"),
        ("answers cut by length", "8%", "50%"),
    ]


def test_a_peer_that_was_lost_is_told():
    views = [replace(World().view(), url=f"http://replica-{n}:8000") for n in range(3)]
    told = told_of(World(), before=views, beside=views[1:2])
    assert [(c.what, c.before, c.after) for c in told] == [("replicas", "3", "2")]


def test_a_peer_that_stopped_answering_is_lost_too():
    views = [replace(World().view(), url=f"http://replica-{n}:8000") for n in range(2)]
    told = told_of(World(), before=views, beside=[replace(views[1], error="timed out")])
    assert [(c.what, c.before, c.after) for c in told] == [("replicas", "2", "1")]
