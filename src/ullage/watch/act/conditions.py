"""One condition of a policy: `kv_used_ratio > 0.95`, or `W003 fires`; true, false or not known.

Holds parsing and evaluation on one replica of a Sight. How long it must hold is `decide.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt

from ullage.findings.finding import Finding
from ullage.watch.figures import NUMBERS, Figures
from ullage.watch.rules.table import RULES

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {">": gt, ">=": ge, "<": lt, "<=": le}
FIRES = "fires"


@dataclass(frozen=True, slots=True)
class Condition:
    """`field operator bound`, or, with an empty operator, that the rule `field` fires."""

    field: str
    operator: str = ""
    bound: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.field} {self.operator} {self.bound:g}"
            if self.operator
            else f"{self.field} {FIRES}"
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Whether it holds, None where that is not known, and the number or the reason in words."""

    holds: bool | None
    why: str


def parse_condition(text: object) -> Condition:
    """The condition that the text spells. Raises ValueError that says what was expected."""
    words = text.split() if isinstance(text, str) else []
    rules = {rule.id for rule in RULES}
    if len(words) == 2 and words[1] == FIRES:
        if words[0] not in rules:
            raise ValueError(f"a rule of watch before {FIRES}: {', '.join(sorted(rules))}")
        return Condition(words[0])
    if len(words) != 3 or words[1] not in OPERATORS:
        raise ValueError('such as "kv_used_ratio > 0.95" or "W003 fires"')
    if words[0] not in NUMBERS:
        raise ValueError(f"one of {', '.join(NUMBERS)}")
    try:
        bound = float(words[2])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise ValueError(f"a number after {words[1]}")
    if words[0].endswith("_ratio") and not 0 <= bound <= 1:
        # Above 95 there is none, and below 95 is each: neither is what was meant.
        raise ValueError(f"a ratio from 0 to 1 after {words[1]} (95% is 0.95)")
    return Condition(words[0], words[1], bound)


def evaluate(condition: Condition, figures: Figures, findings: Mapping[str, Finding]) -> Held:
    """Whether it holds of a replica with these figures and findings (by rule)."""
    if condition.operator:
        value = figures.numbers.get(condition.field)
        if value is None:
            why = figures.absent.get(condition.field, "not known")
            return Held(None, f"{condition.field}: {why}")
        holds = OPERATORS[condition.operator](value, condition.bound)
        return Held(holds, f"{condition.field} is {value:g}")
    finding = findings.get(condition.field)
    if finding is None:
        return Held(None, f"{condition.field} was not judged")
    if finding.state == "not_evaluable":
        return Held(None, f"{condition.field} was not evaluated: {'; '.join(finding.missing)}")
    return Held(finding.state == "fired", finding.cause or f"{condition.field} is clear")
