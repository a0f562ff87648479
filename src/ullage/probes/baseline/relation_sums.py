"""Sums, sizes and differences of one row in all layers at once: what `relations` is made of.

Holds the arithmetic in numpy. Which place is held against which is `relations`'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ullage.probes.baseline.sketch import Doubles, Floats, Form

Numbers = NDArray[Any]
"""float32 or float64."""

_GROUP = 64
"""Inputs that share a scale where activations are rounded to int8 (`kernels.llvm.GROUP`)."""
_SMALLEST_NORMAL = np.float32(2.0**-126)
_FLOAT32_MOST = float(np.finfo(np.float32).max)
TINY = 1e-30
# Of a norm's output in one channel: below so much of the row's rms its own digits do not count.
_NORM_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    name: str
    residual: Doubles
    size: Doubles
    floor: Doubles
    made: Doubles
    said: Doubles
    adapted: Doubles
    channels: NDArray[np.int64]


def part_of(
    name: str, made: object, said: object, size: object, floor: object = 0.0, adapted: object = 0.0
) -> Part:
    wide = np.atleast_1d(np.asarray(made, np.float64))
    rest = [np.broadcast_to(np.asarray(one, np.float64), wide.shape) for one in (said, size)]
    more = [np.broadcast_to(np.asarray(one, np.float64), wide.shape) for one in (floor, adapted)]
    nowhere = np.full(wide.shape, -1, np.int64)
    return Part(name, np.abs(wide - rest[0]), rest[1], more[0], wide, rest[0], more[1], nowhere)


def unread(name: str, shape: tuple[int, ...]) -> Part:
    return part_of(name, np.zeros(shape), 0.0, np.nan)


def of_unattended(mixed_LHD: Numbers) -> Doubles:
    """Of attention that was not computed again [layers, heads]: 0, no reading; NaN, which is one,
    where it is not finite itself: where that begins is told whosever turn it was."""
    found: Doubles = np.where(np.isfinite(mixed_LHD).all(-1), 0.0, np.nan)
    return found


def norm_part(
    name: str, form: Form, x_LE: Numbers, out_LE: Numbers, weight_LE: Numbers, bias_LE: Numbers
) -> Part:
    """The channel that is furthest from x·w/rms (+ b), in parts of what it should be."""
    wide = x_LE.astype(np.float64)
    if form.norm_kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    hat = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + form.norm_eps)
    scaled = hat * weight_LE
    wanted = scaled + bias_LE
    rms = np.sqrt((wanted**2).mean(-1, keepdims=True))
    sizes = np.abs(scaled) + np.abs(bias_LE) + _NORM_FLOOR * rms + TINY
    off = np.abs(out_LE - wanted) / sizes
    # NaN is the largest of all.
    worst = np.argmax(np.where(np.isnan(off), np.inf, off), axis=-1)
    at = np.arange(len(worst))
    made, said = out_LE[at, worst].astype(np.float64), wanted[at, worst]
    ones, zeros = np.ones(len(worst)), np.zeros(len(worst))
    # Where squares do not fit float32 a healthy norm gives anything: it is not looked at.
    ones[(wide**2).sum(-1) > _FLOAT32_MOST] = np.nan
    return Part(name, off[at, worst], ones, zeros, made, said, zeros, worst.astype(np.int64))


def applied(sums: Numbers, x_LI: Numbers) -> Numbers:
    """r·W of each layer times x: [layers, …, in] × [layers, in] → [layers, …]."""
    if sums.ndim == 3:
        heads: Numbers = np.matmul(sums, x_LI[:, :, None])[..., 0]
        return heads
    summed: Numbers = np.einsum("li,li->l", sums, x_LI)
    return summed


def rounded(x_LI: Floats) -> Floats:
    """To int8 by groups, as `kernels.elementwise.quantize` does it, in its float32 bits."""
    short = -x_LI.shape[-1] % _GROUP
    padded = np.pad(x_LI.astype(np.float32), [(0, 0)] * (x_LI.ndim - 1) + [(0, short)])
    groups = padded.reshape(*x_LI.shape[:-1], -1, _GROUP)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        whole = np.rint(groups * (np.float32(127) / largest)) * (largest / np.float32(127))
    whole = np.where(largest < _SMALLEST_NORMAL, np.float32(0), whole)
    found: Floats = np.where(np.isfinite(largest), whole, np.float32(np.nan))
    return found.reshape(padded.shape)[..., : x_LI.shape[-1]]


def by_group(sums: Numbers) -> Numbers:
    """Sums of squares over groups of inputs."""
    short = -sums.shape[-1] % _GROUP
    padded = np.pad(sums, [(0, 0)] * (sums.ndim - 1) + [(0, short)])
    squares: Numbers = (padded.reshape(*sums.shape[:-1], -1, _GROUP) ** 2).sum(-1)
    return squares


def sizes(squares: Numbers, x_LI: Numbers) -> Numbers:
    """√Σ (largest input of a group)² · Σ of the group's squares: what rounding is a share of."""
    short = -x_LI.shape[-1] % _GROUP
    padded = np.pad(x_LI, [(0, 0)] * (x_LI.ndim - 1) + [(0, short)])
    largest: Numbers = np.abs(padded.reshape(*x_LI.shape[:-1], -1, _GROUP)).max(-1) ** 2
    if squares.ndim == 3:
        total: Numbers = np.matmul(squares, largest[:, :, None])[..., 0]
    else:
        total = (squares * largest).sum(-1)
    return np.sqrt(total) + np.float32(TINY)


def length(values: Numbers) -> Numbers:
    return np.asarray(np.linalg.norm(values, axis=-1))


def rotated(heads: Doubles, cos: Doubles, sin: Doubles, interleaved: bool) -> Doubles:
    """Pairs of the first dimensions turned; see `positions.rope.rotate`."""
    found, pairs = heads.copy(), len(cos)
    if interleaved:
        a, b = heads[..., 0 : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
        found[..., 0 : 2 * pairs : 2] = a * cos - b * sin
        found[..., 1 : 2 * pairs : 2] = b * cos + a * sin
        return found
    a, b = heads[..., :pairs], heads[..., pairs : 2 * pairs]
    found[..., :pairs] = a * cos - b * sin
    found[..., pairs : 2 * pairs] = b * cos + a * sin
    return found
