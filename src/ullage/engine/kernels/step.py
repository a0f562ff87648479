"""One step of a decoder in one compiled call: every layer, for rows of any sequences.

Several threads run `step` at once and share its phases (`team`). What the rows are and where the
weights lie is told in flat arrays, made by `engine.compiled`. What is kept of rows that somebody
reads along is `engine.taps`'.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.attention import merge_ranges
from ullage.engine.kernels.attention_batch import (
    COUNT,
    FIRST,
    MOST_BLOCK_ROWS,
    SEQUENCE,
    attend_block,
)
from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.elementwise import quantize, rms_norm, rotate, silu_times
from ullage.engine.kernels.hadamard import turn
from ullage.engine.kernels.llvm import as_pointer
from ullage.engine.kernels.matmul import (
    KIND_INT8,
    MOST_ROWS,
    num_groups,
    rows_at_once,
    share_ahead,
    tile,
    tile_outputs,
    weight_bytes,
)
from ullage.engine.kernels.storing import store
from ullage.engine.kernels.team import enter, finish, leave, take, wait

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Patterns = npt.NDArray[np.uint16]

# Columns of the table of layers, int64 [layers, COLUMNS]. Four are told of each matrix: its kind,
# and the addresses of weights, scales and bias (0: none). Addresses of norms and tables as well.
QKV, OUTPUT, GATE_UP, DOWN = 0, 4, 8, 12
MIXER_NORM, MLP_NORM, Q_NORM, K_NORM, COS, SIN, ROTARY_DIM = 16, 17, 18, 19, 20, 21, 22
KEYS, VALUES, KEY_SCALES, VALUE_SCALES, GROUP, WINDOW = 23, 24, 25, 26, 27, 28
COLUMNS = 29
# Columns of the sizes, int64 [SIZES].
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, NUM_BLOCKS, BLOCK_SIZE, KV_WIDTH = range(8)
SIZES = 8
# Columns of the rules, float32 [layers, 2].
SCALE, SOFT_CAP = 0, 1
PHASES_PER_LAYER = 11
# Columns of a step's taps, int64 [TAPS]: where each of them begins in a row of `kept_LRW`.
(
    TAP_X, TAP_NORMED, TAP_QKV, TAP_TURNED, TAP_MIXED, TAP_MIDDLE, TAP_MLP_NORMED, TAP_GATE, TAP_UP,
    TAP_HIDDEN,
) = range(10)  # fmt: skip
TAPS = 10


def num_phases(layers: int) -> int:
    return layers * PHASES_PER_LAYER + 2


def _floats_at(address: int, count: int) -> Floats:
    """float32 [count] at an address; empty where the address is 0."""
    if address == 0:
        count = 0
    return numba.carray(as_pointer(address), (count,), np.float32)  # type: ignore[no-any-return]


floats_at = compiled(_floats_at)


def _keep(tap_of_T: Ints, row: int, kept_RW: Floats, at: int, values_W: Floats) -> None:
    """Copy what a row is just now, if it is tapped; none is where tap_of is empty."""
    if tap_of_T.shape[0] > 0:
        tap = tap_of_T[row]
        if tap >= 0:
            kept_RW[tap, at : at + values_W.shape[0]] = values_W


keep = compiled(_keep)


def _normalise(
    counters: Ints, phase: int, x_TE: Floats, rows_S: Ints, weight_E: Floats, eps: np.float32,
    kind: int, normed_TE: Floats, whole_N: npt.NDArray[np.int16], scales_N: Floats,
    tap_of_T: Ints, kept_RW: Floats, x_at: int, normed_at: int, before_TW: Floats,
    kept_before_RW: Floats, before_at: int,
) -> None:  # fmt: skip
    """The norm of rows rows_S of x, to row 0, 1, … of normed and, for int8 weights, of whole.

    Keeps of tapped rows x, its norm, and `before`: what x was made of, which the next part of the
    layer overwrites.
    """
    count = rows_S.shape[0]
    while True:
        row = take(counters, phase)
        if row >= count:
            break
        rms_norm(x_TE[rows_S[row]], weight_E, eps, normed_TE[row])
        keep(tap_of_T, rows_S[row], kept_RW, x_at, x_TE[rows_S[row]])
        keep(tap_of_T, rows_S[row], kept_RW, normed_at, normed_TE[row])
        keep(tap_of_T, rows_S[row], kept_before_RW, before_at, before_TW[rows_S[row]])
        if kind == KIND_INT8:
            size = normed_TE.shape[1]
            groups = num_groups(size)
            scales_G = scales_N[row * groups : (row + 1) * groups]
            quantize(normed_TE[row], whole_N[row * size : (row + 1) * size], scales_G)
        finish(counters, phase)
    wait(counters, phase, count)


def _quantize_rows(
    counters: Ints, phase: int, kind: int, x_TI: Floats, whole_N: npt.NDArray[np.int16],
    scales_N: Floats,
) -> None:  # fmt: skip
    if kind != KIND_INT8:
        return
    count, size = x_TI.shape
    groups = num_groups(size)
    while True:
        row = take(counters, phase)
        if row >= count:
            break
        scales_G = scales_N[row * groups : (row + 1) * groups]
        quantize(x_TI[row], whole_N[row * size : (row + 1) * size], scales_G)
        finish(counters, phase)
    wait(counters, phase, count)


normalise, quantize_rows = compiled(_normalise), compiled(_quantize_rows)


def _multiply(
    counters: Ints, phase: int, matrix_4: Ints, outputs: int, x_TI: Floats,
    whole_N: npt.NDArray[np.int16], scales_N: Floats, adds: bool, out_TO: Floats,
    scratch_RN: Floats,
) -> None:  # fmt: skip
    """out = (out +) x·Wᵀ + b, of x's rows; of `whole` and its scales where the weights are int8."""
    rows, size = x_TI.shape
    kind, weight = matrix_4[0], matrix_4[1]
    scales_O, biases_O = floats_at(matrix_4[2], outputs), floats_at(matrix_4[3], outputs)
    x = whole_N.ctypes.data if kind == KIND_INT8 else x_TI.ctypes.data
    row_bytes = size * (2 if kind == KIND_INT8 else 4)
    scales_at, groups = scales_N.ctypes.data, num_groups(size)
    step, share = tile_outputs(kind, size), share_ahead(kind, rows)
    tile_bytes = step * weight_bytes(kind, size)
    pieces = (outputs + step - 1) // step
    piece = take(counters, phase)
    while piece < pieces:
        # Taken one ahead, so that it is known which weights to fetch meanwhile.
        following = take(counters, phase)
        ahead = weight + min(following, pieces - 1) * tile_bytes
        first = piece * step
        last = min(outputs, first + step)
        row = 0
        while row < rows:
            block = rows_at_once(rows - row)
            ahead = tile(
                kind, weight, scales_O, biases_O, size, first, last, x + row * row_bytes,
                scales_at + 4 * row * groups, block, scratch_RN, ahead, share,
            )  # fmt: skip
            for r in range(block):
                if adds:
                    for o in range(last - first):
                        out_TO[row + r, first + o] += scratch_RN[r, o]
                else:
                    for o in range(last - first):
                        out_TO[row + r, first + o] = scratch_RN[r, o]
            row += block
        finish(counters, phase)
        piece = following
    wait(counters, phase, pieces)


def _multiply_gated(
    counters: Ints, phase: int, matrix_4: Ints, x_TI: Floats, whole_N: npt.NDArray[np.int16],
    scales_N: Floats, hidden_TF: Floats, scratch_RN: Floats, gate_RN: Floats, tap_of_T: Ints,
    kept_RW: Floats, taps: Ints,
) -> None:  # fmt: skip
    """hidden = silu(gate)·up, where the matrix's upper half gives the gates, its lower the ups."""
    rows, size = x_TI.shape
    outputs = hidden_TF.shape[1]
    kind, weight = matrix_4[0], matrix_4[1]
    scales_O, biases_O = floats_at(matrix_4[2], 2 * outputs), floats_at(matrix_4[3], 2 * outputs)
    x = whole_N.ctypes.data if kind == KIND_INT8 else x_TI.ctypes.data
    row_bytes = size * (2 if kind == KIND_INT8 else 4)
    scales_at, groups = scales_N.ctypes.data, num_groups(size)
    step, share = tile_outputs(kind, size), share_ahead(kind, rows)
    tile_bytes = step * weight_bytes(kind, size)
    pieces = (outputs + step - 1) // step
    piece = take(counters, phase)
    while piece < pieces:
        # Taken one ahead, so that it is known which weights to fetch meanwhile.
        following = take(counters, phase)
        ahead = weight + min(following, pieces - 1) * tile_bytes
        ahead_up = ahead + outputs * weight_bytes(kind, size)
        first = piece * step
        last = min(outputs, first + step)
        row = 0
        while row < rows:
            block = rows_at_once(rows - row)
            at, few = x + row * row_bytes, scales_at + 4 * row * groups
            ahead = tile(
                kind, weight, scales_O, biases_O, size, first, last, at, few, block, gate_RN,
                ahead, share,
            )  # fmt: skip
            ahead_up = tile(
                kind, weight, scales_O, biases_O, size, outputs + first, outputs + last, at, few,
                block, scratch_RN, ahead_up, share,
            )  # fmt: skip
            for r in range(block):
                keep(tap_of_T, row + r, kept_RW, taps[TAP_GATE] + first, gate_RN[r, : last - first])
                keep(
                    tap_of_T, row + r, kept_RW, taps[TAP_UP] + first, scratch_RN[r, : last - first]
                )
                silu_times(gate_RN[r], scratch_RN[r], hidden_TF[row + r, first:last])
            row += block
        finish(counters, phase)
        piece = following
    wait(counters, phase, pieces)


multiply, multiply_gated = compiled(_multiply), compiled(_multiply_gated)


def _place_heads(
    counters: Ints, phase: int, layer: Ints, sizes: Ints, eps: np.float32, qkv_TO: Floats,
    positions_T: Ints, slots_T: Ints, keys: Any, key_scales: Patterns, values: Any,
    value_scales: Patterns, tap_of_T: Ints, kept_RW: Floats, taps: Ints,
) -> None:  # fmt: skip
    """Q and K normed and turned in place; K and V into the cache."""
    heads, kv_heads, head_dim = sizes[HEADS], sizes[KV_HEADS], sizes[HEAD_DIM]
    q_norm_D, k_norm_D = floats_at(layer[Q_NORM], head_dim), floats_at(layer[K_NORM], head_dim)
    rotary, block_size = layer[ROTARY_DIM], sizes[BLOCK_SIZE]
    rows = qkv_TO.shape[0]
    while True:
        row = take(counters, phase)
        if row >= rows:
            break
        keep(tap_of_T, row, kept_RW, taps[TAP_QKV], qkv_TO[row])
        at = positions_T[row] * rotary * 4
        cos_R, sin_R = floats_at(layer[COS] + at, rotary), floats_at(layer[SIN] + at, rotary)
        for head in range(heads + kv_heads):
            x_D = qkv_TO[row, head * head_dim : (head + 1) * head_dim]
            if q_norm_D.shape[0] > 0:
                rms_norm(x_D, q_norm_D if head < heads else k_norm_D, eps, x_D)
            rotate(x_D, cos_R, sin_R)
            if head < heads and keys.shape[3] != head_dim:
                # Keys of four bits are stored turned, and a product wants both sides alike.
                turn(x_D)
        keep(tap_of_T, row, kept_RW, taps[TAP_TURNED], qkv_TO[row])
        block, offset = slots_T[row] // block_size, slots_T[row] % block_size
        for head in range(kv_heads):
            k = (heads + head) * head_dim
            v = k + kv_heads * head_dim
            store(qkv_TO[row, k : k + head_dim], keys, key_scales, block, offset, head)
            store(qkv_TO[row, v : v + head_dim], values, value_scales, block, offset, head)
        finish(counters, phase)
    wait(counters, phase, rows)


def _attend(
    counters: Ints, phase: int, layer: Ints, rule_2: Floats, slopes_H: Floats, blocks_N4: Ints,
    parts: int, qkv_TO: Floats, mixed_TO: Floats, keys: Any, key_scales: Patterns, values: Any,
    value_scales: Patterns, tables_BW: npt.NDArray[np.int32], states: Floats,
) -> None:  # fmt: skip
    """Every block of rows over what it sees. Two phases where contexts are cut into parts.

    states [rows, KV heads, parts, group, …] is shared by all threads if there are parts, else
    [MOST_BLOCK_ROWS, 1, 1, group, …] is this thread's own.
    """
    kv_heads, group = keys.shape[2], states.shape[3]
    pieces = blocks_N4.shape[0] * parts * kv_heads
    while True:
        piece = take(counters, phase)
        if piece >= pieces:
            break
        block_4 = blocks_N4[piece // (parts * kv_heads)]
        part, head = piece // kv_heads % parts, piece % kv_heads
        row, count = block_4[FIRST], block_4[COUNT]
        room = states[:count, 0, 0] if parts == 1 else states[row : row + count, head, part]
        attend_block(
            block_4, head, group, part, parts, qkv_TO, keys, key_scales, values, value_scales,
            tables_BW[block_4[SEQUENCE]], rule_2[SCALE], rule_2[SOFT_CAP], layer[WINDOW], slopes_H,
            room,
        )  # fmt: skip
        if parts == 1:
            for r in range(count):
                merge_ranges(states[r, 0], head, mixed_TO[row + r])
        finish(counters, phase)
    wait(counters, phase, pieces)
    if parts == 1:
        return
    rows = mixed_TO.shape[0]
    while True:
        row = take(counters, phase + 1)
        if row >= rows:
            break
        for head in range(kv_heads):
            merge_ranges(states[row, head], head, mixed_TO[row])
        finish(counters, phase + 1)
    wait(counters, phase + 1, rows)


place_heads, attend = compiled(_place_heads), compiled(_attend)


def _patterns_at(address: int, shape: tuple[int, int, int]) -> Patterns:
    """Scales of a cache; none where the address is 0."""
    if address == 0:
        shape = (0, 0, 0)
    return numba.carray(as_pointer(address), shape, np.uint16)  # type: ignore[no-any-return]


patterns_at = compiled(_patterns_at)


def _step(
    counters: Ints, epoch: int, layers: Ints, head_4: Ints, final_norm: int, sizes: Ints,
    rules: Floats, slopes_H: Floats, eps: np.float32, storage: Any, positions_T: Ints,
    slots_GT: Ints, blocks_N4: Ints, tables_GBW: npt.NDArray[np.int32], sampled_S: Ints,
    x_TE: Floats, normed_TE: Floats, whole_N: npt.NDArray[np.int16], scales_N: Floats,
    qkv_TO: Floats, mixed_TO: Floats, hidden_TF: Floats, states: Floats, logits_SV: Floats,
    tap_of_T: Ints, kept_LRW: Floats, taps: Ints,
) -> None:  # fmt: skip
    """Logits of the rows sampled_S; x holds the embeddings, and is used up.

    Row t's numbers are kept in kept_LRW[:, tap_of_T[t]] where that is not −1; tap_of_T is empty
    where no row is tapped, and the last of kept_LRW's layers is what follows the layers.

    Every row's K and V are written before any row of the layer attends, so rows may be neighbours
    in one sequence. `storage` is an empty array that has the cache's dtype; blocks are those of
    `attention_batch`; states [rows, KV heads, parts, …] says into how many parts contexts are cut.
    """
    if not enter(counters, epoch):
        return
    all_T = np.arange(x_TE.shape[0])
    scratch_RN = np.empty((MOST_ROWS, 64), np.float32)
    gate_RN = np.empty((MOST_ROWS, 64), np.float32)
    parts = states.shape[2]
    if parts == 1:
        states = np.empty((MOST_BLOCK_ROWS, 1, 1, states.shape[3], states.shape[4]), np.float32)
    hidden, kv_heads = sizes[HIDDEN], sizes[KV_HEADS]
    scales_shape = (sizes[NUM_BLOCKS], sizes[BLOCK_SIZE], kv_heads)
    cache_shape = (sizes[NUM_BLOCKS], sizes[BLOCK_SIZE], kv_heads, sizes[KV_WIDTH])
    for index in range(layers.shape[0]):
        layer, rule_2 = layers[index], rules[index]
        phase = index * PHASES_PER_LAYER
        keys = numba.carray(as_pointer(layer[KEYS]), cache_shape, storage.dtype)
        values = numba.carray(as_pointer(layer[VALUES]), cache_shape, storage.dtype)
        key_scales = patterns_at(layer[KEY_SCALES], scales_shape)
        value_scales = patterns_at(layer[VALUE_SCALES], scales_shape)
        norm_E = floats_at(layer[MIXER_NORM], hidden)
        kept_RW = kept_LRW[index]
        normalise(
            counters, phase, x_TE, all_T, norm_E, eps, layer[QKV], normed_TE, whole_N, scales_N,
            tap_of_T, kept_RW, taps[TAP_X], taps[TAP_NORMED], hidden_TF,
            kept_LRW[max(index - 1, 0)], taps[TAP_HIDDEN],
        )  # fmt: skip
        multiply(
            counters, phase + 1, layer[QKV : QKV + 4], qkv_TO.shape[1], normed_TE, whole_N,
            scales_N, False, qkv_TO, scratch_RN,
        )  # fmt: skip
        place_heads(
            counters, phase + 2, layer, sizes, eps, qkv_TO, positions_T, slots_GT[layer[GROUP]],
            keys, key_scales, values, value_scales, tap_of_T, kept_RW, taps,
        )  # fmt: skip
        attend(
            counters, phase + 3, layer, rule_2, slopes_H, blocks_N4, parts, qkv_TO, mixed_TO, keys,
            key_scales, values, value_scales, tables_GBW[layer[GROUP]], states,
        )  # fmt: skip
        quantize_rows(counters, phase + 5, layer[OUTPUT], mixed_TO, whole_N, scales_N)
        multiply(
            counters, phase + 6, layer[OUTPUT : OUTPUT + 4], hidden, mixed_TO, whole_N, scales_N,
            True, x_TE, scratch_RN,
        )  # fmt: skip
        norm_E = floats_at(layer[MLP_NORM], hidden)
        normalise(
            counters, phase + 7, x_TE, all_T, norm_E, eps, layer[GATE_UP], normed_TE, whole_N,
            scales_N, tap_of_T, kept_RW, taps[TAP_MIDDLE], taps[TAP_MLP_NORMED], mixed_TO, kept_RW,
            taps[TAP_MIXED],
        )  # fmt: skip
        multiply_gated(
            counters, phase + 8, layer[GATE_UP : GATE_UP + 4], normed_TE, whole_N, scales_N,
            hidden_TF, scratch_RN, gate_RN, tap_of_T, kept_RW, taps,
        )  # fmt: skip
        quantize_rows(counters, phase + 9, layer[DOWN], hidden_TF, whole_N, scales_N)
        multiply(
            counters, phase + 10, layer[DOWN : DOWN + 4], hidden, hidden_TF, whole_N, scales_N,
            True, x_TE, scratch_RN,
        )  # fmt: skip
    phase = layers.shape[0] * PHASES_PER_LAYER
    normalise(
        counters, phase, x_TE, sampled_S, floats_at(final_norm, hidden), eps, head_4[0], normed_TE,
        whole_N, scales_N, tap_of_T, kept_LRW[layers.shape[0]], taps[TAP_X], taps[TAP_NORMED],
        hidden_TF, kept_LRW[layers.shape[0] - 1], taps[TAP_HIDDEN],
    )  # fmt: skip
    count = sampled_S.shape[0]
    multiply(
        counters, phase + 1, head_4, sizes[VOCAB], normed_TE[:count], whole_N, scales_N, False,
        logits_SV, scratch_RN,
    )  # fmt: skip
    leave(counters)


step = compiled(_step)
