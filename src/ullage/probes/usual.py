"""What texts usually do to a model: entropies, scores and sizes of activations, and how far is far.

Holds the figures of a row and their distance from what a baseline's prompts showed. These depend
on the text, as `relations` do not: only what lies far outside of every prompt's range counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ullage.probes.relations import Row
from ullage.probes.sketch import Floats, Form

Doubles = NDArray[np.float64]

# Name → the least width that a range is taken to have: prompts are few, texts are many.
LEAST_WIDTHS: Mapping[str, float] = {
    "entropy": 0.15,
    "max_score": 4.0,
    "residual_rms": 0.7,
    "residual_max": 0.7,
    "hidden_max": 1.0,
    "top_logprob": 2.0,
}
FREE_WIDTHS = 1.0
"""How many widths beyond the range are free."""
UNITS_PER_WIDTH = 3.0
"""z grows by so much with each further width."""
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a row. `entropy` is a share of its highest possible; sizes are natural logs."""

    name: str
    layer: int | None
    head: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """float32 [layers, heads]: of one row in all layers."""

    entropy_nats: Floats
    max_score: Floats
    first_mass: Floats
    band_mass: Floats
    visible_L: NDArray[np.int64]

    @property
    def entropy_normalized(self) -> Floats:
        """NaN where a row sees one key only."""
        highest = np.log(np.where(self.visible_L > 1, self.visible_L, np.nan))
        return (self.entropy_nats / highest[:, None]).astype(np.float32)


def figures(form: Form) -> tuple[Figure, ...]:
    """Every figure, in the order of `of_row`."""
    heads = [(layer, head) for layer in range(form.layers) for head in range(form.heads)]
    layers = range(form.layers)
    return (
        *(Figure("entropy", layer, head) for layer, head in heads),
        *(Figure("max_score", layer, head) for layer, head in heads),
        *(Figure("residual_rms", layer) for layer in (*layers, None)),
        *(Figure("residual_max", layer) for layer in (*layers, None)),
        *(Figure("hidden_max", layer) for layer in layers),
        Figure("top_logprob", None),
    )


def of_row(form: Form, row: Row, attended: Attended | None) -> Doubles:
    """float64 [figures]; NaN where it cannot be told."""
    x_LE, logits_V = row.places["x"], row.logits_V
    if attended is None:
        heads = np.full(2 * form.layers * form.heads, np.nan)
    else:
        heads = np.concatenate([attended.entropy_normalized.ravel(), attended.max_score.ravel()])
    top = float(logits_V.max())
    return np.concatenate(
        [
            heads,
            np.log(np.sqrt((x_LE.astype(np.float64) ** 2).mean(-1)) + _TINY),
            np.log(np.abs(x_LE).max(-1) + _TINY),
            np.log(np.abs(row.places["hidden"]).max(-1) + _TINY),
            [-float(np.log(np.exp(logits_V - top, dtype=np.float64).sum()))],
        ]
    )


def widths(form: Form, low: Doubles, high: Doubles) -> Doubles:
    """Of every figure's range, not below the least."""
    least = np.array([LEAST_WIDTHS[figure.name] for figure in figures(form)])
    found: Doubles = np.maximum(high - low, least)
    return found


def distance(values: Doubles, low: Doubles, high: Doubles, width: Doubles) -> Doubles:
    """z of each figure: 0 within the range and a free margin; NaN where nothing is known.

    Raises nothing: a figure that is infinite is infinitely far.
    """
    beyond = np.maximum(low - values, values - high) / width - FREE_WIDTHS
    z = np.maximum(beyond, 0.0) * UNITS_PER_WIDTH
    return np.where(np.isnan(low), np.nan, z)
