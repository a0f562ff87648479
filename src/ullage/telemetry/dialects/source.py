"""What a dialect is made of: where on a page a field of the vocabulary is read from.

Holds the types. Reading a page with them is `telemetry.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ullage.telemetry.snapshot import Name

Combine = Literal["sum", "mean", "max", "copies"]
Proof = Literal["recorded", "published"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The number of a metric's series, or their histogram.

    `name` is the sample's (counters end in `_total`), a histogram's without `_bucket`. `where`:
    only series whose labels have these values ("": they lack the label). Several series
    (data-parallel engines, models) become one by `combine`: `copies` say the same thing each, and
    one that differs makes the field unknown. A mean is weighted by the metric `weight` whose
    series have the same labels. `by` is the label that tells entries apart, in a field with one
    number per label value. `scale` takes the number to the vocabulary's unit. `nan` says what NaN
    means here, where it means something. `note` says what else than the field's meaning this is:
    then the field is approximate. `versions` are those that export it.
    """

    name: str
    versions: str = ""
    where: tuple[tuple[str, str], ...] = ()
    combine: Combine = "sum"
    weight: str = ""
    by: str = ""
    scale: float = 1.0
    nan: str = ""
    note: str = ""

    @property
    def exact(self) -> bool:
        return not self.note

    def __str__(self) -> str:
        labels = ",".join(f'{label}="{value}"' for label, value in self.where)
        named = f"{self.name}{{{labels}}}" if labels else self.name
        return f"{named} ({self.note})" if self.note else named


@dataclass(frozen=True, slots=True)
class Label:
    """A number that a metric's series carry as the text of a label.

    One engine's figure each (`sum`), or every series says the same of all engines (`copies`).
    """

    metric: str
    label: str
    versions: str = ""
    combine: Literal["sum", "copies"] = "copies"

    @property
    def exact(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"{self.metric}[{self.label}]"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Two sources joined. `near`: the result is not what the field means, only near it."""

    left: Metric | Label | Arithmetic
    op: Literal["×", "÷", "+"]
    right: Metric | Label | Arithmetic
    near: bool = False
    versions: str = ""

    @property
    def exact(self) -> bool:
        return not self.near and self.left.exact and self.right.exact

    def __str__(self) -> str:
        return f"{_inner(self.left)} {self.op} {_inner(self.right)}"


Source = Metric | Label | Arithmetic


def _inner(source: Source) -> str:
    return f"({source})" if isinstance(source, Arithmetic) else str(source)


@dataclass(frozen=True, slots=True)
class Info:
    """Where a page tells who serves it, in labels. Empty: nowhere.

    `settings` are metrics whose labels are flags; `model_label`, `engine_label` the labels that
    every series carries; `adapters` (metric, labels) whose texts are adapter names by commas.
    """

    settings: tuple[str, ...] = ()
    model_label: str = ""
    engine_label: str = ""
    version: tuple[str, str] | None = None
    adapters: tuple[str, tuple[str, ...]] | None = None
    max_model_len: Source | None = None
    block_size: Source | None = None
    num_blocks: Source | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's table.

    A page is this engine's when a metric name on it begins with one of `marks` and none with one
    of `unless`. `fields`: newest source first, the first that the page has is read. `absent`:
    every other field, and why the engine cannot say. `copies` are labels over which series repeat
    one number (tensor-parallel ranks): the one with the lowest values counts. `proof`: read from a
    real server here, or from what is published of it.
    """

    engine: str
    title: str
    proof: Proof
    versions: str
    marks: tuple[str, ...]
    fields: Mapping[Name, tuple[Source, ...]]
    absent: Mapping[Name, str]
    info: Info = Info()
    unless: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    hints: Mapping[Name, str] = field(default_factory=dict)
    """What to do where the page lacks a field that the engine can have."""
