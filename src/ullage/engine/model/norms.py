"""RMS and layer norms of a decoder: weights with the kind of normalisation that they belong to.

Holds the arithmetic only. Where a layer has norms is `loading.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """`weight` and `bias` float32 [size], None where a norm has none; a unit offset is in `weight`.

    Computed in float32 whatever x is, and given back in x's dtype (as transformers does it).
    """

    kind: Literal["rms", "layer"]
    size: int
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] normalised over its last dimension."""
        wide = x.float()
        if self.kind == "rms":
            normed = F.rms_norm(wide, (self.size,), self.weight, self.eps)
        else:
            normed = F.layer_norm(wide, (self.size,), self.weight, self.bias, self.eps)
        return normed.to(x.dtype)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.weight, self.bias) if t is not None)
