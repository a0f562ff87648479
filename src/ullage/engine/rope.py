"""Rotary tables: cos and sin of every position, computed once in float64 on the host.

Holds the frequencies of each scaling kind that the engine runs and the rotation itself. What a
config means by its rope fields is `anatomy`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from ullage.errors import UnsupportedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ullage.anatomy.spec import Rope

    Frequencies = NDArray[np.float64]


def rope_tables(rope: Rope, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each float32 [num_positions, rotary_dim], halves repeated.

    Angles are formed in float64: at position 100,000 a float32 product is already wrong by
    several thousandths of a radian. Raises UnsupportedModel for a scaling it does not know.
    """
    angles_ND = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies(rope)[None, :]
    angles_ND = np.concatenate([angles_ND, angles_ND], axis=1)
    return (
        torch.from_numpy(np.cos(angles_ND).astype(np.float32)),
        torch.from_numpy(np.sin(angles_ND).astype(np.float32)),
    )


def frequencies(rope: Rope) -> Frequencies:
    """Radians per position of each pair, float64 [rotary_dim / 2]."""
    refusal = unsupported_rope(rope)
    if refusal is not None:
        raise refusal
    return _SCALINGS[rope.scaling](rope)


def unsupported_rope(rope: Rope) -> UnsupportedModel | None:
    """The reason why this rope cannot run here, or None."""
    if rope.scaling not in _SCALINGS:
        known = ", ".join(sorted(_SCALINGS))
        return UnsupportedModel(
            f"the embedded engine has no rope scaling {rope.scaling!r}",
            field="rope_scaling",
            expected=f"one of {known}",
        )
    if rope.sections:
        return UnsupportedModel(
            f"multi-section rope {list(rope.sections)} is not run by the embedded engine",
            field="mrope_section",
        )
    if rope.interleaved:
        return UnsupportedModel(
            "interleaved rope pairs are not run by the embedded engine", field="rope_interleave"
        )
    return None


def rotate(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Turn the first rotary_dim dimensions of x [tokens, heads, head_dim]; halves are the pairs."""
    rotary_dim = cos_T1D.shape[-1]
    if rotary_dim == x_TND.shape[-1]:
        return _turn(x_TND, cos_T1D, sin_T1D)
    turned = _turn(x_TND[..., :rotary_dim], cos_T1D, sin_T1D)
    return torch.cat([turned, x_TND[..., rotary_dim:]], dim=-1)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    other = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos, other, sin)


def _plain(rope: Rope) -> Frequencies:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain: Frequencies = np.power(float(rope.theta), -exponents)
    return plain


def _linear(rope: Rope) -> Frequencies:
    return _plain(rope) / rope.factor


def _llama3(rope: Rope) -> Frequencies:
    """Llama 3.1's: long waves slowed by `factor`, short ones kept, a ramp between.

    A wave is long when the original context holds fewer than low_freq_factor turns of it.
    """
    numbers: Mapping[str, object] = dict(rope.parameters)
    low, high = _number(numbers, "low_freq_factor"), _number(numbers, "high_freq_factor")
    if rope.original_max_positions is None:
        raise UnsupportedModel(
            "missing", field="original_max_position_embeddings", expected="a number for llama3 rope"
        )
    plain = _plain(rope)
    turns = rope.original_max_positions * plain / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - ramp) * plain / rope.factor + ramp * plain


def _number(numbers: Mapping[str, object], key: str) -> float:
    value = numbers.get(key)
    if not isinstance(value, int | float):
        raise UnsupportedModel(
            "missing" if value is None else repr(value), field=key, expected="a number"
        )
    return float(value)


_SCALINGS: Mapping[str, Callable[[Rope], Frequencies]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
}
