"""Connections that ask for nothing are let go, so that a few hundred of them keep nobody out.

Holds uvicorn's HTTP/1.1 protocol with a bound on the time to a request; uvicorn has none for the
first one, nor for one that never ends its headers (its timeout_keep_alive is for rest).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_WITHIN_S = 10.0
"""From here on a connection without a whole request is closed, at the latest after twice this."""


class PromptProtocol(H11Protocol):
    """Closes what has been without a whole request from one look to the next."""

    _look: asyncio.TimerHandle | None = None
    _idle_since: Any = None  # the last request of one that was idle at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._look = self.loop.call_later(HEAD_WITHIN_S, self._look_now)

    def _look_now(self) -> None:
        last = self.cycle or self
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._idle_since is last:
            self.transport.abort()
            return
        self._idle_since = last if idle else None
        self._look_later()
