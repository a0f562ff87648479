"""What one row of a step is at every place of every layer, in the engine's own numbers.

Holds the room that a step copies into while it runs, compiled or in torch, and why a model has no
such places. Which rows, and what is made of the numbers, is whoever asks (`probes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.anatomy.spec import Dense as DenseSpec
from ullage.anatomy.spec import LayerSpec
from ullage.engine.model.layer import Dense, Layer

if TYPE_CHECKING:
    from ullage.engine.batch import Batch
    from ullage.engine.model.decoder import Decoder

Floats = NDArray[np.float32]

PLACES = (
    "x",
    "normed",
    "qkv",
    "turned",
    "mixed",
    "middle",
    "mlp_normed",
    "gate",
    "up",
    "hidden",
)
"""In the order of a layer, and of the columns that `kernels.step` names (TAP_…).

`x` goes into the layer and `normed` is its norm; `qkv` is their product, `turned` the same after
the norms of heads and the rotation; `mixed` what attention gives, `middle` x with it, `mlp_normed`
its norm; `gate` and `up` before the activation, `hidden` after. Behind the layers stands one more,
of which `x` and `normed` are the last residual and its norm.
"""


class Reader(Protocol):
    """Who reads along. Called in the engine's thread, between a step's parts."""

    def rows(self, batch: Batch) -> Sequence[int]:
        """Which rows of the coming step, all of them among its `sampled_rows`; none: ()."""

    def take(self, batch: Batch, taps: Taps, logits_SV: torch.Tensor) -> None:
        """After the step's numbers are made; K and V of its rows lie in the cache."""


class Taps:
    """Of the rows rows_R of one step: for each place float32 [layers, rows, width]."""

    def __init__(self, decoder: Decoder, rows_R: Sequence[int]) -> None:
        """`why_not(decoder)` is None."""
        self.widths = widths(decoder)
        self.offsets = np.cumsum([0, *self.widths.values()], dtype=np.int64)[:-1]
        self.num_layers = len(decoder.layers)
        self.compiled = False
        self.rows = tuple(rows_R)
        self._places = list(rows_R)
        total = sum(self.widths.values())
        self.kept_LRW: Floats = np.zeros((self.num_layers + 1, len(self.rows), total), np.float32)

    def at(self, place: str) -> Floats:
        """[layers, rows, width] of a place; `x` and `normed` have one layer more."""
        number = PLACES.index(place)
        first = int(self.offsets[number])
        end = self.num_layers + (place in ("x", "normed"))
        return self.kept_LRW[:end, :, first : first + self.widths[place]]

    def keep(self, layer: int, **values: torch.Tensor) -> None:
        """Of a step in torch: by place, the numbers of the batch, or of what is left of it."""
        for place, values_TW in values.items():
            self.at(place)[layer] = values_TW[self._places].flatten(1).float().numpy()

    def narrow(self, sampled_rows: torch.Tensor) -> None:
        """From here on only these rows are left of the batch."""
        where = {row: at for at, row in enumerate(sampled_rows.tolist())}
        self._places = [where[row] for row in self.rows]

    def map_of(self, num_rows: int) -> NDArray[np.int64]:
        """For each row of the batch its number among the tapped, −1 for the others."""
        tap_of_T = np.full(num_rows, -1, np.int64)
        tap_of_T[list(self.rows)] = np.arange(len(self.rows))
        return tap_of_T


def widths(decoder: Decoder) -> Mapping[str, int]:
    """Numbers of one row at each place; `gate` has none where the feed-forward has no gate."""
    layer, hidden = decoder.layers[0], decoder.spec.hidden_size
    mlp = decoder.spec.layers[0].feed_forward
    assert isinstance(mlp, DenseSpec)
    heads = layer.head_dim * layer.num_heads
    qkv = heads + 2 * layer.head_dim * layer.num_kv_heads
    inner = mlp.intermediate
    return dict(
        zip(
            PLACES,
            (hidden, hidden, qkv, qkv, heads, hidden, hidden, inner if mlp.gated else 0, inner,
             inner),
            strict=True,
        )
    )  # fmt: skip


def _is_plain(layer: Layer) -> bool:
    return (
        layer.wiring == "serial"
        and layer.mixer_out_norm is None
        and layer.feed_forward_out_norm is None
        and layer.residual_scale == 1.0
    )


def _form(layer: Layer, spec: LayerSpec) -> tuple[int, ...]:
    mlp = spec.feed_forward
    assert isinstance(mlp, DenseSpec)
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
    return (*heads, mlp.intermediate, mlp.gated)


# What keeps a layer from being tapped: (is it as wanted, what is not).
_WANTS: Sequence[tuple[Callable[[Layer], bool], str]] = (
    (_is_plain, "residuals that are scaled, normed behind a part, or parallel"),
    (lambda layer: isinstance(layer.feed_forward, Dense), "experts"),
    (lambda layer: layer.clip is None, "clipped queries, keys and values"),
    (
        lambda layer: layer.mixer_norm is not None and layer.feed_forward_norm is not None,
        "no norm in front of a part",
    ),
    (
        lambda layer: all(
            norm is None or norm.size == layer.head_dim for norm in (layer.q_norm, layer.k_norm)
        ),
        "a norm over more than one head",
    ),
)


def why_not(decoder: Decoder) -> str | None:
    """What keeps the rows of `decoder` from being tapped, in words; None where nothing does."""
    for layer in decoder.layers:
        for is_wanted, what in _WANTS:
            if not is_wanted(layer):
                return what
    if len(set(map(_form, decoder.layers, decoder.spec.layers))) != 1:
        return "layers of unlike shapes"
    if decoder.project_in is not None or decoder.final_norm is None:
        return "projected hidden states, or no last norm"
    return None
