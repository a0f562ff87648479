"""One layer of an encoder: its weights as read, which norms it has, its feed-forward.

Holds the reading by slot and the arithmetic within a token; what tokens see is `encoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ullage.anatomy.spec import Attention, Dense, ModelSpec, Rope
from ullage.engine.encoder.weights import EncoderWeights
from ullage.engine.linear import Linear, LinearFactory

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class EncoderNorm:
    """x normalised over its last dimension, then scaled and shifted; `centred`: its mean is 0."""

    weight_E: torch.Tensor
    bias_E: torch.Tensor | None
    eps: float
    centred: bool

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        if self.centred:
            return F.layer_norm(x_TE, self.weight_E.shape, self.weight_E, self.bias_E, self.eps)
        return F.rms_norm(x_TE, self.weight_E.shape, self.weight_E, self.eps)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(up(x))); with `gated`, gate over up in one matrix, the gate activated."""

    up: Linear
    down: Linear
    gated: bool
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.down(self.activation(self.up(x_TE)))
        gate_TF, up_TF = self.up(x_TE).chunk(2, -1)
        return self.down(self.activation(gate_TF) * up_TF)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Norms before or behind each part; a norm behind one is over its sum with the residual.

    `window` tokens to each side are seen, None: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int | None
    qkv: Linear
    output: Linear
    feed_forward: FeedForward
    pre_mixer: EncoderNorm | None
    post_mixer: EncoderNorm | None
    pre_feed_forward: EncoderNorm | None
    post_feed_forward: EncoderNorm | None

    @property
    def norms(self) -> tuple[EncoderNorm | None, ...]:
        return (self.pre_mixer, self.post_mixer, self.pre_feed_forward, self.post_feed_forward)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.output, self.feed_forward.up, self.feed_forward.down)


def encoder_norm(
    spec: ModelSpec, weights: EncoderWeights, slot: str, layer: int | None = None
) -> EncoderNorm:
    """The norm of a slot that the spec has."""
    bias = weights.optional(slot, layer, ".bias")
    return EncoderNorm(weights.tensor(slot, layer), bias, spec.norm.eps, spec.norm.kind == "layer")


def read_layer(
    spec: ModelSpec, index: int, weights: EncoderWeights, linear: LinearFactory
) -> EncoderLayer:
    """Layer `index`, Q, K and V in one matrix whether or not they are stored so."""
    layer = spec.layers[index]
    mixer, mlp = layer.mixer, layer.feed_forward
    assert isinstance(mixer, Attention)
    assert isinstance(mlp, Dense)

    def product(whole: str, *parts: str) -> Linear:
        """One matrix: stored as `whole`, or as `parts` stacked along the output."""
        slots = (whole,) if weights.has(whole, index) else parts
        matrix = [weights.tensor(slot, index) for slot in slots]
        found = [weights.optional(slot, index, ".bias") for slot in slots]
        if all(bias_O is None for bias_O in found):
            return linear(torch.cat(matrix), None)
        biases = [
            torch.zeros(len(weight_OI)) if bias_O is None else bias_O
            for weight_OI, bias_O in zip(matrix, found, strict=True)
        ]
        return linear(torch.cat(matrix), torch.cat(biases))

    def norm(slot: str) -> EncoderNorm | None:
        # ModernBERT's first layer has none before its attention: the embedding's is there.
        return encoder_norm(spec, weights, slot, index) if weights.has(slot, index) else None

    before = spec.norm.place == "pre"
    up = product("gate_up", "gate", "up") if mlp.gated else product("up")
    return EncoderLayer(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        scale=mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
        rope=mixer.rope,
        # A configuration counts both sides of the token.
        window=None if mixer.window is None else mixer.window // 2,
        qkv=product("qkv", "q", "k", "v"),
        output=product("o"),
        feed_forward=FeedForward(up, product("down"), mlp.gated, ACTIVATIONS[mlp.activation]),
        pre_mixer=norm("pre1") if before else None,
        post_mixer=None if before else norm("post1"),
        pre_feed_forward=norm("pre2") if before else None,
        post_feed_forward=None if before else norm("post2"),
    )
