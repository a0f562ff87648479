"""Rotary scaling of a GGUF model: from its keys, or from the tables that it stores instead.

Holds the recognition of `rope.scaling.*`, of `rope_freqs` (Llama 3) and of the long and short
factors (longrope). Computing angles is the engine's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

# Configuration key ← metadata key below `rope.scaling.`.
_NUMBERS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}

# The constants of Llama 3's scaling. GGUF stores the resulting table only, which is checked.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_scaling(
    scaling: Mapping[str, object],
    table: Callable[[str], Sequence[float] | None],
    theta: float,
) -> tuple[dict[str, object], str] | None:
    """The `rope_scaling` of a configuration and where it came from; None when there is none.

    Args:
        scaling: the metadata below `rope.scaling.`, prefix removed.
        table: gives a small float32 tensor of the file by name, None when it is not there.
        theta: `rope.freq_base`, against which Llama 3's table is checked.

    A table that no known rule gives becomes the kind "gguf_table", which nobody may guess at.
    """
    kind = scaling.get("type")
    long_factors, short_factors = (
        table("rope_factors_long.weight"),
        table("rope_factors_short.weight"),
    )
    if long_factors is not None and short_factors is not None:
        found = _numbers(scaling)
        found.update(
            rope_type="longrope", long_factor=list(long_factors), short_factor=list(short_factors)
        )
        return found, "header: rope_factors_long.weight, rope_factors_short.weight"
    frequencies = table("rope_freqs.weight")
    if frequencies is not None:
        return _llama3(frequencies, theta), "header: rope_freqs.weight"
    if not isinstance(kind, str) or kind == "none":
        return None
    found = {"rope_type": kind, **_numbers(scaling)}
    multiplier = scaling.get("yarn_log_multiplier")
    if isinstance(multiplier, int | float):
        # llama.cpp's converter of DeepSeek: yarn_log_multiplier = 0.1 · mscale_all_dim.
        found["mscale_all_dim"] = round(multiplier * 10, 6)
    return found, "header: rope.scaling.*"


def _numbers(scaling: Mapping[str, object]) -> dict[str, object]:
    return {
        key: scaling[source]
        for key, source in _NUMBERS.items()
        if isinstance(scaling.get(source), int | float)
    }


def _llama3(frequencies: Sequence[float], theta: float) -> dict[str, object]:
    factor = max(frequencies, default=1.0)
    expected = llama3_table(2 * len(frequencies), theta, factor)
    fits = all(
        math.isclose(found, wanted, rel_tol=1e-4)
        for found, wanted in zip(frequencies, expected, strict=True)
    )
    if not fits:
        return {"rope_type": "gguf_table"}
    return {"rope_type": "llama3", "factor": round(factor, 6), **_LLAMA3}


def llama3_table(rotary_dim: int, theta: float, factor: float) -> list[float]:
    """By what Llama 3's scaling divides each of rotary_dim/2 frequencies (Llama 3.1's constants).

    Short wavelengths stay, long ones are stretched by `factor`, those between are blended.
    """
    original = _LLAMA3["original_max_position_embeddings"]
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    table = []
    for pair in range(rotary_dim // 2):
        turns = original * theta ** (-2 * pair / rotary_dim) / (2 * math.pi)
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        table.append(1 / ((1 - blend) / factor + blend))
    return table
