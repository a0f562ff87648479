"""Products of some rows with a tile of a weight matrix: int8, float32 or bfloat16 weights.

Weights lie [out, in] in memory given by address; rows are taken eight, four, two or one at a time,
so that a weight once read serves all of them, while the next tile's are on their way. Which blocks
are fastest was measured: for floats four rows by three outputs (twelve sums, three weights and one
of x are all registers of AVX2; eight rows in steps of 4 KiB push each other out of the cache).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.llvm import BFLOAT16, CACHE_LINE, FLOAT32, GROUP, dot_block, int8_block

Floats = npt.NDArray[np.float32]

# The kinds of weight as numbers, which is all that compiled code can ask.
KIND_FLOAT32, KIND_BFLOAT16, KIND_INT8 = 0, 1, 2
WEIGHT_BYTES = {KIND_FLOAT32: 4, KIND_BFLOAT16: 2, KIND_INT8: 1}
# `size`, the width of a weight matrix, is a multiple of this.
WIDTH_MULTIPLE = 32
MOST_ROWS = 8
# A tile's weights stay near while the rows pass over it, and are so few that threads which share a
# matrix finish together.
_TILE_BYTES = 36864
# Of wider rows only so much at a time: four rows of x and three of float32 weights then stay in the
# first cache.
_DEPTH = 768

_int8_8, _int8_4, _int8_2, _int8_1 = int8_block(8), int8_block(4), int8_block(2), int8_block(1)
_float32_4_3, _float32_4 = dot_block(FLOAT32, 4, 3), dot_block(FLOAT32, 4, 1)
_float32_2, _float32_1 = dot_block(FLOAT32, 2, 1, 4), dot_block(FLOAT32, 1, 1, 4)
_bfloat16_4_3, _bfloat16_4 = dot_block(BFLOAT16, 4, 3), dot_block(BFLOAT16, 4, 1)
_bfloat16_2, _bfloat16_1 = dot_block(BFLOAT16, 2, 1, 4), dot_block(BFLOAT16, 1, 1, 4)


def _num_groups(size: int) -> int:
    """Scales of a row of x that meets int8 weights."""
    return (size + GROUP - 1) // GROUP


num_groups = compiled(_num_groups)


def _weight_bytes(kind: int, size: int) -> int:
    """Of one output's weights."""
    if kind == KIND_INT8:
        return size
    return size * (4 if kind == KIND_FLOAT32 else 2)


weight_bytes = compiled(_weight_bytes)


def _tile_outputs(kind: int, size: int) -> int:
    """Outputs of one tile of a matrix `size` wide."""
    outputs = min(64, _TILE_BYTES // weight_bytes(kind, size))
    return max(4, outputs) if kind == KIND_INT8 else max(1, outputs // 3) * 3


def _dots_int8(
    weight: int, size: int, outputs: int, x: int, scales: int, rows: int, out: int,
    out_stride: int, ahead: int, share: int,
) -> int:  # fmt: skip
    """float32 out[r, o] = Σ w[o]·x[r], int8 by int16 with x's scales by groups; all addresses.

    Memory from `ahead` on is fetched meanwhile; returns where the next such call goes on.
    """
    groups = num_groups(size)
    for o in range(outputs):
        w, y = weight + o * size, out + 4 * o
        if rows == 8:
            _int8_8(w, x, size, size, scales, groups, y, out_stride, ahead, share)
        elif rows == 4:
            _int8_4(w, x, size, size, scales, groups, y, out_stride, ahead, share)
        elif rows == 2:
            _int8_2(w, x, size, size, scales, groups, y, out_stride, ahead, share)
        else:
            _int8_1(w, x, size, size, scales, groups, y, out_stride, ahead, share)
        ahead += size * share // CACHE_LINE
    return ahead


def _dots_float32(
    weight: int, size: int, outputs: int, x: int, rows: int, out: int, out_stride: int, ahead: int,
    share: int,
) -> int:  # fmt: skip
    """float32 out[r, o] = Σ w[o]·x[r]; `ahead` as in `dots_int8`."""
    if rows >= 4:
        for row in range(0, rows, 4):
            y_4 = out + 4 * row * out_stride
            for i in range(0, size, _DEPTH):
                x_4, depth = x + 4 * (row * size + i), min(_DEPTH, size - i)
                each = 4 * depth * share // CACHE_LINE
                threes = outputs // 3 * 3
                for o in range(0, threes, 3):
                    w, y = weight + 4 * (o * size + i), y_4 + 4 * o
                    _float32_4_3(w, x_4, size, depth, i, y, out_stride, ahead, share)
                    ahead += 3 * each
                for o in range(threes, outputs):
                    w, y = weight + 4 * (o * size + i), y_4 + 4 * o
                    _float32_4(w, x_4, size, depth, i, y, out_stride, ahead, share)
                    ahead += each
        return ahead
    for o in range(outputs):
        w, y = weight + 4 * o * size, out + 4 * o
        if rows == 2:
            _float32_2(w, x, size, size, 0, y, out_stride, ahead, share)
        else:
            _float32_1(w, x, size, size, 0, y, out_stride, ahead, share)
        ahead += 4 * size * share // CACHE_LINE
    return ahead


def _dots_bfloat16(
    weight: int, size: int, outputs: int, x: int, rows: int, out: int, out_stride: int, ahead: int,
    share: int,
) -> int:  # fmt: skip
    """As `dots_float32`, of weights that are the upper halves of float32."""
    if rows >= 4:
        for row in range(0, rows, 4):
            y_4 = out + 4 * row * out_stride
            for i in range(0, size, _DEPTH):
                x_4, depth = x + 4 * (row * size + i), min(_DEPTH, size - i)
                each = 2 * depth * share // CACHE_LINE
                threes = outputs // 3 * 3
                for o in range(0, threes, 3):
                    w, y = weight + 2 * (o * size + i), y_4 + 4 * o
                    _bfloat16_4_3(w, x_4, size, depth, i, y, out_stride, ahead, share)
                    ahead += 3 * each
                for o in range(threes, outputs):
                    w, y = weight + 2 * (o * size + i), y_4 + 4 * o
                    _bfloat16_4(w, x_4, size, depth, i, y, out_stride, ahead, share)
                    ahead += each
        return ahead
    for o in range(outputs):
        w, y = weight + 2 * o * size, out + 4 * o
        if rows == 2:
            _bfloat16_2(w, x, size, size, 0, y, out_stride, ahead, share)
        else:
            _bfloat16_1(w, x, size, size, 0, y, out_stride, ahead, share)
        ahead += 2 * size * share // CACHE_LINE
    return ahead


_int8, _float32 = compiled(_dots_int8), compiled(_dots_float32)
_bfloat16 = compiled(_dots_bfloat16)


def _rows_at_once(rows: int) -> int:
    """The largest block of rows that there is code for."""
    if rows >= 8:
        return 8
    if rows >= 4:
        return 4
    return 2 if rows >= 2 else 1


def _share_ahead(kind: int, rows: int) -> int:
    """What each pass over a tile fetches of the next one, in bytes for every 64 of its own.

    As many passes as there are read a tile's weights once each, and together the next tile's.
    """
    rest = rows % 8
    passes = rows // 8 * (1 if kind == KIND_INT8 else 2) + rest // 4 + rest % 4 // 2 + rest % 2
    return (CACHE_LINE + passes - 1) // max(1, passes)


rows_at_once, share_ahead = compiled(_rows_at_once), compiled(_share_ahead)


def _tile(
    kind: int, weight: int, scales_O: Floats, biases_O: Floats, size: int, first: int, last: int,
    x: int, x_scales: int, rows: int, out_RN: Floats, ahead: int, share: int,
) -> int:  # fmt: skip
    """Outputs first … last−1 of `rows` (at most 8, `rows_at_once`) into out_RN[r, o − first].

    x is the address of rows [rows, size]: int16 with scales [rows, groups] at x_scales for int8
    weights, else float32. Arrays of size 0 stand for scales and biases that there are none of.
    Out's rows may be wider. Meanwhile memory from `ahead` on is fetched, `share` bytes for every 64
    of weights; returns where the next rows' call goes on with that.
    """
    outputs, stride = last - first, out_RN.shape[1]
    address = out_RN.ctypes.data
    if kind == KIND_INT8:
        w = weight + first * size
        ahead = _int8(w, size, outputs, x, x_scales, rows, address, stride, ahead, share)
        for r in range(rows):
            for o in range(outputs):
                out_RN[r, o] *= scales_O[first + o]
    elif kind == KIND_FLOAT32:
        w = weight + 4 * first * size
        ahead = _float32(w, size, outputs, x, rows, address, stride, ahead, share)
    else:
        w = weight + 2 * first * size
        ahead = _bfloat16(w, size, outputs, x, rows, address, stride, ahead, share)
    if biases_O.shape[0] > 0:
        for r in range(rows):
            for o in range(outputs):
                out_RN[r, o] += biases_O[first + o]
    return ahead


tile, tile_outputs = compiled(_tile), compiled(_tile_outputs)
