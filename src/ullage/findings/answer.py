"""The three answers that a rule may give, and how an answer becomes a `Finding`.

Holds the types that all rooms with rules share. What a rule looks at is each room's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ullage.findings.finding import Evidence, Finding, Severity


@dataclass(frozen=True, slots=True)
class Fired:
    """The rule found what it looks for. `severity` overrides the rule's when this case differs."""

    cause: str
    remedy: str
    evidence: tuple[Evidence, ...]
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    """The rule was evaluated and is content; `evidence` says on what, and is never empty.

    Where the rule speaks of a part that the model lacks, the evidence says that it lacks it
    (`experts: 0`): that is known, so the rule was evaluated.
    """

    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class NotEvaluable:
    """The rule could not be evaluated; `missing` names each thing that was lacking."""

    missing: tuple[str, ...]


Answer = Fired | Clear | NotEvaluable


class Described(Protocol):
    """What every rule says of itself, whatever it looks at.

    `title` names what is looked at, in words that stay true whatever is found. `why` says what
    goes wrong, `fix` what to do in general, `source` where the fact comes from, `example` what it
    fires on.
    """

    @property
    def id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def severity(self) -> Severity: ...
    @property
    def category(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def fix(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def example(self) -> str: ...


def finding_of(rule: Described, answer: Answer) -> Finding:
    """The finding of one rule; equal evidence is listed once."""
    if isinstance(answer, NotEvaluable):
        return Finding(rule.id, rule.title, rule.severity, "not_evaluable", missing=answer.missing)
    assert answer.evidence, f"{rule.id}: a rule that was evaluated says on what"
    evidence = tuple(dict.fromkeys(answer.evidence))
    if isinstance(answer, Clear):
        return Finding(rule.id, rule.title, rule.severity, "clear", evidence)
    return Finding(
        rule.id,
        rule.title,
        answer.severity or rule.severity,
        "fired",
        evidence,
        cause=answer.cause,
        remedy=answer.remedy,
    )
