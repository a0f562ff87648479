"""What orchestrators and scrapers ask: is it alive, is it ready, which version, its metrics.

The same for decoders and encoders; who runs behind it is a loop's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ullage import __version__

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Runs(Protocol):
    """A thread that serves: `failure` is what it died of."""

    ready: bool
    draining: bool
    failure: BaseException | None


class Exposition(Protocol):
    """Metrics as text."""

    def render(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Probes:
    """The handlers, over one loop."""

    loop: Runs
    exposition: Exposition

    async def health(self, _: Request) -> Response:
        """Whether the process is worth keeping: 503 once the loop's thread has died."""
        return Response(status_code=200 if self.loop.failure is None else 503)

    async def ready(self, _: Request) -> Response:
        """Whether to send requests here: warmed up, not draining."""
        ready = self.loop.ready and not self.loop.draining
        return Response(status_code=200 if ready else 503)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        return Response(self.exposition.render(), media_type=PROMETHEUS_TYPE)
