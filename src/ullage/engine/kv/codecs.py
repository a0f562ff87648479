"""Numbers to storage and back, in torch: what a format of `kv_formats` does to float32.

Quantised rows are symmetric: whole numbers times one scale, rounded up to bfloat16 so that nothing
clips. The error of a number is at most half its row's scale (past 3.3e38 it may become infinite).
A row that is not finite comes back as NaN, all of it, and touches no other row.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """The lowest bfloat16 that is not less than x ≥ 0: the upper half of the pattern, carried."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
