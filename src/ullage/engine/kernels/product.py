"""One matrix product by all threads: of float32, or of rows quantised here and int8 weights."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt
from llvmlite import binding

from ullage.engine.kernels.compiling import aligned, compiled
from ullage.engine.kernels.elementwise import quantize
from ullage.engine.kernels.matmul import (
    KIND_INT8,
    MOST_ROWS,
    num_groups,
    rows_at_once,
    share_ahead,
    tile,
    tile_outputs,
)
from ullage.engine.kernels.outer import COLUMNS, LANES, ROWS, multiply
from ullage.engine.kernels.team import Team, enter, finish, leave, take, wait

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def _quantize_all(
    counters: Ints, phase: int, x_TI: Floats, whole_TI: npt.NDArray[np.int16], scales_TG: Floats
) -> None:
    rows, size = x_TI.shape
    few = max(1, min(16, rows // 8))
    pieces = (rows + few - 1) // few
    while True:
        piece = take(counters, phase)
        if piece >= pieces:
            break
        for row in range(piece * few, min(rows, piece * few + few)):
            quantize(x_TI[row], whole_TI[row, :size], scales_TG[row])
            whole_TI[row, size:] = 0
        finish(counters, phase)
    wait(counters, phase, pieces)


quantize_all = compiled(_quantize_all)


def _product(
    counters: Ints, epoch: int, x_TI: Floats, weight_OI: npt.NDArray[np.int8], scales_O: Floats,
    biases_O: Floats, whole_TI: npt.NDArray[np.int16], scales_TG: Floats, out_TO: Floats,
) -> None:  # fmt: skip
    if not enter(counters, epoch):
        return
    quantize_all(counters, 0, x_TI, whole_TI, scales_TG)
    outputs, size = weight_OI.shape
    rows = x_TI.shape[0]
    scratch_RN = np.empty((MOST_ROWS, 64), np.float32)
    step = tile_outputs(KIND_INT8, size)
    pieces = (outputs + step - 1) // step
    weight, x = weight_OI.ctypes.data, whole_TI.ctypes.data
    x_scales, share = scales_TG.ctypes.data, share_ahead(KIND_INT8, rows)
    piece = take(counters, 1)
    while piece < pieces:
        # Taken one ahead, so that it is known what to fetch.
        following = take(counters, 1)
        ahead = weight + min(following, pieces - 1) * step * size
        first = piece * step
        last = min(outputs, first + step)
        row = 0
        while row < rows:
            block = rows_at_once(rows - row)
            ahead = tile(
                KIND_INT8, weight, scales_O, biases_O, size, first, last, x + 2 * row * size,
                x_scales + 4 * row * scales_TG.shape[1], block, scratch_RN, ahead,
                share,
            )  # fmt: skip
            for r in range(block):
                for o in range(last - first):
                    out_TO[row + r, first + o] = scratch_RN[r, o]
            row += block
        finish(counters, 1)
        piece = following
    wait(counters, 1, pieces)
    leave(counters)


_all_threads = compiled(_product)

# Outputs of a piece of work. Their weights lie turned in the second cache, by parts of a row of at
# most this depth, and so many rows of x are multiplied by one half of them after the other.
_STRIP = 2 * COLUMNS
_DEPTH = 640
_NEAR = 4 * ROWS
# Turned together: what is written stays in the first cache until its lines are full.
_TURNED = 16
# Threads should find so many pieces, of so many rows each at least: turning takes as long as 32.
_PIECES_PER_THREAD, _LEAST_ROWS = 4, 128


def _turn_strip(
    weight_OI: Floats, first: int, count: int, at: int, depth: int, strip_DN: Floats
) -> None:
    """Weights of `count` outputs from `first` on, of inputs at … at+depth−1, an input a row."""
    for start in range(0, depth, _TURNED):
        num = min(_TURNED, depth - start)
        for n in range(count):
            row_D = weight_OI[first + n, at + start : at + start + num]
            if num == _TURNED:
                for d in range(_TURNED):
                    strip_DN[start + d, n] = row_D[d]
            else:
                for d in range(num):
                    strip_DN[start + d, n] = row_D[d]


turn_strip = compiled(_turn_strip)


def _multiply_floats(
    counters: Ints, epoch: int, x_TI: Floats, weight_OI: Floats, each_rows: int, adds: bool,
    out_TO: Floats,
) -> None:  # fmt: skip
    """out = (out +) x·Wᵀ. Outputs are a multiple of COLUMNS."""
    if not enter(counters, epoch):
        return
    (rows, size), outputs = x_TI.shape, weight_OI.shape[0]
    parts = (size + _DEPTH - 1) // _DEPTH
    each = (size + parts - 1) // parts
    strip_DN = np.empty((each, _STRIP), np.float32)
    strips = (outputs + _STRIP - 1) // _STRIP
    pieces = strips * ((rows + each_rows - 1) // each_rows)
    while True:
        piece = take(counters, 0)
        if piece >= pieces:
            break
        first, row = piece % strips * _STRIP, piece // strips * each_rows
        count, last = min(_STRIP, outputs - first), min(rows, row + each_rows)
        for at in range(0, size, each):
            depth = min(each, size - at)
            turn_strip(weight_OI, first, count, at, depth, strip_DN)
            for r in range(row, last, _NEAR):
                multiply(
                    x_TI.ctypes.data + 4 * (r * size + at), size, strip_DN.ctypes.data, _STRIP,
                    min(_NEAR, last - r), depth, count,
                    out_TO.ctypes.data + 4 * (r * outputs + first), outputs,
                    1 if adds or at > 0 else 0,
                )  # fmt: skip
        finish(counters, 0)
    wait(counters, 0, pieces)
    leave(counters)


_float_threads = compiled(_multiply_floats)
_none = np.zeros(0, np.float32)
_lock = threading.Lock()
_team: Team | None = None


def team(num_threads: int | None = None) -> Team:
    """The process's threads, made at the first call and as many as then asked for.

    By default OMP_NUM_THREADS, as torch's own; without it one for each processor allowed.
    """
    global _team
    with _lock:
        if _team is None:
            said = os.environ.get("OMP_NUM_THREADS", "")
            allowed = len(os.sched_getaffinity(0))
            _team = Team(num_threads or (int(said) if said.isdecimal() and int(said) else allowed))
        return _team


def int8_product(
    x_TI: Floats,
    weight_OI: npt.NDArray[np.int8],
    scales_O: Floats,
    biases_O: Floats | None,
    out_TO: Floats,
) -> None:
    """out = x·(W·scales)ᵀ + b, x quantised by rows; W is as wide as x or filled up with zeros."""
    rows, size = x_TI.shape[0], weight_OI.shape[1]
    whole_TI = aligned(rows * size, np.int16).reshape(rows, size)
    scales_TG = np.zeros((rows, num_groups(size)), np.float32)
    biases_O = _none if biases_O is None else biases_O
    team().run(_all_threads, 2, x_TI, weight_OI, scales_O, biases_O, whole_TI, scales_TG, out_TO)


# torch multiplies float32 by MKL, which on AMD's processors takes its kernels for AVX2. One thread
# of an EPYC with AVX-512 (Zen 5), the matrices of SmolLM2-135M: 105 billion operations a second at
# any number of rows; these loops 150 at 64 rows, 172 at 128, 221 at 512, 227 at 2,048.
OUTRUNS_TORCH = LANES == 16 and binding.get_host_cpu_name().startswith("znver")
LEAST_FLOAT_ROWS = 64


def takes_floats(rows: int, outputs: int) -> bool:
    """Whether `float_product` is the way to a product: possible, and sooner done than torch's."""
    return OUTRUNS_TORCH and rows >= LEAST_FLOAT_ROWS and outputs % COLUMNS == 0


def float_product(x_TI: Floats, weight_OI: Floats, biases_O: Floats | None, out_TO: Floats) -> None:
    """out = x·Wᵀ + b in float32, for a multiple of COLUMNS of outputs. Holds no memory between."""
    rows, outputs = x_TI.shape[0], weight_OI.shape[0]
    if biases_O is not None:
        out_TO[:] = biases_O
    threads = team()
    strips = -(-outputs // _STRIP)
    chunks = -(-_PIECES_PER_THREAD * threads.num_threads // strips)
    each_rows = max(_LEAST_ROWS, -(-rows // chunks))
    threads.run(_float_threads, 1, x_TI, weight_OI, each_rows, biases_O is not None, out_TO)
