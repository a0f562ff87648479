"""What is remembered of a model's weights, to hold its live activations against: a few sums each.

Holds the sketch and its taking from a decoder. A matrix W is remembered as r·W for one fixed row r
of random numbers: whatever x a healthy model multiplies, r·(W·x) is (r·W)·x (Freivalds' check of
products, 1977; in arrays of processors: Huang and Abraham, 1984). `relations` holds rows to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.engine.linear import FloatLinear, Int8Linear, Linear
from ullage.engine.lora import LoraAdapter
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.layer import Layer
from ullage.engine.model.norms import Norm
from ullage.engine.positions.scaling import Reach, rope_angles
from ullage.engine.rule import AttentionRule
from ullage.errors import UnsupportedModel

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SEED = 20_261_130
_ROWS_AT_A_TIME = 1 << 10


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes of every layer, and what it does beside multiplying.

    `rounds_inputs`: every product rounds its inputs to int8, in groups, and is exact from there.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    activation: str
    gated: bool
    norm_kind: str
    norm_eps: float
    scales: tuple[float, ...]
    windows: tuple[int | None, ...]
    soft_caps: tuple[float | None, ...]
    slopes: tuple[float, ...]
    rope_of: tuple[int | None, ...]
    embedding_scale: float
    first_position: int
    logit_scale: float
    logit_cap: float | None
    rounds_inputs: bool

    @property
    def rules(self) -> tuple[AttentionRule, ...]:
        return tuple(
            AttentionRule(scale, window, cap, self.slopes)
            for scale, window, cap in zip(self.scales, self.windows, self.soft_caps, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Turning:
    """One rotary table: float64 [pairs] radians per position, and what cos and sin are times."""

    frequencies: Doubles
    factor: float
    interleaved: bool


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSketch:
    """What an adapter adds to r·W of each place of the model; zeros where it adds none."""

    heads_LHI: Floats
    o_LI: Floats
    gate_LI: Floats
    up_LI: Floats
    down_LI: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """float32, by layer. `heads` are those of q, then k, then v; biases are r·b of the same.

    Norm weights are there whole (ones where a norm has none), as are turnings. The embedding has
    one sum for each token, learned positions one for each position (empty: none).
    """

    form: Form
    heads_LHI: Floats
    heads_bias_LH: Floats
    o_LI: Floats
    o_bias_L: Floats
    gate_LI: Floats
    gate_bias_L: Floats
    up_LI: Floats
    up_bias_L: Floats
    down_LI: Floats
    down_bias_L: Floats
    head_E: Floats
    head_bias: float
    mixer_norm_LE: Floats
    mixer_norm_bias_LE: Floats
    mlp_norm_LE: Floats
    mlp_norm_bias_LE: Floats
    final_norm_E: Floats
    final_norm_bias_E: Floats
    q_norm_LD: Floats
    k_norm_LD: Floats
    embedding_V: Floats
    positions_N: Floats
    turnings: tuple[Turning, ...]
    adapters: dict[str, AdapterSketch] = field(default_factory=dict)


def signs(count: int, of: str) -> Floats:
    """The fixed row r for outputs of one sort (`heads`, `hidden`, `inner`, `vocab`).

    Signs, each times a size of its own from 1/2 to 3/2: outputs that change places change the sum.
    """
    random = np.random.default_rng([SEED, *of.encode()])
    drawn = 2 * random.integers(0, 2, count, dtype=np.int8) - 1
    return (drawn * random.uniform(0.5, 1.5, count)).astype(np.float32)


def why_not(decoder: Decoder) -> str | None:
    """What keeps a sketch from being taken, in words; None where nothing does."""
    from ullage.engine import taps

    if (reason := taps.why_not(decoder)) is not None:
        return reason
    if decoder.embedding_norm is not None:
        return "a norm at the embedding"
    if any(_rows(linear) is None for linear in _linears(decoder)):
        return "weights packed unseen (numba is not installed)"
    return None


def take(decoder: Decoder, adapters: tuple[LoraAdapter, ...] = ()) -> Sketch:
    """The sketch of the weights as `decoder` holds them, its quantisation included.

    Raises UnsupportedModel for a model that cannot be held against one.
    """
    if (reason := why_not(decoder)) is not None:
        raise UnsupportedModel(f"live activations cannot be held against {reason}")
    form = form_of(decoder)
    sums = [_of_layer(layer, form) for layer in decoder.layers]
    hidden = signs(form.hidden, "hidden")
    stacked = {name: np.stack([one[name] for one in sums]) for name in sums[0]}
    positions = np.zeros(0, np.float32)
    if decoder.positions_NE is not None:
        positions = _times(decoder.positions_NE, hidden)
    final = decoder.final_norm
    assert final is not None
    vocab = signs(form.vocab, "vocab")
    return Sketch(
        form=form,
        head_E=_sums(decoder.head, vocab[None])[0],
        head_bias=float(_bias(decoder.head, vocab[None])[0]),
        final_norm_E=_weight(final),
        final_norm_bias_E=_norm_bias(final),
        embedding_V=_times(decoder.embedding_VE, hidden),
        positions_N=positions,
        turnings=tuple(_turnings(decoder)),
        adapters={adapter.name: _of_adapter(adapter, form) for adapter in adapters},
        **stacked,
    )


def form_of(decoder: Decoder) -> Form:
    """Sizes and rules of a decoder. Raises UnsupportedModel where rows of it cannot be tapped."""
    from ullage.engine import taps

    if (reason := taps.why_not(decoder)) is not None:
        raise UnsupportedModel(f"live activations are not read of {reason}")
    spec, layer = decoder.spec, decoder.layers[0]
    widths = taps.widths(decoder)
    mlp = layer.feed_forward
    assert layer.mixer_norm is not None
    rules = [one.rule for one in decoder.layers]
    return Form(
        layers=len(decoder.layers),
        hidden=spec.hidden_size,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        inner=widths["up"],
        vocab=spec.vocab_size,
        activation=mlp.activation_name,  # type: ignore[union-attr]
        gated=mlp.gated,  # type: ignore[union-attr]
        norm_kind=layer.mixer_norm.kind,
        norm_eps=layer.mixer_norm.eps,
        scales=tuple(rule.scale for rule in rules),
        windows=tuple(decoder.windows),
        soft_caps=tuple(rule.soft_cap for rule in rules),
        slopes=rules[0].slopes,
        rope_of=tuple(one.rope for one in decoder.layers),
        embedding_scale=spec.embedding_scale,
        first_position=decoder.first_position if decoder.positions_NE is not None else 0,
        logit_scale=decoder.logit_scale,
        logit_cap=spec.logit_soft_cap,
        rounds_inputs=all(isinstance(linear, Int8Linear) for linear in _linears(decoder)),
    )


def _of_layer(layer: Layer, form: Form) -> dict[str, Floats]:
    of_heads = _blocks_of_signs(form)
    hidden, inner = signs(form.hidden, "hidden")[None], signs(form.inner, "inner")
    two = np.zeros((2, 2 * form.inner), np.float32)
    two[0, : form.inner], two[1, form.inner :] = inner, inner
    gate_up, down = layer.linears[2], layer.linears[3]
    rows = two if form.gated else np.stack([np.zeros_like(inner), inner])
    made, biased = _sums(gate_up, rows), _bias(gate_up, rows)
    assert layer.mixer_norm is not None
    assert layer.feed_forward_norm is not None
    return {
        "heads_LHI": _sums(layer.qkv, of_heads),
        "heads_bias_LH": _bias(layer.qkv, of_heads),
        "o_LI": _sums(layer.output, hidden)[0],
        "o_bias_L": _bias(layer.output, hidden)[0],
        "gate_LI": made[0],
        "gate_bias_L": biased[0],
        "up_LI": made[1],
        "up_bias_L": biased[1],
        "down_LI": _sums(down, hidden)[0],
        "down_bias_L": _bias(down, hidden)[0],
        "mixer_norm_LE": _weight(layer.mixer_norm),
        "mixer_norm_bias_LE": _norm_bias(layer.mixer_norm),
        "mlp_norm_LE": _weight(layer.feed_forward_norm),
        "mlp_norm_bias_LE": _norm_bias(layer.feed_forward_norm),
        "q_norm_LD": _head_norm(layer.q_norm),
        "k_norm_LD": _head_norm(layer.k_norm),
    }


def _blocks_of_signs(form: Form) -> Floats:
    """[heads of q, k and v, outputs]: each head's signs at its own outputs, zeros elsewhere."""
    count, size = form.heads + 2 * form.kv_heads, form.head_dim
    drawn = signs(count * size, "heads")
    blocks = np.zeros((count, count * size), np.float32)
    for head in range(count):
        own = slice(head * size, (head + 1) * size)
        blocks[head, own] = drawn[own]
    return blocks


def _of_adapter(adapter: LoraAdapter, form: Form) -> AdapterSketch:
    """r·(B·A) of every place that the adapter changes."""
    of_heads, hidden = _blocks_of_signs(form), signs(form.hidden, "hidden")[None]
    inner = signs(form.inner, "inner")
    two = np.zeros((2, 2 * form.inner), np.float32)
    two[0, : form.inner], two[1, form.inner :] = inner, inner
    one = np.stack([np.zeros_like(inner), inner])
    of_site = {
        "qkv": of_heads,
        "output": hidden,
        "gate_up": two if form.gated else one,
        "down": hidden,
    }
    mixed = form.heads * form.head_dim
    widths = {"qkv": form.hidden, "output": mixed, "gate_up": form.hidden, "down": form.inner}
    sums = {
        site: np.zeros((form.layers, len(rows), widths[site]), np.float32)
        for site, rows in of_site.items()
    }
    for (layer, site), deltas in adapter.deltas.items():
        for delta in deltas:
            rows = torch.from_numpy(of_site[site][:, delta.first : delta.last].copy()).double()
            added = (rows @ delta.b_OR.double()) @ delta.a_RI.double()
            sums[site][layer] += added.float().numpy()
    return AdapterSketch(
        sums["qkv"],
        sums["output"][:, 0],
        sums["gate_up"][:, 0],
        sums["gate_up"][:, 1],
        sums["down"][:, 0],
    )


# --- sums over what a linear holds ---------------------------------------------------------------


def _linears(decoder: Decoder) -> list[Linear]:
    return [decoder.head, *(linear for layer in decoder.layers for linear in layer.linears)]


def _rows(linear: Linear) -> Iterator[torch.Tensor] | None:
    """The weight as it is multiplied, float64, some rows at a time."""
    if isinstance(linear, FloatLinear):
        return (part.double() for part in linear.weight_OI.split(_ROWS_AT_A_TIME))  # type: ignore[no-untyped-call]
    if isinstance(linear, Int8Linear):
        return _widened(linear)
    return None


def _widened(linear: Int8Linear) -> Iterator[torch.Tensor]:
    for first in range(0, len(linear.weight_OI), _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        whole = linear.weight_OI[rows, : linear.in_features].double()
        yield whole * linear.scales_O[rows, None].double()


def _sums(linear: Linear, rows_KO: Floats) -> Floats:
    """rows·W, float32 [rows, in], added up in float64."""
    total: torch.Tensor | None = None
    parts, at = _rows(linear), 0
    assert parts is not None
    for part in parts:
        signed = torch.from_numpy(rows_KO[:, at : at + len(part)].copy()).double() @ part
        total = signed if total is None else total + signed
        at += len(part)
    assert total is not None
    return total.float().numpy()


def _bias(linear: Linear, rows_KO: Floats) -> Floats:
    bias = getattr(linear, "bias_O", None)
    if bias is None:
        return np.zeros(len(rows_KO), np.float32)
    summed: Doubles = rows_KO.astype(np.float64) @ bias.double().numpy()
    return summed.astype(np.float32)


def _times(table_NE: torch.Tensor, signs_E: Floats) -> Floats:
    wide = torch.from_numpy(signs_E).double()
    parts = [part.double() @ wide for part in table_NE.split(_ROWS_AT_A_TIME)]  # type: ignore[no-untyped-call]
    return torch.cat(parts).float().numpy()


def _weight(norm: Norm) -> Floats:
    if norm.weight is None:
        return np.ones(norm.size, np.float32)
    weight: Floats = norm.weight.float().numpy().copy()
    return weight


def _norm_bias(norm: Norm) -> Floats:
    if norm.bias is None:
        return np.zeros(norm.size, np.float32)
    bias: Floats = norm.bias.float().numpy().copy()
    return bias


def _head_norm(norm: Norm | None) -> Floats:
    """Empty where heads are not normed."""
    return np.zeros(0, np.float32) if norm is None else _weight(norm)


def _turnings(decoder: Decoder) -> Iterator[Turning]:
    from ullage.engine.model.decoder import turns_of  # the tables' own order

    for rope, head_dim in turns_of(decoder.spec):
        angles = rope_angles(
            rope, Reach(decoder.max_model_len, decoder.spec.max_positions, head_dim)
        )
        yield Turning(angles.frequencies, angles.attention_factor, angles.interleaved)
