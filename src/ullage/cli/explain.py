"""`ullage explain ID`: what a rule says, why it matters, how to fix it, where the fact is from.

Holds printing only. `docs/rules/ID.md` is the same text as a page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from ullage.audit.pages import explanation
from ullage.audit.rules import RULES, find_rule
from ullage.findings.answer import Described


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage explain`."""
    parser.add_argument(
        "rule", metavar="ID", nargs="?", help="a rule's id, such as A001; none lists all rules"
    )


def run(args: argparse.Namespace) -> int:
    """Print one rule, or the list of all of them."""
    if args.rule is None:
        others = (rule for rules in TABLES.values() for rule in rules())
        for rule in (*RULES, *others):
            print(f"{rule.id}  {rule.severity.name:<7}  {rule.title}")
        return 0
    sys.stdout.write(explanation(_find(args.rule)))
    return 0


def _find(rule_id: str) -> Described:
    """The rule of that id, in the table of its letter; the audit's are all others."""
    wanted = rule_id.strip().upper()
    if wanted[:1] in TABLES:
        for rule in TABLES[wanted[:1]]():
            if rule.id == wanted:
                return rule
    return find_rule(rule_id)


def _adapter_rules() -> tuple[Described, ...]:
    from ullage.adapters.rules.table import (
        RULES as ADAPTER_RULES,  # an audit's rule costs less without
    )

    return ADAPTER_RULES


def _baseline_rules() -> tuple[Described, ...]:
    from ullage.probes.baseline.rules import RULES as BASELINE_RULES

    return BASELINE_RULES


def _quality_rules() -> tuple[Described, ...]:
    from ullage.probes.quality.rules import RULES as QUALITY_RULES

    return QUALITY_RULES


def _watch_rules() -> tuple[Described, ...]:
    from ullage.watch.rules.table import RULES as WATCH_RULES

    return WATCH_RULES


# First letter of an id → its rules, in the order in which they are listed.
TABLES: Mapping[str, Callable[[], tuple[Described, ...]]] = {
    "L": _adapter_rules,
    "P": _baseline_rules,
    "Q": _quality_rules,
    "W": _watch_rules,
}
