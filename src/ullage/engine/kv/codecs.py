"""Numbers to storage and back, in torch: what a format of `kv_formats` does to float32.

Quantised rows are symmetric: whole numbers times one scale, rounded up to bfloat16 so that nothing
clips; a number is off by half a scale at most (past 3.3e38 it may become infinite). Rows of four
bits are turned first, which spreads the few dimensions of a key that are far larger than the rest
(docs/engine.md has the perplexity with and without). A row that is not finite comes back as NaN,
all of it, and touches no other row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from ullage.engine.kv_formats import KVFormat

STORAGE: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8_per_token_head": torch.int8,
    "int4_per_token_head": torch.uint8,
}
# The inverse of a smaller scale would not be finite; numbers so small become 0.
SMALLEST_SCALE = 2.0**-120


def largest(bits: int) -> int:
    """The highest whole number; its negative is the lowest."""
    return int(2 ** (bits - 1)) - 1


def encode(x_ND: torch.Tensor, stored: KVFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Storage [..., width] and scales bfloat16 [...] (None without) of float32 [..., dim]."""
    if stored.scale_bytes == 0:
        return x_ND.to(STORAGE[stored.name]), None
    if stored.bits == 4:
        x_ND = turned(x_ND)
    top_N = x_ND.abs().amax(dim=-1)
    scales_N = _rounded_up(top_N / largest(stored.bits)).clamp_min(SMALLEST_SCALE)
    whole_ND = torch.round(x_ND * (1 / scales_N.float())[..., None]).nan_to_num(0.0, 0.0, 0.0)
    scales_N = scales_N.masked_fill(~torch.isfinite(top_N), torch.nan)
    if stored.bits == 8:
        return whole_ND.to(torch.int8), scales_N
    low_NW, high_NW = (whole_ND + 8).to(torch.uint8).chunk(2, dim=-1)
    return low_NW | (high_NW << 4), scales_N


def decode(
    storage_NW: torch.Tensor, scales_N: torch.Tensor | None, stored: KVFormat, out_ND: torch.Tensor
) -> None:
    """Float32 [..., dim] of storage, into `out`."""
    if stored.bits == 4:
        width = storage_NW.shape[-1]
        out_ND[..., :width] = storage_NW & 15
        out_ND[..., width:] = storage_NW >> 4
        out_ND -= 8
    else:
        out_ND.copy_(storage_NW)
    if scales_N is not None:
        out_ND *= scales_N[..., None]
    if stored.bits == 4:
        matrix_NN = _hadamard(out_ND.shape[-1] & -out_ND.shape[-1])
        blocks_MN = out_ND.reshape(-1, len(matrix_NN))
        out_ND.copy_((blocks_MN @ matrix_NN).view(out_ND.shape))


def turned(x_ND: torch.Tensor) -> torch.Tensor:
    """Each row's Hadamard transform, by blocks of the largest power of two that divides dim.

    Its own inverse, but for rounding: entries are ±1/√block.
    """
    dim = x_ND.shape[-1]
    block = dim & -dim
    half = 1
    while half < block:
        low, high = x_ND.reshape(*x_ND.shape[:-1], -1, 2, half).unbind(-2)
        x_ND = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return x_ND * float(np.float32(1) / np.sqrt(np.float32(block)))


@cache
def _hadamard(block: int) -> torch.Tensor:
    """What `turned` multiplies with: one product is a tenth of the butterflies' time in torch."""
    return turned(torch.eye(block))


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """The lowest bfloat16 that is not less than x ≥ 0: the upper half of the pattern, carried."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
