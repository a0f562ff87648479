"""All rules of `watch`, and their answers about every replica: `RULES`, `judge_all`.

Holds the table. Ids are for ever; a new rule is a `Rule` in the module of its concern.
"""

from __future__ import annotations

from collections.abc import Iterable

from ullage.watch.peers import peers_of
from ullage.watch.rule import Judged, Rule, Subject, judge
from ullage.watch.rules import (
    balance,
    fragmentation,
    gpus,
    identity,
    leaving,
    liveness,
    memory,
    outcomes,
    pods,
    prefix,
    probe,
    queues,
    shifts,
    silence,
)
from ullage.watch.view import View

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *memory.RULES,
            *fragmentation.RULES,
            *prefix.RULES,
            *queues.RULES,
            *liveness.RULES,
            *silence.RULES,
            *balance.RULES,
            *shifts.RULES,
            *leaving.RULES,
            *identity.RULES,
            *outcomes.RULES,
            *gpus.RULES,
            *pods.RULES,
            *probe.RULES,
        ),
        key=lambda rule: rule.id,
    )
)


def judge_all(
    views: Iterable[View], time_s: float, rules: tuple[Rule, ...] = RULES
) -> tuple[Judged, ...]:
    """What every rule says of every replica at `time_s` (Unix), replica by replica."""
    fleet = tuple(views)
    peers = peers_of(fleet)
    return tuple(
        judge(rule, subject)
        for subject in (Subject(view, fleet, time_s, peers) for view in fleet)
        for rule in rules
    )
