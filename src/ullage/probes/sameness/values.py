"""Every weight of a decoder by its layer and kind, and a sketch of its values.

Holds the walk over what the embedded engine holds, in one layout whatever file it came from, and
the making of sketches. How far two are apart is `distances`, stored bytes are `deep`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.deep.sum64 import odd_factors
from ullage.engine.linear import FloatLinear, Linear
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.experts import MixtureOfExperts
from ullage.engine.model.freed import give_back_freed
from ullage.engine.model.layer import Dense, Layer
from ullage.engine.model.loading import LayerReader
from ullage.engine.model.norms import Norm
from ullage.engine.model.weights import Weights
from ullage.probes.sameness.marks import NUM_BUCKETS, ValueMark

if TYPE_CHECKING:
    from ullage.anatomy.spec import ModelSpec

_CHUNK = 1 << 20
_SHIFTS = 4093
_STEP = 89
_DIGITS = 9

Part = tuple[str, str, torch.Tensor]
"""Name within its layer, kind, the weight in float32."""


def value_marks(decoder: Decoder) -> tuple[ValueMark, ...]:
    """A mark of every weight, outside the layers first. `decoder` holds plain float32 matrices."""
    found = [_mark(name, None, kind, weight) for name, kind, weight in _outside(decoder)]
    for index, layer in enumerate(decoder.layers):
        found += _layer_marks(index, layer)
    return tuple(found)


def streamed_marks(spec: ModelSpec, weights: Weights) -> tuple[ValueMark, ...]:
    """The same, with one layer in memory at a time: for models that do not fit in float32.

    `spec` is one that the engine runs (`possible.require_possible`).
    """
    outside = Decoder(replace(spec, layers=()), weights, FloatLinear, 1)
    found = list(value_marks(outside))
    del outside
    reader = LayerReader(spec, weights, FloatLinear, torch.float32)
    for index in range(spec.num_layers):
        found += _layer_marks(index, reader.layer(index, None))
        give_back_freed()
    return tuple(found)


def _layer_marks(index: int, layer: Layer) -> list[ValueMark]:
    return [
        _mark(f"layers.{index}.{name}", index, kind, weight)
        for name, kind, weight in _layer_parts(layer)
    ]


def sketch(weight: torch.Tensor) -> tuple[float, tuple[float, ...]]:
    """‖w‖ and the sums of w with random signs in 32 buckets; no buckets where w is not finite."""
    flat = weight.detach().to(torch.float32).contiguous().view(-1).numpy()
    buckets = np.zeros(NUM_BUCKETS)
    squares = 0.0
    for number, start in enumerate(range(0, len(flat), _CHUNK)):
        chunk = flat[start : start + _CHUNK].astype(np.float64)
        squares += float(chunk @ chunk)
        # Other signs for each chunk: blocks that change places with each other must not cancel.
        first = number * _STEP % _SHIFTS
        chunk *= _signs()[first : first + len(chunk)]
        if rest := -len(chunk) % NUM_BUCKETS:
            chunk = np.concatenate([chunk, np.zeros(rest)])
        buckets += chunk.reshape(-1, NUM_BUCKETS).sum(axis=0)
    if not math.isfinite(squares):
        return 0.0, ()
    return _short(math.sqrt(squares)), tuple(_short(number) for number in buckets.tolist())


def _short(number: float) -> float:
    return float(f"{number:.{_DIGITS - 1}e}")


_held: list[NDArray[np.float64]] = []


def _signs() -> NDArray[np.float64]:
    if not _held:
        top = odd_factors(0, _CHUNK + _SHIFTS) >> np.uint64(63)
        _held.append(1.0 - 2.0 * top.astype(np.float64))
    return _held[0]


def _mark(name: str, layer: int | None, kind: str, weight: torch.Tensor) -> ValueMark:
    norm, buckets = sketch(weight)
    return ValueMark(name, layer, kind, tuple(weight.shape), norm, buckets)


# --- the walk ------------------------------------------------------------------------------------


def parts(decoder: Decoder) -> Iterator[tuple[int | None, Part]]:
    """Every weight and its layer, outside the layers first: the tensors that run, not copies."""
    yield from ((None, part) for part in _outside(decoder))
    for index, layer in enumerate(decoder.layers):
        for name, kind, weight in _layer_parts(layer):
            yield index, (f"layers.{index}.{name}", kind, weight)


def _outside(decoder: Decoder) -> Iterator[Part]:
    yield "embed", "embedding", decoder.embedding_VE
    if decoder.positions_NE is not None:
        yield "positions", "embedding", decoder.positions_NE
    yield from _norm("embed_norm", decoder.embedding_norm)
    for name, linear in (("project_in", decoder.project_in), ("project_out", decoder.project_out)):
        if linear is not None:
            yield from _linear(name, "embedding", linear)
    yield from _norm("final_norm", decoder.final_norm)
    if not decoder.spec.tie_embeddings:
        yield from _linear("lm_head", "embedding", decoder.head)


def _layer_parts(layer: Layer) -> Iterator[Part]:
    size = layer.head_dim
    cuts = (layer.num_heads * size, layer.num_kv_heads * size)
    yield from _norm("mixer_norm", layer.mixer_norm)
    yield from _cut(layer.qkv, ("q", "k", "v"), (*cuts, cuts[1]), ("q", "k", "v"))
    yield from _norm("q_norm", layer.q_norm)
    yield from _norm("k_norm", layer.k_norm)
    yield from _linear("o", "o", layer.output)
    yield from _norm("mixer_out_norm", layer.mixer_out_norm)
    yield from _norm("feed_forward_norm", layer.feed_forward_norm)
    mlp = layer.feed_forward
    if isinstance(mlp, MixtureOfExperts):
        yield from _experts(mlp)
    else:
        yield from _dense(mlp)
    yield from _norm("feed_forward_out_norm", layer.feed_forward_out_norm)


def _dense(mlp: Dense) -> Iterator[Part]:
    if mlp.gated:
        yield from _halves("", mlp.gate_up)
    else:
        yield from _linear("up", "mlp", mlp.gate_up)
    yield from _linear("down", "mlp", mlp.down)


def _experts(mixture: MixtureOfExperts) -> Iterator[Part]:
    yield from _linear("router", "mlp", mixture.router)
    named = [(f"experts.{number}.", mlp) for number, mlp in enumerate(mixture.experts)]
    if mixture.shared is not None:
        named.append(("shared.", mixture.shared))
    for prefix, mlp in named:
        yield from _halves(prefix, mlp.gate_up)
        yield from _linear(f"{prefix}down", "mlp", mlp.down)
    if mixture.shared_gate is not None:
        yield from _linear("shared_gate", "mlp", mixture.shared_gate)


def _halves(prefix: str, linear: Linear) -> Iterator[Part]:
    half = _tensors(linear)[0].shape[0] // 2
    yield from _cut(linear, (f"{prefix}gate", f"{prefix}up"), (half, half), ("mlp", "mlp"))


def _cut(
    linear: Linear, names: tuple[str, ...], sizes: tuple[int, ...], kinds: tuple[str, ...]
) -> Iterator[Part]:
    weight, *bias = _tensors(linear)
    rows = zip(names, kinds, weight.split(sizes), strict=True)  # type: ignore[no-untyped-call]
    yield from rows
    for tensor in bias:
        parts = zip(names, kinds, tensor.split(sizes), strict=True)  # type: ignore[no-untyped-call]
        yield from ((f"{name}_bias", kind, part) for name, kind, part in parts)


def _linear(name: str, kind: str, linear: Linear) -> Iterator[Part]:
    weight, *bias = _tensors(linear)
    yield name, kind, weight
    for tensor in bias:
        yield f"{name}_bias", kind, tensor


def _norm(name: str, norm: Norm | None) -> Iterator[Part]:
    if norm is not None and norm.weight is not None:
        yield name, "norm", norm.weight
    if norm is not None and norm.bias is not None:
        yield f"{name}_bias", "norm", norm.bias


def _tensors(linear: Linear) -> tuple[torch.Tensor, ...]:
    tensors = linear.tensors
    assert tensors is not None, "float matrices are not packed"
    return tensors
