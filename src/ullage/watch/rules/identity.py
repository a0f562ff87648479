"""Rules about what a replica is: W016 another model, version or flag than a moment ago.

Holds which changes matter. That a process began anew is `liveness.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.watch.changes import MAX_CHANGES
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import Lacking, answer_of, answering, seconds
from ullage.watch.view import RECENT_S, Change

EVERYDAY = frozenset({"adapters", "num_blocks", "pod ready", "pod restarts", "pod uid", "pod node"})
"""Adapters are loaded and dropped in service; blocks differ a little from start to start; a pod
may be started anew, or elsewhere, with all as it was."""
WAYS = {
    "models": "It serves another model",
    "engine": "It is another engine",
    "version": "It runs another version",
    "pod image": "Its pod runs another image",
    "pod revision": "Its pod is of another revision",
}
MOST_TOLD = 5
"""A replica that flips between two identities changes with each scrape."""


@answering
def _swapped(subject: Subject) -> Answer:
    now = answer_of(subject)
    if subject.view.last is None:
        raise Lacking("two scrapes that answered")
    if not now.identity.engine:
        raise Lacking("an engine whose page is known")
    recent = [c for c in subject.view.changes if subject.time_s - c.time_s <= RECENT_S]
    telling = [change for change in recent if _tells(change, now.identity.adapters)]
    told = _first(telling)
    shown = told or _first(recent)
    facts = (
        Evidence("models", ", ".join(now.identity.models) or None, "", "engine"),
        Evidence("version", now.identity.version or None, "", "engine"),
        *(Evidence(f"{c.what} before", c.before, "", "engine") for c in shown),
        *(Evidence(f"{c.what} after", c.after, "", "engine") for c in shown),
    )
    if not telling:
        return Clear(facts)
    sentences = [
        f"{WAYS.get(c.what, f'{c.what} is another')}: {c.before or 'none'} → {c.after or 'none'}."
        for c in told
    ]
    if len(telling) > len(told):
        least = "at least " if len(recent) == MAX_CHANGES else ""
        more = f"{least}{len(telling) - len(told):,} more"
        sentences.append(f"And {more} such changes within {seconds(RECENT_S)}.")
    return Fired(
        " ".join(sentences),
        "If this was a rollout, compare latency, cut answers and KV before and after; if nobody "
        "meant it, see who changed the tag, the mounted revision or the deployment.",
        facts,
    )


def _first(changes: Sequence[Change]) -> list[Change]:
    """Those in WAYS first, of each kind the newest; as many as are told, in order of time."""
    ranked = sorted(changes, key=lambda change: (change.what not in WAYS, -change.time_s))
    return sorted(ranked[:MOST_TOLD], key=lambda change: (change.what not in WAYS, change.time_s))


def _tells(change: Change, adapters: tuple[str, ...]) -> bool:
    """Whether the change is one of what is served, and not of the adapters on top of it."""
    if change.what in EVERYDAY:
        return False
    if change.what != "models":
        return True
    before, after = set(change.before.split(", ")), set(change.after.split(", "))
    return not (before & after) - set(adapters)


RULES = (
    Rule(
        id="W016",
        title="Model, version and flags",
        severity=Severity.warning,
        category="identity",
        why="A tag that moved or a flag that changed explains more incidents than any load, and no "
        "engine's metrics draw attention to it.",
        fix="Pin image, revision and flags; compare before and after.",
        source="what the server tells of itself: /version, /v1/models, vllm:cache_config_info, "
        "/get_server_info",
        example="version 0.31.0 → 0.32.0 between two scrapes",
        check=_swapped,
    ),
)
