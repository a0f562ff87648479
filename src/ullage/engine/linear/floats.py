"""Weights that are multiplied as the floats they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class FloatLinear:
    """The weight as it is, float32 [out, in]."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight_OI,) if self.bias_O is None else (self.weight_OI, self.bias_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)
