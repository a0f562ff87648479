"""One head's key or value into the cache, in any storage: bit for bit what `kv.codecs` writes.

`store(x_D, numbers, scales, block, offset, head)` with numbers [blocks, block_size, kv_heads,
width] of float32, uint16 (bfloat16's patterns), int8 or uint8 (two of four bits), and scales
[blocks, block_size, kv_heads] uint16, looked at for the last two only.
"""

# ruff: noqa: ARG001 (every storage takes the same arguments, and numba asks for them by name)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.hadamard import turn
from ullage.engine.kernels.llvm import as_bits, as_float
from ullage.engine.kernels.vectors import scratch

Floats = npt.NDArray[np.float32]
Patterns = npt.NDArray[np.uint16]

# Room on the stack for one head, in words of two floats; kv_formats.MOST_INT4_DIM holds it to that.
_SCRATCH_WORDS = 256
_ABS = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_NAN_BFLOAT16 = np.uint16(0x7FC0)
_SMALLEST_SCALE = np.float32(2.0**-120)


def _bfloat16(x: np.float32) -> np.uint16:
    """The nearest bfloat16, ties to even."""
    bits = as_bits(x)
    if bits & _ABS > _INF:
        return _NAN_BFLOAT16
    odd = (bits >> np.int32(16)) & np.int32(1)
    return np.uint16((np.uint32(bits) + np.uint32(0x7FFF) + np.uint32(odd)) >> np.uint32(16))


def _top(x_D: Floats) -> np.int32:
    """The pattern of the largest magnitude; those of Inf and NaN are above all others."""
    patterns = x_D.view(np.int32)
    top = np.int32(0)
    for i in range(patterns.shape[0]):
        top = max(top, patterns[i] & _ABS)
    return top


def _scale(top: np.int32, largest: int) -> np.uint16:
    """The lowest bfloat16 that is not less than top / largest, nor than the smallest scale."""
    exact = max(np.float32(as_float(top) / np.float32(largest)), _SMALLEST_SCALE)
    return np.uint16((np.uint32(as_bits(exact)) + np.uint32(0xFFFF)) >> np.uint32(16))


bfloat16, top_of, scale_of = compiled(_bfloat16), compiled(_top), compiled(_scale)


# numba wants the implementations' annotations equal to those of `_implementation`.


def _store_float32(x_D: Any, numbers: Any, scales: Any, block: Any, offset: Any, head: Any) -> None:
    for i in range(x_D.shape[0]):
        numbers[block, offset, head, i] = x_D[i]


def _store_bfloat16(
    x_D: Any, numbers: Any, scales: Any, block: Any, offset: Any, head: Any
) -> None:
    for i in range(x_D.shape[0]):
        numbers[block, offset, head, i] = bfloat16(x_D[i])


def _store_int8(x_D: Any, numbers: Any, scales: Any, block: Any, offset: Any, head: Any) -> None:
    top = top_of(x_D)
    if top >= _INF:
        numbers[block, offset, head, :] = 0
        scales[block, offset, head] = _NAN_BFLOAT16
        return
    scale = scale_of(top, 127)
    scales[block, offset, head] = scale
    factor = np.float32(1) / as_float(np.int32(np.uint32(scale) << np.uint32(16)))
    for i in range(x_D.shape[0]):
        numbers[block, offset, head, i] = np.int8(np.rint(x_D[i] * factor))


def _store_int4(x_D: Any, numbers: Any, scales: Any, block: Any, offset: Any, head: Any) -> None:
    width = x_D.shape[0] // 2
    turned_D = numba.carray(scratch(_SCRATCH_WORDS), (2 * width,), np.float32)
    turned_D[:] = x_D
    turn(turned_D)
    top = top_of(turned_D)
    if top >= _INF:
        numbers[block, offset, head, :] = 0x88
        scales[block, offset, head] = _NAN_BFLOAT16
        return
    scale = scale_of(top, 7)
    scales[block, offset, head] = scale
    factor = np.float32(1) / as_float(np.int32(np.uint32(scale) << np.uint32(16)))
    for i in range(width):
        low = np.int32(np.rint(turned_D[i] * factor)) + 8
        high = np.int32(np.rint(turned_D[width + i] * factor)) + 8
        numbers[block, offset, head, i] = np.uint8(low | (high << 4))


_BY_STORAGE: dict[Any, Callable[..., None]] = {
    types.float32: _store_float32,
    types.uint16: _store_bfloat16,
    types.int8: _store_int8,
    types.uint8: _store_int4,
}


def store(x_D: Floats, numbers: Any, scales: Patterns, block: int, offset: int, head: int) -> None:
    """Only compiled code calls this: numba takes the implementation of the storage's type."""
    raise NotImplementedError


def _implementation(
    x_D: Any, numbers: Any, scales: Any, block: Any, offset: Any, head: Any
) -> Callable[..., None] | None:
    return _BY_STORAGE.get(numbers.dtype)


overload(store)(_implementation)


def _store_rows(x_TKD: Any, slots_T: npt.NDArray[np.int64], numbers: Any, scales: Patterns) -> None:
    """All heads of all tokens, each at its slot: block × block_size + offset."""
    block_size = numbers.shape[1]
    for token in range(x_TKD.shape[0]):
        block, offset = slots_T[token] // block_size, slots_T[token] % block_size
        for head in range(x_TKD.shape[1]):
            store(x_TKD[token, head], numbers, scales, block, offset, head)


store_rows = compiled(_store_rows)
