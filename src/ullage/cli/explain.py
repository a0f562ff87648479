"""`ullage explain ID`: what a rule says, why it matters, how to fix it, where the fact is from.

Holds printing only. `docs/rules/ID.md` is the same text as a page.
"""

from __future__ import annotations

import argparse
import sys

from ullage.audit.pages import explanation
from ullage.audit.rules import RULES, find_rule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage explain`."""
    parser.add_argument(
        "rule", metavar="ID", nargs="?", help="a rule's id, such as A001; none lists all rules"
    )


def run(args: argparse.Namespace) -> int:
    """Print one rule, or the list of all of them."""
    if args.rule is None:
        for rule in RULES:
            print(f"{rule.id}  {rule.severity.name:<7}  {rule.title}")
        return 0
    sys.stdout.write(explanation(find_rule(args.rule)))
    return 0
