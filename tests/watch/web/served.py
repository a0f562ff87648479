"""The page of a feed on a free port, in a thread, as tests and photographs need it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator

from ullage.watch.web.app import create_app
from ullage.watch.web.attention import Attention
from ullage.watch.web.feed import Feed
from ullage.watch.web.server import serving


@contextlib.contextmanager
def served(
    feed: Feed,
    *,
    api_key: str | None = None,
    host: str = "127.0.0.1",
    attention: Attention | None = None,
) -> Iterator[str]:
    """Its URL, while the block lasts; the server has then stopped cleanly."""
    urls: queue.Queue[str] = queue.Queue()
    end: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        end.put((asyncio.get_running_loop(), stop))
        app = create_app(feed, api_key=api_key, attention=attention)
        async with serving(app, host=host, api_key=api_key, before_stop=feed.close) as url:
            urls.put(url)
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield urls.get(timeout=10)
    finally:
        loop, stop = end.get(timeout=10)
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
        assert not thread.is_alive(), "the server did not stop"
