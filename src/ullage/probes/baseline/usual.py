"""What texts usually do to a model: entropies, scores and sizes of activations, and how far is far.

Holds the figures of a row and their distance from what a baseline's prompts showed. These depend
on the text, as `relations` do not: a request is one reading, however many of its rows are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ullage.probes.baseline.relations import Row
from ullage.probes.baseline.sketch import Floats, Form

Doubles = NDArray[np.float64]

# Name → the least that prompts are taken to differ by (standard deviation): a baseline has few.
LEAST_SPREADS: Mapping[str, float] = {
    "entropy": 0.05,
    "max_score": 2.0,
    "residual_rms": 0.25,
    "residual_max": 0.25,
    "hidden_max": 0.4,
    "top_logprob": 0.7,
}
MARGIN = 3.0
"""Requests may differ by three times as much as the baseline's prompts do: texts are many."""
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a row. `entropy` is a share of its highest possible; sizes are natural logs."""

    name: str
    layer: int | None
    head: int | None = None

    @property
    def kind(self) -> str:
        """`entropy`: how heads attend; `size`: how large what flows is, and how sure the model."""
        return "entropy" if self.name in ("entropy", "max_score") else "size"


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
    # Of a model that is broken they are not finite, and not known.
    with np.errstate(invalid="ignore", over="ignore"):
        return np.concatenate(
            [
                heads,
                np.log(np.sqrt((x_LE.astype(np.float64) ** 2).mean(-1)) + _TINY),
                np.log(np.abs(x_LE).max(-1) + _TINY),
                np.log(np.abs(row.places["hidden"]).max(-1) + _TINY),
                [-float(np.log(np.exp(logits_V - top, dtype=np.float64).sum()))],
            ]
        )


def least_spreads(form: Form) -> Doubles:
    """Of every figure."""
    return np.array([LEAST_SPREADS[figure.name] for figure in figures(form)])


def z_of(values: Doubles, mean: Doubles, spread: Doubles) -> Doubles:
    """Of each figure of one request, in units of what requests may differ by; NaN: not known."""
    found: Doubles = np.abs(values - mean) / (MARGIN * spread)
    return found


class Requests:
    """Rows become readings of requests: the mean of a request's first 4, 64, 1,024 … rows."""

    FIRST, GROWTH, MOST = 4, 16, 256

    def __init__(self) -> None:
        # By request, those that were read last at the end: rows so far, sum, rows of each figure.
        self._open: dict[str, tuple[int, Doubles, Doubles]] = {}

    def add(self, request_id: str, values: Doubles) -> Doubles | None:
        """The mean over the request's rows, where it is time for one."""
        known = np.isfinite(values)
        fresh = (0, np.zeros(len(values)), np.zeros(len(values)))
        rows, total, counts = self._open.pop(request_id, fresh)
        rows, total, counts = rows + 1, total + np.where(known, values, 0.0), counts + known
        self._open[request_id] = (rows, total, counts)
        if len(self._open) > self.MOST:
            del self._open[next(iter(self._open))]
        due = self.FIRST
        while due < rows:
            due *= self.GROWTH
        if rows != due:
            return None
        with np.errstate(invalid="ignore"):
            mean: Doubles = total / np.where(counts > 0, counts, np.nan)
        return mean
