"""A verdict with its evidence: the value that every judging room returns.

Holds `Finding` and its parts. Rules live in the rooms that judge; showing is the renderers'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class Severity(IntEnum):
    """How much a fired finding matters. Ordered: `error` > `warning` > `info`."""

    info = 1
    warning = 2
    error = 3


State = Literal["fired", "clear", "not_evaluable"]
"""`clear` is only said of a rule that was evaluated; see `Finding.missing` for the third."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number or fact: what it is, its value with unit ("" when it has none), its source."""

    name: str
    value: int | float | str | bool | None
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule says of one subject.

    `missing` names what was lacking when the state is `not_evaluable`, and is empty otherwise.
    `cause` and `remedy` are whole sentences, empty unless fired.
    `accepted`: it fired, and a baseline says that this is known (see `baseline.py`).
    """

    id: str
    title: str
    severity: Severity
    state: State
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    remedy: str = ""
    missing: tuple[str, ...] = ()
    accepted: bool = False

    def __post_init__(self) -> None:
        assert (self.state == "not_evaluable") == bool(self.missing), (
            f"{self.id}: `missing` goes with not_evaluable, and only with it"
        )


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity that fired and was not accepted, or None when nothing did."""
    return max(
        (f.severity for f in findings if f.state == "fired" and not f.accepted), default=None
    )
