"""Attention of a batch over paged KV in one compiled call that all threads share.

Rows come in blocks of one sequence's neighbours: a decode is a block of one row, a prefill chunk
many of them, so that keys which are near serve several rows. Holds the loop over blocks, heads and
parts of contexts; the arithmetic is `attention`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.attention import (
    EXTRA,
    TILE,
    add_values,
    bend,
    merge_ranges,
    score_rows,
    weigh,
)
from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.elementwise import exp
from ullage.engine.kernels.hadamard import turn
from ullage.engine.kernels.team import enter, finish, leave, take, wait
from ullage.engine.kernels.vectors import scratch

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# Rows of a block at most: with more, their states no longer lie in the nearest cache.
MOST_BLOCK_ROWS = 16
# Columns of the table of blocks: its first row, how many, the first one's position, its sequence.
FIRST, COUNT, POSITION, SEQUENCE = range(4)


def _attend_block(
    block_4: Ints, kv_head: int, group: int, part: int, parts: int, q_TO: Floats, keys: Any,
    key_scales: npt.NDArray[np.uint16], values: Any, value_scales: npt.NDArray[np.uint16],
    table_W: npt.NDArray[np.int32], scale: np.float32, soft_cap: np.float32, window: int,
    slopes_H: Floats, states_RGX: Floats,
) -> None:  # fmt: skip
    """Part `part` of `parts` of what a block's rows see, into their states [rows, group, …].

    With int4 the heads of q come turned, as `attention.attend_range` wants them.
    """
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    dim = states_RGX.shape[2] - EXTRA
    rows_S = numba.carray(scratch(64), (TILE,), np.int64)
    weights_S = numba.carray(scratch(32), (TILE,), np.float32)
    count, position = block_4[COUNT], block_4[POSITION]
    for r in range(count):
        for g in range(group):
            states_RGX[r, g, :dim] = 0
            states_RGX[r, g, dim] = -np.inf
            states_RGX[r, g, dim + 1] = 0
    start = max(0, position - window + 1) if window > 0 else 0
    end = position + count
    each = (end - start + parts - 1) // parts
    at, last = start + part * each, min(end, start + (part + 1) * each)
    while at < last:
        num = min(TILE, last - at)
        index, offset = at // block_size, at % block_size
        for i in range(num):
            rows_S[i] = (np.int64(table_W[index]) * block_size + offset) * kv_heads + kv_head
            offset += 1
            if offset == block_size:
                index, offset = index + 1, 0
        for r in range(count):
            own = position + r
            low = max(0, own - window + 1 - at) if window > 0 else 0
            seen = min(num, own + 1 - at) - low
            if seen <= 0:
                continue
            for g in range(group):
                head = kv_head * group + g
                q_O, state_X = q_TO[block_4[FIRST] + r], states_RGX[r, g]
                score_rows(q_O, head * dim, dim, keys, rows_S[low:], seen, weights_S)
                slope = slopes_H[head] if slopes_H.shape[0] > 0 else np.float32(0)
                highest = bend(
                    weights_S, seen, rows_S[low:], key_scales, scale, soft_cap, slope,
                    at + low - own,
                )  # fmt: skip
                top = max(state_X[dim], highest)
                factor = exp(state_X[dim] - top)
                total = weigh(weights_S, seen, top, rows_S[low:], value_scales)
                add_values(weights_S, seen, values, rows_S[low:], factor, dim, state_X)
                state_X[dim] = top
                state_X[dim + 1] = factor * state_X[dim + 1] + total
        at += num
    if values.shape[3] != dim:
        for r in range(count):
            for g in range(group):
                turn(states_RGX[r, g, :dim])


attend_block = compiled(_attend_block)


def _attend_batch(
    counters: Ints, epoch: int, blocks_N4: Ints, q_TO: Floats, group: int, keys: Any,
    key_scales: npt.NDArray[np.uint16], values: Any, value_scales: npt.NDArray[np.uint16],
    tables_BW: npt.NDArray[np.int32], scale: np.float32, soft_cap: np.float32, window: int,
    slopes_H: Floats, parts: int, states_TKPGX: Floats, out_TO: Floats,
) -> None:  # fmt: skip
    """out[row] of all blocks' rows, which write their keys and values before. window 0: none."""
    if not enter(counters, epoch):
        return
    kv_heads = keys.shape[2]
    # Neighbouring pieces are heads of the same positions, which lie together in memory.
    pieces = blocks_N4.shape[0] * parts * kv_heads
    while True:
        piece = take(counters, 0)
        if piece >= pieces:
            break
        n, rest = piece // (parts * kv_heads), piece % (parts * kv_heads)
        part, head = rest // kv_heads, rest % kv_heads
        block_4 = blocks_N4[n]
        first, last = block_4[FIRST], block_4[FIRST] + block_4[COUNT]
        attend_block(
            block_4, head, group, part, parts, q_TO, keys, key_scales, values, value_scales,
            tables_BW[block_4[SEQUENCE]], scale, soft_cap, window, slopes_H,
            states_TKPGX[first:last, head, part],
        )  # fmt: skip
        if parts == 1:
            for row in range(first, last):
                merge_ranges(states_TKPGX[row, head], head, out_TO[row])
        finish(counters, 0)
    wait(counters, 0, pieces)
    if parts > 1:
        while True:
            n = take(counters, 1)
            if n >= blocks_N4.shape[0]:
                break
            for row in range(blocks_N4[n, FIRST], blocks_N4[n, FIRST] + blocks_N4[n, COUNT]):
                for head in range(kv_heads):
                    merge_ranges(states_TKPGX[row, head], head, out_TO[row])
            finish(counters, 1)
        wait(counters, 1, blocks_N4.shape[0])
    leave(counters)


attend_batch = compiled(_attend_batch)
