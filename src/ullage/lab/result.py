"""What an experiment finds: a sentence, tables, plots and the numbers under them, as frozen data.

Holds the nouns only. Every column and every series says where its figures come from; how they are
drawn is `html/`, how they are printed `text.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Value = int | float | str | None
MEASURED = "measured"
CACHED = "cached"
"""The raster owner of what nobody holds and what is kept for whoever comes."""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. `unit` as in `units.shown`; `source`: measured, config, or modelled and
    by what formula. An empty source is for what only names a row."""

    name: str
    unit: str = ""
    source: str = MEASURED


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values, one for each column; None where nothing is known, with `note` saying why."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis with its unit; `log` for what is compared by ratios."""

    title: str
    unit: str = ""
    log: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of (x, y). What is not measured is drawn dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    source: str = MEASURED


@dataclass(frozen=True, slots=True)
class Lines:
    """y against x, one line per series. `marks` are (y, name): levels worth comparing with."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per (group, series): `values[s][g]`, None where there is none."""

    title: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    source: str = MEASURED


@dataclass(frozen=True, slots=True)
class Stretch:
    """One row of a raster from `start` to `end`, held by `owner` (an index of the raster's)."""

    row: int
    start: float
    end: float
    owner: int


@dataclass(frozen=True, slots=True)
class Raster:
    """Who held what and when: rows (blocks) against x (steps), coloured by owner."""

    title: str
    x: Axis
    y: Axis
    num_rows: int
    owners: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    source: str = MEASURED


Plot = Lines | Bars | Raster


@dataclass(frozen=True, slots=True)
class Result:
    """One experiment's outcome.

    `learnt` is computed from the numbers; `how` says what was measured, with what, and how often.
    `data` is plain JSON: the numbers that `learnt` was computed from, unrounded. `wall_s`,
    `processor_s` (of this process and its children) and `elsewhere_ratio` (the share of the cores'
    time that other processes took) are filled in by whoever ran it; None: not known.
    """

    name: str
    learnt: str
    how: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    processor_s: float | None = None
    elsewhere_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class NotRun:
    """An experiment that gave no result, and the sentence why. Never silently left out."""

    name: str
    reason: str
