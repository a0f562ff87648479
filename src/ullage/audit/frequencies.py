"""The angle per token of each rotary pair, for every RoPE scaling whose formula is known.

Holds formulas only, in plain floats, so that rules about positions need no tensors. The engine
builds its own tables; `tests/audit/test_frequencies.py` holds both against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ullage.anatomy.spec import Rope

TURN = 2 * math.pi


def angles_per_token(rope: Rope, *, head_dim: int, length: int) -> tuple[float, ...] | None:
    """Radians that each of the rotary pairs turns per token, fastest first; None if unknown.

    `head_dim` matters to proportional RoPE only, `length` (tokens served) to dynamic scaling.
    Formulas: transformers 5.24, modeling_rope_utils.py.
    """
    formula = FORMULAS.get(rope.scaling)
    if formula is None or rope.rotary_dim < 2 or rope.theta <= 0:
        return None
    # Factors and theta at the edge of a float's range leave no angle to speak of.
    try:
        angles = formula(rope, head_dim, length)
    except (OverflowError, ZeroDivisionError):
        return None
    return angles if angles is not None and all(map(math.isfinite, angles)) else None


def _plain(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-i / dim) for i in range(0, dim - 1, 2))


def _default(rope: Rope, _head_dim: int, _length: int) -> tuple[float, ...]:
    return _plain(rope.theta, rope.rotary_dim)


def _linear(rope: Rope, head_dim: int, length: int) -> tuple[float, ...]:
    return tuple(a / rope.factor for a in _default(rope, head_dim, length))


def _dynamic(rope: Rope, _head_dim: int, length: int) -> tuple[float, ...] | None:
    original = rope.original_max_positions
    if original is None or rope.rotary_dim <= 2:
        return None
    stretch = rope.factor * max(length, original) / original - (rope.factor - 1)
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return _plain(theta, rope.rotary_dim)


def _yarn(rope: Rope, head_dim: int, length: int) -> tuple[float, ...] | None:
    original, dim = rope.original_max_positions, rope.rotary_dim
    if original is None or rope.theta <= 1:
        return None
    numbers = dict(rope.parameters)
    fast = _number(numbers.get("beta_fast"), 32.0)
    slow = _number(numbers.get("beta_slow"), 1.0)
    if fast <= 0 or slow <= 0:
        return None  # no pair turns so many times

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * TURN)) / (2 * math.log(rope.theta))

    low, high = pair_with(fast), pair_with(slow)
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    plain = _default(rope, head_dim, length)
    made = []
    for i, angle in enumerate(plain):
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        made.append(angle / rope.factor * stretched + angle * (1 - stretched))
    return tuple(made)


def _llama3(rope: Rope, head_dim: int, length: int) -> tuple[float, ...] | None:
    original = rope.original_max_positions
    numbers = dict(rope.parameters)
    low = _number(numbers.get("low_freq_factor"), 0.0)
    high = _number(numbers.get("high_freq_factor"), 0.0)
    if original is None or not low or not high:
        return None
    made = []
    for angle in _default(rope, head_dim, length):
        turns = original * angle / TURN
        if turns < low:
            made.append(angle / rope.factor)
        elif turns > high:
            made.append(angle)
        else:
            kept = (turns - low) / (high - low) if high != low else 1.0
            made.append((1 - kept) * angle / rope.factor + kept * angle)
    return tuple(made)


def _proportional(rope: Rope, head_dim: int, _length: int) -> tuple[float, ...]:
    """The first pairs of the whole head turn, the others stand still (their angle is 0)."""
    turning = tuple(
        rope.theta ** (-i / head_dim) / rope.factor for i in range(0, rope.rotary_dim - 1, 2)
    )
    return turning + (0.0,) * (head_dim // 2 - len(turning))


def _longrope(rope: Rope, head_dim: int, length: int) -> tuple[float, ...] | None:
    """A factor per pair: short ones up to the original length, long ones beyond it."""
    original = rope.original_max_positions
    if original is None:
        return None
    factors = dict(rope.parameters).get("long_factor" if length > original else "short_factor")
    plain = _default(rope, head_dim, length)
    if not isinstance(factors, tuple) or len(factors) != len(plain) or 0 in factors:
        return None
    return tuple(angle / factor for angle, factor in zip(plain, factors, strict=True))


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


FORMULAS: dict[str, Callable[[Rope, int, int], tuple[float, ...] | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
