"""Weights that are multiplied as the floats they are, float32 or bfloat16."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F

from ullage.engine.kernels.compiling import available

# From this many rows on bfloat16 is widened first: without AVX-512 BF16 torch 2.13 multiplies it
# an element at a time (SmolLM2-135M, 32 rows: 583 ms a step, widened 170).
_WIDEN_FROM_ROWS = 4


class FloatLinear:
    """The weight as it is, [out, in]; a bias is kept in float32, as the kernels add it."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = None if bias_O is None else bias_O.float()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight_OI,) if self.bias_O is None else (self.weight_OI, self.bias_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        dtype = self.weight_OI.dtype
        if dtype == torch.float32:
            return _multiplied(x_TI, self.weight_OI, self.bias_O)
        if x_TI.shape[0] < _WIDEN_FROM_ROWS:
            return F.linear(
                x_TI, self.weight_OI, None if self.bias_O is None else self.bias_O.to(dtype)
            )
        return _multiplied(x_TI.float(), _widened(self.weight_OI), self.bias_O).to(x_TI.dtype)


def _multiplied(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """In float32, by the package's own loops where those are known to be the faster."""
    if not available():
        return F.linear(x_TI, weight_OI, bias_O)
    from ullage.engine.kernels.product import float_product, takes_floats

    if not takes_floats(x_TI.shape[0], weight_OI.shape[0]):
        return F.linear(x_TI, weight_OI, bias_O)
    y_TO = torch.empty(x_TI.shape[0], weight_OI.shape[0])
    float_product(
        x_TI.contiguous().numpy(),
        weight_OI.numpy(),
        None if bias_O is None else bias_O.numpy(),
        y_TO.numpy(),
    )
    return y_TO


class _Workspace(threading.local):
    """Each thread's own, for what it holds is gone with the next call."""

    held: torch.Tensor = torch.empty(0)


_workspace = _Workspace()


def _widened(weight_OI: torch.Tensor) -> torch.Tensor:
    """float32 in memory that the next call overwrites: fresh pages cost more than the copy."""
    if _workspace.held.numel() < weight_OI.numel():
        # What inference mode makes could not be written outside of it.
        with torch.inference_mode(False):
            _workspace.held = torch.empty(weight_OI.numel())
    return _workspace.held[: weight_OI.numel()].view(weight_OI.shape).copy_(weight_OI)
