"""Rules about one replica beside its peers: W010 imbalance.

Holds when a difference does harm. Means of groups are `watch/peers.py`'s.
"""

from __future__ import annotations

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.snapshot import Gauge, Snapshot
from ullage.watch.peers import FINISHED, Group, finished_in, key_of
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    percent,
    recent_of,
    require,
    seconds,
    source_of,
    tidy,
    trend_fact,
    trend_of,
)
from ullage.watch.view import Span

WATCHED_S = 120.0
QUEUE = 3.0
TIMES = 4.0
ROOM = 0.8
"""Of KV held by its peers: above it they could not take what waits here."""
FAIR_SHARE = 50.0
"""Requests that each peer ended: by fair chance none of them here has odds of e⁻⁵⁰."""


@answering
def _imbalance(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "running", "waiting")
    recent = recent_of(subject, WATCHED_S)
    waiting = trend_of(now, recent, "waiting")
    trend_of(now, recent, "running")
    group = subject.peers.get(key_of(now.identity))
    theirs = group.median_of_others("waiting", waiting.mean) if group else None
    if group is None or theirs is None:
        raise Lacking("another replica of the same model")
    facts: tuple[Evidence, ...] = (
        trend_fact(now, recent, "waiting"),
        Evidence("waiting at its peers, median of means", tidy(theirs), "requests", "measured"),
        trend_fact(now, recent, "running"),
        Evidence("replicas compared", group.num("waiting"), "", "measured"),
    )
    held = _held(recent, group)
    if held is not None:
        facts = (*facts, Evidence("kv_used_ratio of its peers, median", tidy(held), "ratio",
                                  source_of(now, "kv_used_ratio")))  # fmt: skip
    starved = _starved(now, recent, group)
    if starved is not None:
        return Fired(
            f"It got no request for {seconds(recent.seconds)} while its peers each ended about "
            f"{starved.value}: the router does not know it, or takes it for unhealthy.",
            "Look at the router's list of endpoints, the Service's selector and this replica's "
            "readiness.",
            (*facts, starved),
        )
    most = max(QUEUE, TIMES * (theirs + 0.5))
    if waiting.mean < most or waiting.last < 1 or (held is not None and held > ROOM):
        return Clear(facts)
    beside = f" and hold {percent(held)} of their KV cache" if held is not None else ""
    return Fired(
        f"{waiting.mean:.3g} requests wait here on average over {seconds(recent.seconds)} and "
        f"{theirs:.2g} at its peers, which have room{beside}: the router sends it more than its "
        "share, or it is slower than they are.",
        "Balance on requests in flight or on KV use and not on connections or round robin; see "
        "whether long sessions stick to it, and whether it is slower (W014, W018).",
        facts,
    )


def _held(recent: Span, group: Group) -> float | None:
    name: Gauge = "kv_used_ratio"
    own = recent.trends.get(name)
    return group.median_of_others(name, own.mean) if own is not None else None


def _starved(now: Snapshot, recent: Span, group: Group) -> Evidence | None:
    """What each of its peers ended, where it got nothing and that cannot be chance.

    A sleeping replica, or one that started within the span, is not expected to have got any.
    """
    finished = finished_in(recent)
    if finished is None or finished > 0 or recent.trends["running"].most > 0:
        return None
    if recent.trends["waiting"].most > 0 or recent.resets:
        return None
    sleep = now.labelled.get("sleep_state", {})
    if any(value > 0 for name, value in sleep.items() if name != "awake"):
        return None
    theirs = group.median_of_others(FINISHED, finished)
    if theirs is None or theirs < FAIR_SHARE:
        return None
    return Evidence("requests ended by its peers, median", tidy(theirs), "requests",
                    source_of(now, "finished_by_reason"))  # fmt: skip


RULES = (
    Rule(
        id="W010",
        title="Load against its peers",
        severity=Severity.warning,
        category="fleet",
        why="Requests that wait at one replica while others have room are late for nothing, and an "
        "autoscaler that looks at means sees nothing.",
        fix="Balance on what a replica holds; give every replica its share.",
        source="median of the peers' means over five minutes; a fair share that came out as none",
        example="12 requests wait at one replica, none at two others whose KV is half free",
        check=_imbalance,
    ),
)
