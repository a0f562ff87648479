"""What a row may see and how scores are formed: one `AttentionRule` per layer, fixed at load.

Plain data that the decoder fills from the spec and every attention path obeys.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """score(t, s) = cap(q_t·k_s·scale) + slope·(s − t) for s ≤ t; with a window, s > t − window.

    `soft_cap` c: cap(x) = c·tanh(x / c) (Gemma-2); `slopes` one per query head (ALiBi, BLOOM, MPT).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: tuple[float, ...] = ()
