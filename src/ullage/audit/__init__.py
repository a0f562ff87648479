"""Rules that judge a model and its deployment before launch.

`audit(subject)` runs them; `rules.py` is their table, `rule.py` says what a rule is, and each
concern has a module. Nothing here reads files: the subject holds what was read.
"""

from __future__ import annotations

from collections.abc import Iterable

from ullage.audit.prepare import prepare
from ullage.audit.rule import Rule, judge
from ullage.audit.rules import RULES, choose, find_rule
from ullage.audit.subject import Subject, subject_of
from ullage.findings.finding import Finding

__all__ = [
    "RULES",
    "Rule",
    "Subject",
    "audit",
    "choose",
    "find_rule",
    "judge",
    "prepare",
    "subject_of",
]


def audit(subject: Subject, rules: Iterable[Rule] = RULES) -> tuple[Finding, ...]:
    """What each rule says of `subject`, in the order of their ids."""
    return tuple(judge(rule, subject) for rule in rules)
