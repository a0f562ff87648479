"""Attention kernels, one by one, against the sum written out in float64, per head size.

Holds the inputs, the reference and the bound. What a model's own attention does is
`apart`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ullage.probes.numerics.bundle_compare import HALF_STEPS
from ullage.probes.numerics.numerics import KernelReading

KERNELS: Mapping[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""torch's own, by the names of `torch.nn.attention.SDPBackend`."""
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
"""Head sizes of released models, beside the model's own."""
ROWS = (1, 17, 129)
"""One row, and lengths that no tile divides."""
SLACK = 8.0
"""In half steps of the dtype, of the output's norm: weights and output are rounded once each, and
scores of a spread of 1 turn a half step of theirs into as much of a weight's."""


def kernels_of(
    dtype: torch.dtype, head_dims: Iterable[int], device: torch.device
) -> tuple[KernelReading, ...]:
    """Each kernel that the device has, at each head size and number of rows."""
    found: list[KernelReading] = []
    for head_dim in sorted(set(head_dims)):
        for rows in ROWS:
            found += _of_size(dtype, head_dim, rows, device)
    return tuple(found)


def _of_size(
    dtype: torch.dtype, head_dim: int, rows: int, device: torch.device
) -> Iterator[KernelReading]:
    chance = torch.Generator().manual_seed(head_dim * 1000 + rows)
    drawn = torch.randn(3, 1, 2, rows, head_dim, generator=chance)
    q, k, v = drawn.to(device=device, dtype=dtype)
    exact = causal_attention(q, k, v)
    allowed = SLACK * HALF_STEPS[str(dtype).removeprefix("torch.")]
    for name, backend in KERNELS.items():
        try:
            with sdpa_kernel([backend]):
                given = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        except RuntimeError as error:
            said = str(error).partition("\n")[0][:80]
            yield KernelReading(name, head_dim, rows, None, allowed, refused=said)
            continue
        gap = float((given.double() - exact).norm() / exact.norm())
        off = gap if math.isfinite(gap) else None
        yield KernelReading(name, head_dim, rows, off, allowed)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Written out: softmax(q·kᵀ/√d)·v, each row seeing those up to its own, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(unseen, -math.inf).softmax(-1) @ v
