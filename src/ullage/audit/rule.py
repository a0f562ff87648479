"""What a rule is: `Rule`, and the three answers that its check may give.

Holds the types and `judge`, which turns an answer into a Finding. The rules themselves lie in one
module per concern; `rules.py` is the table of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.audit.subject import Subject
from ullage.findings.answer import Clear, Fired, NotEvaluable, finding_of
from ullage.findings.finding import Finding, Severity
from ullage.launch.open_values import OpenValue

__all__ = ["Clear", "Fired", "NotEvaluable", "Rule", "Verdict", "judge"]


Verdict = Fired | Clear | NotEvaluable


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong before launch, and the pure function that looks for it.

    `title` names what is looked at, in words that stay true whatever is found.
    `why` says what goes wrong, `fix` what to do in general, `source` where the fact comes from,
    `example` a configuration or a command line on which it fires.
    """

    id: str
    title: str
    severity: Severity
    category: str
    why: str
    fix: str
    source: str
    example: str
    check: Callable[[Subject], Verdict]


BESIDE_THE_CONFIGURATION = ("deployment", "safety", "tokenizer", "weights")
"""Categories whose rules read the configuration only where their evidence says so."""


def _rests_on_the_configuration(rule: Rule, verdict: Verdict) -> bool:
    if isinstance(verdict, NotEvaluable):
        return False
    read = any(evidence.source.startswith("config") for evidence in verdict.evidence)
    return read or rule.category not in BESIDE_THE_CONFIGURATION


def judge(rule: Rule, subject: Subject) -> Finding:
    """What `rule` says of `subject`.

    Where the configuration leaves something open, the verdict must be the same for every spec that
    it allows; otherwise the rule is not evaluable, for want of the fields that are open. Nor is it
    where it needs a flag whose value the deployment file hides, or a configuration of which the
    command replaces what is not known.
    """
    try:
        verdict = rule.check(subject)
        if any(type(rule.check(other)) is not type(verdict) for other in subject.brackets):
            verdict = NotEvaluable(
                tuple(dict.fromkeys(unknown.field for unknown in subject.spec.unknowns))
                or ("what the configuration leaves open",)
            )
    except OpenValue as hidden:
        verdict = NotEvaluable((str(hidden),))
    replaced = subject.replaced
    if replaced is not None and replaced.open and _rests_on_the_configuration(rule, verdict):
        verdict = NotEvaluable(replaced.missing())
    return finding_of(rule, verdict)
