"""Rounds come at a steady pace, whatever the source does; what it says ends up in every Sight."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.watch.test_history import START_S, answered, failed, snapshot
from ullage.telemetry.prometheus_api import QueryFailed
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import Identity
from ullage.watch import watcher as watching
from ullage.watch.rules.table import RULES
from ullage.watch.sight import Sight
from ullage.watch.view import GONE
from ullage.watch.watcher import Watcher

URL = "http://replica:8000"


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose time passes only while all sleep, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        selector = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def passed(timeout: float | None) -> object:
            self.now_s += timeout or 0.0
            return select(0)

        selector.select = passed

    def time(self) -> float:
        return self.now_s


class Scripted:
    """A source whose n-th round is what the n-th of these gives, then the last one again."""

    def __init__(
        self, *rounds: Callable[[], tuple[Look, ...]], pause_s: Sequence[float] = (0.0,)
    ) -> None:
        self.rounds = rounds
        self.pause_s = pause_s
        self.times: list[float] = []

    async def look(self) -> tuple[Look, ...]:
        self.times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.pause_s[min(len(self.times), len(self.pause_s)) - 1])
        return self.rounds[min(len(self.times), len(self.rounds)) - 1]()


def raising(error: Exception) -> Callable[[], tuple[Look, ...]]:
    def look() -> tuple[Look, ...]:
        raise error

    return look


def good(at: float = 0.0, url: str = URL) -> Look:
    said = snapshot(START_S + at, gauges={"running": at}, identity=Identity("vllm"))
    return Look(url, said.time_s, said)


def sights_of(source: Scripted, num: int, interval_s: float = 0.02) -> list[Sight]:
    async def run() -> list[Sight]:
        found: list[Sight] = []
        async for sight in Watcher(source, interval_s).rounds():
            found.append(sight)
            if len(found) == num:
                break
        return found

    with asyncio.Runner(loop_factory=Virtual) as runner:
        return runner.run(run())


def test_a_round_shows_every_replica_judged_by_every_rule() -> None:
    source = Scripted(lambda: (good(url="a"), good(url="b")))
    (sight,) = sights_of(source, 1)
    assert [view.url for view in sight.views] == ["a", "b"]
    assert {(judged.url, judged.finding.id) for judged in sight.judged} >= {
        (url, rule.id) for url in "ab" for rule in RULES
    }
    assert sight.error == "" and sight.interval_s == 0.02


@given(st.lists(st.floats(0.0, 12.0), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_rounds_begin_at_whole_intervals_and_slow_ones_are_not_made_up_for(
    slow_s: list[float],
) -> None:
    source = Scripted(lambda: (good(),), pause_s=slow_s)
    sights_of(source, len(slow_s) + 1, interval_s=5.0)
    starts_s = [0.0]
    for took_s in slow_s:
        starts_s.append(5.0 * (math.floor((starts_s[-1] + took_s) / 5.0) + 1))
    assert source.times == pytest.approx(starts_s)


def test_a_source_that_fails_is_said_and_watching_goes_on() -> None:
    source = Scripted(
        lambda: (good(1),), raising(OSError("no route")), raising(KeyError()), lambda: (good(2),)
    )
    first, second, third, fourth = sights_of(source, 4)
    assert (first.error, first.views[0].error) == ("", "")
    assert second.error == second.views[0].error == "no route"
    assert third.error == "a fault of ullage's own: KeyError"
    assert second.views[0].now == first.views[0].now  # what was known stays, and is old
    assert fourth.error == "" == fourth.views[0].error
    assert fourth.views[0].last and fourth.views[0].last.num_failed == 2


def test_a_source_that_fails_is_no_replicas_silence() -> None:
    """A Prometheus that restarts must not tell of a thousand replicas that do not answer."""
    source = Scripted(lambda: (good(1),), raising(OSError("down")), lambda: (failed(2),))
    states = [
        next(one.finding.state for one in sight.judged if one.finding.id == "W017")
        for sight in sights_of(source, 3)
    ]
    assert states == ["clear", "not_evaluable", "fired"]


@pytest.mark.parametrize("error", [QueryFailed("http://p: HTTP 502"), OSError("no route")])
def test_what_is_foreseen_is_said_in_its_own_words(error: Exception) -> None:
    (sight,) = sights_of(Scripted(raising(error)), 1)
    assert sight.error == str(error)


def test_a_source_that_fails_at_once_is_a_sight_without_replicas() -> None:
    (sight,) = sights_of(Scripted(raising(OSError("down"))), 1)
    assert sight.views == () and sight.error == "down"


def test_a_source_that_hangs_has_failed_after_its_time() -> None:
    source = Scripted(lambda: (good(),), pause_s=[3600.0, 0.0])
    first, second = sights_of(source, 2, interval_s=5.0)
    assert first.error == "no answer within 65 s" and not second.error
    assert source.times == [0.0, watching.STUCK_S + 10.0]


def test_to_be_stopped_is_no_failure() -> None:
    source = Scripted(raising(asyncio.CancelledError()))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        sights_of(source, 1)


def test_who_is_named_no_more_is_gone_and_then_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    both = (good(url="a"), good(url="b"))
    source = Scripted(lambda: both, lambda: both[:1])
    _, second = sights_of(source, 2)
    assert [(view.url, view.error) for view in second.views] == [("a", ""), ("b", GONE)]
    monkeypatch.setattr(watching, "FORGET_S", 0.0)
    *_, last = sights_of(Scripted(lambda: both, lambda: both[:1]), 3)
    assert [view.url for view in last.views] == ["a"]


def test_replicas_that_join_later_are_watched_from_then_on() -> None:
    source = Scripted(lambda: (good(url="a"),), lambda: (good(url="a"), good(url="b")))
    assert [view.url for view in sights_of(source, 2)[1].views] == ["a", "b"]


def test_pods_reach_the_view() -> None:
    pod = {"phase": "Running", "node": "n1"}
    look = Look(URL, START_S, None, "connection refused", pod=pod)
    (sight,) = sights_of(Scripted(lambda: (look,)), 1)
    assert sight.views[0].pod == pod


def test_incidents_are_taken_over_rounds() -> None:
    """A replica that never answers is one: its rule fires in every round."""
    urls = [failed(START_S + at) for at in range(4)]
    source = Scripted(*[lambda look=look: (look, good(1, "b")) for look in urls])  # type: ignore[misc]
    sights = sights_of(source, 4)
    fired = {j.finding.id for j in sights[-1].judged if j.finding.state == "fired" and j.url == URL}
    assert fired
    told = {one.finding.id for one in sights[-1].incidents if one.url == URL}
    assert told and told <= fired


def test_answered_looks_are_kept_as_history() -> None:
    looks = [answered(snapshot(START_S + at, counters={"prompt_tokens": at})) for at in (0, 5, 10)]
    source = Scripted(*[lambda look=look: (look,) for look in looks])  # type: ignore[misc]
    last = sights_of(source, 3)[-1].views[0].recent
    assert last and last.rises == {"prompt_tokens": 10} and last.num_scrapes == 3
