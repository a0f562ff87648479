"""One layer of a decoder as plain data: its matrices, norms, and how its parts are joined.

Holds data and the dense feed-forward. Filling it from a checkpoint is `loading.py`, running it
`decoder.py`; the compiled step reads the same fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from ullage.engine.linear import Linear
from ullage.engine.model.experts import MixtureOfExperts
from ullage.engine.model.norms import Norm
from ullage.engine.rule import AttentionRule


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


# Words of configurations; several of them name one function (transformers 5.24, activations.py).
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
}


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """down(act(gate) · up), gate and up fused into one matrix; without a gate down(act(up))."""

    gate_up: Linear
    down: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    activation_name: str
    gated: bool

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.gate_up, self.down)


Wiring = Literal["serial", "parallel", "after_sum"]
"""How a layer's parts join the residual x, with norms where they are given.

`serial`: x + n2(mixer(n1(x))), then the same with the feed-forward. `parallel`: x + mixer(n1(x)) +
feed_forward(n1(x) or its own norm of x). `after_sum`: n2(x + mixer(x)), then the same.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Q, K and V fused into one matrix. `rope` is an index into the decoder's tables.

    `mixer_norm`, `feed_forward_norm` stand before a part, the `…_out_norm` behind it. `q_norm` and
    `k_norm` are over one head, or over the whole projection where their size says so. `clip` bounds
    Q, K and V (both ways); `residual_scale` multiplies what a part adds.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rule: AttentionRule
    rope: int | None
    mixer_norm: Norm | None
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    mixer_out_norm: Norm | None
    feed_forward_norm: Norm | None
    feed_forward: Dense | MixtureOfExperts
    feed_forward_out_norm: Norm | None
    wiring: Wiring = "serial"
    clip: float | None = None
    residual_scale: float = 1.0

    @property
    def norms(self) -> tuple[Norm, ...]:
        return tuple(
            norm
            for norm in (
                self.mixer_norm,
                self.q_norm,
                self.k_norm,
                self.mixer_out_norm,
                self.feed_forward_norm,
                self.feed_forward_out_norm,
            )
            if norm is not None
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.output, *self.feed_forward.linears)
