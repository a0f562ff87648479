"""Angles per position of each rotary scaling kind, in float64 on the host, and their fingerprint.

Holds numbers only and no torch; the tables made of them and the rotation are `rope`. What a config
means by its rope fields is `anatomy`'s business.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ullage.anatomy.spec import Attention
from ullage.errors import UnsupportedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ullage.anatomy.spec import ModelSpec, Rope

    Frequencies = NDArray[np.float64]

# Digits that enter a fingerprint: tables formed in float32 differ in the eighth, while power
# functions of two math libraries agree to the fifteenth.
FINGERPRINT_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Reach:
    """What a scaling may ask about beyond its own numbers.

    `max_model_len` positions are served; the model was made for `max_positions` (0: not known).
    """

    max_model_len: int
    max_positions: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """`frequencies` float64 [pairs], radians per position; cos and sin times `attention_factor`.

    Pairs lie side by side when `interleaved`, else half of the rotated dimensions apart.
    """

    frequencies: Frequencies
    attention_factor: float
    interleaved: bool


def rope_angles(rope: Rope, reach: Reach) -> Angles:
    """The angles of `rope`, one set for all positions below `reach.max_model_len`.

    They equal those of transformers 5.24 (modeling_rope_utils.py) but in longrope, where a cached
    key must not change its angle once the sequence grows: as vLLM 0.32 does it
    (phi3_long_rope_scaled_rope.py), the long factors hold for every position as soon as
    max_model_len is above the original length. Raises UnsupportedModel.
    """
    refusal = unsupported_rope(rope)
    if refusal is not None:
        raise refusal
    frequencies, attention_factor = _SCALINGS[rope.scaling](rope, reach)
    return Angles(frequencies, attention_factor, rope.interleaved)


def unsupported_rope(rope: Rope) -> UnsupportedModel | None:
    """The reason why this rope cannot run here, or None."""
    if rope.scaling not in _SCALINGS:
        return UnsupportedModel(
            f"the embedded engine has no rope scaling {rope.scaling!r}",
            field="rope_scaling",
            expected="one of " + ", ".join(sorted(_SCALINGS)),
        )
    if rope.sections:
        return UnsupportedModel(
            f"multi-section rope {list(rope.sections)} is not run by the embedded engine",
            field="mrope_section",
        )
    if rope.rotary_dim < 2 or rope.rotary_dim % 2:
        return UnsupportedModel(
            f"rope over {rope.rotary_dim} dimensions is not run by the embedded engine",
            field="rotary_dim",
            expected="an even number of dimensions",
        )
    unknown = [key for key, _ in rope.parameters if key not in _PARAMETERS]
    if unknown:
        return UnsupportedModel(
            f"{unknown[0][:80]} is not known to the embedded engine",
            field="rope_scaling",
            expected="the parameters of " + ", ".join(sorted(_SCALINGS)),
        )
    return None


def length_note(spec: ModelSpec, max_model_len: int) -> str | None:
    """One sentence where max_model_len chose the angles of every position; None where it did not.

    Short texts then turn otherwise than on a server with a lower limit.
    """
    for layer in spec.layers:
        rope = layer.mixer.rope if isinstance(layer.mixer, Attention) else None
        if rope is None or rope.scaling != "longrope":
            continue
        original = _original(rope)
        kind = "long" if max_model_len > original else "short"
        return (
            f"longrope turns every position by its {kind} factors, since --max-model-len is "
            f"{max_model_len:,} and the original length {original:,}"
        )
    return None


def rope_fingerprint(angles: Iterable[Angles | None]) -> str:
    """16 hexadecimal digits that two tables share only if they turn alike.

    Over frequencies and attention factor to ten digits, number of pairs and their kind, for each
    of `angles` in order (None: a layer without rotation). Replicas and ranks of one model that
    differ here answer differently at far positions, however equal their weights are.
    """
    digest = hashlib.sha256()
    for one in angles:
        if one is None:
            digest.update(b"none\n")
            continue
        numbers = (one.attention_factor, *one.frequencies.tolist())
        shown = " ".join(f"{number:.{FINGERPRINT_DIGITS - 1}e}" for number in numbers)
        digest.update(f"{'interleaved' if one.interleaved else 'halves'} {shown}\n".encode())
    return digest.hexdigest()[:16]


def model_rope_fingerprint(spec: ModelSpec, max_model_len: int) -> str | None:
    """The fingerprint over all layers of a model, None when none of them rotates."""
    angles: list[Angles | None] = []
    known: dict[tuple[Rope, int], Angles] = {}
    for layer in spec.layers:
        mixer = layer.mixer
        if not isinstance(mixer, Attention) or mixer.rope is None:
            angles.append(None)
            continue
        key = (mixer.rope, mixer.head_dim)
        if key not in known:
            reach = Reach(max_model_len, spec.max_positions, mixer.head_dim)
            known[key] = rope_angles(mixer.rope, reach)
        angles.append(known[key])
    return rope_fingerprint(angles) if known else None


# --- the kinds -----------------------------------------------------------------------------------


def _powers(theta: float, rotary_dim: int, num_pairs: int | None = None) -> Frequencies:
    pairs = np.arange(rotary_dim // 2 if num_pairs is None else num_pairs, dtype=np.float64)
    powers: Frequencies = np.power(float(theta), -2 * pairs / rotary_dim)
    return powers


def _default(rope: Rope, _: Reach) -> tuple[Frequencies, float]:
    return _powers(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: Rope, _: Reach) -> tuple[Frequencies, float]:
    return _powers(rope.theta, rope.rotary_dim) / rope.factor, 1.0


def _proportional(rope: Rope, reach: Reach) -> tuple[Frequencies, float]:
    """Gemma-4's: the exponents run over head_dim, the pairs that do not turn stay in place."""
    turning = _powers(rope.theta, reach.head_dim, rope.rotary_dim // 2) / rope.factor
    return np.concatenate([turning, np.zeros(reach.head_dim // 2 - len(turning))]), 1.0


def _dynamic(rope: Rope, reach: Reach) -> tuple[Frequencies, float]:
    """A larger base beyond the length that the model was made for; none within it.

    `alpha` (Hunyuan) is a stretch that always holds.
    """
    numbers = dict(rope.parameters)
    power = rope.rotary_dim / (rope.rotary_dim - 2)
    if "alpha" in numbers:
        return _powers(rope.theta * _number(numbers, "alpha") ** power, rope.rotary_dim), 1.0
    if reach.max_positions <= 0:
        raise UnsupportedModel(
            "missing", field="max_position_embeddings", expected="a number for dynamic rope"
        )
    times = max(reach.max_model_len, reach.max_positions) / reach.max_positions
    stretch = rope.factor * times - (rope.factor - 1)
    return _powers(rope.theta * stretch**power, rope.rotary_dim), 1.0


def _yarn(rope: Rope, _: Reach) -> tuple[Frequencies, float]:
    """Long waves slowed by `factor`, short ones kept, a ramp over the pairs between.

    Where the ramp lies is counted in turns within the original length: beta_fast and beta_slow.
    """
    numbers = dict(rope.parameters)
    original, dim = _original(rope), rope.rotary_dim
    truncate = numbers.get("truncate", True)

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    # 0 means the default in transformers, as absent does.
    low = pair_of(_number(numbers, "beta_fast", 32.0) or 32.0)
    high = pair_of(_number(numbers, "beta_slow", 1.0) or 1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    plain = _powers(rope.theta, dim)
    return plain / rope.factor * slowed + plain * (1 - slowed), _yarn_attention(rope, numbers)


def _yarn_attention(rope: Rope, numbers: Mapping[str, object]) -> float:
    """Given, or 0.1·m·ln(factor) + 1, for both of m = mscale and mscale_all_dim their quotient."""

    def grown(times: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * times * math.log(rope.factor) + 1.0

    if "attention_factor" in numbers:
        return _number(numbers, "attention_factor")
    mscale, all_dim = _number(numbers, "mscale", 0.0), _number(numbers, "mscale_all_dim", 0.0)
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)


def _longrope(rope: Rope, reach: Reach) -> tuple[Frequencies, float]:
    """A divisor per pair, one set for the original length and one for all lengths above it.

    The attention factor follows from how far the model reaches, not from what is served.
    """
    numbers = dict(rope.parameters)
    original, dim = _original(rope), rope.rotary_dim
    kind = "long" if reach.max_model_len > original else "short"
    divisors = numbers.get(f"{kind}_factor")
    if not isinstance(divisors, tuple) or len(divisors) != dim // 2 or min(divisors) <= 0:
        raise UnsupportedModel(
            "missing" if divisors is None else str(divisors)[:80],
            field=f"{kind}_factor",
            expected=f"{dim // 2} positive numbers",
        )
    # What a file calls `factor` wins (transformers); most give only the two lengths.
    times = rope.factor if rope.factor != 1.0 else reach.max_positions / original
    if "attention_factor" in numbers:
        attention_factor = _number(numbers, "attention_factor")
    elif f"{kind}_mscale" in numbers:  # vLLM's; Phi-3-small has them
        attention_factor = _number(numbers, f"{kind}_mscale")
    elif times <= 1:
        attention_factor = 1.0
    else:
        attention_factor = math.sqrt(1 + math.log(times) / math.log(original))
    return _powers(rope.theta, dim) / np.array(divisors, dtype=np.float64), attention_factor


def _llama3(rope: Rope, _: Reach) -> tuple[Frequencies, float]:
    """Llama 3.1's: long waves slowed by `factor`, short ones kept, a ramp between.

    A wave is long when the original context holds fewer than low_freq_factor turns of it.
    """
    numbers = dict(rope.parameters)
    low, high = _number(numbers, "low_freq_factor"), _number(numbers, "high_freq_factor")
    plain = _powers(rope.theta, rope.rotary_dim)
    turns = _original(rope) * plain / (2 * math.pi)
    # Llama-4-Scout's factors are equal: a step.
    ramp = np.clip((turns - low) / max(high - low, 1e-9), 0.0, 1.0)
    return (1 - ramp) * plain / rope.factor + ramp * plain, 1.0


def _original(rope: Rope) -> int:
    if rope.original_max_positions is None:
        raise UnsupportedModel(
            "missing",
            field="original_max_position_embeddings",
            expected=f"a number for {rope.scaling} rope",
        )
    return rope.original_max_positions


def _number(numbers: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = numbers.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(
            "missing" if value is None else repr(value)[:80], field=key, expected="a number"
        )
    return float(value)


_SCALINGS: Mapping[str, Callable[[Rope, Reach], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
# Every number that a kind reads. One that another kind reads is idle here, as in transformers;
# one that nobody knows might change the angles (or, llama_4_scaling_beta, the attention).
_PARAMETERS = frozenset(
    {
        *("alpha", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("truncate", "long_factor", "short_factor", "long_mscale", "short_mscale"),
        *("low_freq_factor", "high_freq_factor", "finetuned"),
    }
)
