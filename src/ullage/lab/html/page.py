"""`render(document) -> str`: results as one HTML file without any outside reference.

Holds the page's frame and how a result is laid out; plots are `charts.py`, the document's data
`document.py`.
"""

from __future__ import annotations

from importlib.resources import files

from ullage.lab.document import Document, disturbance
from ullage.lab.html.charts import draw
from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import NotRun, Plot, Result, Table, Value
from ullage.lab.units import shown
from ullage.pages.markup import Cell, drawing, section, table
from ullage.pages.words import escape


def render(document: Document) -> str:
    """The page of all results of one call."""
    style = "".join(
        (files(room) / "style.css").read_text(encoding="utf-8")
        for room in ("ullage.pages", "ullage.lab.html")
    )
    body = "".join(
        _section(outcome) for outcome in document.outcomes if isinstance(outcome, Result)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>ullage lab: {escape(document.subject)}</title><style>{style}</style></head><body>"
        f"{_header(document)}<main>{body}</main>{_footer(document)}</body></html>\n"
    )


def _header(document: Document) -> str:
    facts = " · ".join(f"{name} {value}" for name, value in document.machine.items())
    lines = "".join(_content_line(outcome) for outcome in document.outcomes)
    return (
        f'<header><p class="kicker">ullage lab</p><h1>{escape(document.subject)}</h1>'
        f'<p class="meta">{escape(facts)}</p><ul class="contents">{lines}</ul></header>'
    )


def _content_line(outcome: Result | NotRun) -> str:
    title = escape(EXPERIMENTS[outcome.name].title)
    if isinstance(outcome, NotRun):
        return f'<li><b>{title}</b><span class="why">Not run: {escape(outcome.reason)}</span></li>'
    link = f'<a href="#{escape(outcome.name)}">{title}</a>'
    return f"<li>{link}<span>{escape(outcome.learnt)}</span></li>"


def _section(result: Result) -> str:
    about = EXPERIMENTS[result.name]
    body = f'<p class="learnt">{escape(result.learnt)}</p>'
    body += "".join(_plot(plot) for plot in result.plots)
    body += "".join(_table(one) for one in result.tables)
    return section(
        about.title, (about.question, *result.how, disturbance(result)), body, name=result.name
    )


def _plot(plot: Plot) -> str:
    return f"<h3>{escape(plot.title)}</h3>" + drawing(lambda width: draw(plot, width))


def _table(one: Table) -> str:
    head = [_head(column.name, one, index) for index, column in enumerate(one.columns)]
    rows = [
        [_cell(value, one.columns[index].unit) for index, value in enumerate(row)]
        for row in one.rows
    ]
    sources = _sources(one)
    said = f'<p class="sources">{escape(sources)}</p>' if sources else ""
    note = f'<p class="note">{escape(one.note)}</p>' if one.note else ""
    return f"<h3>{escape(one.title)}</h3>{table(head, rows)}{said}{note}"


def _head(name: str, one: Table, index: int) -> Cell:
    numeric = any(isinstance(row[index], int | float) for row in one.rows)
    return Cell(escape(name), numeric=numeric)


def _cell(value: Value, unit: str) -> Cell:
    return Cell(escape(shown(value, unit)), numeric=not isinstance(value, str))


def _sources(one: Table) -> str:
    """Where the columns' figures come from, columns of one source together."""
    by_source: dict[str, list[str]] = {}
    for column in one.columns:
        if column.source:
            by_source.setdefault(column.source, []).append(column.name)
    if len(by_source) == 1:
        return f"All figures: {next(iter(by_source))}."
    return " · ".join(f"{', '.join(names)}: {source}" for source, names in by_source.items())


def _footer(document: Document) -> str:
    return (
        f"<footer><p>Written by ullage {escape(document.ullage)} at {escape(document.created)} in "
        f"{document.wall_s:,.0f} s. Every figure without rounding is in lab.json beside this file. "
        "Byte units are decimal: 1 GB is 1,000,000,000 bytes. Solid lines are measured, dashed "
        "ones predicted.</p></footer>"
    )
