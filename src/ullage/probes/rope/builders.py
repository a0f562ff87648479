"""How cos and sin of a position come about: the embedded engine's way, transformers', other casts.

Holds the builders, each a function of positions; what their tables are off by is `rope`'s.
transformers is imported only where it is asked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.engine.positions.rope import rotary_rows
from ullage.engine.positions.scaling import Angles

Doubles = NDArray[np.float64]
Table = tuple[Doubles, Doubles]
"""cos and sin [positions, pairs] as they were built, widened to float64."""
Build = Callable[[Doubles], Table]
"""Positions → their rows of the table, in a sequence as long as the one that is asked about."""

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Builder:
    """`name` and `dtype` tell one row from another, `source` says whose way it is.

    What its own rounding allows: `frequency_eps` and `table_eps`, the relative errors of the
    frequencies (and their products with positions) and of cos and sin, and `frequency_step`, the
    absolute one of a frequency that the dtype holds with fewer digits. Beyond these, the formula is
    another one.
    """

    name: str
    dtype: str
    source: str
    build: Build
    frequency_eps: float
    table_eps: float
    frequency_step: float = 0.0


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A way that was not measured, and why."""

    name: str
    reason: str


# The exponents and the power are float32 too; over theta and dimensions they were never further
# off than 3e-6 (tests/engine/test_rope.py), which is not to pass for another formula.
_FLOAT32_FREQUENCIES = 5e-6


def eps_of(dtype: str) -> float:
    """The spacing of numbers just above 1."""
    return float(torch.finfo(DTYPES[dtype]).eps)


def _step_of(dtype: str) -> float:
    """The spacing of the numbers next to 0: in float16 the slowest pairs turn by fewer digits."""
    return float(torch.finfo(DTYPES[dtype]).tiny) * eps_of(dtype)


def exact_rows(angles: Angles, positions_N: Doubles) -> Table:
    """cos and sin by float64 products: below 1e-9 rad off up to ten million positions."""
    turned_NP = positions_N[:, None] * angles.frequencies[None, :]
    factor = angles.attention_factor
    return np.cos(turned_NP) * factor, np.sin(turned_NP) * factor


def embedded(angles: Angles) -> Builder:
    """The embedded engine's own function."""

    def build(positions_N: Doubles) -> Table:
        tables = rotary_rows(angles, np.append(positions_N, 0.0))
        return _pairs((tables.cos_ND, tables.sin_ND), len(positions_N))

    source = "measured: the embedded engine"
    return Builder("ullage", "float32", source, build, 1e-9, 2 * eps_of("float32"))


def stored_in_dtype(angles: Angles, dtype: str, device: str) -> Builder:
    """Products in float32, the table kept in the model's dtype."""
    kept = DTYPES[dtype]

    def build(positions_N: Doubles) -> Table:
        turned = _products(angles, positions_N, torch.float32, device)
        factor = angles.attention_factor
        return _wide((turned.cos() * factor).to(kept)), _wide((turned.sin() * factor).to(kept))

    source = "recipe of vLLM 0.30-0.32 (rotary_embedding/base.py: cos_sin_cache)"
    return Builder("table-in-dtype", dtype, source, build, _FLOAT32_FREQUENCIES, 2 * eps_of(dtype))


def product_in_dtype(angles: Angles, dtype: str, device: str) -> Builder:
    """Frequencies, positions and their products all in the model's dtype: what no engine should."""

    def build(positions_N: Doubles) -> Table:
        turned = _products(angles, positions_N, DTYPES[dtype], device)
        factor = angles.attention_factor
        return _wide(turned.cos() * factor), _wide(turned.sin() * factor)

    source = "recipe: everything cast before the product"
    eps = eps_of(dtype)
    frequency_eps = _FLOAT32_FREQUENCIES + 4 * eps
    return Builder(
        "product-in-dtype", dtype, source, build, frequency_eps, 4 * eps, _step_of(dtype)
    )


def _products(
    angles: Angles, positions_N: Doubles, dtype: torch.dtype, device: str
) -> torch.Tensor:
    frequencies_P = torch.from_numpy(angles.frequencies).to(torch.float32).to(device, dtype)
    # A position beyond the dtype's largest number is Inf there too (65,504 in float16).
    positions = torch.from_numpy(positions_N).to(torch.float32).to(device, dtype)
    return positions[:, None] * frequencies_P[None, :]


def _wide(x: torch.Tensor) -> Doubles:
    wide: Doubles = x.detach().to("cpu", torch.float64).numpy()
    return wide


# --- transformers --------------------------------------------------------------------------------


def transformers_config(config: Mapping[str, object]) -> Any | NotBuilt:
    """The text model's configuration as the installed transformers reads it."""
    try:
        import transformers
    except ImportError:
        return NotBuilt("transformers", "transformers is not installed")
    kind = str(config.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        return NotBuilt("transformers", f"transformers {version} has no model type {kind!r}")
    logging: Any = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(dict(config)).get_text_config()
    except Exception as error:  # its own checks raise whatever they like
        return NotBuilt("transformers", f"transformers reads the configuration otherwise: {error}")
    finally:
        logging.set_verbosity(before)


def from_transformers(
    config: Any, layer: int, dtype: str, device: str, num_positions: int, *, cast: bool
) -> Builder | NotBuilt:
    """The rotary module of the model's own class, in a sequence of `num_positions`.

    `cast`: after `module.to(dtype)`, which rounds the frequencies too; from_pretrained does not.
    """
    import transformers

    name = "transformers-cast" if cast else "transformers"
    found = _rotary_class(config)
    if isinstance(found, str):
        return NotBuilt(name, found)
    try:
        module = found(config=config)
        module = module.to(device, DTYPES[dtype]) if cast else module.to(device)
    except Exception as error:  # code of another package over a configuration of any kind
        return NotBuilt(name, f"{found.__name__} cannot be built: {error}")
    more: dict[str, Any] = {}
    if "layer_type" in inspect.signature(inspect.unwrap(found.forward)).parameters:
        kinds = getattr(config, "layer_types", None) or ()
        more["layer_type"] = kinds[layer] if layer < len(kinds) else None
        if more["layer_type"] not in getattr(module, "layer_types", kinds):
            return NotBuilt(name, f"{found.__name__} does not know layers by {more['layer_type']}")
    x = torch.zeros(1, dtype=DTYPES[dtype], device=device)

    def build(positions_N: Doubles) -> Table:
        # The last position stands for the whole sequence: some kinds choose angles by its length.
        # The first tells cos from sin.
        ends = (num_positions - 1, 0)
        positions = torch.from_numpy(np.append(positions_N, ends)).long().to(device)
        with torch.inference_mode():
            return _pairs(module(x, positions[None], **more), len(positions_N))

    try:
        build(np.zeros(1))
    except Exception as error:  # the same; GPT-J's table ends with the model's own positions
        return NotBuilt(name, f"{found.__name__} cannot be asked: {error}")

    done = " after .to(dtype)" if cast else ""
    source = f"measured: transformers {transformers.__version__} {found.__name__}{done}"
    eps = eps_of(dtype)
    if not cast:
        return Builder(name, dtype, source, build, _FLOAT32_FREQUENCIES, 2 * eps)
    return Builder(name, dtype, source, build, _FLOAT32_FREQUENCIES + eps, 2 * eps, _step_of(dtype))


def _rotary_class(config: Any) -> Any | str:
    """The class in the model's own module that turns text, or why none is known."""
    place = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        modeling = import_module(place)
    except ImportError as error:
        return f"{place} cannot be imported: {error}"
    classes = [
        value
        for name, value in vars(modeling).items()
        if isinstance(value, type)
        and re.search(r"Rotary(Pos|Position)?(al)?Embedding$", name)
        and not re.search(r"Vision|Audio|Image|Speech|Code2Wav|Talker|2D", name)
        and value.__module__ == place
        and "config" in inspect.signature(value).parameters
    ]
    if len(classes) == 1:
        return classes[0]
    told = ", ".join(one.__name__ for one in classes) or "none"
    return f"which rotary class of {place} is the text model's is not known (found: {told})"


def _pairs(made: Any, count: int) -> Table:
    """cos and sin of the first `count` positions, each pair once, whatever the module's layout.

    The last row made is position 0's.
    """
    if isinstance(made, torch.Tensor) and made.is_complex():
        made = (made.real, made.imag)
    cos, sin = (_wide(part) for part in made)
    while cos.ndim > 2:
        cos, sin = cos[0], sin[0]
    if not cos[-1].any():  # GPT-J's module gives sin first
        cos, sin = sin, cos
    half = cos.shape[1] // 2
    if np.array_equal(sin[:, :half], sin[:, half:]):
        cos, sin = cos[:, :half], sin[:, :half]
    elif np.array_equal(sin[:, ::2], sin[:, 1::2]):
        cos, sin = cos[:, ::2], sin[:, ::2]
    return cos[:count], sin[:count]
