"""Many replicas as a table: a line for each, and the columns that find room.

Holds columns and their widths. What is said of one replica in full is `cards.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from ullage.pages.words import byte_size, count
from ullage.telemetry.snapshot import Histograms
from ullage.watch import cells
from ullage.watch.cards import GAP, STYLES, Row
from ullage.watch.figures import Figures


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its head, its text for a replica, and how soon it is given up for width."""

    head: str
    text: Callable[[Figures], str]
    priority: int


def _number(name: str, show: Callable[[float], str]) -> Callable[[Figures], str]:
    def text(figures: Figures) -> str:
        value = figures.numbers.get(name)
        return cells.NONE if value is None else show(value)

    return text


def _p99(name: Histograms) -> Callable[[Figures], str]:
    def text(figures: Figures) -> str:
        spread = figures.spreads.get(name)
        return cells.NONE if spread is None else cells.time_range(spread.p99)

    return text


def _use(figures: Figures) -> str:
    ratio = figures.used_ratio
    return cells.NONE if ratio is None else f"{cells.bar(ratio, 8)} {cells.percent(ratio):>5}"


def _full_in(figures: Figures) -> str:
    if figures.time_to_full is None:
        return cells.NONE
    return cells.to_full(figures.time_to_full).removeprefix("full in ")


def _gpu(figures: Figures) -> str:
    """How busy its GPUs are on average, where all of them say it."""
    busy = [gpu.busy_ratio for gpu in figures.gpus if gpu.busy_ratio is not None]
    if not busy or len(busy) < len(figures.gpus):
        return cells.NONE
    return cells.percent(sum(busy) / len(busy))


COLUMNS = (
    Column("KV used", _use, 0),
    Column("full in", _full_in, 5),
    Column("free", _number("kv_free_bytes", byte_size), 6),
    Column("pages", _number("page_utilization_ratio", cells.percent), 8),
    Column("run", _number("running", count), 1),
    Column("wait", _number("waiting", count), 2),
    Column("preempted", _number("preemptions_per_s", cells.rate), 3),
    Column("prefix", _number("prefix_hit_ratio", cells.percent), 9),
    Column("TTFT p99", _p99("ttft_s"), 4),
    Column("ITL p99", _p99("itl_s"), 7),
    Column("GPU", _gpu, 10),
)
LEAST_NAME = 16


def table(rows: Sequence[Row], width: int) -> list[Text]:
    """A line for each replica; columns that find no room are left out, the least telling first."""
    names = [cells.clean(row.figures.url).partition("://")[2] or row.figures.url for row in rows]
    texts = {
        column.head: [
            cells.NONE if r.figures.time_s is None else column.text(r.figures) for r in rows
        ]
        for column in COLUMNS
    }
    widths = {
        head: max(len(head), *(len(text) for text in column)) for head, column in texts.items()
    }
    rules = [" ".join(row.ids) if row.figures.time_s is not None else "no answer" for row in rows]
    rules_width = max(len("fired"), *(len(text) for text in rules))
    room = width - min(max(len(name) for name in names), 40) - len(GAP) - rules_width
    kept: set[str] = set()
    for column in sorted(COLUMNS, key=lambda column: column.priority):
        if room - 2 - widths[column.head] < 0:
            break
        kept.add(column.head)
        room -= 2 + widths[column.head]
    chosen = [column.head for column in COLUMNS if column.head in kept]
    name_width = max(
        LEAST_NAME, width - rules_width - len(GAP) - sum(widths[h] + 2 for h in chosen)
    )
    name_width = min(name_width, max(len("replica"), *(len(name) for name in names)))
    head = Text(f"{'replica':<{name_width}}", "dim")
    for name in chosen:
        head.append(f"  {name:>{widths[name]}}")
    lines = [head.append(f"{GAP}fired")]
    for at, row in enumerate(rows):
        style = "" if row.gravest is None else STYLES[row.gravest]
        line = Text(f"{cells.shorten(names[at], name_width):<{name_width}}")
        for name in chosen:
            text = texts[name][at]
            line.append(f"  {text:>{widths[name]}}", style if name == "KV used" else "")
        line.append(GAP).append(rules[at], style or "bold red" if rules[at] else "")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines
