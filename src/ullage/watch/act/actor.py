"""A policy at work: each round is decided on, done, logged, and looked at again in the next scrape.

Holds the joints between deciding, performing and the journal, and the sentences that are shown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ullage.pages.words import byte_size
from ullage.watch.act.decide import Due, State, decide, forbid
from ullage.watch.act.journal import BEGUN, Journal
from ullage.watch.act.perform import Outcome, Performer
from ullage.watch.act.policy import Policy
from ullage.watch.cells import clean, duration, percent
from ullage.watch.document import iso_time
from ullage.watch.figures import Figures, figures_of
from ullage.watch.sight import Sight

MAX_SAID = 3
SEEN = ("kv_used_ratio", "kv_used_bytes", "running", "waiting")


@dataclass(frozen=True, slots=True)
class _Before:
    """How a replica was when something was done to it."""

    due: Due
    outcome: Outcome
    numbers: Mapping[str, float]


class Actor:
    """Follows a policy, Sight by Sight. `say` is given a sentence for everything that happens."""

    def __init__(
        self, policy: Policy, performer: Performer, journal: Journal, say: Callable[[str], None],
        *, now_s: float,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._performer = performer
        self._journal = journal
        self._say = say
        self._state = State(done=() if performer.dry_run else journal.attempts(now_s))
        self._before: dict[str, _Before] = {}
        self._saying: deque[str] = deque(maxlen=MAX_SAID)

    @property
    def said(self) -> tuple[str, ...]:
        """The last sentences."""
        return tuple(self._saying)

    async def take(self, sight: Sight) -> None:
        """Do what is due in this round. Raises OSError when the journal cannot be written."""
        figures = {view.url: figures_of(view) for view in sight.views} if self._before else {}
        self._look_again(figures)
        self._state, due = decide(self._policy, self._state, sight)
        for one in due:
            if one.blocked:
                self._tell(one, Outcome("nothing", one.blocked), "blocked")
        acting = [one for one in due if not one.blocked]
        numbers = {v.url: figures_of(v).numbers for v in sight.views} if acting else {}
        await asyncio.gather(*(self._act(one, numbers[one.url]) for one in acting))

    async def _act(self, due: Due, numbers: Mapping[str, float]) -> None:
        if not self._performer.dry_run:
            # Before it is done: what a crash cuts short was attempted, and counts.
            self._journal.write(_entry(due, BEGUN, dry_run=False))
        outcome = await self._performer.perform(due.action, due.url)
        if outcome.kind == "cannot":
            self._state = forbid(self._state, due.url, due.time_s)
        if outcome.kind == "done":
            self._before[due.url] = _Before(due, outcome, numbers)
        self._tell(due, outcome, outcome.kind)

    def _look_again(self, figures: Mapping[str, Figures]) -> None:
        """What the first scrape after an action shows, beside what it promised."""
        for url, before in list(self._before.items()):
            now = figures.get(url)
            if now is None or now.time_s is None or now.time_s <= before.due.time_s:
                continue
            del self._before[url]
            seen = {name: now.numbers.get(name) for name in SEEN}
            was = {name: before.numbers.get(name) for name in SEEN}
            self._journal.write(
                {
                    **_entry(before.due, "seen", dry_run=self._performer.dry_run),
                    "time": iso_time(now.time_s),
                    "time_s": now.time_s,
                    "before": was,
                    "after": seen,
                    "promised_bytes": before.outcome.promised_bytes,
                    "freed_bytes": before.outcome.freed_bytes,
                }
            )
            first, last = was["kv_used_ratio"], seen["kv_used_ratio"]
            if first is not None and last is not None:
                self._speak(
                    f"{clean(url, 80)}: the cache was {percent(first)} full before "
                    f"{before.due.action.name}, and is {percent(last)} now"
                )

    def _tell(self, due: Due, outcome: Outcome, kind: str) -> None:
        self._journal.write(
            {
                **_entry(due, kind, dry_run=self._performer.dry_run),
                "message": outcome.message,
                "num_requests": outcome.num_requests,
                "promised_bytes": outcome.promised_bytes,
                "freed_bytes": outcome.freed_bytes,
            }
        )
        self._speak(_sentence(due, outcome, kind))

    def _speak(self, sentence: str) -> None:
        self._saying.append(sentence)
        self._say(sentence)


def _entry(due: Due, kind: str, *, dry_run: bool) -> dict[str, object]:
    return {
        "time": iso_time(due.time_s),
        "time_s": due.time_s,
        "url": due.url,
        "action": due.action.name,
        "do": due.action.do,
        "percent": due.action.percent,
        "dry_run": dry_run,
        "outcome": kind,
        "held_s": due.held_s,
        "why": due.why,
    }


def _sentence(due: Due, outcome: Outcome, kind: str) -> str:
    """`URL: shed the oldest, held 30 s (…): ended 2 requests, freed 12 MB of 12 MB promised`."""
    sizes = []
    if outcome.freed_bytes is not None:
        sizes.append(f"freed {byte_size(outcome.freed_bytes)}")
    if outcome.promised_bytes is not None and outcome.kind in ("done", "would"):
        sizes.append(f"{byte_size(outcome.promised_bytes)} promised")
    lead = {"blocked": "not done: ", "cannot": "not done: ", "failed": "failed: "}.get(kind, "")
    told = ", ".join([lead + outcome.message, *sizes])
    held = f"held {duration(due.held_s)}, " if due.held_s else ""
    return clean(f"{due.url}: {due.action.name} ({held}{due.why}): {told}", 400)
