"""KV storage: what comes back, how far off it may be, and what it costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.hadamard import hadamard
from ullage.engine.kv import KV_FORMATS, KVCache, KVFormat, KVShape
from ullage.engine.kv import cache as cache_module
from ullage.engine.kv.codecs import SMALLEST_SCALE, decode, encode, largest, turned
from ullage.engine.paging.layout import kv_layout
from ullage.errors import BadUsage

FORMATS = list(KV_FORMATS.values())
QUANTISED = [stored for stored in FORMATS if stored.scale_bytes]
DIM = 16


def there_and_back(x: torch.Tensor, stored: KVFormat) -> torch.Tensor:
    out = torch.empty_like(x)
    decode(*encode(x, stored), stored, out)
    return out


def cache_of(
    stored: KVFormat, shapes: list[KVShape], num_blocks: int = 10, block_size: int = 4
) -> KVCache:
    layout = kv_layout([None] * len(shapes), shapes)
    return KVCache(shapes, layout, num_blocks, block_size, stored)


# Rows that quantisation finds hard: all magnitudes of float32, zeros, one huge number among small.
ROWS = st.lists(
    st.one_of(
        # Not to the end of float32: rounding a scale up, or turning, may make infinity of that.
        st.floats(-(2.0**120), 2.0**120, width=32),
        st.floats(-3, 3, width=32),
        st.just(0.0),
    ),
    min_size=DIM,
    max_size=DIM,
)


@pytest.mark.parametrize("stored", QUANTISED, ids=lambda s: s.name)
@settings(max_examples=150, deadline=None)
@given(row=ROWS)
@example(row=[0.0] * DIM)
@example(row=[1e-45] * DIM)
@example(row=[2.0**120] + [1.0] * (DIM - 1))
@example(row=[-(2.0**120)] * DIM)
def test_a_number_is_off_by_half_a_scale_and_the_scale_is_the_least(
    stored: KVFormat, row: list[float]
) -> None:
    """Half of top/127 (top/7 with four bits), and what rounding up to bfloat16 adds: 1/128."""
    x = torch.tensor(row, dtype=torch.float32)
    found, wanted = there_and_back(x, stored).double().numpy(), x.double().numpy()
    if stored.bits == 4:
        # Off by half a scale where it is stored: in the turned row.
        found, wanted = found @ hadamard(DIM), wanted @ hadamard(DIM)
    top = np.abs(wanted).max()
    exact_scale = max(top / largest(stored.bits), SMALLEST_SCALE)
    bound = 0.5 * exact_scale * (1 + 2**-7) * (1 + 1e-5)
    rounding = 2**-20 * top if stored.bits == 4 else 0.0
    assert np.abs(found - wanted).max() <= bound + rounding


@pytest.mark.parametrize("dim", [2, 8, 24, 64, 80, 512])
def test_turning_is_the_hadamard_transform_and_undoes_itself(dim: int) -> None:
    x = torch.randn(3, dim)
    np.testing.assert_allclose(turned(x), x.double().numpy() @ hadamard(dim), atol=1e-5)
    torch.testing.assert_close(turned(turned(x)), x)


@settings(max_examples=100, deadline=None)
@given(row=ROWS)
def test_bfloat16_is_off_by_its_last_bit(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float32)
    found = there_and_back(x, KV_FORMATS["bfloat16"]).double()
    assert bool(((found - x.double()).abs() <= x.double().abs() * 2**-8 + 2**-133).all())


@pytest.mark.parametrize("stored", FORMATS, ids=lambda s: s.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_touches_no_other(stored: KVFormat, bad: float) -> None:
    kv = cache_of(stored, [KVShape(2, DIM)])
    k, v = torch.randn(2, 3, 2, DIM)
    slots = torch.tensor([4, 5, 6])
    k[1, 0, 7] = bad
    kv.write(0, slots, k, v)
    found, _ = kv.read(0, [1])
    assert not torch.isfinite(found[1, 0]).all()
    assert torch.isfinite(found[[0, 2]]).all()
    assert torch.isfinite(found[1, 1]).all()
    if stored.scale_bytes:
        assert torch.isnan(found[1, 0]).all()


@pytest.mark.parametrize("stored", QUANTISED, ids=lambda s: s.name)
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROWS, min_size=6, max_size=6), bad=st.sampled_from([None, math.nan, math.inf]))
def test_machine_code_stores_the_same_bits(
    stored: KVFormat, rows: list[list[float]], bad: float | None
) -> None:
    x = torch.tensor(rows, dtype=torch.float32).view(3, 2, DIM)
    if bad is not None:
        x[1, 1, 3] = bad
    slots = torch.tensor([9, 2, 30])
    compiled, plain = cache_of(stored, [KVShape(2, DIM)]), cache_of(stored, [KVShape(2, DIM)])
    assert compiled._store_rows is not None
    plain._store_rows = None
    for kv in (compiled, plain):
        kv.write(0, slots, x, -x)
    for which in ("keys", "values", "key_scales", "value_scales"):
        found, wanted = (getattr(kv, which)[0].view(torch.uint8) for kv in (compiled, plain))
        assert torch.equal(found, wanted), which


def test_without_numba_torch_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "available", lambda: False)
    kv = cache_of(KV_FORMATS["int8_per_token_head"], [KVShape(1, DIM)])
    assert kv._store_rows is None
    k, v = torch.randn(2, 1, 1, DIM)
    kv.write(0, torch.tensor([3]), k, v)
    torch.testing.assert_close(kv.read(0, [0])[0][3], k[0], atol=0.03, rtol=0)


@pytest.mark.parametrize("stored", FORMATS, ids=lambda s: s.name)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_the_cache_costs_what_its_shapes_say(stored: KVFormat, block_size: int) -> None:
    kv = cache_of(stored, [KVShape(3, 6), KVShape(1, 10)], 7, block_size)
    tensors = (*kv.keys, *kv.values, *kv.key_scales, *kv.value_scales)
    assert kv.num_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert kv.num_bytes == kv.num_blocks * kv.bytes_per_block
    numbers = (3 * 6 + 10) * {32: 4, 16: 2, 8: 1, 4: 0.5}[stored.bits]
    scales = 4 * 2 if stored.scale_bytes else 0
    assert kv.bytes_per_block == 2 * block_size * (numbers + scales)


def test_int8_halves_bfloat16_and_int4_quarters_it_but_for_the_scale() -> None:
    each = {name: stored.head_bytes(64) for name, stored in KV_FORMATS.items()}
    assert each == {
        "float32": 256,
        "bfloat16": 128,
        "int8_per_token_head": 66,
        "int4_per_token_head": 34,
    }


@pytest.mark.parametrize("stored", FORMATS, ids=lambda s: s.name)
def test_blocks_are_written_copied_cleared_and_read(stored: KVFormat) -> None:
    shapes = [KVShape(2, DIM), KVShape(3, 8)]
    kv = cache_of(stored, shapes)
    written = []
    for layer, shape in enumerate(shapes):
        k, v = torch.randn(2, 4, shape.num_kv_heads, shape.head_dim)
        kv.write(layer, torch.tensor([12, 13, 14, 15]), k, v)
        written.append((k, v))
    kv.copy([3], [7])
    for layer, pair in enumerate(written):
        for found, x in zip(kv.read(layer, [0, 7]), pair, strict=True):
            assert not found[:4].any()
            assert torch.equal(found[4:], there_and_back(x, stored))
    kv.clear([7])
    assert all(not x.any() for layer in (0, 1) for x in kv.read(layer, [7]))
    assert all(x.any() for layer in (0, 1) for x in kv.read(layer, [3]))


def test_numbers_begin_at_a_cache_line_and_scales_are_aligned() -> None:
    for stored in FORMATS:
        kv = cache_of(stored, [KVShape(1, 2), KVShape(3, 2)], 3, 1)
        assert kv.keys[0].data_ptr() % 64 == 0
        for tensor in (*kv.keys, *kv.values, *kv.key_scales, *kv.value_scales):
            assert tensor.numel() == 0 or tensor.data_ptr() % tensor.element_size() == 0


def test_four_bits_want_an_even_head() -> None:
    with pytest.raises(BadUsage, match="even head_dim"):
        cache_of(KV_FORMATS["int4_per_token_head"], [KVShape(1, 5)])


def test_layers_of_two_groups_share_storage() -> None:
    shapes = [KVShape(1, DIM)] * 2
    kv = KVCache(shapes, kv_layout([None, 8], shapes), 4, 4)
    assert kv.keys[0].data_ptr() == kv.keys[1].data_ptr()
    assert kv.bytes_per_block == 4 * 2 * DIM * np.dtype(np.float32).itemsize


@pytest.mark.parametrize("num_blocks", [2**50, 2**90])
def test_more_memory_than_there_can_be_is_refused_by_its_flag(num_blocks: int) -> None:
    """The first is refused by the kernel, the second is no size at all."""
    with pytest.raises(BadUsage, match="--kv-cache-memory-bytes"):
        cache_of(KV_FORMATS["float32"], [KVShape(2, DIM)], num_blocks)
