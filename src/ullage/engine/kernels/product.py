"""One matrix product by all threads: rows quantised, then multiplied by int8 weights."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

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
