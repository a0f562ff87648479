"""A row read in all layers at once is what `attention_rows` reads in each, whatever KV is kept as.

`attention_rows` is held to float64 over written-out scores in test_entropy; here it reads the keys
and values that the cache gives back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.driving import generate, greedy_params
from ullage.engine.batch import Batch, Span
from ullage.engine.compiled import CompiledDecoder
from ullage.engine.engine import Engine
from ullage.engine.kernels.compiling import available
from ullage.engine.kv import KVCache
from ullage.engine.kv_formats import KV_FORMATS, KVShape
from ullage.engine.options import EngineOptions
from ullage.engine.paging.layout import FREED, kv_layout
from ullage.engine.rule import AttentionRule
from ullage.engine.taps import Taps
from ullage.probes.attention import rows as module
from ullage.probes.attention.entropy import RowReadings, attention_rows
from ullage.probes.attention.rows import RowOfLayers, RowReader, read_row

NATS = 1e-4
FIGURES = ("entropy_nats", "max_score", "first_mass", "band_mass", "band_entropy_nats")
PLAIN = AttentionRule(0.2)


def slopes(heads: int) -> AttentionRule:
    return AttentionRule(0.2, slopes=tuple(2.0 ** -(n + 2) for n in range(heads)))


@dataclass
class Sequence1:
    """One sequence in a cache whose other blocks hold what nobody may read."""

    rules: Sequence[AttentionRule]
    context: int
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    block_size: int = 16
    stored: str = "float32"

    def __post_init__(self) -> None:
        shapes = [KVShape(self.kv_heads, self.dim)] * len(self.rules)
        layout = kv_layout([rule.window for rule in self.rules], shapes)
        blocks = -(-self.context // self.block_size)
        num_blocks = blocks * len(layout.groups) + 3
        self.kv = KVCache(shapes, layout, num_blocks, self.block_size, KV_FORMATS[self.stored])
        generator = torch.Generator().manual_seed(self.context + self.dim)
        order = torch.randperm(num_blocks, generator=generator).tolist()
        tables = []
        for number, group in enumerate(layout.groups):
            table = order[number * blocks : (number + 1) * blocks]
            # As the engine leaves it: what the window has passed is somebody else's.
            seen = 0 if group.window is None else max(self.context - group.window, 0)
            freed = seen // self.block_size
            tables.append((*(FREED,) * freed, *table[freed:]))
        self.span = Span(0, 1, self.context - 1, tuple(tables))
        self._fill(generator)
        size = (len(self.rules), self.heads, self.dim)
        self.queries = torch.randn(size, generator=generator).numpy()

    def _fill(self, generator: torch.Generator) -> None:
        for tensor in (*self.kv.keys, *self.kv.values):
            if tensor.dtype.is_floating_point:
                tensor.fill_(math.nan)
        for scales in (*self.kv.key_scales, *self.kv.value_scales):
            scales.fill_(math.nan)
        for layer in range(len(self.rules)):
            positions, slots = self._slots(layer)
            size = (len(positions), self.kv_heads, self.dim)
            k, v = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
            self.kv.write(layer, slots, k, v)

    def _slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions that the last row sees, and where they lie."""
        window, size = self.rules[layer].window, self.block_size
        positions = torch.arange(
            0 if window is None else max(self.context - window, 0), self.context
        )
        table = torch.tensor(self.span.tables[self.kv.layout.group_of[layer]])
        return positions, table[positions // size] * size + positions % size

    def expected(self, layer: int) -> RowReadings:
        positions, slots = self._slots(layer)
        size = self.block_size
        k_SKD, v_SKD = self.kv.read(layer, (slots // size).unique().tolist())
        at = {int(slot): n for n, slot in enumerate(self._read_order(slots))}
        order = torch.tensor([at[int(slot)] for slot in slots])
        pieces = [(int(positions[0]), k_SKD[order], v_SKD[order])]
        row = torch.tensor([self.context - 1])
        return attention_rows(
            torch.from_numpy(self.queries[layer])[None], pieces, row, self.rules[layer]
        )

    def _read_order(self, slots: torch.Tensor) -> torch.Tensor:
        size = self.block_size
        blocks = (slots // size).unique()
        return (blocks[:, None] * size + torch.arange(size)).flatten()

    def check(self, found: RowOfLayers | None = None) -> None:
        found = found or read_row(self.kv, self.span, self.queries, self.rules)
        for layer in range(len(self.rules)):
            wanted = self.expected(layer)
            for name in FIGURES:
                close(
                    getattr(found, name)[layer], getattr(wanted, name)[0], NATS, f"{name} {layer}"
                )
            assert found.visible[layer] == wanted.visible[0]
            assert wanted.output_RHD is not None
            close(found.output_LHD[layer], wanted.output_RHD[0], 1e-5, f"output {layer}")


def close(found: np.ndarray, expected: torch.Tensor, atol: float, what: str) -> None:
    np.testing.assert_allclose(found, expected.numpy(), atol=atol, rtol=1e-5, err_msg=what)


# --- what is stored, and what is seen ------------------------------------------------------------


@pytest.mark.parametrize("stored", KV_FORMATS)
@pytest.mark.parametrize("context", [1, 2, 16, 17, 35, 341, 513, 1100])
def test_every_format_at_every_length(stored: str, context: int) -> None:
    """Of one token, less than a block, just one, and more than is looked at at once."""
    Sequence1([PLAIN] * 3, context, stored=stored).check()


RULES = {
    "windows of some layers": [PLAIN, AttentionRule(0.2, window=40), AttentionRule(0.3, window=40)],
    "a window narrower than the band": [AttentionRule(0.2, window=5), PLAIN],
    "a window of one key": [AttentionRule(0.2, window=1), PLAIN],
    "a window that nothing has passed": [AttentionRule(0.2, window=900)],
    "a soft cap in one layer": [AttentionRule(1.5, soft_cap=4.0), PLAIN],
    "slopes": [slopes(9), slopes(9)],
    "all at once": [AttentionRule(1.5, 60, 8.0, slopes(9).slopes), slopes(9)],
}


@pytest.mark.parametrize("stored", KV_FORMATS)
@pytest.mark.parametrize("rules", RULES)
def test_every_rule(stored: str, rules: str) -> None:
    Sequence1(RULES[rules], 600, stored=stored).check()


HEADS = {  # query heads, kv heads, dim
    "one head": (1, 1, 16),
    "a kv head each": (5, 5, 32),
    "pairs": (4, 2, 96),
    "fours": (8, 2, 128),
    "sevens": (14, 2, 64),
    "one kv head for all": (8, 1, 80),
    "three, of a width that three are not added by": (6, 2, 48),
}


@pytest.mark.parametrize("stored", KV_FORMATS)
@pytest.mark.parametrize("shape", HEADS)
def test_every_grouping_of_heads(stored: str, shape: str) -> None:
    heads, kv_heads, dim = HEADS[shape]
    Sequence1([PLAIN] * 2, 150, heads, kv_heads, dim, stored=stored).check()


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_every_block_size(block_size: int) -> None:
    Sequence1([PLAIN, AttentionRule(0.2, window=40)], 130, block_size=block_size).check()


@pytest.mark.parametrize("stored", KV_FORMATS)
def test_keys_of_many_heads_are_looked_at_in_smaller_tiles(stored: str) -> None:
    """32 kv heads of 128: a token has 16 KB of keys in float32."""
    Sequence1([PLAIN], 90, 32, 32, 128, stored=stored).check()


@pytest.mark.parametrize("stored", ["float32", "int8_per_token_head"])
def test_heads_that_no_loop_takes_are_read_layer_by_layer(stored: str) -> None:
    rules = [PLAIN, AttentionRule(0.2, window=40), AttentionRule(0.2, soft_cap=4.0)]
    Sequence1(rules, 130, 6, 2, 12, stored=stored).check()


@pytest.mark.parametrize("stored", KV_FORMATS)
def test_without_machine_code_it_is_the_same(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: False)
    Sequence1([PLAIN, AttentionRule(0.2, window=40)], 130, stored=stored).check()


def test_a_reader_reads_row_after_row() -> None:
    """Each a longer context of one sequence; nothing is left of the row before."""
    longest = Sequence1([PLAIN, AttentionRule(0.2, soft_cap=4.0)], 90)
    reader = RowReader(longest.kv, longest.rules)
    tables = longest.span.tables
    for context in (90, 3, 50, 90):
        longest.context, longest.span = context, Span(0, 1, context - 1, tables)
        longest.check(reader.read(longest.span, longest.queries))


def test_queries_need_not_lie_side_by_side() -> None:
    one = Sequence1([PLAIN] * 2, 50)
    apart = np.zeros((2, 9, 128), np.float32)[..., ::2]
    apart[:] = one.queries
    one.check(read_row(one.kv, one.span, apart, one.rules))


# --- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 60, 129])
def test_a_key_that_is_not_finite_shows_in_its_layer_and_heads_alone(
    bad: float, position: int
) -> None:
    one = Sequence1([PLAIN] * 3, 130)
    block = one.span.tables[0][position // 16]
    one.kv.keys[1][block, position % 16, 2, 5] = bad
    found = read_row(one.kv, one.span, one.queries, one.rules)
    for column in (found.entropy_nats, found.output_LHD.sum(-1)):
        assert np.isnan(column[1, 6:]).all()
        column[1, 6:] = 0
        assert np.isfinite(column).all()


def test_scores_far_apart_are_weighed_as_they_are() -> None:
    """Tiles whose highest score is ten thousand above or below the tile before."""
    for sign in (1.0, -1.0):
        one = Sequence1([AttentionRule(1.0)], 1300, 3, 1, 8)
        one.queries[:] = 0
        one.queries[..., 0] = 1
        _, slots = one._slots(0)
        one.kv.keys[0].view(-1, 8)[slots, 0] = sign * torch.arange(1300) * (1e4 / 1300)
        one.check()


# --- in an engine ---------------------------------------------------------------------------------


class Reading:
    """Every sampled row of every step: attention as it was, and as it is read again."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.found = engine, []
        self.rules = [layer.rule for layer in engine.decoder.layers]

    def rows(self, batch: Batch) -> Sequence[int]:
        return batch.sampled_rows.tolist()

    def take(self, batch: Batch, taps: Taps, logits_SV: torch.Tensor) -> None:
        layer = self.engine.decoder.layers[0]
        shape = (taps.num_layers, layer.num_heads, layer.head_dim)
        spans = {span.first + span.count - 1: span for span in batch.decodes + batch.prefills}
        for number, row in enumerate(taps.rows):
            queries = taps.at("turned")[:, number, : shape[1] * shape[2]].reshape(shape)
            again = read_row(self.engine.kv, spans[row], queries, self.rules)
            mixed = taps.at("mixed")[:, number].reshape(shape)
            self.found.append((mixed.copy(), again))


@pytest.mark.skipif(not available(), reason="numba is not installed")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8_per_token_head"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_attention_read_again_is_what_the_engine_had(
    family: str, stored: str, compiled: bool, family_dir: Any
) -> None:
    """Ragged batches, chunks of prompts, windows that have freed blocks."""
    directory: Path = family_dir(family)
    options = EngineOptions(
        attention="gathered",
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_cache_dtype=stored,
        kv_cache_memory_bytes=1 << 23,
    )
    engine = Engine.load(directory, options)
    if compiled:
        engine._decoder = CompiledDecoder(engine._decoder)
    engine.reader = reader = Reading(engine)
    prompts = [tuple(range(3, 3 + length)) for length in (41, 7, 20)]
    generate(engine, prompts, greedy_params(5))
    assert len(reader.found) >= 15
    for mixed, again in reader.found:
        np.testing.assert_allclose(again.output_LHD, mixed, atol=2e-5)
        assert np.isfinite(again.entropy_nats).all()
