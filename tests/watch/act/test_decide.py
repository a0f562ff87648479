"""What a policy does, and above all what it never does: the state machine under any history."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.watch import sights
from ullage.watch.act.conditions import parse_condition
from ullage.watch.act.decide import Done, Due, State, decide, forbid
from ullage.watch.act.policy import Action, Limits, Policy
from ullage.watch.rule import Judged
from ullage.watch.sight import Sight
from ullage.watch.view import View

INTERVAL_S = 5.0
# Histories are long: a failure is looked at as it was found, not for minutes made smaller.
QUICK = tuple(phase for phase in Phase if phase not in (Phase.shrink, Phase.explain))
NEVER_MIND = Limits(per_replica_per_hour=1000, per_hour=1000, min_pause_s=1.0, min_answering=0)


def shed(for_s: float = 10.0, when: str = "kv_used_ratio > 0.95", name: str = "shed") -> Action:
    return Action(name, (parse_condition(when),), for_s, "cancel_oldest", 10.0)


def drain(for_s: float = 10.0) -> Action:
    return Action("drain", (parse_condition("kv_used_ratio > 0.95"),), for_s, "drain")


@dataclass(frozen=True)
class Step:
    """What a replica shows in a round. `ratio` None: it does not say; `again`: no new scrape."""

    ratio: float | None = 0.99
    age_s: float = 0.0
    again: bool = False
    down: bool = False
    resets: int = 0
    unchanged_s: float = 0.0


def view_at(step: Step, url: str, time_s: float, before: View | None) -> View:
    if step.again and before is not None:
        return before
    if step.down:
        return sights.view(url, error="timed out")
    gauges = {} if step.ratio is None else {"kv_used_ratio": step.ratio}
    now = sights.snapshot(time_s - step.age_s, gauges=gauges)
    if before is not None and before.now is not None and now.time_s <= before.now.time_s:
        return before  # scrapes never go back
    last = sights.span(resets=step.resets)
    return sights.view(url, now=now, last=last, unchanged_s=step.unchanged_s)


def play(
    policy: Policy, rounds: list[dict[str, Step]], judged: tuple[Judged, ...] = ()
) -> tuple[list[Due], list[Sight]]:
    """Everything that was due, blocked or not, and the Sights that it was decided on."""
    state, found, seen = State(), [], []
    views: dict[str, View] = {}
    for at, steps in enumerate(rounds):
        time_s = sights.NOW_S + at * INTERVAL_S
        views = {url: view_at(step, url, time_s, views.get(url)) for url, step in steps.items()}
        sight = sights.sight(*views.values(), time_s=time_s, judged=judged)
        state, due = decide(policy, state, sight)
        found += due
        seen.append(sight)
    return found, seen


def one(*steps: Step) -> list[dict[str, Step]]:
    return [{"a": step} for step in steps]


def acts(found: list[Due]) -> list[float]:
    """When something was done, in rounds since the start."""
    return [(due.time_s - sights.NOW_S) / INTERVAL_S for due in found if not due.blocked]


HIGH, LOW = Step(0.99), Step(0.5)


def test_it_acts_once_the_condition_has_held_for_so_long():
    found, _ = play(Policy((shed(10.0),), NEVER_MIND), one(*[HIGH] * 3))
    assert acts(found) == [2]
    assert (found[0].held_s, found[0].url) == (10.0, "a")
    assert "kv_used_ratio is 0.99" in found[0].why


def test_one_scrape_is_never_enough():
    assert acts(play(Policy((shed(0.0),), NEVER_MIND), one(HIGH))[0]) == []
    assert acts(play(Policy((shed(0.0),), NEVER_MIND), one(HIGH, HIGH))[0]) == [1]


def test_after_an_action_the_condition_must_hold_anew():
    found, _ = play(Policy((shed(10.0),), NEVER_MIND), one(*[HIGH] * 9))
    assert acts(found) == [2, 5, 8]


@pytest.mark.parametrize(
    "broken",
    [
        LOW,
        Step(None),
        Step(down=True),
        Step(0.99, resets=1),
        Step(0.99, unchanged_s=60.0),
    ],
    ids=["false", "not known", "down", "restarted", "frozen"],
)
def test_what_is_not_known_fresh_and_true_begins_the_wait_anew(broken):
    found, _ = play(Policy((shed(10.0),), NEVER_MIND), one(HIGH, HIGH, broken, HIGH, HIGH))
    assert acts(found) == ([4] if broken.resets else [])


def test_numbers_that_always_come_late_are_never_acted_on():
    late = Step(0.99, age_s=2.5 * INTERVAL_S)
    assert acts(play(Policy((shed(10.0),), NEVER_MIND), one(*[late] * 20))[0]) == []


def test_a_gap_between_scrapes_is_not_time_in_which_it_held():
    again = replace(HIGH, again=True)
    found, _ = play(Policy((shed(15.0),), NEVER_MIND), one(HIGH, *[again] * 3, HIGH))
    assert acts(found) == []


def test_the_same_scrape_again_is_never_acted_on_twice():
    again = replace(HIGH, again=True)
    found, _ = play(Policy((shed(0.0), shed(0.0, name="b")), NEVER_MIND), one(HIGH, HIGH, again))
    assert acts(found) == [1]
    assert len(found) == 1  # nor is the other action told as one that was kept from it


def test_what_stays_unknown_is_said_once():
    found, _ = play(Policy((shed(),), NEVER_MIND), one(*[Step(None)] * 5, HIGH, Step(None)))
    assert [bool(due.blocked) for due in found] == [True, True]
    assert sights.WHY in found[0].why


def test_pauses_and_counts_hold_and_are_told_once_each():
    limits = Limits(per_replica_per_hour=2, per_hour=3, min_pause_s=60.0)
    rounds = [{"a": HIGH, "b": HIGH}] * 100
    found, _ = play(Policy((shed(5.0),), limits), rounds)
    done = [due for due in found if not due.blocked]
    assert len(done) == 3
    assert sorted(due.url for due in done) in (["a", "a", "b"], ["a", "b", "b"])
    times = sorted(due.time_s for due in done if due.url == done[0].url)
    assert all(after - before >= 60.0 for before, after in pairwise(times))
    reasons = [due.blocked for due in found if due.blocked]
    assert any("60 s ago" in reason for reason in reasons)
    assert len(reasons) < 10


def test_limits_count_what_an_earlier_watcher_did():
    done = tuple(Done(sights.NOW_S - 10, "a", "shed", "cancel_oldest", 0.0) for _ in range(6))
    state, due = State(done=done), ()
    for at in range(6):
        time_s = sights.NOW_S + at * INTERVAL_S
        view = view_at(HIGH, "a", time_s, None)
        state, due = decide(
            Policy((shed(5.0),), Limits(min_pause_s=1.0)), state, sights.sight(view, time_s=time_s)
        )
        assert all(one.blocked for one in due)


def test_the_last_one_that_answers_is_not_drained():
    rounds = [{"a": HIGH, "b": HIGH, "c": Step(down=True)}] * 20
    found, _ = play(Policy((drain(),), Limits(min_answering=1)), rounds)
    assert [due.url for due in found if not due.blocked] == ["a"]
    assert any("would be left" in due.blocked for due in found)


def test_an_engine_that_cannot_is_left_alone():
    policy = Policy((shed(0.0),), NEVER_MIND)
    sight = sights.sight(view_at(HIGH, "a", sights.NOW_S, None))
    state, _ = decide(policy, State(), sight)
    state = forbid(state, "a", sights.NOW_S)
    later = sights.sight(view_at(HIGH, "a", sights.NOW_S + 5, None), time_s=sights.NOW_S + 5)
    _, due = decide(policy, state, later)
    assert [one.blocked for one in due] == ["the engine cannot, or does not let us"]


def test_a_rule_as_condition_has_three_states():
    policy = Policy((shed(5.0, "W001 fires"),), NEVER_MIND)
    rounds = one(*[LOW] * 4)
    assert acts(play(policy, rounds, (Judged("a", sights.fired()),))[0]) == [1, 3]
    assert play(policy, rounds, (Judged("a", sights.clear("W001")),))[0] == []
    (due,) = play(policy, rounds, (Judged("a", sights.lacking("W001")),))[0]
    assert due.blocked
    (due,) = play(policy, rounds, (Judged("b", sights.fired()),))[0]
    assert due.blocked


STEPS = st.builds(
    Step,
    ratio=st.sampled_from([0.99, 0.99, 0.99, 0.5, None]),
    age_s=st.sampled_from([0.0, 0.0, 0.0, 3.0, 20.0]),
    again=st.sampled_from([False, False, False, True]),
    down=st.sampled_from([False, False, False, False, True]),
    resets=st.sampled_from([0, 0, 0, 0, 1]),
    unchanged_s=st.sampled_from([0.0, 0.0, 0.0, 100.0]),
)


def scrapes_until(seen: list[Sight], due: Due) -> list[tuple[float, View]]:
    """(when it was first seen, what it showed) of each scrape of the replica, the latest first.

    A round in which it failed is a scrape too, with an error.
    """
    found: list[tuple[float, View]] = []
    for sight in seen:
        if sight.time_s <= due.time_s:
            view = next(one for one in sight.views if one.url == due.url)
            if view.error or not found or view is not found[-1][1]:
                found.append((sight.time_s, view))
    return found[::-1]


@settings(max_examples=100, deadline=None, phases=QUICK)
@given(
    rounds=st.lists(st.fixed_dictionaries({"a": STEPS, "b": STEPS}), min_size=1, max_size=40),
    for_s=st.sampled_from([0.0, 5.0, 12.0, 30.0]),
    limits=st.builds(
        Limits,
        per_replica_per_hour=st.integers(1, 4),
        per_hour=st.integers(1, 6),
        min_pause_s=st.sampled_from([1.0, 20.0, 60.0]),
        min_answering=st.integers(0, 1),
    ),
    does=st.sampled_from([(shed,), (drain,), (shed, drain)]),
)
def test_whatever_happens_an_action_has_its_reasons(rounds, for_s, limits, does):
    """Held against the Sights themselves: each action on a replica stands on scrapes that are
    distinct, evaluated, true, fresh, without a gap or a restart, for as long as it must be."""
    found, seen = play(Policy(tuple(do(for_s) for do in does), limits), rounds)
    done = [due for due in found if not due.blocked]
    for due in done:
        scrapes = scrapes_until(seen, due)
        assert scrapes[0][1].now.time_s == due.scrape_s
        for at, (sight_s, view) in enumerate(scrapes):
            assert not view.error
            assert view.now.gauges["kv_used_ratio"] > 0.95
            assert sight_s - view.now.time_s <= 2 * INTERVAL_S
            assert view.unchanged_s < max(for_s, 2 * INTERVAL_S)
            held_s = due.scrape_s - view.now.time_s
            if held_s >= for_s and at:
                break
            assert not view.last.resets
            assert view.now.time_s - scrapes[at + 1][1].now.time_s <= 3 * INTERVAL_S
        else:
            pytest.fail("acted before it had held for long enough")
    assert len({(due.url, due.scrape_s) for due in done}) == len(done)
    for url in "ab":
        mine = [due.time_s for due in done if due.url == url]
        assert len(mine) <= limits.per_replica_per_hour
        assert all(b - a >= limits.min_pause_s for a, b in pairwise(mine))
    assert len(done) <= limits.per_hour
    assert len({due.url for due in done if due.action.do == "drain"}) <= 2 - limits.min_answering


@settings(max_examples=30, deadline=None, phases=QUICK)
@given(st.integers(0, 20), st.sampled_from([0.0, 5.0, 30.0]))
def test_what_holds_for_long_enough_is_always_acted_on(num_low, for_s):
    """The machine cannot get stuck: after any number of quiet rounds it still acts."""
    found, _ = play(Policy((shed(for_s),), NEVER_MIND), one(*[LOW] * num_low, *[HIGH] * 10))
    assert acts(found)[0] == num_low + max(1, for_s / INTERVAL_S)
