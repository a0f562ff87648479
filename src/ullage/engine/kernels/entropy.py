"""What attention rows are spread over, compiled: sums for entropy and masses, and attention itself.

One pass over keys in tiles; of each row and head only seven sums are kept, between calls too, so
that keys may come in pieces. What the sums mean is `probes.entropy`'s. Pieces of work are the heads
of one kv head at neighbouring rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.elementwise import exp
from ullage.engine.kernels.llvm import as_pointer
from ullage.engine.kernels.outer import COLUMNS, maximum, multiply
from ullage.engine.kernels.team import enter, finish, leave, take, wait

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# What `sums` holds of a row and head: highest score m, Σ e^(s−m) and Σ e^(s−m)(s−m) of all keys,
# the same of its band, and the score of the first token (−inf: not seen).
TOP, TOTAL, MOMENT, BAND_TOP, BAND_TOTAL, BAND_MOMENT, FIRST_SCORE = range(7)
NUM_SUMS = 7
# Rows of `tensors`.
QUERIES, KEYS, VALUES, OUTPUT = range(4)

# Keys of a tile; with rows of scores they stay in the second cache.
_TILE = 256
# Rows of a tile lie so far apart, in floats: at a power of two they would share a few cache sets.
_STRIDE = _TILE + 16
# Rows times heads of a piece of work.
_PIECE_ROWS = 96
# The score of what is kept hidden: its distance to any other is finite.
_HIDDEN = np.float32(-1e30)


def _highest(scores_S: Floats) -> np.float32:
    top = np.float32(-np.inf)
    for i in range(scores_S.shape[0]):
        top = maximum(top, scores_S[i])
    return top


def _weigh(scores_S: Floats, top: np.float32) -> tuple[np.float32, np.float32]:
    """Scores to weights e^(s − top), in place; their sum and Σ weight·(s − top)."""
    total, moment = np.float32(0), np.float32(0)
    for i in range(scores_S.shape[0]):
        distance = scores_S[i] - top
        # e^−87 is the least that `exp` knows; what is not finite makes NaN.
        bounded = max(np.float32(-87), distance)
        weight = exp(bounded) + np.float32(0) * distance
        scores_S[i] = weight
        total += weight
        moment += weight * bounded
    return total, moment


def _blank(scores_S: Floats) -> None:
    for i in range(scores_S.shape[0]):
        scores_S[i] = 0


def _bend(scores_S: Floats, soft_cap: np.float32, slope: np.float32, distance: int) -> None:
    """Soft cap and slope as the rule says; `distance` is the first position's from the row's."""
    if soft_cap > 0:
        for i in range(scores_S.shape[0]):
            # tanh(x) = 1 − 2 / (e^2x + 1); NaN stays what it is.
            x = scores_S[i] / soft_cap
            capped = np.float32(1) - np.float32(2) / (exp(x + x) + np.float32(1))
            scores_S[i] = soft_cap * (capped + np.float32(0) * x)
    if slope != 0:
        for i in range(scores_S.shape[0]):
            scores_S[i] += slope * np.float32(distance + i)


# Loops run from 0 to a length that numba sees: from elsewhere an index might be negative for all it
# knows, and no vectors are made of the loop (seven times the time).
highest, weigh = compiled(_highest, fast=True), compiled(_weigh, fast=True)
bend, blank = compiled(_bend, fast=True), compiled(_blank)


def _count(sums_3: Doubles, top: np.float32, total: np.float32, moment: np.float32) -> np.float64:
    """Add sums relative to `top`, at least the highest so far; by what earlier weights shrink."""
    factor = np.float64(1)
    if sums_3[1] != 0 and sums_3[0] != top:
        shift = sums_3[0] - top
        factor = np.exp(shift)
        sums_3[2] = factor * (sums_3[2] + shift * sums_3[1])
        sums_3[1] *= factor
    sums_3[0] = top
    sums_3[1] += total
    sums_3[2] += moment
    return factor


count_in = compiled(_count)


def _count_range(scores_S: Floats, sums_3: Doubles) -> np.float64:
    """Scores become weights and are counted in; zeros where all is hidden."""
    own = highest(scores_S)
    if own <= _HIDDEN:
        blank(scores_S)
        return np.float64(1)
    top = np.float32(max(sums_3[0], own)) if own == own else own
    total, moment = weigh(scores_S, top)
    return count_in(sums_3, top, total, moment)


count_range = compiled(_count_range)


def _see_row(
    scores_S: Floats, at: int, count: int, low: int, high: int, position: int, first_token: int,
    band: int, keep_S: npt.NDArray[np.bool_], soft_cap: np.float32, slope: np.float32,
    room_B: Floats, sums_X: Doubles,
) -> np.float64:  # fmt: skip
    """A row's products with keys at … at+count−1, of which it sees low … high−1, become weights.

    All positions. Hidden ones weigh 0. Returns by what the row's earlier weights shrink.
    """
    first, last = max(low - at, 0), min(high - at, count)
    if first >= last:
        blank(scores_S[:count])
        return np.float64(1)
    seen_S = scores_S[first:last]
    bend(seen_S, soft_cap, slope, at + first - position)
    if keep_S.shape[0] > 0:
        for i in range(first, last):
            if not keep_S[at + i]:
                scores_S[i] = _HIDDEN
    if first <= first_token - at < last and scores_S[first_token - at] != _HIDDEN:
        sums_X[FIRST_SCORE] = scores_S[first_token - at]
    near, far = max(first, position - band - at), min(last, position + band + 1 - at)
    if near < far:
        for i in range(near, far):
            room_B[i - near] = scores_S[i]
        count_range(room_B[: far - near], sums_X[BAND_TOP : BAND_TOP + 3])
    factor = count_range(seen_S, sums_X[TOP : TOP + 3])
    blank(scores_S[:first])
    blank(scores_S[last:count])
    return factor


see_row = compiled(_see_row)


def _row(tensors: Ints, which: int, token: int, head: int, dim: int) -> Floats:
    """Elements of one token and head of a tensor whose address and strides are tensors[which]."""
    place = tensors[which, 0] + 4 * (token * tensors[which, 1] + head * tensors[which, 2])
    return numba.carray(as_pointer(place), (dim,), np.float32)  # type: ignore[no-any-return]


row_at = compiled(_row)


def _turn_keys(
    tensors: Ints, first: int, count: int, head: int, dim: int, turned_DS: Floats
) -> None:
    """Keys of one head side by side, zeros where there are none."""
    for i in range(count):
        k_D = row_at(tensors, KEYS, first + i, head, dim)
        for d in range(dim):
            turned_DS[d, i] = k_D[d]
    for d in range(dim):
        blank(turned_DS[d, count:_TILE])


turn_keys = compiled(_turn_keys)


def _see_piece(
    row: int, last_row: int, head: int, group: int, dim: int, width: int, num_keys: int,
    tensors: Ints, start: int, rows_R: Ints, lows_R: Ints, highs_R: Ints, first_token: int,
    band: int, keep_S: npt.NDArray[np.bool_], scale: np.float32, soft_cap: np.float32,
    slopes_H: Floats, q_ND: Floats, turned_DS: Floats, scores_NS: Floats, room_B: Floats,
    values_SD: Floats, out_ND: Floats, sums_RHX: Doubles,
) -> None:  # fmt: skip
    """Rows row … last_row−1 and kv head `head`; `q` … `out` are only room to work."""
    num = (last_row - row) * group
    for n in range(num):
        q_D = row_at(tensors, QUERIES, row + n // group, head * group + n % group, dim)
        for d in range(dim):
            q_ND[n, d] = q_D[d] * scale
        if width > 0:
            out_D = row_at(tensors, OUTPUT, row + n // group, head * group + n % group, width)
            for d in range(width):
                out_ND[n, d] = out_D[d]
    at = max(start, lows_R[row:last_row].min())
    end = min(start + num_keys, highs_R[row:last_row].max())
    while at < end:
        count = min(_TILE, end - at)
        turn_keys(tensors, at - start, count, head, dim, turned_DS)
        multiply(
            q_ND.ctypes.data, dim, turned_DS.ctypes.data, _STRIDE, num, dim, count,
            scores_NS.ctypes.data, _STRIDE, 0,
        )  # fmt: skip
        for n in range(num):
            r, h = row + n // group, head * group + n % group
            slope = slopes_H[h] if slopes_H.shape[0] > 0 else np.float32(0)
            factor = see_row(
                scores_NS[n], at, count, lows_R[r], highs_R[r], rows_R[r], first_token, band,
                keep_S, soft_cap, slope, room_B, sums_RHX[r, h],
            )  # fmt: skip
            if width > 0 and factor != 1:
                for d in range(width):
                    out_ND[n, d] *= np.float32(factor)
        if width > 0:
            for i in range(count):
                v_D = row_at(tensors, VALUES, at - start + i, head, width)
                for d in range(width):
                    values_SD[i, d] = v_D[d]
            multiply(
                scores_NS.ctypes.data, _STRIDE, values_SD.ctypes.data, values_SD.shape[1], num,
                count, width, out_ND.ctypes.data, out_ND.shape[1], 1,
            )  # fmt: skip
        at += count
    if width > 0:
        for n in range(num):
            out_D = row_at(tensors, OUTPUT, row + n // group, head * group + n % group, width)
            for d in range(width):
                out_D[d] = out_ND[n, d]


see_piece = compiled(_see_piece)


def _see_keys(
    counters: Ints, epoch: int, tensors: Ints, kv_heads: int, dim: int, width: int, num_keys: int,
    start: int, rows_R: Ints, lows_R: Ints, highs_R: Ints, first_token: int, band: int,
    keep_S: npt.NDArray[np.bool_], scale: np.float32, soft_cap: np.float32, slopes_H: Floats,
    sums_RHX: Doubles,
) -> None:  # fmt: skip
    """Count keys at positions start … into the sums of all rows, which see low … high−1 each.

    `tensors` [4, 3]: address and strides (in elements) of tokens and heads of float32 queries,
    keys, values and output; `dim` and `width` of a query and a value lie side by side. Width 0: no
    values. To `output` weights times values are added, not yet divided by Σ e^(s−m). `keep` and
    slopes of size 0: none; soft cap 0: none.
    """
    if not enter(counters, epoch):
        return
    rows, heads = sums_RHX.shape[0], sums_RHX.shape[1]
    group = heads // kv_heads
    each = max(1, _PIECE_ROWS // group)
    blocks = (rows + each - 1) // each
    padded = (width + COLUMNS - 1) // COLUMNS * COLUMNS
    q_ND, turned_DS = (
        np.empty((each * group, dim), np.float32),
        np.empty((dim, _STRIDE), np.float32),
    )
    scores_NS = np.empty((each * group, _STRIDE), np.float32)
    room_B = np.empty(2 * band + 1, np.float32)
    values_SD = np.zeros((_TILE, padded), np.float32)
    out_ND = np.zeros((each * group, padded), np.float32)
    pieces = blocks * kv_heads
    while True:
        piece = take(counters, 0)
        if piece >= pieces:
            break
        # The last rows see most: begun first, so that none is left to one thread at the end.
        row = (blocks - 1 - piece // kv_heads) * each
        see_piece(
            row, min(rows, row + each), piece % kv_heads, group, dim, width, num_keys, tensors,
            start, rows_R, lows_R, highs_R, first_token, band, keep_S, scale, soft_cap, slopes_H,
            q_ND, turned_DS, scores_NS, room_B, values_SD, out_ND, sums_RHX,
        )  # fmt: skip
        finish(counters, 0)
    wait(counters, 0, pieces)
    leave(counters)


see_keys: Any = compiled(_see_keys)
