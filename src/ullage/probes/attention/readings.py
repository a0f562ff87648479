"""What a probe of attention says: statistics per layer and head over the query rows it looked at.

Plain data and its JSON document; how a reading is taken is `entropy`, from whom `embedded` and
`through_transformers`. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one value per row: its mean and the values that 5% and 95% of the rows stay below."""

    mean: float
    p5: float
    p95: float


@dataclass(frozen=True, slots=True)
class HeadReading:
    """One head's attention, over `rows` query rows; None where no row could say.

    Entropies are in nats and over keys only, learned sinks left out, unless the name says so.
    `entropy_normalized` is the mean of H / ln(visible keys) over rows that see at least two: a row
    with 20 keys cannot have an entropy above ln 20. `sink_mass` is the mean weight of the first
    token, `band_mass` of the keys within ±16 positions; `band_entropy_nats` is the entropy of the
    weights within that band alone, which folklore takes for the whole. `effective_context` is the
    mean of e^H: as many keys with equal weights would have that entropy. `max_score` is the highest
    score before softmax, after scale, soft cap and slope. `not_finite` rows gave NaN or Inf and
    are in no other figure.
    """

    head: int
    rows: int
    not_finite: int
    entropy_nats: Spread | None
    entropy_normalized: float | None
    sink_mass: float | None
    band_mass: float | None
    band_entropy_nats: float | None
    effective_context: float | None
    max_score: float | None
    entropy_with_sink_nats: Spread | None = None
    learned_sink_mass: float | None = None


@dataclass(frozen=True, slots=True)
class LayerReading:
    """A layer's heads, in the model's order."""

    layer: int
    heads: tuple[HeadReading, ...]


@dataclass(frozen=True, slots=True)
class AttentionReading:
    """A prompt of `tokens` read at `rows` query positions by `source`, e.g. "embedded engine"."""

    model: str
    source: str
    tokens: int
    rows: int
    layers: tuple[LayerReading, ...]

    def to_json(self) -> dict[str, Any]:
        """The document: what no layer of this model has (a learned sink) is left out."""
        return {
            "model": self.model,
            "source": self.source,
            "tokens": self.tokens,
            "rows": self.rows,
            "layers": [
                {"layer": layer.layer, "heads": [_head_json(head) for head in layer.heads]}
                for layer in self.layers
            ],
        }

    def heads(self) -> Iterator[tuple[int, HeadReading]]:
        """(layer, head's reading) of all."""
        for layer in self.layers:
            for head in layer.heads:
                yield layer.layer, head


_ONLY_WITH_SINKS = ("entropy_with_sink_nats", "learned_sink_mass")


def _head_json(head: HeadReading) -> dict[str, Any]:
    document = asdict(head)
    for name in _ONLY_WITH_SINKS:
        if document[name] is None:
            del document[name]
    return document
