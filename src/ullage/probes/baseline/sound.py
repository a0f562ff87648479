"""Whether what a baseline's file says fits itself: types, shapes, numbers that are numbers.

Holds the checks. The file and what is in it are `baseline`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ullage.probes.baseline.sketch import AdapterSketch, Form

if TYPE_CHECKING:
    from ullage.probes.baseline.baseline import Baseline

MOST = 1 << 24
"""Of every count of a form: an embedding has fewer rows."""
_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab")
_OUTSIDE_CELLS, _CELLS_OF_LAYER = 3, 9
_NORMS = ("rms", "layer")
Shapes = Iterator[tuple[str, NDArray[Any], tuple[int, ...]]]


def require_sound(found: Baseline, num_paths: int) -> None:
    """Raise ValueError where types are wrong, or shapes do not follow from the form."""
    _require_form(found.sketch.form, len(found.sketch.turnings))
    for name in ("model", "by", "settings"):
        _require(isinstance(getattr(found, name), str), f"{name} is no text")
    for name in ("max_model_len", "rows", "prompts"):
        _require_count(name, getattr(found, name))
    for name in ("dtype", "quantization", "kv_cache_dtype"):
        _require(isinstance(getattr(found.precision, name), str), f"{name} is no text")
    _require(_is_number(found.rounding) and 0 < found.rounding < 1, "rounding is no share")
    _require(math.isfinite(found.sketch.head_bias), "head_bias is not finite")
    for name, array, shape in _shapes(found, num_paths):
        if array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}, expected {list(shape)}")
        may_lack = name in ("noise", "usual")
        wanted = np.float64 if may_lack or name == "turning" else np.float32
        _require(array.dtype == wanted, f"{name} is {array.dtype}, expected {np.dtype(wanted)}")
        known = array[~np.isnan(array)] if may_lack else array
        _require(bool(np.isfinite(known).all()), f"{name} has numbers that are not finite")
        if name == "noise":
            _require(bool((known > 0).all()), "noise has numbers that are not positive")


def _shapes(found: Baseline, num_paths: int) -> Shapes:
    from ullage.probes.baseline import usual

    sketch, form = found.sketch, found.sketch.form
    layers, hidden, inner = form.layers, form.hidden, form.inner
    heads, mixed = form.heads + 2 * form.kv_heads, form.heads * form.head_dim
    wide = {"heads_LHI": (layers, heads, hidden), "o_LI": (layers, mixed)}
    wide |= {"gate_LI": (layers, hidden), "up_LI": (layers, hidden), "down_LI": (layers, inner)}
    for name, shape in wide.items():
        yield name, getattr(sketch, name), shape
        for adapter in sketch.adapters.values():
            yield f"adapter's {name}", getattr(adapter, name), shape
    assert set(wide) == {field.name for field in fields(AdapterSketch)}
    for part in ("o", "gate", "up", "down"):
        yield f"{part}_bias_L", getattr(sketch, f"{part}_bias_L"), (layers,)
    yield "heads_bias_LH", sketch.heads_bias_LH, (layers, heads)
    for name in ("mixer_norm", "mlp_norm"):
        for kind in ("", "_bias"):
            yield f"{name}{kind}_LE", getattr(sketch, f"{name}{kind}_LE"), (layers, hidden)
    for name in ("final_norm_E", "final_norm_bias_E", "head_E"):
        yield name, getattr(sketch, name), (hidden,)
    yield "embedding_V", sketch.embedding_V, (form.vocab,)
    yield "positions_N", sketch.positions_N, (sketch.positions_N.size,)
    normed = form.head_dim if sketch.q_norm_LD.shape[-1] else 0
    for name in ("q_norm_LD", "k_norm_LD"):
        yield name, getattr(sketch, name), (layers, normed)
    for turning in sketch.turnings:
        pairs = min(turning.frequencies.size, form.head_dim // 2)
        yield "turning", turning.frequencies, (pairs,)
    # Counted before they are made: a form of billions of layers has no such arrays.
    count = _OUTSIDE_CELLS + layers * (2 * form.heads + 2 * form.kv_heads + _CELLS_OF_LAYER)
    yield "noise", found.noise, (num_paths, count)
    figures = len(usual.figures(form))
    for array in (getattr(found.usual, field.name) for field in fields(found.usual)):
        yield "usual", array, (figures,)


def _require_form(form: Form, num_turnings: int) -> None:
    from ullage.engine.model.layer import ACTIVATIONS

    for name in _COUNTS:
        _require_count(name, getattr(form, name))
    for name, kind in get_type_hints(Form).items():
        value = getattr(form, name)
        if kind is bool:
            _require(isinstance(value, bool), f"{name} is neither true nor false")
        elif kind is float or (kind == float | None and value is not None):
            _require(_is_number(value), f"{name} is no number")
    _require(form.activation in ACTIVATIONS, "an unknown activation")
    _require(form.norm_kind in _NORMS, "an unknown norm")
    _require_count("first_position", form.first_position + 1)
    for name in ("scales", "windows", "soft_caps", "rope_of"):
        listed = getattr(form, name)
        _require(isinstance(listed, tuple) and len(listed) == form.layers, f"{name} of no layers")
    _require(all(map(_is_number, form.scales)), "scales are no numbers")
    _require(all(map(_is_number, form.slopes)), "slopes are no numbers")
    _require(len(form.slopes) in (0, form.heads), "slopes of no heads")
    for window in form.windows:
        if window is not None:
            _require_count("windows", window)
    for cap in form.soft_caps:
        _require(cap is None or (_is_number(cap) and cap > 0), "soft_caps are no numbers")
    for number in form.rope_of:
        _require(
            number is None or (type(number) is int and 0 <= number < num_turnings),
            "rope_of names a turning that is not there",
        )


def _require_count(name: str, value: object) -> None:
    _require(type(value) is int and 0 < value <= MOST, f"{name} is no count")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
