"""A rule as text: the Markdown page of docs/rules/ and the plain text of `ullage explain`.

Holds layout only; the words are the rule's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from ullage.audit.silent_examples import SILENT
from ullage.findings.answer import Described

WIDTH = 88
ADDING = (
    "To add a rule to the audit: write `def _name(subject: Subject) -> Verdict` in the module of",
    "its concern under `src/ullage/audit/`, returning `Fired` (cause, remedy, evidence), `Clear`",
    "(evidence) or `NotEvaluable` (what is missing); add a `Rule` with the next free id to the",
    "module's `RULES`; give it a case in `tests/audit/rule_cases.py` (a change that fires it; the",
    "models on which it must be clear are tried for you); run `python",
    "tools/generate_rule_pages.py`. A rule about adapters lies in `src/ullage/adapters/rules_*.py`",
    "and has its case in `tests/adapters/rule_cases.py`; one about live engines lies in",
    "`src/ullage/watch/rules/` and has its cases in `tests/watch/rules/cases.py`.",
)


def explanation(rule: Described) -> str:
    """The rule as plain text for a terminal, ending in a newline."""
    parts = (
        ("Why", rule.why),
        ("Fix", rule.fix),
        ("Example", f"fires on: {rule.example}"),
        ("", f"must not fire on: {SILENT[rule.id]}"),
        ("Source", rule.source),
    )
    body = "\n\n".join(
        (f"{name}\n" if name else "")
        + fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        for name, text in parts
    )
    return f"{rule.id}  {rule.title}\n{rule.severity.name}, {rule.category}\n\n{body}\n"


def rule_page(rule: Described) -> str:
    """docs/rules/ID.md."""
    return (
        f"# {rule.id}: {rule.title}\n\n"
        f"{rule.severity.name} · {rule.category}\n\n"
        f"## Why\n\n{rule.why}\n\n"
        f"## Fix\n\n{rule.fix}\n\n"
        f"## Example\n\nFires on: {rule.example}\n\n"
        f"Must not fire on: {SILENT[rule.id]}\n\n"
        f"## Source\n\n{rule.source}\n"
    )


def index_page(rules: Sequence[Described]) -> str:
    """docs/rules/README.md: all rules by category."""
    rows = [
        "# Rules",
        "",
        "Those of `ullage audit` begin with A, those of `ullage adapter check` with L, those on a",
        "model's activations (`ullage probe check`, `ullage serve --probe-baseline`) with P, those",
        "on a server's answers (`ullage serve --probe-quality`) with Q, those of `ullage watch`",
        "with W.",
        "Each rule fires, is clear, or could not be evaluated (then it names what was missing).",
        "`ullage explain ID` prints the same pages. Severities are the usual ones; a finding may",
        "be graver or milder where the case is.",
    ]
    rows += ["", *ADDING]
    for category in dict.fromkeys(rule.category for rule in rules):
        rows += ["", f"## {category}", "", "| id | severity | rule |", "|---|---|---|"]
        rows += [
            f"| [{rule.id}]({rule.id}.md) | {rule.severity.name} | {rule.title} |"
            for rule in rules
            if rule.category == category
        ]
    return "\n".join(rows) + "\n"
