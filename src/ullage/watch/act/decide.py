"""Which actions are due: conditions that held long enough, on fresh numbers, within the limits.

Holds a pure state machine: (policy, state, sight) → (state, decisions). Doing it is `perform.py`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ullage.findings.finding import Finding
from ullage.watch.act.conditions import evaluate
from ullage.watch.act.policy import HOUR_S, Action, Limits, Policy
from ullage.watch.figures import Figures, figures_of
from ullage.watch.sight import Sight
from ullage.watch.view import View

MAX_GAP_INTERVALS = 3.0
"""A condition that was not seen for longer than so many intervals has not held meanwhile."""
MAX_AGE_INTERVALS = 2.0
LEAST_SCRAPES = 2
Key = tuple[str, str]  # an action's name, a replica's url


@dataclass(frozen=True, slots=True)
class Hold:
    """Since when (the scrape's own time) an action's conditions have held, and in how many."""

    since_s: float
    last_s: float
    num_scrapes: int
    told: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """An attempt, at `time_s` (Unix), on the scrape of `scrape_s`; failed ones count too."""

    time_s: float
    url: str
    action: str
    do: str
    scrape_s: float


@dataclass(frozen=True, slots=True)
class State:
    """What the machine remembers: holds, the attempts of the last hour (oldest first), engines
    that cannot, and actions whose conditions are not known."""

    holds: Mapping[Key, Hold] = field(default_factory=dict)
    done: tuple[Done, ...] = ()
    cannot: Mapping[str, float] = field(default_factory=dict)
    unknown: Collection[Key] = ()


@dataclass(frozen=True, slots=True)
class Due:
    """`action` is to be done on `url` now: `why` are its conditions with the numbers found.

    `blocked` says what forbids it, "" when nothing does; it is told once for each time that the
    conditions begin to hold.
    """

    action: Action
    url: str
    time_s: float
    scrape_s: float
    held_s: float
    why: str
    blocked: str = ""


def decide(policy: Policy, state: State, sight: Sight) -> tuple[State, tuple[Due, ...]]:
    """One round. What is due and not blocked is taken as attempted, whatever becomes of it."""
    turn = _Turn(policy.limits, state, sight)
    for view in sight.views:
        figures = figures_of(view)
        if figures.time_s is not None:
            for action in policy.actions:
                turn.judge(action, view, figures, figures.time_s)
    return State(turn.holds, tuple(turn.done), turn.cannot, turn.unknown), tuple(turn.due)


def forbid(state: State, url: str, time_s: float) -> State:
    """The engine at `url` cannot do what was asked: it is not asked again for an hour."""
    return replace(state, cannot={**state.cannot, url: time_s})


class _Turn:
    """One round in the making."""

    def __init__(self, limits: Limits, state: State, sight: Sight) -> None:
        since_s = sight.time_s - HOUR_S
        self._limits = limits
        self._state = state
        self._sight = sight
        self._answering = {view.url for view in sight.views if view.now and not view.error}
        self._findings: dict[str, dict[str, Finding]] = defaultdict(dict)
        for judged in sight.judged:
            self._findings[judged.url][judged.finding.id] = judged.finding
        self.done = [one for one in state.done if one.time_s > since_s]
        self.cannot = {url: time_s for url, time_s in state.cannot.items() if time_s > since_s}
        self.holds: dict[Key, Hold] = {}
        self.unknown: set[Key] = set()
        self.due: list[Due] = []

    def judge(self, action: Action, view: View, figures: Figures, scrape_s: float) -> None:
        """Whether the action is due on one replica that answered, in the scrape of `scrape_s`."""
        key = (action.name, view.url)
        before = self._state.holds.get(key)
        if before is not None and scrape_s <= before.last_s:
            self.holds[key] = before  # the same scrape again tells nothing new
            return
        answers = [evaluate(one, figures, self._findings[view.url]) for one in action.when]
        why = "; ".join(
            f"{condition}: {answer.why}"
            for condition, answer in zip(action.when, answers, strict=True)
        )
        if any(answer.holds is None for answer in answers):
            self._not_known(key, action, scrape_s, why)
        elif all(answer.holds for answer in answers) and self._is_fresh(view, scrape_s, action):
            hold = self._hold(before, view, scrape_s)
            self.holds[key] = hold
            if self._is_ripe(action, hold, view.url):
                self._decide(key, action, hold, why)

    def _not_known(self, key: Key, action: Action, scrape_s: float, why: str) -> None:
        """An action that can never be due for want of a number is said once, not left silent."""
        self.unknown.add(key)
        if key not in self._state.unknown:
            blocked = "whether its condition holds is not known"
            self.due.append(Due(action, key[1], self._sight.time_s, scrape_s, 0.0, why, blocked))

    def _is_fresh(self, view: View, scrape_s: float, action: Action) -> bool:
        """Numbers that are old, or that stand still, are no evidence of how it is now."""
        interval_s = self._sight.interval_s
        if scrape_s < self._sight.time_s - MAX_AGE_INTERVALS * interval_s:
            return False
        return view.unchanged_s < max(action.for_s, MAX_AGE_INTERVALS * interval_s)

    def _hold(self, before: Hold | None, view: View, scrape_s: float) -> Hold:
        """One scrape more, or the first after a gap or a restart."""
        restarted = view.last is not None and view.last.resets > 0
        longest_s = MAX_GAP_INTERVALS * self._sight.interval_s
        if before is None or restarted or scrape_s - before.last_s > longest_s:
            return Hold(scrape_s, scrape_s, 1)
        return Hold(before.since_s, scrape_s, before.num_scrapes + 1, before.told)

    def _is_ripe(self, action: Action, hold: Hold, url: str) -> bool:
        """Whether it has held long enough, in a scrape that nothing has been done on yet."""
        if hold.num_scrapes < LEAST_SCRAPES or hold.last_s - hold.since_s < action.for_s:
            return False
        return all(one.scrape_s < hold.last_s for one in self.done if one.url == url)

    def _decide(self, key: Key, action: Action, hold: Hold, why: str) -> None:
        url = key[1]
        blocked = self._blocked(action, url)
        if not blocked:
            del self.holds[key]
            self.done.append(Done(self._sight.time_s, url, action.name, action.do, hold.last_s))
        elif hold.told:
            return
        else:
            self.holds[key] = replace(hold, told=True)
        held_s = hold.last_s - hold.since_s
        self.due.append(Due(action, url, self._sight.time_s, hold.last_s, held_s, why, blocked))

    def _blocked(self, action: Action, url: str) -> str:
        """What forbids the action now, in words; "" when nothing does."""
        limits, now_s = self._limits, self._sight.time_s
        mine = [one for one in self.done if one.url == url]
        if url in self.cannot:
            return "the engine cannot, or does not let us"
        if mine and now_s - mine[-1].time_s < limits.min_pause_s:
            return f"the last action on it is less than {limits.min_pause_s:g} s ago"
        if len(mine) >= limits.per_replica_per_hour:
            return f"{len(mine)} actions on it in the last hour are all that are allowed"
        if len(self.done) >= limits.per_hour:
            return f"{len(self.done)} actions in the last hour are all that are allowed"
        if action.do == "drain":
            drained = {one.url for one in self.done if one.do == "drain"}
            left = len(self._answering - drained - {url})
            if url in drained:
                return "it was drained in the last hour"
            if left < limits.min_answering:
                return f"{left} other replicas would be left, fewer than {limits.min_answering}"
        return ""
