"""One run of watching: rounds until there were enough or somebody stops it, each shown to all.

Holds the loop between a watcher and those who show or act. What they do with a Sight is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from ullage.watch.sight import Sight

Shown = Callable[[Sight], Awaitable[None] | None]


class Rounds(Protocol):
    """What gives a Sight per interval: `watch.watcher.Watcher`."""

    def rounds(self) -> AsyncIterator[Sight]: ...


async def follow(
    watcher: Rounds, shown: Sequence[Shown], stop: asyncio.Event, *, num_rounds: int | None = None
) -> Sight | None:
    """Give every Sight to each of `shown`, in order; the last one, None when there was none.

    Ends after `num_rounds`, or as soon as `stop` is set: a round that is under way is dropped.
    """
    last: Sight | None = None
    num = 0
    rounds = watcher.rounds()
    stopping = asyncio.ensure_future(stop.wait())
    coming: asyncio.Future[Sight] | None = None
    try:
        while not stop.is_set() and (num_rounds is None or num < num_rounds):
            coming = asyncio.ensure_future(_next(rounds))
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                break
            last = coming.result()
            num += 1
            for show in shown:
                told = show(last)
                if told is not None:
                    await told
    finally:
        stopping.cancel()
        if coming is not None and not coming.done():
            # Also where the loop itself is cancelled: what runs cannot be closed.
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        close = getattr(rounds, "aclose", None)
        if close is not None:
            await close()
    return last


async def _next(rounds: AsyncIterator[Sight]) -> Sight:
    return await anext(rounds)
