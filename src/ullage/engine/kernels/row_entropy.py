"""One decode row of a sequence in all its layers at once: what it attends to, and attention itself.

Reads paged KV where it lies, in any storage, in one thread and one call. Holds the loops over
layers, tiles and heads; what is kept of the keys is `entropy`'s, what the sums mean `probes.rows`'.
"""

# ruff: noqa: ARG001 (numba types an intrinsic by the names of the arguments it may not need)
from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ullage.engine.kernels.attention import add_values, score_rows
from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.entropy import BAND_TOP, FIRST_SCORE, TOP, see_row
from ullage.engine.kernels.hadamard import turn
from ullage.engine.kernels.llvm import CACHE_LINE, as_pointer
from ullage.engine.kernels.vectors import (
    bfloat16_at,
    fma8,
    load8,
    splat8,
    store8,
    store_sums4,
    zero8,
)

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Patterns = npt.NDArray[np.uint16]

# Columns of the table of layers, int64 [layers, COLUMNS]: addresses in the cache (of scales 0:
# none), the group of layers whose block table is theirs, the window (0: none).
KEYS, VALUES, KEY_SCALES, VALUE_SCALES, GROUP, WINDOW = range(6)
COLUMNS = 6
# Columns of the rules, float32 [layers, 2]; a cap of 0 is none.
SCALE, SOFT_CAP = 0, 1

# Positions whose scores are made into weights together at most: fewer where their keys, which are
# fetched ahead, would take more than this of the second cache. Of these so many are read for one kv
# head after the other: what lies side by side in memory is then read in order.
_TILE = 512
_TILE_BYTES = 1 << 18
_RUN = 16


def _ask(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address without waiting (llvm.prefetch: read, second cache)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i8p, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [i8p, i32, i32, i32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.inttoptr(args[0], i8p)
        builder.call(prefetch, [place, *(ir.Constant(i32, n) for n in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


_fetch_line = intrinsic(_ask)


def _fetch(
    storage: int, row_bytes: int, table_W: npt.NDArray[np.int32], block_size: int, first: int,
    last: int,
) -> None:  # fmt: skip
    """Ask for what a layer holds of positions first … last−1."""
    at = first
    while at < last:
        index, offset = at // block_size, at % block_size
        count = min(block_size - offset, last - at)
        place = storage + (np.int64(table_W[index]) * block_size + offset) * row_bytes
        for byte in range(0, count * row_bytes, CACHE_LINE):
            _fetch_line(place + byte)
        at += count


fetch = compiled(_fetch)


def _score_three(
    q_O: Floats, first: int, dim: int, keys: Any, rows_S: Ints, count: int, scores_3S: Floats
) -> None:
    """`attention.score_rows` of three neighbouring heads: a key is loaded once. count: of fours."""
    width = keys.shape[3]
    second, third = first + dim, first + 2 * dim
    for i in range(0, count, 4):
        a0, a1, a2, a3 = zero8(), zero8(), zero8(), zero8()
        b0, b1, b2, b3 = zero8(), zero8(), zero8(), zero8()
        c0, c1, c2, c3 = zero8(), zero8(), zero8(), zero8()
        k0, k1 = rows_S[i] * width, rows_S[i + 1] * width
        k2, k3 = rows_S[i + 2] * width, rows_S[i + 3] * width
        for n in range(0, dim, 8):
            a, b = load8(q_O, first, n, dim), load8(q_O, second, n, dim)
            c = load8(q_O, third, n, dim)
            k = load8(keys, k0, n, width)
            a0, b0, c0 = fma8(a, k, a0), fma8(b, k, b0), fma8(c, k, c0)
            k = load8(keys, k1, n, width)
            a1, b1, c1 = fma8(a, k, a1), fma8(b, k, b1), fma8(c, k, c1)
            k = load8(keys, k2, n, width)
            a2, b2, c2 = fma8(a, k, a2), fma8(b, k, b2), fma8(c, k, c2)
            k = load8(keys, k3, n, width)
            a3, b3, c3 = fma8(a, k, a3), fma8(b, k, b3), fma8(c, k, c3)
        store_sums4(a0, a1, a2, a3, scores_3S[0], i)
        store_sums4(b0, b1, b2, b3, scores_3S[1], i)
        store_sums4(c0, c1, c2, c3, scores_3S[2], i)


def _add_three(
    weights_3S: Floats, count: int, values: Any, rows_S: Ints, dim: int, sums_3D: Floats
) -> None:
    """`attention.add_values` of three heads: a value is loaded once. dim: a multiple of 32."""
    width = values.shape[3]
    a_D, b_D, c_D = sums_3D[0], sums_3D[1], sums_3D[2]
    for n in range(0, dim, 32):
        a0, a1 = load8(a_D, 0, n, dim), load8(a_D, 0, n + 8, dim)
        a2, a3 = load8(a_D, 0, n + 16, dim), load8(a_D, 0, n + 24, dim)
        b0, b1 = load8(b_D, 0, n, dim), load8(b_D, 0, n + 8, dim)
        b2, b3 = load8(b_D, 0, n + 16, dim), load8(b_D, 0, n + 24, dim)
        c0, c1 = load8(c_D, 0, n, dim), load8(c_D, 0, n + 8, dim)
        c2, c3 = load8(c_D, 0, n + 16, dim), load8(c_D, 0, n + 24, dim)
        for i in range(count):
            a, b, c = splat8(weights_3S[0, i]), splat8(weights_3S[1, i]), splat8(weights_3S[2, i])
            row = rows_S[i] * width
            v = load8(values, row, n, width)
            a0, b0, c0 = fma8(a, v, a0), fma8(b, v, b0), fma8(c, v, c0)
            v = load8(values, row, n + 8, width)
            a1, b1, c1 = fma8(a, v, a1), fma8(b, v, b1), fma8(c, v, c1)
            v = load8(values, row, n + 16, width)
            a2, b2, c2 = fma8(a, v, a2), fma8(b, v, b2), fma8(c, v, c2)
            v = load8(values, row, n + 24, width)
            a3, b3, c3 = fma8(a, v, a3), fma8(b, v, b3), fma8(c, v, c3)
        store8(a_D, n, a0)
        store8(a_D, n + 8, a1)
        store8(a_D, n + 16, a2)
        store8(a_D, n + 24, a3)
        store8(b_D, n, b0)
        store8(b_D, n + 8, b1)
        store8(b_D, n + 16, b2)
        store8(b_D, n + 24, b3)
        store8(c_D, n, c0)
        store8(c_D, n + 8, c1)
        store8(c_D, n + 16, c2)
        store8(c_D, n + 24, c3)


score_three, add_three = compiled(_score_three), compiled(_add_three)


def _patterns_at(address: int, shape: tuple[int, int, int]) -> Patterns:
    if address == 0:
        shape = (0, 0, 0)
    return numba.carray(as_pointer(address), shape, np.uint16)  # type: ignore[no-any-return]


def _scale_by(scores_S: Floats, rows_S: Ints, scales: Patterns) -> None:
    if scales.shape[0] > 0:
        for i in range(scores_S.shape[0]):
            scores_S[i] *= bfloat16_at(scales, rows_S[i])


def _first_seen(window: int, context: int) -> int:
    return max(0, context - window) if window > 0 else 0


first_seen = compiled(_first_seen)
patterns_at, scale_by = compiled(_patterns_at), compiled(_scale_by)


def _find_rows(
    table_W: npt.NDArray[np.int32], block_size: int, at: int, count: int, rows_KS: Ints
) -> None:
    """Where positions at … at+count−1 lie for each kv head; the last again, up to fours."""
    kv_heads = rows_KS.shape[0]
    index, offset = at // block_size, at % block_size
    for i in range(count):
        row = (np.int64(table_W[index]) * block_size + offset) * kv_heads
        for kv_head in range(kv_heads):
            rows_KS[kv_head, i] = row + kv_head
        offset += 1
        if offset == block_size:
            index, offset = index + 1, 0
    for i in range(count, (count + 3) // 4 * 4):
        for kv_head in range(kv_heads):
            rows_KS[kv_head, i] = rows_KS[kv_head, count - 1]


def _score(
    q_HD: Floats, keys: Any, rows_KS: Ints, first: int, count: int, scores_HS: Floats
) -> None:
    """Products of every head with keys first … first+count−1 of its tile, or up to 3 more."""
    heads, dim = q_HD.shape
    kv_heads = rows_KS.shape[0]
    group = heads // kv_heads
    q_O, fours = q_HD.reshape(heads * dim), (count + 3) // 4 * 4
    for kv_head in range(kv_heads):
        rows_S, head = rows_KS[kv_head, first:], kv_head * group
        last = head + group
        while head + 3 <= last:
            score_three(q_O, head * dim, dim, keys, rows_S, fours, scores_HS[head:, first:])
            head += 3
        while head < last:
            score_rows(q_O, head * dim, dim, keys, rows_S, count, scores_HS[head, first:])
            head += 1


def _weigh(
    weights_HS: Floats, values: Any, rows_KS: Ints, first: int, count: int, out_HD: Floats
) -> None:
    """Σ weight·value of every head at such keys, added to `out`."""
    heads, dim = out_HD.shape
    kv_heads = rows_KS.shape[0]
    group = heads // kv_heads
    for kv_head in range(kv_heads):
        rows_S, head = rows_KS[kv_head, first:], kv_head * group
        last = head + group
        while dim % 32 == 0 and head + 3 <= last:
            add_three(weights_HS[head:, first:], count, values, rows_S, dim, out_HD[head:])
            head += 3
        while head < last:
            one = np.float32(1)
            add_values(weights_HS[head, first:], count, values, rows_S, one, dim, out_HD[head])
            head += 1


find_rows, score, weigh = compiled(_find_rows), compiled(_score), compiled(_weigh)


def _see_heads(
    scores_HS: Floats, at: int, count: int, start: int, context: int, band: int,
    soft_cap: np.float32, slopes_H: Floats, rows_KS: Ints, key_scales: Patterns,
    value_scales: Patterns, keep_none: npt.NDArray[np.bool_], room_B: Floats, sums_HX: Doubles,
    out_HD: Floats,
) -> None:  # fmt: skip
    """Products become weights and are counted; what `out` holds shrinks as earlier weights do."""
    heads, dim = out_HD.shape
    group = heads // rows_KS.shape[0]
    for head in range(heads):
        rows_S, scores_S = rows_KS[head // group], scores_HS[head, :count]
        scale_by(scores_S, rows_S, key_scales)
        slope = slopes_H[head] if slopes_H.shape[0] > 0 else np.float32(0)
        factor = see_row(
            scores_S, at, count, start, context, context - 1, 0, band, keep_none, soft_cap, slope,
            room_B, sums_HX[head],
        )  # fmt: skip
        scale_by(scores_S, rows_S, value_scales)
        if factor != 1:
            for d in range(dim):
                out_HD[head, d] *= np.float32(factor)


see_heads = compiled(_see_heads)


def _begin_layer(q_HD: Floats, scale: np.float32, turns: bool, scaled_HD: Floats) -> None:
    """Queries scaled, and turned where the keys are."""
    for h in range(q_HD.shape[0]):
        for d in range(q_HD.shape[1]):
            scaled_HD[h, d] = q_HD[h, d] * scale
        if turns:
            turn(scaled_HD[h])


begin_layer = compiled(_begin_layer)


def _read_layers(
    queries_LHD: Floats, layers: Ints, rules: Floats, slopes_LH: Floats,
    storage: Any, cache_shape: tuple[int, int, int, int], tables_GW: npt.NDArray[np.int32],
    context: int, band: int, sums_LHX: Doubles, out_LHD: Floats,
) -> None:  # fmt: skip
    """Sums of `entropy` of the row at context − 1 in every layer of the table, and Σ weight·value.

    Queries are those after norms and rotation, of a multiple of 8 dimensions (of 16 for int4).
    slopes: of no heads where there are none. `storage` is an empty array of the cache's dtype.
    """
    heads, dim = queries_LHD.shape[1], queries_LHD.shape[2]
    block_size, kv_heads, width = cache_shape[1:]
    row_bytes = kv_heads * width * storage.itemsize
    tile = max(_RUN, min(_TILE, _TILE_BYTES // row_bytes // _RUN * _RUN))
    q_HD = np.empty((heads, dim), np.float32)
    rows_KS = np.empty((kv_heads, tile), np.int64)
    scores_HS = np.empty((heads, tile), np.float32)
    room_B = np.empty(2 * band + 1, np.float32)
    keep_none = np.empty(0, np.bool_)
    sums_LHX[:] = 0
    sums_LHX[:, :, TOP] = sums_LHX[:, :, BAND_TOP] = sums_LHX[:, :, FIRST_SCORE] = -np.inf
    out_LHD[:] = 0
    for n in range(layers.shape[0]):
        layer, table_W = layers[n], tables_GW[layers[n, GROUP]]
        keys = numba.carray(as_pointer(layer[KEYS]), cache_shape, storage.dtype)
        values = numba.carray(as_pointer(layer[VALUES]), cache_shape, storage.dtype)
        key_scales = patterns_at(layer[KEY_SCALES], cache_shape[:3])
        value_scales = patterns_at(layer[VALUE_SCALES], cache_shape[:3])
        begin_layer(queries_LHD[n], rules[n, SCALE], width != dim, q_HD)
        start = first_seen(layer[WINDOW], context)
        for at in range(start, context, tile):
            count = min(tile, context - at)
            find_rows(table_W, block_size, at, count, rows_KS)
            # While keys are multiplied the tile's values are fetched, while values are the keys of
            # the next tile, of this layer or the next.
            for i in range(0, count, _RUN):
                run = min(_RUN, count - i)
                fetch(layer[VALUES], row_bytes, table_W, block_size, at + i, at + i + run)
                score(q_HD, keys, rows_KS, i, run, scores_HS)
            see_heads(
                scores_HS, at, count, start, context, band, rules[n, SOFT_CAP], slopes_LH[n],
                rows_KS, key_scales, value_scales, keep_none, room_B, sums_LHX[n], out_LHD[n],
            )  # fmt: skip
            wanted, ahead = layer, at + count
            if ahead == context:
                wanted = layers[min(n + 1, layers.shape[0] - 1)]
                ahead = first_seen(wanted[WINDOW], context)
            for i in range(0, count, _RUN):
                fetch(
                    wanted[KEYS], row_bytes, tables_GW[wanted[GROUP]], block_size, ahead + i,
                    min(context, ahead + i + _RUN),
                )  # fmt: skip
                weigh(scores_HS, values, rows_KS, i, min(_RUN, count - i), out_LHD[n])
        if width != dim:
            for h in range(heads):
                turn(out_LHD[n, h])


read_layers: Any = compiled(_read_layers)
