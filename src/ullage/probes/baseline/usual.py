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
    """float32 [layers, heads] of one row; NaN, and 0 visible, in a layer that was not read."""

    entropy_nats: Floats
    max_score: Floats
    first_mass: Floats
    band_mass: Floats
    visible_L: NDArray[np.int64]

    @property
    def read_L(self) -> NDArray[np.bool_]:
        """The layers that were read: whatever a row shows there, it sees one key at least."""
        return self.visible_L > 0

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


def read_of(values: Doubles, attended: Attended) -> NDArray[np.bool_] | None:
    """Which figures of a row were read, whatever came of it; None: all of them."""
    read_L, (layers, heads) = attended.read_L, attended.max_score.shape
    if read_L.all():
        return None
    found = np.ones(len(values), np.bool_)
    found[: 2 * layers * heads] = np.tile(np.repeat(read_L, heads), 2)
    return found


def least_spreads(form: Form) -> Doubles:
    """Of every figure."""
    return np.array([LEAST_SPREADS[figure.name] for figure in figures(form)])


def z_of(values: Doubles, mean: Doubles, spread: Doubles) -> Doubles:
    """Of each figure of one request, in units of what requests may differ by; NaN: not known."""
    found: Doubles = np.abs(values - mean) / (MARGIN * spread)
    return found


class Requests:
    """Rows become readings of requests: the mean of a request's first 4, 64, 1,024 … rows.

    Of each figure those in which it was read: what is read in turn has its readings later, of as
    many rows as others.
    """

    FIRST, GROWTH, MOST = 4, 16, 256

    def __init__(self) -> None:
        # By request, those that were read last at the end; of each figure the rows in which it was
        # read, its sum, and the rows in which it was known.
        self._open: dict[str, tuple[Doubles, Doubles, Doubles]] = {}

    def add(
        self, request_id: str, values: Doubles, read: NDArray[np.bool_] | None = None
    ) -> Doubles | None:
        """The mean over the request's rows, of figures for which it is time (else NaN).

        None where it is time for none. `read`: which figures were (None: all); a row is none of
        the others', whatever stands there.
        """
        read = np.ones(len(values), np.bool_) if read is None else read
        known = read & np.isfinite(values)
        fresh = (np.zeros(len(values)), np.zeros(len(values)), np.zeros(len(values)))
        rows, total, counts = self._open.pop(request_id, fresh)
        rows, total, counts = rows + read, total + np.where(known, values, 0.0), counts + known
        self._open[request_id] = (rows, total, counts)
        if len(self._open) > self.MOST:
            del self._open[next(iter(self._open))]
        due = read & self._is_time(rows)
        if not due.any():
            return None
        with np.errstate(invalid="ignore"):
            mean: Doubles = total / np.where(due & (counts > 0), counts, np.nan)
        return mean

    def _is_time(self, rows: Doubles) -> NDArray[np.bool_]:
        due, most = self.FIRST, rows.max(initial=0.0)
        found: NDArray[np.bool_] = rows == due
        while due < most:
            due *= self.GROWTH
            found |= rows == due
        return found
