"""Results made by hand, for what shows them."""

from __future__ import annotations

from ullage.lab.document import Document
from ullage.lab.result import (
    Axis,
    Bars,
    Column,
    Lines,
    NotRun,
    Raster,
    Result,
    Series,
    Stretch,
    Table,
)

HOSTILE = '<script>alert("x")</script> & \x1b[31m'


def result(name: str = "gqa", *, learnt: str = "Nothing yet.", words: str = "plain") -> Result:
    return Result(
        name=name,
        learnt=learnt,
        how=(f"measured by hand, {words}",),
        tables=(
            Table(
                f"a table, {words}",
                (
                    Column("what", source=""),
                    Column("bytes", "bytes", "modelled: by hand"),
                    Column("time", "s"),
                    Column("unknown", "s", "measured, where the system tells"),
                ),
                ((words, 2048, 0.25, None), ("other", 1, 2.0, None)),
            ),
        ),
        plots=(
            Lines(
                f"lines, {words}",
                Axis("x", log=True),
                Axis("y", "s", log=True),
                (
                    Series(f"first, {words}", ((1.0, 0.1), (8.0, 0.9))),
                    Series("second", ((1.0, 0.2), (8.0, 0.3)), "modelled"),
                ),
            ),
            Bars("bars", "tokens/s", ("one", "two"), ("a", "b"), ((1.0, None), (3.0, 4.0))),
            Raster(
                "raster",
                Axis("steps"),
                Axis("blocks"),
                4,
                ("r0", "r1"),
                (Stretch(0, 0.0, 2.0, 0), Stretch(3, 1.0, 5.0, 1)),
            ),
        ),
        data={"answer": 42},
        wall_s=3.0,
        elsewhere_ratio=0.5,
    )


def document(*outcomes: Result | NotRun, subject: str = "a model") -> Document:
    return Document(
        subject=subject,
        machine={"on": "a processor", "cores": "2"},
        outcomes=outcomes or (result(),),
        ullage="0",
        created="2026-01-01T00:00:00+00:00",
        wall_s=1.0,
    )
