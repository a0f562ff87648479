"""What the replicas of one model do side by side: the values that one of them is compared with.

Holds the arithmetic, done once a round for all of them. When a difference is too much is the
rules' (`rules/`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ullage.telemetry.snapshot import Gauge, Identity
from ullage.watch.view import Span, View

Key = tuple[str, tuple[str, ...]]
"""Engine and the models that it serves: only such replicas can take each other's requests."""

LEAST_SPAN_S = 60.0
"""Before that a mean says more of the last few requests than of the replica."""

COMPARED: tuple[Gauge, ...] = ("running", "waiting", "kv_used_ratio")
HITS = "prefix_hit_ratio"
FINISHED = "finished_requests"


def key_of(identity: Identity) -> Key:
    """What makes replicas peers. Adapters differ from replica to replica and do not count."""
    own = frozenset(identity.adapters)
    return identity.engine, tuple(sorted(name for name in identity.models if name not in own))


def finished_in(span: Span) -> float | None:
    """Requests that ended in the span, however; None where that is not known."""
    reasons = span.labelled_rises.get("finished_by_reason")
    return None if reasons is None else sum(reasons.values())


def hit_ratio_in(span: Span) -> float | None:
    """Prompt tokens found in the prefix cache over those looked up; None where none were."""
    hits, asked = span.rises.get("prefix_hits_tokens"), span.rises.get("prefix_queries_tokens")
    return None if hits is None or not asked else hits / asked


@dataclass(frozen=True, slots=True)
class Group:
    """The recent means of a model's replicas, each sorted; of those that were seen for long enough.

    Names are those of COMPARED, HITS and FINISHED.
    """

    values: Mapping[str, tuple[float, ...]]

    def median_of_others(self, name: str, own: float) -> float | None:
        """The lower median of the others' values; None where there are no others."""
        values = self.values.get(name, ())
        at = bisect_left(values, own)
        if at == len(values) or values[at] != own:
            return None  # its own is not among them: it is not one of the group
        others = len(values) - 1
        if others < 1:
            return None
        middle = (others - 1) // 2
        return values[middle if middle < at else middle + 1]

    def num(self, name: str) -> int:
        """How many replicas say it."""
        return len(self.values.get(name, ()))


Peers = Mapping[Key, Group]


def measures_of(view: View) -> dict[str, float]:
    """What is compared, of one replica; empty for one that does not answer or is new."""
    recent = view.recent
    if view.error or view.now is None or recent is None or recent.seconds < LEAST_SPAN_S:
        return {}
    found: dict[str, float] = {n: recent.trends[n].mean for n in COMPARED if n in recent.trends}
    hits, finished = hit_ratio_in(recent), finished_in(recent)
    if hits is not None:
        found[HITS] = hits
    if finished is not None:
        found[FINISHED] = finished
    return found


def peers_of(views: Iterable[View]) -> Peers:
    """The groups of all replicas that answered."""
    lists: dict[Key, dict[str, list[float]]] = {}
    for view in views:
        measures = measures_of(view)
        if measures and view.now is not None:
            group = lists.setdefault(key_of(view.now.identity), {})
            for name, value in measures.items():
                group.setdefault(name, []).append(value)
    return {
        key: Group({name: tuple(sorted(values)) for name, values in group.items()})
        for key, group in lists.items()
    }
