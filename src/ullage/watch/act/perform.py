"""Asking an engine to act: POST /ullage/cancel_oldest, POST /ullage/drain, or saying what it would.

Holds the requests and what their answers mean. The embedded engine and vLLM with ullage's plugin
have these routes; any other engine cannot, and is told apart by its answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from ullage.errors import BadUsage
from ullage.telemetry.bounded import fetch
from ullage.telemetry.scrape import PATHS
from ullage.telemetry.wire import in_words, origin_and_path
from ullage.watch.act.policy import Action

WITHIN_S = 10.0
CANNOT = {
    401: "the engine wants another key (--api-key)",
    403: "the engine wants another key (--api-key)",
    404: "the engine has no such route: it takes the embedded engine with "
    "--enable-control-routes, or vLLM with ullage's plugin",
    405: "the engine has no such route",
    501: "the engine has no such route",
}
Kind = Literal["done", "would", "nothing", "cannot", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it: done, or (dry run) would be; nothing to do; the engine cannot; failed.

    Bytes and requests are the engine's own words: promised before, freed after; None where they
    were not told.
    """

    kind: Kind
    message: str
    num_requests: int | None = None
    promised_bytes: float | None = None
    freed_bytes: float | None = None


class _Refused(Exception):
    """The engine did not do it; carries the outcome."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.outcome = Outcome(kind, message)


class Performer:
    """Asks engines; one HTTP client for all. With `dry_run` nothing is ever changed."""

    def __init__(self, *, api_key: str | None, dry_run: bool) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.dry_run = dry_run
        self._client = httpx2.AsyncClient(headers=headers, trust_env=False, timeout=WITHIN_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def perform(self, action: Action, url: str) -> Outcome:
        """Do it, or ask what it would do. Raises nothing: what went wrong is the outcome's."""
        try:
            base = base_of(url)
            if action.do == "drain":
                return await self._drain(base)
            assert action.percent is not None
            return await self._cancel(base, action.percent)
        except _Refused as refused:
            return refused.outcome
        except BadUsage as error:
            return Outcome("failed", str(error)[:200])
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return Outcome("failed", in_words(error, urlsplit(base).hostname or "")[:200])

    async def _cancel(self, base: str, percent: float) -> Outcome:
        """What would be is asked for first: an engine that cannot answer that is not let act."""
        would = _report(await self._ask("POST", _cancel_url(base, percent, dry_run=True)), True)
        if not would.num:
            return Outcome("nothing", "no request is running", 0, would.promised_bytes)
        if self.dry_run:
            message = f"would end {_requests(would.num)}"
            return Outcome("would", message, would.num, would.promised_bytes)
        did = _report(await self._ask("POST", _cancel_url(base, percent, dry_run=False)), False)
        message = f"ended {_requests(did.num)}"
        return Outcome("done", message, did.num, did.promised_bytes, did.freed_bytes)

    async def _drain(self, base: str) -> Outcome:
        if self.dry_run:
            await self._ask("GET", f"{base}/ullage/kv")  # whether it could be asked at all
            return Outcome("would", "would take nothing new and end when what runs is finished")
        answer = await self._ask("POST", f"{base}/ullage/drain")
        if answer.get("draining") is not True:
            raise _Refused("failed", "the answer does not say that it drains")
        num = answer.get("in_flight")
        if not isinstance(num, int) or isinstance(num, bool) or num < 0:
            return Outcome("done", "it takes nothing new")
        return Outcome("done", f"it takes nothing new, {_requests(num)} in flight", num)

    async def _ask(self, method: str, url: str) -> dict[str, Any]:
        """The JSON object that it answers. Raises _Refused."""
        status, body = await fetch(self._client, method, url, within_s=WITHIN_S)
        if status in CANNOT:
            raise _Refused("cannot", f"HTTP {status}: {CANNOT[status]}")
        if not 200 <= status < 300:
            raise _Refused("failed", f"HTTP {status}")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _Refused("cannot", "the answer is no JSON object: this is another server")
        return found


def base_of(url: str) -> str:
    """Where a replica's other routes are, by the URL of its page. Raises BadUsage."""
    origin, path = origin_and_path(url)
    given = next((known for known in reversed(PATHS) if path.endswith(known)), "")
    return f"{origin}{path.removesuffix(given)}"


def _cancel_url(base: str, percent: float, *, dry_run: bool) -> str:
    return f"{base}/ullage/cancel_oldest?percent={percent:g}&dry_run={str(dry_run).lower()}"


@dataclass(frozen=True, slots=True)
class _Report:
    """How many requests; the promise was made at the moment of the deed, for just those."""

    num: int
    promised_bytes: float
    freed_bytes: float


def _report(found: dict[str, Any], dry_run: bool) -> _Report:
    """The answer of cancel_oldest. Raises _Refused for any other answer, above all for one that
    did something where it was only asked what it would do."""
    ids = found.get("request_ids")
    sizes = [found.get("promised_bytes"), found.get("freed_bytes")]
    known = [s for s in sizes if isinstance(s, int | float) and not isinstance(s, bool) and s >= 0]
    if not isinstance(ids, list) or len(known) != 2 or found.get("dry_run") is not dry_run:
        raise _Refused("failed", "the answer is not what this route answers")
    return _Report(len(ids), float(known[0]), float(known[1]))


def _requests(num: int) -> str:
    return f"{num:,} request{'s' if num != 1 else ''}"
