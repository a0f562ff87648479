"""What the decoder asks of a matrix: to multiply, and to say what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Linear(Protocol):
    """y = x·Wᵀ + b. `tensors` are what it holds, or None where a kernel packed them unseen."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...] | None: ...

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor: ...


LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Makes a linear of a float32 weight [out, in] and a bias [out] or None."""
