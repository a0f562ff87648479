"""One row of a sequence read in every layer at once, from the paged cache that attention read.

Holds the tables that `kernels.row_entropy` wants. Many rows of one layer are `entropy`'s; whose row
is read, and when, is whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.engine.attention.protocol import first_visible
from ullage.engine.batch import Span
from ullage.engine.kernels.compiling import available
from ullage.engine.kv import KVCache
from ullage.engine.rule import AttentionRule
from ullage.probes.attention.entropy import RowReadings, attention_rows, readings_of
from ullage.probes.attention.sums import BAND, counted_of

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# How compiled code sees what a cache holds.
_STORAGE: Mapping[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
# Dimensions that the loops take at once, of heads in eight bits or more, and in four.
_DIM_MULTIPLE, _INT4_DIM_MULTIPLE = 8, 16


@dataclass(frozen=True, slots=True, eq=False)
class RowOfLayers:
    """As `RowReadings`, of one row in all layers: float32 [layers, heads], `visible` [layers].

    `output_LHD` is attention itself, computed from the same pass over keys and values. A layer
    that was not read has NaN, and 0 visible; one that was read has 1 or more.
    """

    entropy_nats: Floats
    max_score: Floats
    first_mass: Floats
    band_mass: Floats
    band_entropy_nats: Floats
    visible: NDArray[np.int64]
    output_LHD: Floats


def read_row(
    kv: KVCache, span: Span, queries_LHD: Floats, rules: Sequence[AttentionRule]
) -> RowOfLayers:
    """As `RowReader`, which is worth keeping where more rows will be read."""
    return RowReader(kv, rules).read(span, queries_LHD)


class RowReader:
    """Reads rows of a cache in all its layers; compiled where numba and the heads allow it."""

    def __init__(self, kv: KVCache, rules: Sequence[AttentionRule]) -> None:
        """`rules` are those of all layers, in order; the layers have heads of one shape."""
        self._kv, self._rules = kv, tuple(rules)
        multiple = _INT4_DIM_MULTIPLE if kv.format.bits == 4 else _DIM_MULTIPLE
        self._compiled = available() and kv.shapes[0].head_dim % multiple == 0
        if self._compiled:
            self._bind()

    def read(self, span: Span, queries_LHD: Floats, layers: Ints | None = None) -> RowOfLayers:
        """The last row of `span`, whose keys and values lie in the cache, in `layers` (None: all).

        Queries are what attention was given, after norms and rotation: float32 [layers, heads,
        head_dim], those of all layers.
        """
        own = np.arange(len(self._rules)) if layers is None else layers
        queries_LHD = np.ascontiguousarray(queries_LHD if layers is None else queries_LHD[layers])
        if self._compiled:
            found = _row([self._read_compiled(span, queries_LHD, own)])
        else:
            queries = zip(own.tolist(), torch.from_numpy(queries_LHD), strict=True)
            found = _row([self._read_layer(n, span, q_HD[None]) for n, q_HD in queries])
        return found if layers is None else _among(found, layers, len(self._rules))

    def _read_layer(self, layer: int, span: Span, q_1HD: torch.Tensor) -> RowReadings:
        size, rule, position = self._kv.block_size, self._rules[layer], span.context - 1
        table = span.tables[self._kv.layout.group_of[layer]]
        first = first_visible(span, rule.window) // size
        k_SKD, v_SKD = self._kv.read(layer, table[first : position // size + 1])
        end = span.context - first * size
        pieces = [(first * size, k_SKD[:end], v_SKD[:end])]
        return attention_rows(q_1HD, pieces, torch.tensor([position]), rule)

    def _bind(self) -> None:
        from ullage.engine.kernels import entropy, row_entropy

        kv, rules, kernel = self._kv, self._rules, row_entropy
        self._read_layers, self._num_sums = kernel.read_layers, entropy.NUM_SUMS
        self._table = np.zeros((len(rules), kernel.COLUMNS), np.int64)
        for layer, row in enumerate(self._table):
            for column, tensor in (
                (kernel.KEYS, kv.keys[layer]),
                (kernel.VALUES, kv.values[layer]),
                (kernel.KEY_SCALES, kv.key_scales[layer]),
                (kernel.VALUE_SCALES, kv.value_scales[layer]),
            ):
                row[column] = tensor.data_ptr() if tensor.numel() else 0
            row[kernel.GROUP] = kv.layout.group_of[layer]
            row[kernel.WINDOW] = rules[layer].window or 0
        self._forms = np.array([(rule.scale, rule.soft_cap or 0) for rule in rules], np.float32)
        self._slopes = np.array([rule.slopes for rule in rules], np.float32)
        self._storage = np.empty(0, _STORAGE[kv.keys[0].dtype])
        furthest = torch.iinfo(torch.int64).max
        self._windows = torch.tensor([rule.window or furthest for rule in rules])

    def _read_compiled(self, span: Span, queries_LHD: Floats, layers: Ints) -> RowReadings:
        from ullage.engine.attention.row_blocks import block_tables

        kv = self._kv
        sums_LHX = torch.empty((*queries_LHD.shape[:2], self._num_sums), dtype=torch.float64)
        output_LHD = torch.empty(queries_LHD.shape)
        self._read_layers(
            queries_LHD,
            self._table[layers],
            self._forms[layers],
            self._slopes[layers],
            self._storage,
            tuple(kv.keys[0].shape),
            block_tables((span,), len(kv.layout.groups))[:, 0],
            span.context,
            BAND,
            sums_LHX.numpy(),
            output_LHD.numpy(),
        )
        visible = self._windows[torch.from_numpy(layers)].clamp(max=span.context)
        return readings_of(counted_of(sums_LHX, output_LHD), visible)


# Of `RowReadings`, in the order of `RowOfLayers`.
_COLUMNS = (
    *("entropy_nats", "max_score", "first_mass", "band_mass", "band_entropy_nats", "visible"),
    "output_RHD",
)


def _row(parts: Sequence[RowReadings]) -> RowOfLayers:
    """Of readings whose rows are layers."""

    def joined(name: str) -> NDArray[Any]:
        columns = [getattr(part, name).numpy() for part in parts]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    return RowOfLayers(*map(joined, _COLUMNS))


def _among(found: RowOfLayers, layers: Ints, num_layers: int) -> RowOfLayers:
    """What was read of some layers, among all of them."""

    def spread(values: NDArray[Any], else_: float) -> NDArray[Any]:
        wide = np.full((num_layers, *values.shape[1:]), else_, values.dtype)
        wide[layers] = values
        return wide

    values = {one.name: getattr(found, one.name) for one in fields(RowOfLayers)}
    return RowOfLayers(**{n: spread(v, 0 if n == "visible" else np.nan) for n, v in values.items()})
