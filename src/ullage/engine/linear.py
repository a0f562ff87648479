"""Matrix products: float32, or int8 weights with activations quantised on the fly.

Each class holds one (perhaps fused) weight and is called with [tokens, in] → [tokens, out].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """y = x·Wᵀ + b. `tensors` are what it holds, or None where a kernel packed them unseen."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...] | None: ...

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor: ...


class FloatLinear:
    """The weight as it is, float32 [out, in]."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._weight_OI,) if self._bias_O is None else (self._weight_OI, self._bias_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self._weight_OI, self._bias_O)


class Int8Linear:
    """One int8 scale per output channel; activations are quantised per call (FBGEMM).

    `reduce_range` keeps the activation in 7 bits: without VNNI the kernel adds pairs of products
    in 16 bits, which overflow with 8.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        scales_O = (weight_OI.abs().amax(dim=1).double() / 127).clamp_min(1e-12)
        zeros_O = torch.zeros_like(scales_O, dtype=torch.int64)
        with warnings.catch_warnings():
            # Announced for removal, but the only fast int8 product on AVX2 so far.
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            quantized = torch.quantize_per_channel(weight_OI, scales_O, zeros_O, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantized, bias_O)

    @property
    def tensors(self) -> None:
        return None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic(x_TI, self._packed, True)
        return y


LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], Linear]
LINEARS: Mapping[str, LinearFactory] = {"none": FloatLinear, "int8": Int8Linear}
