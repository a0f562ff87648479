"""Rotary tables in float32, cos and sin of every position, and the rotation itself.

Where the angles come from is `rope_scaling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ullage.engine.positions.scaling import Angles

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Turn:
    """The rotation of one batch: cos and sin, each [tokens, 1, rotary_dim], and which are pairs."""

    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor
    interleaved: bool

    def __call__(self, x_TND: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, head_dim] with its first rotary_dim dimensions turned."""
        return rotate(x_TND, self.cos_T1D, self.sin_T1D, interleaved=self.interleaved)


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTables:
    """cos and sin, each float32 [positions, rotary_dim]: a pair's value stands at both its places.

    A pair is dimensions i and i + rotary_dim/2, or 2i and 2i + 1 when `interleaved`.
    """

    cos_ND: torch.Tensor
    sin_ND: torch.Tensor
    interleaved: bool

    def at(self, positions_T: torch.Tensor) -> Turn:
        """The rotation of tokens at these positions."""
        cos_TD = self.cos_ND.index_select(0, positions_T)
        sin_TD = self.sin_ND.index_select(0, positions_T)
        return Turn(cos_TD[:, None], sin_TD[:, None], self.interleaved)


def rotary_tables(angles: Angles, num_positions: int) -> RotaryTables:
    """Tables of positions 0 … num_positions−1."""
    return rotary_rows(angles, np.arange(num_positions, dtype=np.float64))


def rotary_rows(angles: Angles, positions_N: NDArray[np.float64]) -> RotaryTables:
    """Tables of these positions alone.

    Products are formed in float64: at position 100,000 a float32 one is already wrong by several
    thousandths of a radian.
    """
    angles_NP = positions_N[:, None] * angles.frequencies[None, :]

    def spread(x_NP: NDArray[np.float64]) -> torch.Tensor:
        x_NP = (x_NP * angles.attention_factor).astype(np.float32)
        x_ND = np.repeat(x_NP, 2, axis=1) if angles.interleaved else np.tile(x_NP, 2)
        return torch.from_numpy(x_ND)

    return RotaryTables(spread(np.cos(angles_NP)), spread(np.sin(angles_NP)), angles.interleaved)


def rotate(
    x_TND: torch.Tensor,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """Turn the first rotary_dim dimensions of x [tokens, heads, head_dim]; the rest stays."""
    rotary_dim = cos_T1D.shape[-1]
    turn = _turn_neighbours if interleaved else _turn_halves
    if rotary_dim == x_TND.shape[-1]:
        return turn(x_TND, cos_T1D, sin_T1D)
    turned = turn(x_TND[..., :rotary_dim], cos_T1D, sin_T1D)
    return torch.cat([turned, x_TND[..., rotary_dim:]], dim=-1)


def _turn_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    other = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos, other, sin)


def _turn_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return torch.addcmul(x * cos, other, sin)
