"""What distance adds to scores: a number per head, far ones in buckets; or −∞ beyond a window.

Pure arithmetic, after transformers 5.24's MPNet and ModernBERT.
"""

from __future__ import annotations

import math

import torch

MAX_DISTANCE = 128
# MPNet's code forms buckets for this many, whatever the table holds.
NUM_BUCKETS = 32


def bucketed_bias(bias_RH: torch.Tensor, length: int) -> torch.Tensor:
    """What is added to the scores of one text, float32 [heads, length, length].

    `bias_RH` is the table [buckets, heads].
    """
    at = torch.arange(length)
    return bias_RH[bucket(at[None, :] - at[:, None])].permute(2, 0, 1).contiguous()


def window_bias(window: int, length: int) -> torch.Tensor | None:
    """0 for keys up to `window` tokens away on either side, −∞ beyond; None where all are within.

    Float32 [length, length].
    """
    if length <= window + 1:
        return None
    at = torch.arange(length)
    far = (at[None, :] - at[:, None]).abs() > window
    return torch.zeros(length, length).masked_fill(far, float("-inf"))


def bucket(distance: torch.Tensor) -> torch.Tensor:
    """Rows of the table for key position − query position.

    Half of the buckets are for keys behind the query's. Of each half, half hold one distance each
    and the others grow by a constant factor up to MAX_DISTANCE.
    """
    half = NUM_BUCKETS // 2
    exact = half // 2
    far = distance.abs()
    grown = (far.clamp_min(1).float() / exact).log() / math.log(MAX_DISTANCE / exact)
    large = (exact + (grown * (half - exact)).long()).clamp_max(half - 1)
    return torch.where(far < exact, far, large) + (distance > 0) * half
