"""The loop of a watch: everybody sees each round in order, and stopping is heeded at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.watch import sights
from ullage.watch.session import follow
from ullage.watch.sight import Sight


class Rounds:
    """Gives numbered Sights; after `num` of them nothing ever comes."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.closed = False

    async def rounds(self) -> AsyncIterator[Sight]:
        try:
            for at in range(self.num):
                yield sights.sight(time_s=float(at))
            await asyncio.Event().wait()
        finally:
            self.closed = True


def followed(rounds: Rounds, shown, stop=None, **more) -> Sight | None:
    async def run() -> Sight | None:
        stopping = asyncio.Event()
        if stop is not None:
            asyncio.get_running_loop().call_later(stop, stopping.set)
        async with asyncio.timeout(10):
            return await follow(rounds, shown, stopping, **more)

    return asyncio.run(run())


def test_each_round_is_shown_to_all_in_order_and_awaited():
    seen: list[tuple[str, float]] = []

    async def slowly(sight: Sight) -> None:
        await asyncio.sleep(0.01)
        seen.append(("slow", sight.time_s))

    rounds = Rounds(5)
    last = followed(rounds, [slowly, lambda s: seen.append(("fast", s.time_s))], num_rounds=2)
    assert seen == [("slow", 0.0), ("fast", 0.0), ("slow", 1.0), ("fast", 1.0)]
    assert last is not None
    assert last.time_s == 1.0
    assert rounds.closed


def test_to_be_cancelled_while_a_round_is_under_way_closes_the_rounds():
    """As asyncio does at a SIGINT that comes before there is a handler of ours."""
    rounds = Rounds(1)

    async def run() -> None:
        following = asyncio.ensure_future(follow(rounds, [], asyncio.Event()))
        await asyncio.sleep(0.05)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following

    asyncio.run(run())
    assert rounds.closed


def test_stopping_drops_the_round_that_is_under_way():
    rounds = Rounds(2)
    last = followed(rounds, [], stop=0.1)
    assert last is not None
    assert last.time_s == 1.0
    assert rounds.closed


def test_stopped_before_the_first_round_there_is_none():
    assert followed(Rounds(0), [], stop=0.05) is None


def test_what_fails_in_showing_ends_the_watch():
    def broken(_: Sight) -> None:
        raise OSError("No space left on device")

    rounds = Rounds(3)
    with pytest.raises(OSError, match="No space"):
        followed(rounds, [broken])
    assert rounds.closed
