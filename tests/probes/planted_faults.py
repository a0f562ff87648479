"""Faults planted in an engine's model. Each says where it is, so that who finds it elsewhere errs.

Holds the table of faults; engines that are read along are `planting`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.probes.planting import (
    Judged,
    changed,
    eager,
    exchange,
    flip_bit,
    scaled,
    tensors_of,
    with_layer,
)
from ullage.engine.engine import Engine
from ullage.engine.linear import Int8Linear, Linear
from ullage.engine.model.layer import ACTIVATIONS, Layer
from ullage.engine.positions.rope import rotary_tables
from ullage.engine.positions.scaling import Angles
from ullage.probes.baseline import sketch as sketches

Planted = Callable[[Engine, ExitStack, int], Engine]
"""Plants into a layer (ignored where it is in none); the engine to run."""


@dataclass(frozen=True)
class Fault:
    """`places`: kinds that may be named, of the layer (`everywhere`: of whichever layers)."""

    name: str
    kinds: tuple[str, ...]
    plant: Planted
    everywhere: bool = False
    outside: bool = False

    def found_by(self, judged: Judged, layer: int) -> bool:
        """Whether all that fired is at the right place, and something did."""
        return bool(judged.fired) and all(
            one.kind in self.kinds
            and (self.everywhere or one.layers == (() if self.outside else (layer,)))
            for one in judged.fired
        )


def _heads(layer: Layer, kind: str, head: int) -> slice:
    before = {"q": 0, "k": layer.num_heads, "v": layer.num_heads + layer.num_kv_heads}[kind]
    first = (before + head) * layer.head_dim
    return slice(first, first + layer.head_dim)


def _in(pick: Callable[[Layer], Linear], change: Callable[[Layer, Linear], None]) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        layer = engine.decoder.layers[index]
        linear = pick(layer)
        stack.enter_context(changed(*tensors_of(linear)))
        change(layer, linear)
        return engine

    return plant


def _qkv(layer: Layer) -> Linear:
    return layer.qkv


def output_of(layer: Layer) -> Linear:
    return layer.output


def gate_up_of(layer: Layer) -> Linear:
    return layer.linears[2]


def down_of(layer: Layer) -> Linear:
    return layer.linears[3]


def head_times(kind: str, head: int, factor: float) -> Planted:
    return _in(_qkv, lambda layer, linear: scaled(linear, _heads(layer, kind, head), factor))


def all_heads(kind: str, factor: float) -> Planted:
    def change(layer: Layer, linear: Linear) -> None:
        count = layer.num_heads if kind == "q" else layer.num_kv_heads
        for head in range(count):
            scaled(linear, _heads(layer, kind, head), factor)

    return _in(_qkv, change)


def matrix_times(pick: Callable[[Layer], Linear], factor: float) -> Planted:
    return _in(pick, lambda _, linear: scaled(linear, slice(None), factor))


def row_times(pick: Callable[[Layer], Linear], row: int, factor: float) -> Planted:
    return _in(pick, lambda _, linear: scaled(linear, slice(row, row + 1), factor))


def bit_flipped(pick: Callable[[Layer], Linear], index: tuple[int, int], bit: int) -> Planted:
    """The bit is float32's, of which bfloat16 is the upper half; of int8 its own."""
    return _in(pick, lambda _, linear: _flip_bit(linear.weight_OI, index, bit))  # type: ignore[attr-defined]


def noise(pick: Callable[[Layer], Linear], share: float) -> Planted:
    """Of each element's own matrix; in int8 some of the whole numbers move by one."""

    def change(_: Layer, linear: Linear) -> None:
        random = torch.Generator().manual_seed(5)
        weight = linear.weight_OI  # type: ignore[attr-defined]
        if isinstance(linear, Int8Linear):
            moved = (torch.rand(weight.shape, generator=random) < share).to(torch.int8)
            weight.copy_((weight + moved).clamp(-127, 127))
        else:
            weight += torch.randn(weight.shape, generator=random).to(weight.dtype) * (
                weight.float().std() * share
            )

    return _in(pick, change)


def exchanged_heads(kind: str) -> Planted:
    def change(layer: Layer, linear: Linear) -> None:
        for one in tensors_of(linear):
            exchange(one, _heads(layer, kind, 0), _heads(layer, kind, 1))

    return _in(_qkv, change)


def _gate_for_up(_: Layer, linear: Linear) -> None:
    half = linear.weight_OI.shape[0] // 2  # type: ignore[attr-defined]
    for one in tensors_of(linear):
        exchange(one, slice(half), slice(half, 2 * half))


def _stale_half(_: Layer, linear: Linear) -> None:
    """Its lower rows are the upper ones still."""
    half = linear.weight_OI.shape[0] // 2  # type: ignore[attr-defined]
    for one in tensors_of(linear):
        one[half : 2 * half] = one[:half].clone()


def _rows_of_o(_: Layer, linear: Linear) -> None:
    for one in tensors_of(linear):
        exchange(one, slice(0, 1), slice(3, 4))


def norm_channel(which: str, channel: int, factor: float) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        norm = getattr(engine.decoder.layers[index], which)
        stack.enter_context(changed(norm.weight))
        norm.weight[channel] *= factor
        return engine

    return plant


def norm_bit(channel: int, bit: int) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        weight = engine.decoder.layers[index].mixer_norm.weight  # type: ignore[union-attr]
        stack.enter_context(changed(weight))
        _flip_bit(weight, (channel,), bit)
        return engine

    return plant


def _flip_bit(weight: torch.Tensor, index: tuple[int, ...], bit: int) -> None:
    flip_bit(weight, index, bit - 16 if weight.element_size() == 2 else bit)


def _norm_of_ones(engine: Engine, stack: ExitStack, index: int) -> Engine:
    weight = engine.decoder.layers[index].feed_forward_norm.weight  # type: ignore[union-attr]
    stack.enter_context(changed(weight))
    weight.fill_(1.0)
    return engine


def eps_times(factor: float) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        def change(layer: Layer) -> Layer:
            norm = layer.mixer_norm
            assert norm is not None
            return replace(layer, mixer_norm=replace(norm, eps=norm.eps * factor))

        # The compiled step has one epsilon for all norms.
        return stack.enter_context(with_layer(eager(engine), index, change))

    return plant


def rule(**more: Any) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        def change(layer: Layer) -> Layer:
            asked = {
                name: value(layer.rule) if callable(value) else value
                for name, value in more.items()
            }
            return replace(layer, rule=replace(layer.rule, **asked))

        return stack.enter_context(with_layer(engine, index, change))

    return plant


def other_activation(engine: Engine, stack: ExitStack, index: int) -> Engine:
    def change(layer: Layer) -> Layer:
        mlp = layer.feed_forward
        name = "gelu" if mlp.activation_name != "gelu" else "silu"  # type: ignore[union-attr]
        # The name stays: the code beneath it is what went wrong.
        wrong = replace(mlp, activation=ACTIVATIONS[name])  # type: ignore[type-var]
        return replace(layer, feed_forward=wrong)

    other = Engine(
        engine.decoder, engine.tokenizer, replace(engine.options, enforce_eager=True),
        engine.max_model_len,
    )  # fmt: skip
    return stack.enter_context(with_layer(other, index, change))


def layers_exchanged(engine: Engine, stack: ExitStack, index: int) -> Engine:
    layers = engine.decoder.layers
    a, b = layers[index], layers[index - 1]
    for one, other in zip(a.linears, b.linears, strict=True):
        stack.enter_context(changed(*tensors_of(one), *tensors_of(other)))
        for x, y in zip(tensors_of(one), tensors_of(other), strict=True):
            kept = x.clone()
            x.copy_(y)
            y.copy_(kept)
    return engine


def _tables(make: Callable[[Engine], Any]) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        for tables in engine.decoder.ropes:
            stack.enter_context(changed(tables.cos_ND, tables.sin_ND))
        make(engine)
        return engine

    return plant


def theta_times(factor: float) -> Planted:
    def make(engine: Engine) -> None:
        turnings = sketches._turnings(engine.decoder)
        for tables, turning in zip(engine.decoder.ropes, turnings, strict=True):
            # A frequency is theta^(−i): i at theta 10,000 (or what it is) from the last of them.
            count = len(turning.frequencies)
            powers = torch.arange(count, dtype=torch.float64).numpy() / count
            other = Angles(
                turning.frequencies * factor**-powers, turning.factor, turning.interleaved
            )
            new = rotary_tables(other, len(tables.cos_ND))
            tables.cos_ND.copy_(new.cos_ND)
            tables.sin_ND.copy_(new.sin_ND)

    return _tables(make)


def _off_by_one(engine: Engine) -> None:
    for tables in engine.decoder.ropes:
        tables.cos_ND.copy_(tables.cos_ND.roll(-1, 0))
        tables.sin_ND.copy_(tables.sin_ND.roll(-1, 0))


def head_row(share: float) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        head = engine.decoder.head
        stack.enter_context(changed(*tensors_of(head), engine.decoder.embedding_VE))
        scaled(head, slice(40, 41), 1 + share)
        return engine

    return plant


def embedding_channel(engine: Engine, stack: ExitStack, index: int) -> Engine:
    """All of them: which token comes is the model's choice. A tied head goes with it."""
    table = engine.decoder.embedding_VE
    stack.enter_context(changed(table))
    table[:, 1] = 0
    return engine


def last_norm(factor: float) -> Planted:
    def plant(engine: Engine, stack: ExitStack, index: int) -> Engine:
        weight = engine.decoder.final_norm.weight  # type: ignore[union-attr]
        stack.enter_context(changed(weight))
        weight[3] *= factor
        return engine

    return plant


GATE_FOR_UP, STALE_HALF = _in(gate_up_of, _gate_for_up), _in(gate_up_of, _stale_half)
ROWS_OF_O, OFF_BY_ONE = _in(output_of, _rows_of_o), _tables(_off_by_one)


FAULTS: tuple[Fault, ...] = (
    Fault("q of one head times 4", ("q",), head_times("q", 1, 4.0)),
    Fault("k zeroed", ("k",), all_heads("k", 0.0)),
    Fault("v of one head times 1.1", ("v",), head_times("v", 0, 1.1)),
    Fault("v of one head zeroed", ("v",), head_times("v", 0, 0.0)),
    Fault("two q heads exchanged", ("q",), exchanged_heads("q")),
    Fault("two k heads exchanged", ("k",), exchanged_heads("k")),
    Fault("o times 1.02", ("o",), matrix_times(output_of, 1.02)),
    Fault("two rows of o exchanged", ("o",), _in(output_of, _rows_of_o)),
    Fault("noise in o", ("o",), noise(output_of, 0.01)),
    Fault("gate and up exchanged", ("mlp",), _in(gate_up_of, _gate_for_up)),
    Fault("half of gate_up stale", ("mlp",), _in(gate_up_of, _stale_half)),
    Fault("one channel of up times 2", ("mlp",), row_times(gate_up_of, -5 % 96 + 96, 2.0)),
    Fault("down times 0.99", ("mlp",), matrix_times(down_of, 0.99)),
    Fault("one channel of down times 1.5", ("mlp",), row_times(down_of, 7, 1.5)),
    Fault("noise in down", ("mlp",), noise(down_of, 0.01)),
    Fault("one norm weight times 2", ("norm",), norm_channel("mixer_norm", 11, 2.0)),
    Fault("one norm weight times 1.01", ("norm",), norm_channel("feed_forward_norm", 5, 1.01)),
    Fault("an exponent bit of a norm weight", ("norm",), norm_bit(9, 24)),
    Fault("a norm of ones", ("norm",), _norm_of_ones),
    Fault("eps times 1,000,000", ("norm",), eps_times(1e6)),
    Fault("scores times 1/head_dim", ("attention",), rule(scale=lambda rule: rule.scale**2)),
    Fault("another activation", ("mlp",), other_activation),
    Fault("theta times 5", ("rope",), theta_times(5.0), everywhere=True),
    Fault("positions off by one", ("rope",), _tables(_off_by_one), everywhere=True),
    Fault("two layers exchanged", ("q", "k", "v", "o", "mlp"), layers_exchanged, everywhere=True),
    Fault("one row of the head times 1.5", ("embedding",), head_row(0.5), outside=True),
    Fault("one channel of the embedding zero", ("embedding",), embedding_channel, outside=True),
    Fault("a weight of the last norm times 1.5", ("norm",), last_norm(1.5), outside=True),
)
