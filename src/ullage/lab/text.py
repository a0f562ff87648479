"""Results as text for a terminal: the question, the tables, and what was learnt.

Holds the printing only; plots are on the page.
"""

from __future__ import annotations

import textwrap

from ullage.lab.document import disturbance
from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import NotRun, Result, Table
from ullage.lab.units import shown

WIDTH = 96


def as_text(outcome: Result | NotRun) -> str:
    about = EXPERIMENTS[outcome.name]
    if isinstance(outcome, NotRun):
        return f"{outcome.name}\n" + _wrapped(f"not run: {outcome.reason}")
    parts = [outcome.name, _wrapped(about.question), ""]
    for table in outcome.tables:
        parts += [_table(table), ""]
    parts += [_wrapped(outcome.learnt), _wrapped(disturbance(outcome))]
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _table(table: Table) -> str:
    cells = [[column.name for column in table.columns]]
    cells += [
        [shown(value, column.unit) for value, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    numeric = [
        any(isinstance(row[i], int | float) for row in table.rows)
        for i in range(len(table.columns))
    ]
    lines = [f"  {table.title}"]
    for row in cells:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append(("    " + "  ".join(padded)).rstrip())
    if table.note:
        lines.append(_wrapped(table.note))
    return "\n".join(lines)
