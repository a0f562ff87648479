"""How the heads of one replica attend, asked of it when somebody looks: GET /ullage/entropy.

Holds the asking, and the answer made small and harmless. Rounds know nothing of it: of a thousand
replicas only the one that is looked at is asked, at most every FRESH_S seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ullage.findings.finding import Severity
from ullage.findings.json import STATES
from ullage.telemetry.scrape import place_of
from ullage.telemetry.wire import UNAUTHORIZED, Connection, NoAnswer
from ullage.watch.web.numbers import Document
from ullage.watch.web.wording import plain

ROUTE = "/ullage/entropy"
FRESH_S = 4.0
SILENT_S = 60.0
"""One that has no such route is asked less often: it may log every question."""
WITHIN_S = 8.0
"""An engine answers between two steps."""
MOST_KEPT = 32
MOST_CELLS = 1 << 15
MOST_FINDINGS = 64
MOST_EVIDENCE = 24
ENGINES = frozenset({"ullage", "vllm"})
"""Those that may have the route: the embedded engine, and vLLM with the plugin."""
_SAYS_NOTHING = "its answer is not of the form that ullage's servers give"

# Name on the page → field of a head.
FIGURES: Mapping[str, str] = {
    "entropy": "entropy_normalized",
    "sink": "sink_mass",
    "band": "band_mass",
    "context": "effective_context",
    "score": "max_score",
}


@dataclass(slots=True)
class _Kept:
    connection: Connection
    path: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    told: Document | None = None
    again_s: float = -math.inf


class Attention:
    """Asks replicas by the URL that they are scraped at; an answer is told again for a while."""

    def __init__(self, *, api_key: str | None = None) -> None:
        self._api_key = api_key
        self._kept: dict[str, _Kept] = {}

    async def of(self, url: str) -> Document | None:
        """None where there is nothing to be asked; `why` where it does not tell what it could."""
        kept = self._kept_of(url)
        async with kept.lock:
            loop = asyncio.get_running_loop()
            if loop.time() >= kept.again_s:
                kept.told = await self._asked(kept)
                kept.again_s = loop.time() + (FRESH_S if kept.told else SILENT_S)
        return kept.told

    def _kept_of(self, url: str) -> _Kept:
        kept = self._kept.pop(url, None)
        if kept is None:
            origin, base, _ = place_of(url)
            kept = _Kept(Connection(origin, api_key=self._api_key), base + ROUTE)
        self._kept[url] = kept  # the last asked are at the end
        if len(self._kept) > MOST_KEPT:
            idle = next((u for u, one in self._kept.items() if not one.lock.locked()), None)
            if idle is not None:
                self._kept.pop(idle).connection.close()
        return kept

    async def _asked(self, kept: _Kept) -> Document | None:
        try:
            async with asyncio.timeout(WITHIN_S):
                answer = await kept.connection.get(kept.path)
        except TimeoutError:
            return {"why": f"{ROUTE} has not answered within {WITHIN_S:g} s"}
        except NoAnswer as error:
            return {"why": f"{ROUTE}: {plain(error)}"}
        if answer.status in UNAUTHORIZED:
            wanted = "another key" if self._api_key else "a key (--api-key)"
            return {"why": f"{ROUTE} wants {wanted}"}
        if answer.status != 200:
            return None  # it does not read along, or is no server of ours
        try:
            return document_of(json.loads(answer.body))
        except (ValueError, RecursionError, KeyError, TypeError):
            return {"why": f"{ROUTE}: {_SAYS_NOTHING}"}

    def close(self) -> None:
        for kept in self._kept.values():
            kept.connection.close()
        self._kept.clear()


def document_of(told: Any) -> Document:
    """What the page draws, of the route's answer. Raises KeyError, TypeError or ValueError for
    what has another form."""
    layers = [
        (_whole(layer["layer"]), _listed(layer["heads"])) for layer in _listed(told["layers"])
    ]
    cells = sum(len(heads) for _, heads in layers)
    if cells > MOST_CELLS:
        return {"why": f"{cells:,} heads are more than can be drawn ({MOST_CELLS:,})"}
    numbers = sorted({_whole(head["head"]) for _, heads in layers for head in heads})
    at = {number: place for place, number in enumerate(numbers)}

    def table(name: str, read: Any) -> list[list[Any]]:
        rows = [[None] * len(numbers) for _ in layers]
        for row, (_, heads) in zip(rows, layers, strict=True):
            for head in heads:
                row[at[head["head"]]] = read(head.get(name))
        return rows

    return {
        "why": "",
        "rows": _whole(told["rows"]),
        "kept": _whole(told.get("rows_kept", told["rows"])),
        "every": _whole(told["every"]),
        "seconds": _number(told.get("seconds")),
        "baseline": _baseline(told.get("baseline")),
        "layers": [number for number, _ in layers],
        "heads": numbers,
        **{name: table(key, _number) for name, key in FIGURES.items()},
        "nats": table("entropy_nats", lambda found: _number(_part(found, "mean"))),
        "usual": table("usual_entropy_normalized", lambda found: _number(_part(found, "mean"))),
        "outside": table("outside", lambda found: found is True),
        "findings": list(_findings(told.get("findings"))),
    }


def _findings(told: Any) -> Iterator[Document]:
    for one in [] if told is None else _listed(told)[:MOST_FINDINGS]:
        state, severity = one["state"], one["severity"]
        if state not in STATES or severity not in Severity.__members__:
            raise ValueError("an unknown state or severity")
        yield {
            "id": plain(one["id"], 20),
            "title": plain(one["title"]),
            "severity": severity,
            "state": state,
            "accepted": False,
            "kind": plain(one["kind"], 40),
            "layers": [_whole(layer) for layer in _listed(one["layers"])[:512]],
            "heads": [_whole(head) for head in _listed(one["heads"])[:512]],
            "cause": plain(one["cause"], 1200),
            "remedy": plain(one["remedy"], 1200),
            "missing": [plain(text) for text in _listed(one["missing"])[:MOST_EVIDENCE]],
            "evidence": [],
        }


def _baseline(told: Any) -> Document | None:
    if told is None:
        return None
    return {
        "model": plain(told["model"], 200),
        "rows": _whole(told["rows"]),
        "prompts": _whole(told["prompts"]),
    }


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ValueError("no count")
    return value


def _number(value: Any) -> float | None:
    """Six digits are more than is drawn."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, int) and value.bit_length() > 64:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else None
