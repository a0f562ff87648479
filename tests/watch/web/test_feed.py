"""Rounds reach those who wait for them, from any thread, and a closed feed lets everybody go."""

from __future__ import annotations

import asyncio
import threading
import time

from tests.watch import sights
from tests.watch.web import simulated
from ullage.watch.web.feed import Feed, id_of


def test_rounds_are_counted_and_found_by_a_short_name() -> None:
    feed = Feed()
    for _ in range(3):
        feed.take(sights.sight(sights.view(), sights.down()))
    assert feed.round is not None
    assert feed.round.num == 3
    assert feed.round.by_id[id_of(sights.URL)].view.url == sights.URL
    assert feed.past.of(sights.URL) is not None


def test_a_name_of_any_characters_has_an_id() -> None:
    assert len({id_of(url) for url in ("", "a", "é", "\ud800", "a/../b?c#d")}) == 5


def test_who_waits_gets_the_next_round_from_another_thread() -> None:
    feed = Feed()
    feed.take(sights.sight(sights.view()))

    async def wait() -> int:
        threading.Timer(0.05, lambda: feed.take(sights.sight(sights.view()))).start()
        latest = await feed.next_round(1, within_s=10)
        assert latest is not None
        return latest.num

    assert asyncio.run(wait()) == 2


def test_a_round_that_is_there_is_not_waited_for() -> None:
    feed = Feed()
    feed.take(sights.sight(sights.view()))
    latest = asyncio.run(feed.next_round(0, within_s=0))
    assert latest is not None


def test_without_a_round_in_time_there_is_none() -> None:
    feed = Feed()
    assert asyncio.run(feed.next_round(0, within_s=0.01)) is None
    assert not feed._waiting


def test_closing_lets_go_of_all_who_wait() -> None:
    feed = Feed()

    async def wait() -> list[object]:
        threading.Timer(0.05, feed.close).start()
        return list(await asyncio.gather(*(feed.next_round(0, within_s=10) for _ in range(5))))

    began = time.monotonic()
    assert asyncio.run(wait()) == [None] * 5
    assert time.monotonic() - began < 5


def test_a_round_of_a_thousand_is_taken_in_a_fraction_of_its_interval() -> None:
    feed = Feed()
    sight = simulated.sight_at(simulated.START_S, num=1000)
    feed.take(sight)
    began = time.process_time()
    feed.take(sight)
    assert time.process_time() - began < 1.0
