"""One row at a time: RMS norm, quantisation of an activation, rotation, SiLU.

Rows are float32. Where NaN or Inf stands, zeros are stored with a scale of NaN, so that whatever is
made of the row is NaN too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.llvm import GROUP, as_bits, as_float

Floats = npt.NDArray[np.float32]

_ABS = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_SMALLEST_NORMAL = np.int32(0x00800000)
_ONE = np.int32(0x3F800000)
_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts, the first with so few bits that its product with a small whole number is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5·2²³: added and taken away, it rounds to a whole number


def _exp(x: np.float32) -> np.float32:
    """e^x within 2 units in the last place, for x in −87 … 88 and else the nearest of these.

    2^n·e^r with |r| ≤ ln 2 / 2, e^r by its Taylor series. NaN gives some finite number.
    """
    x = max(np.float32(-87), min(np.float32(88), x))
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(0.5)
    series = series * r * r + r + np.float32(1)
    power = (as_bits(shifted) - as_bits(_ROUND)) << np.int32(23)
    return np.float32(series * as_float(np.int32(power + _ONE)))


def _mean_square(x_E: Floats) -> np.float32:
    total = np.float32(0)
    for i in range(x_E.shape[0]):
        total += x_E[i] * x_E[i]
    return total / np.float32(x_E.shape[0])


exp = compiled(_exp)
mean_square = compiled(_mean_square, fast=True)


def _rms_norm(x_E: Floats, weight_E: Floats, eps: np.float32, out_E: Floats) -> None:
    """x·weight / sqrt(mean(x²) + eps)."""
    factor = np.float32(1) / np.sqrt(mean_square(x_E) + eps)
    for i in range(x_E.shape[0]):
        out_E[i] = x_E[i] * factor * weight_E[i]


def _quantize(x_I: Floats, out_I: npt.NDArray[np.int16], scales_G: Floats) -> None:
    """Whole numbers from −127 to 127 in int16, symmetric; what one is worth, by groups of GROUP."""
    patterns = x_I.view(np.int32)
    size = x_I.shape[0]
    for group in range(scales_G.shape[0]):
        first, last = group * GROUP, min(size, group * GROUP + GROUP)
        top = np.int32(0)
        for i in range(first, last):
            top = max(top, patterns[i] & _ABS)
        if top >= _INF:
            out_I[first:last] = 0
            scales_G[group] = np.nan
            continue
        if top < _SMALLEST_NORMAL:
            # The inverse of so small a scale would not be finite.
            out_I[first:last] = 0
            scales_G[group] = 0
            continue
        largest = as_float(top)
        factor = np.float32(127) / largest
        for i in range(first, last):
            out_I[i] = np.int16(np.rint(x_I[i] * factor))
        scales_G[group] = largest / np.float32(127)


def _rotate(x_D: Floats, cos_R: Floats, sin_R: Floats) -> None:
    """Turn pairs (i, i + R/2) of the first R dimensions in place."""
    half = cos_R.shape[0] // 2
    for i in range(half):
        low, high = x_D[i], x_D[i + half]
        x_D[i] = low * cos_R[i] - high * sin_R[i]
        x_D[i + half] = high * cos_R[i + half] + low * sin_R[i + half]


def _silu_times(gate_F: Floats, up_F: Floats, out_F: Floats) -> None:
    """gate·sigmoid(gate)·up."""
    for i in range(out_F.shape[0]):
        out_F[i] = gate_F[i] / (np.float32(1) + exp(-gate_F[i])) * up_F[i]


rms_norm, quantize, rotate = compiled(_rms_norm), compiled(_quantize), compiled(_rotate)
silu_times = compiled(_silu_times)
