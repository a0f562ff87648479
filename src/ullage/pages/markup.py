"""Small pieces of HTML that the sections share: sections, tables, figures with their provenance.

Holds markup only, and is where text from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.pages.words import escape, figure_text

# A drawing's text keeps its size on every screen, so each is drawn twice and CSS shows one.
WIDE, NARROW = 762.0, 348.0
HALF = 368.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One table cell: HTML that is already safe, and whether it is a number (right-aligned)."""

    html: str
    numeric: bool = False
    kind: str = ""


def words(text: object) -> Cell:
    return Cell(escape(text))


def value(text: object) -> Cell:
    return Cell(escape(text), numeric=True)


def roomy(text: object) -> Cell:
    """A number that a narrow screen leaves out."""
    return Cell(escape(text), numeric=True, kind="roomy")


def source(text: object) -> Cell:
    return Cell(f'<span class="source">{escape(text)}</span>', kind="from")


def section(title: str, captions: Iterable[str], body: str, *, name: str) -> str:
    """A heading with what to conclude beside it, and the evidence."""
    aside = "".join(f"<p>{escape(c)}</p>" for c in captions if c)
    return (
        f'<section id="{escape(name)}"><div class="aside"><h2>{escape(title)}</h2>{aside}</div>'
        f"<div>{body}</div></section>"
    )


def table(
    head: Sequence[Cell],
    rows: Iterable[Sequence[Cell]],
    *,
    total: Sequence[Cell] | None = None,
    kind: str = "",
) -> str:
    """A table in its own scroller, so that a wide one never widens the page.

    With `kind="stack"` a narrow screen shows each row as a small block with its source below, and
    numbers named by the words of their column.
    """
    labels = [cell.html if cell.numeric else "" for cell in head]
    top = "".join(_cell("th", cell) for cell in head)
    body = "".join(_row(row, labels) for row in rows)
    if total is not None:
        body += _row(total, labels, ' class="total"')
    classes = f' class="{kind}"' if kind else ""
    return (
        f'<div class="scroll"><table{classes}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[Cell], labels: Sequence[str], attribute: str = "") -> str:
    inner = "".join(_cell("td", c, label) for c, label in zip(cells, labels, strict=True))
    return f"<tr{attribute}>{inner}</tr>"


def _cell(tag: str, cell: Cell, label: str = "") -> str:
    classes = " ".join(name for name in ("n" if cell.numeric else "", cell.kind) if name)
    attribute = f' class="{classes}"' if classes else ""
    if label:
        attribute += f' data-label="{label}"'
    return f"<{tag}{attribute}>{cell.html}</{tag}>"


def drawing(draw: Callable[[float], str], *, wide: float = WIDE) -> str:
    """A chart drawn for wide and for narrow screens."""
    return (
        f'<figure class="wide">{draw(wide)}</figure><figure class="narrow">{draw(NARROW)}</figure>'
    )


def figures_table(rows: Iterable[tuple[str, Mapping[str, Any] | None]]) -> str:
    """Named figures, each with its value and where it comes from."""
    lines: list[list[Cell]] = []
    for name, figure in rows:
        said = "" if figure is None else figure.get("source", "")
        note = "" if figure is None else figure.get("note", "")
        lines.append([words(name), value(figure_text(figure)), source(joined(said, note))])
    head = [words("what"), value(""), words("source")]
    return table(head, lines, kind="stack")


def joined(*parts: object) -> str:
    return "; ".join(str(part) for part in parts if part)


def plain_list(items: Iterable[tuple[str, str]]) -> str:
    """Name and sentence per line."""
    lines = "".join(
        f"<li><b>{escape(name)}</b> {escape(sentence)}</li>" for name, sentence in items
    )
    return f'<ul class="plain">{lines}</ul>'
