"""What a rule of `watch` is, what it is asked about, and its answer as a finding of one replica.

Holds the types. The rules lie in `rules/`, one module per concern; `rules/table.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.findings.answer import Answer, finding_of
from ullage.findings.finding import Finding, Severity
from ullage.watch.peers import Peers
from ullage.watch.view import View


@dataclass(frozen=True, slots=True)
class Subject:
    """One replica and all that are watched with it (itself included), at `time_s` (Unix).

    `peers` is what the fleet's replicas of each model do, worked out once for all of them.
    """

    view: View
    fleet: tuple[View, ...]
    time_s: float
    peers: Peers


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can go wrong in a live engine, and the pure function that looks for it.

    As the audit's rules (`findings.answer.Described`): `title` stays true whatever is found, `why`
    says what goes wrong, `fix` what to do, `source` where the fact is from, `example` what it
    fires on.
    """

    id: str
    title: str
    severity: Severity
    category: str
    why: str
    fix: str
    source: str
    example: str
    check: Callable[[Subject], Answer]


@dataclass(frozen=True, slots=True)
class Judged:
    """A finding and the replica that it speaks of ("" for the fleet as a whole)."""

    url: str
    finding: Finding


def judge(rule: Rule, subject: Subject) -> Judged:
    """What `rule` says of the subject's replica."""
    return Judged(subject.view.url, finding_of(rule, rule.check(subject)))
