"""Attention of single rows over paged KV, compiled: any storage, any rule, any part of a context.

`attend_range` does a part of one sequence's context for the query heads of one KV head,
`merge_ranges` joins parts; `attend_decode` is both for a whole context. Storage is what `kv` lays
out: [blocks, block_size, kv_heads, width], scales [blocks, block_size, kv_heads] of patterns of
bfloat16 (no blocks where there are none). Nothing is allocated here.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.elementwise import exp
from ullage.engine.kernels.hadamard import turn
from ullage.engine.kernels.vectors import (
    bfloat16_at,
    fma8,
    load8,
    scratch,
    splat8,
    store8,
    store_sums4,
    sum8,
    zero8,
)

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# Positions looked at together: their scores stay on the stack, their keys in the nearest cache.
TILE = 64
# What `state` keeps of a head beside its sums: the highest score so far and the sum of weights.
EXTRA = 2


def _scores(
    q: Floats, first: int, dim: int, keys: Any, rows_S: Rows, count: int, scores_S: Floats
) -> None:
    """scores[i] = q[first : first + dim] · keys of row rows[i], unscaled. dim: a multiple of 8."""
    width = keys.shape[3]
    i = 0
    while i + 4 <= count:
        a, b, c, d = zero8(), zero8(), zero8(), zero8()
        k_a, k_b = rows_S[i] * width, rows_S[i + 1] * width
        k_c, k_d = rows_S[i + 2] * width, rows_S[i + 3] * width
        for n in range(0, dim, 8):
            x = load8(q, first, n, dim)
            a = fma8(x, load8(keys, k_a, n, width), a)
            b = fma8(x, load8(keys, k_b, n, width), b)
            c = fma8(x, load8(keys, k_c, n, width), c)
            d = fma8(x, load8(keys, k_d, n, width), d)
        store_sums4(a, b, c, d, scores_S, i)
        i += 4
    while i < count:
        a = zero8()
        for n in range(0, dim, 8):
            a = fma8(load8(q, first, n, dim), load8(keys, rows_S[i] * width, n, width), a)
        scores_S[i] = sum8(a)
        i += 1


def _add_values(
    weights_S: Floats, count: int, values: Any, rows_S: Rows, factor: np.float32, dim: int,
    sums_D: Floats,
) -> None:  # fmt: skip
    """sums = factor·sums + Σ weights[i]·values of row rows[i]. dim: a multiple of 8."""
    width = values.shape[3]
    old = splat8(factor)
    n = 0
    while n + 64 <= dim:
        a = fma8(old, load8(sums_D, 0, n, dim), zero8())
        b = fma8(old, load8(sums_D, 0, n + 8, dim), zero8())
        c = fma8(old, load8(sums_D, 0, n + 16, dim), zero8())
        d = fma8(old, load8(sums_D, 0, n + 24, dim), zero8())
        e = fma8(old, load8(sums_D, 0, n + 32, dim), zero8())
        f = fma8(old, load8(sums_D, 0, n + 40, dim), zero8())
        g = fma8(old, load8(sums_D, 0, n + 48, dim), zero8())
        h = fma8(old, load8(sums_D, 0, n + 56, dim), zero8())
        for i in range(count):
            w, v = splat8(weights_S[i]), rows_S[i] * width
            a = fma8(w, load8(values, v, n, width), a)
            b = fma8(w, load8(values, v, n + 8, width), b)
            c = fma8(w, load8(values, v, n + 16, width), c)
            d = fma8(w, load8(values, v, n + 24, width), d)
            e = fma8(w, load8(values, v, n + 32, width), e)
            f = fma8(w, load8(values, v, n + 40, width), f)
            g = fma8(w, load8(values, v, n + 48, width), g)
            h = fma8(w, load8(values, v, n + 56, width), h)
        store8(sums_D, n, a)
        store8(sums_D, n + 8, b)
        store8(sums_D, n + 16, c)
        store8(sums_D, n + 24, d)
        store8(sums_D, n + 32, e)
        store8(sums_D, n + 40, f)
        store8(sums_D, n + 48, g)
        store8(sums_D, n + 56, h)
        n += 64
    while n < dim:
        a = fma8(old, load8(sums_D, 0, n, dim), zero8())
        for i in range(count):
            a = fma8(splat8(weights_S[i]), load8(values, rows_S[i] * width, n, width), a)
        store8(sums_D, n, a)
        n += 8


def _bend(
    scores_S: Floats, count: int, rows_S: Rows, scales: npt.NDArray[np.uint16],
    scale: np.float32, soft_cap: np.float32, slope: np.float32, distance: int,
) -> np.float32:  # fmt: skip
    """From products to scores as the rule says, in place; returns the highest.

    `distance` is the first position's from the row's own, at most 0.
    """
    if scales.shape[0] > 0:
        for i in range(count):
            scores_S[i] *= bfloat16_at(scales, rows_S[i])
    if soft_cap > 0:
        for i in range(count):
            # tanh(x) = 1 − 2 / (e^2x + 1); NaN stays what it is.
            x = scores_S[i] * scale / soft_cap
            capped = np.float32(1) - np.float32(2) / (exp(x + x) + np.float32(1))
            scores_S[i] = soft_cap * (capped + np.float32(0) * x)
    else:
        for i in range(count):
            scores_S[i] *= scale
    if slope != 0:
        for i in range(count):
            scores_S[i] += slope * np.float32(distance + i)
    top = np.float32(-np.inf)
    for i in range(count):
        top = max(top, scores_S[i])
    return top


def _weigh(
    scores_S: Floats, count: int, top: np.float32, rows_S: Rows, scales: npt.NDArray[np.uint16]
) -> np.float32:
    """Scores to weights e^(score − top), in place; returns their sum.

    The weights are then multiplied with the scales of the values, where there are any. A score
    that is not finite makes a weight and the sum NaN.
    """
    total = np.float32(0)
    for i in range(count):
        x = scores_S[i] - top
        weight = exp(x) + np.float32(0) * x
        scores_S[i] = weight
        total += weight
    if scales.shape[0] > 0:
        for i in range(count):
            scores_S[i] *= bfloat16_at(scales, rows_S[i])
    return total


score_rows, add_values = compiled(_scores), compiled(_add_values)
bend, weigh = compiled(_bend, fast=True), compiled(_weigh, fast=True)


def _attend_range(
    q_O: Floats, kv_head: int, group: int, keys: Any, key_scales: npt.NDArray[np.uint16],
    values: Any, value_scales: npt.NDArray[np.uint16], table_W: npt.NDArray[np.int32],
    first: int, last: int, position: int, scale: np.float32, soft_cap: np.float32,
    slopes_H: Floats, state_GX: Floats,
) -> None:  # fmt: skip
    """What positions first … last−1 give the `group` query heads of `kv_head`, into `state`.

    q is one row [heads × dim] at `position`, dim a multiple of 8 (of 16 for int4). soft_cap 0:
    none; slopes empty: none. state [group, dim + EXTRA]: per head the weighted sum of values, the
    highest score and the sum of weights, for `merge_ranges`. Blocks that hold none of the range are
    not looked at, nor are positions outside it. With int4, q's heads come turned (`hadamard`), as
    the keys are stored; what is left in `state` is as if nothing had been turned.
    """
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    dim = state_GX.shape[1] - EXTRA
    rows_S = numba.carray(scratch(64), (TILE,), np.int64)
    weights_S = numba.carray(scratch(32), (TILE,), np.float32)
    for g in range(group):
        state_GX[g, :dim] = 0
        state_GX[g, dim] = -np.inf
        state_GX[g, dim + 1] = 0
    at = first
    while at < last:
        count = min(TILE, last - at)
        index, offset = at // block_size, at % block_size
        for i in range(count):
            rows_S[i] = (np.int64(table_W[index]) * block_size + offset) * kv_heads + kv_head
            offset += 1
            if offset == block_size:
                index, offset = index + 1, 0
        for g in range(group):
            head = kv_head * group + g
            score_rows(q_O, head * dim, dim, keys, rows_S, count, weights_S)
            slope = slopes_H[head] if slopes_H.shape[0] > 0 else np.float32(0)
            highest = bend(
                weights_S, count, rows_S, key_scales, scale, soft_cap, slope, at - position
            )
            top = max(state_GX[g, dim], highest)
            factor = exp(state_GX[g, dim] - top)
            total = weigh(weights_S, count, top, rows_S, value_scales)
            add_values(weights_S, count, values, rows_S, factor, dim, state_GX[g])
            state_GX[g, dim] = top
            state_GX[g, dim + 1] = factor * state_GX[g, dim + 1] + total
        at += count
    if values.shape[3] != dim:
        for g in range(group):
            turn(state_GX[g, :dim])


def _merge_ranges(states_RGX: Floats, kv_head: int, out_O: Floats) -> None:
    """The heads of `kv_head` in a row [heads × dim], from the states of all its ranges.

    A range that was empty has the sum of weights 0 and counts for nothing.
    """
    ranges, group, dim = states_RGX.shape[0], states_RGX.shape[1], states_RGX.shape[2] - EXTRA
    for g in range(group):
        top = np.float32(-np.inf)
        for r in range(ranges):
            top = max(top, states_RGX[r, g, dim])
        out_D = out_O[(kv_head * group + g) * dim : (kv_head * group + g + 1) * dim]
        out_D[:] = 0
        total = np.float32(0)
        for r in range(ranges):
            state_X = states_RGX[r, g]
            if state_X[dim + 1] == 0:
                continue
            factor = exp(state_X[dim] - top)
            total += factor * state_X[dim + 1]
            for n in range(dim):
                out_D[n] += factor * state_X[n]
        for n in range(dim):
            out_D[n] /= total


attend_range, merge_ranges = compiled(_attend_range), compiled(_merge_ranges)


def _attend_decode(
    q_O: Floats, out_O: Floats, kv_head: int, group: int, keys: Any,
    key_scales: npt.NDArray[np.uint16], values: Any, value_scales: npt.NDArray[np.uint16],
    table_W: npt.NDArray[np.int32], start: int, context: int, scale: np.float32,
    soft_cap: np.float32, slopes_H: Floats, states_1GX: Floats,
) -> None:  # fmt: skip
    """Positions start … context−1 whole; `states` [1, group, dim + EXTRA] is only room to work."""
    attend_range(
        q_O, kv_head, group, keys, key_scales, values, value_scales, table_W, start, context,
        context - 1, scale, soft_cap, slopes_H, states_1GX[0],
    )  # fmt: skip
    merge_ranges(states_1GX, kv_head, out_O)


attend_decode = compiled(_attend_decode)
