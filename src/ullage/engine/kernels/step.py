"""One step of a decoder in one compiled call: every layer, for rows that are one token each.

Several threads run `step` at once and share its phases (`team`). What the rows are and where the
weights lie is told in flat arrays, made by `engine.compiled`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.attention import EXTRA, attend_decode
from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.elementwise import quantize, rms_norm, rotate, silu_times
from ullage.engine.kernels.llvm import as_pointer
from ullage.engine.kernels.matmul import KIND_INT8, MOST_ROWS, rows_at_once, tile, tile_outputs
from ullage.engine.kernels.team import enter, finish, leave, take, wait

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# Columns of the table of layers, int64 [layers, COLUMNS]. Four are told of each matrix: its kind,
# and the addresses of weights, scales and bias (0: none). Addresses of norms and tables as well.
QKV, OUTPUT, GATE_UP, DOWN = 0, 4, 8, 12
MIXER_NORM, MLP_NORM, Q_NORM, K_NORM, COS, SIN, ROTARY_DIM = 16, 17, 18, 19, 20, 21, 22
KEYS, VALUES, KEY_SCALES, VALUE_SCALES, GROUP, WINDOW = 23, 24, 25, 26, 27, 28
COLUMNS = 29
# Columns of the sizes, int64 [SIZES].
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, NUM_BLOCKS, BLOCK_SIZE, WIDEST = range(9)
SIZES = 9
# Columns of the rules, float32 [layers, 2].
SCALE, SOFT_CAP = 0, 1
PHASES_PER_LAYER = 10


def num_phases(layers: int) -> int:
    return layers * PHASES_PER_LAYER + 2


def _floats_at(address: int, count: int) -> Floats:
    """float32 [count] at an address; empty where the address is 0."""
    if address == 0:
        count = 0
    return numba.carray(as_pointer(address), (count,), np.float32)  # type: ignore[no-any-return]


floats_at = compiled(_floats_at)


def _normalise(
    counters: Ints, phase: int, x_TE: Floats, rows_S: Ints, weight_E: Floats, eps: np.float32,
    kind: int, normed_TE: Floats, whole_N: npt.NDArray[np.int16], scales_T: Floats,
) -> None:  # fmt: skip
    """The norm of rows rows_S of x, to row 0, 1, … of normed and, for int8 weights, of whole."""
    count = rows_S.shape[0]
    while True:
        row = take(counters, phase)
        if row >= count:
            break
        rms_norm(x_TE[rows_S[row]], weight_E, eps, normed_TE[row])
        if kind == KIND_INT8:
            size = normed_TE.shape[1]
            scales_T[row] = quantize(normed_TE[row], whole_N[row * size : (row + 1) * size])
        finish(counters, phase)
    wait(counters, phase, count)


def _quantize_rows(
    counters: Ints, phase: int, kind: int, x_TI: Floats, whole_N: npt.NDArray[np.int16],
    scales_T: Floats,
) -> None:  # fmt: skip
    if kind != KIND_INT8:
        return
    count, size = x_TI.shape
    while True:
        row = take(counters, phase)
        if row >= count:
            break
        scales_T[row] = quantize(x_TI[row], whole_N[row * size : (row + 1) * size])
        finish(counters, phase)
    wait(counters, phase, count)


normalise, quantize_rows = compiled(_normalise), compiled(_quantize_rows)


def _multiply(
    counters: Ints, phase: int, matrix_4: Ints, outputs: int, x_TI: Floats,
    whole_N: npt.NDArray[np.int16], scales_T: Floats, adds: bool, out_TO: Floats,
    scratch_RN: Floats,
) -> None:  # fmt: skip
    """out = (out +) x·Wᵀ + b, of x's rows; of `whole` and its scales where the weights are int8."""
    rows, size = x_TI.shape
    kind, weight = matrix_4[0], matrix_4[1]
    scales_O, biases_O = floats_at(matrix_4[2], outputs), floats_at(matrix_4[3], outputs)
    x = whole_N.ctypes.data if kind == KIND_INT8 else x_TI.ctypes.data
    row_bytes = size * (2 if kind == KIND_INT8 else 4)
    step = tile_outputs(kind, size)
    pieces = (outputs + step - 1) // step
    while True:
        piece = take(counters, phase)
        if piece >= pieces:
            break
        first = piece * step
        last = min(outputs, first + step)
        row = 0
        while row < rows:
            block = rows_at_once(rows - row)
            tile(
                kind, weight, scales_O, biases_O, size, first, last, x + row * row_bytes,
                scales_T[row:], block, scratch_RN,
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
    wait(counters, phase, pieces)


def _multiply_gated(
    counters: Ints, phase: int, matrix_4: Ints, x_TI: Floats, whole_N: npt.NDArray[np.int16],
    scales_T: Floats, hidden_TF: Floats, scratch_RN: Floats, gate_RN: Floats,
) -> None:  # fmt: skip
    """hidden = silu(gate)·up, where the matrix's upper half gives the gates, its lower the ups."""
    rows, size = x_TI.shape
    outputs = hidden_TF.shape[1]
    kind, weight = matrix_4[0], matrix_4[1]
    scales_O, biases_O = floats_at(matrix_4[2], 2 * outputs), floats_at(matrix_4[3], 2 * outputs)
    x = whole_N.ctypes.data if kind == KIND_INT8 else x_TI.ctypes.data
    row_bytes = size * (2 if kind == KIND_INT8 else 4)
    step = tile_outputs(kind, size)
    pieces = (outputs + step - 1) // step
    while True:
        piece = take(counters, phase)
        if piece >= pieces:
            break
        first = piece * step
        last = min(outputs, first + step)
        row = 0
        while row < rows:
            block = rows_at_once(rows - row)
            at, few = x + row * row_bytes, scales_T[row:]
            tile(kind, weight, scales_O, biases_O, size, first, last, at, few, block, gate_RN)
            tile(
                kind, weight, scales_O, biases_O, size, outputs + first, outputs + last, at, few,
                block, scratch_RN,
            )  # fmt: skip
            for r in range(block):
                silu_times(gate_RN[r], scratch_RN[r], hidden_TF[row + r, first:last])
            row += block
        finish(counters, phase)
    wait(counters, phase, pieces)


multiply, multiply_gated = compiled(_multiply), compiled(_multiply_gated)


def _place_heads(
    counters: Ints, phase: int, layer: Ints, sizes: Ints, eps: np.float32, qkv_TO: Floats,
    positions_T: Ints, slots_T: Ints, keys: Any, values: Any,
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
        at = positions_T[row] * rotary * 4
        cos_R, sin_R = floats_at(layer[COS] + at, rotary), floats_at(layer[SIN] + at, rotary)
        for head in range(heads + kv_heads):
            x_D = qkv_TO[row, head * head_dim : (head + 1) * head_dim]
            if q_norm_D.shape[0] > 0:
                rms_norm(x_D, q_norm_D if head < heads else k_norm_D, eps, x_D)
            rotate(x_D, cos_R, sin_R)
        block, offset = slots_T[row] // block_size, slots_T[row] % block_size
        k_first = heads * head_dim
        for head in range(kv_heads):
            k = k_first + head * head_dim
            v = k + kv_heads * head_dim
            for i in range(head_dim):
                keys[block, offset, head, i] = qkv_TO[row, k + i]
                values[block, offset, head, i] = qkv_TO[row, v + i]
        finish(counters, phase)
    wait(counters, phase, rows)


def _attend(
    counters: Ints, phase: int, layer: Ints, sizes: Ints, rule_2: Floats, slopes_H: Floats,
    qkv_TO: Floats, mixed_TO: Floats, keys: Any, key_scales: npt.NDArray[np.uint16], values: Any,
    value_scales: npt.NDArray[np.uint16], tables_TW: npt.NDArray[np.int32], positions_T: Ints,
    states_1GX: Floats,
) -> None:  # fmt: skip
    """Every row over what it sees of its sequence; one piece is the heads of one KV head."""
    rows, kv_heads = qkv_TO.shape[0], sizes[KV_HEADS]
    pieces, group, window = rows * kv_heads, sizes[HEADS] // kv_heads, layer[WINDOW]
    while True:
        piece = take(counters, phase)
        if piece >= pieces:
            break
        row, head = piece // kv_heads, piece % kv_heads
        context = positions_T[row] + 1
        start = max(0, context - window) if window > 0 else 0
        attend_decode(
            qkv_TO[row], mixed_TO[row], head, group, keys, key_scales, values, value_scales,
            tables_TW[row], start, context, rule_2[SCALE], rule_2[SOFT_CAP], slopes_H, states_1GX,
        )  # fmt: skip
        finish(counters, phase)
    wait(counters, phase, pieces)


place_heads, attend = compiled(_place_heads), compiled(_attend)


def _step(
    counters: Ints, epoch: int, layers: Ints, head_4: Ints, final_norm: int, sizes: Ints,
    rules: Floats, eps: np.float32, storage: Any, positions_T: Ints, slots_GT: Ints,
    tables_GTW: npt.NDArray[np.int32], sampled_S: Ints, x_TE: Floats, normed_TE: Floats,
    whole_N: npt.NDArray[np.int16], scales_T: Floats, qkv_TO: Floats, mixed_TO: Floats,
    hidden_TF: Floats, logits_SV: Floats,
) -> None:  # fmt: skip
    """Logits of the rows sampled_S; x holds the embeddings, and is used up.

    Every row's K and V are written before any row of the layer attends, so rows may be neighbours
    in one sequence. `storage` is an empty array that has the cache's dtype.
    """
    if not enter(counters, epoch):
        return
    rows = x_TE.shape[0]
    all_T = np.arange(rows)
    scratch_RN = np.empty((MOST_ROWS, 64), np.float32)
    gate_RN = np.empty((MOST_ROWS, 64), np.float32)
    group = sizes[HEADS] // sizes[KV_HEADS]
    states_1GX = np.empty((1, group, sizes[HEAD_DIM] + EXTRA), np.float32)
    slopes_H, no_scales = np.empty(0, np.float32), np.empty((0, 1, 1), np.uint16)
    hidden, kv_heads, head_dim = sizes[HIDDEN], sizes[KV_HEADS], sizes[HEAD_DIM]
    cache_shape = (sizes[NUM_BLOCKS], sizes[BLOCK_SIZE], kv_heads, head_dim)
    qkv_size = (sizes[HEADS] + 2 * kv_heads) * head_dim
    phase = 0
    for index in range(layers.shape[0]):
        layer = layers[index]
        phase = index * PHASES_PER_LAYER
        keys = numba.carray(as_pointer(layer[KEYS]), cache_shape, storage.dtype)
        values = numba.carray(as_pointer(layer[VALUES]), cache_shape, storage.dtype)
        norm_E = floats_at(layer[MIXER_NORM], hidden)
        normalise(
            counters, phase, x_TE, all_T, norm_E, eps, layer[QKV], normed_TE, whole_N, scales_T
        )
        matrix_4 = layer[QKV : QKV + 4]
        multiply(
            counters, phase + 1, matrix_4, qkv_size, normed_TE, whole_N, scales_T, False, qkv_TO,
            scratch_RN,
        )  # fmt: skip
        place_heads(
            counters, phase + 2, layer, sizes, eps, qkv_TO, positions_T, slots_GT[layer[GROUP]],
            keys, values,
        )  # fmt: skip
        attend(
            counters, phase + 3, layer, sizes, rules[index], slopes_H, qkv_TO, mixed_TO, keys,
            no_scales, values, no_scales, tables_GTW[layer[GROUP]], positions_T, states_1GX,
        )  # fmt: skip
        quantize_rows(counters, phase + 4, layer[OUTPUT], mixed_TO, whole_N, scales_T)
        matrix_4 = layer[OUTPUT : OUTPUT + 4]
        multiply(
            counters, phase + 5, matrix_4, hidden, mixed_TO, whole_N, scales_T, True, x_TE,
            scratch_RN,
        )  # fmt: skip
        norm_E = floats_at(layer[MLP_NORM], hidden)
        normalise(
            counters, phase + 6, x_TE, all_T, norm_E, eps, layer[GATE_UP], normed_TE, whole_N,
            scales_T,
        )  # fmt: skip
        matrix_4 = layer[GATE_UP : GATE_UP + 4]
        multiply_gated(
            counters, phase + 7, matrix_4, normed_TE, whole_N, scales_T, hidden_TF, scratch_RN,
            gate_RN,
        )  # fmt: skip
        quantize_rows(counters, phase + 8, layer[DOWN], hidden_TF, whole_N, scales_T)
        matrix_4 = layer[DOWN : DOWN + 4]
        multiply(
            counters, phase + 9, matrix_4, hidden, hidden_TF, whole_N, scales_T, True, x_TE,
            scratch_RN,
        )  # fmt: skip
    phase = layers.shape[0] * PHASES_PER_LAYER
    normalise(
        counters, phase, x_TE, sampled_S, floats_at(final_norm, hidden), eps, head_4[0], normed_TE,
        whole_N, scales_T,
    )  # fmt: skip
    count = sampled_S.shape[0]
    multiply(
        counters, phase + 1, head_4, sizes[VOCAB], normed_TE[:count], whole_N, scales_T, False,
        logits_SV, scratch_RN,
    )  # fmt: skip
    leave(counters)


step = compiled(_step)
