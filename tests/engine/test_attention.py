"""The gathered path against the plain formula, on ragged batches over scattered blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.engine.attention import GatheredAttention, ReferenceAttention
from ullage.engine.batch import build_batch
from ullage.engine.blocks import BlockPool
from ullage.engine.kv import KVCache, KVShape
from ullage.engine.layout import kv_layout
from ullage.engine.request import Request, SamplingParams
from ullage.engine.rule import AttentionRule
from ullage.engine.scheduler import Plan, Work

HEADS, KV_HEADS, DIM, NUM_BLOCKS = 4, 2, 8, 64


def cache_of(shapes: list[KVShape], num_blocks: int, block_size: int) -> KVCache:
    layout = kv_layout([None] * len(shapes), shapes)
    return KVCache(shapes, layout, num_blocks, block_size)


def filled_cache(block_size: int) -> KVCache:
    torch.manual_seed(0)
    kv = cache_of([KVShape(KV_HEADS, DIM)], NUM_BLOCKS, block_size)
    kv.keys[0].normal_()
    kv.values[0].normal_()
    return kv


def plan_of(work: list[tuple[int, int]], pool: BlockPool, shuffle: torch.Generator) -> Plan:
    """Work of (start, count) each, on blocks in a random order."""
    order = torch.randperm(NUM_BLOCKS, generator=shuffle).tolist()
    planned = []
    for index, (start, count) in enumerate(work):
        request = Request(str(index), tuple(range(start + count)), SamplingParams())
        num_blocks = pool.blocks_for(start + count)
        table, order = tuple(order[:num_blocks]), order[num_blocks:]
        planned.append(Work(request, start, count, (table,), samples=True))
    return Plan(tuple(planned))


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6),
    block_size=st.sampled_from([6, 8, 16]),
    seed=st.integers(0, 1000),
)
def test_gathered_equals_the_formula(
    work: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    shuffle = torch.Generator().manual_seed(seed)
    kv = filled_cache(block_size)
    pool = BlockPool(NUM_BLOCKS, block_size)
    batch = build_batch(plan_of(work, pool, shuffle), block_size)
    num_rows = len(batch.token_ids_T)
    q = torch.randn(num_rows, HEADS, DIM, generator=shuffle)
    k = torch.randn(num_rows, KV_HEADS, DIM, generator=shuffle)
    v = torch.randn(num_rows, KV_HEADS, DIM, generator=shuffle)
    kv.write(0, batch.slots[0], k, v)
    wanted = ReferenceAttention(kv).prepare(batch)(0, q, k, v, AttentionRule(0.3))
    found = GatheredAttention(kv).prepare(batch)(0, q, k, v, AttentionRule(0.3))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_the_formula_itself_by_hand() -> None:
    """One decode over three positions in two blocks, written out in plain loops."""
    kv = filled_cache(2)
    request = Request("a", (1, 2, 3), SamplingParams())
    batch = build_batch(Plan((Work(request, 2, 1, ((5, 9),), True),)), 2)
    q = torch.randn(1, HEADS, DIM)
    out = ReferenceAttention(kv).prepare(batch)(0, q, q, q, AttentionRule(0.5))
    for head in range(HEADS):
        places = [(5, 0), (5, 1), (9, 0)]
        keys = [kv.keys[0][b, o, head // 2] for b, o in places]
        values = [kv.values[0][b, o, head // 2] for b, o in places]
        weights = torch.stack([(q[0, head] * k).sum() * 0.5 for k in keys]).exp()
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / weights.sum()
        torch.testing.assert_close(out[0, head], mean)


def test_keys_never_written_weigh_nothing_even_when_not_finite() -> None:
    """Blocks of others may hold anything; padding must not read them."""
    kv = filled_cache(8)
    kv.keys[0][20:] = float("nan")
    kv.values[0][20:] = float("nan")
    pool = BlockPool(NUM_BLOCKS, 8)
    work = []
    for index, context in enumerate((40, 21)):
        request = Request(str(index), tuple(range(context)), SamplingParams())
        table = tuple(range(index * 8, index * 8 + pool.blocks_for(context)))
        work.append(Work(request, context - 1, 1, (table,), True))
    batch = build_batch(Plan(tuple(work)), 8)
    q = torch.randn(2, HEADS, DIM)
    kv_new = torch.randn(2, KV_HEADS, DIM)
    kv.write(0, batch.slots[0], kv_new, kv_new)
    out = GatheredAttention(kv).prepare(batch)(0, q, kv_new, kv_new, AttentionRule(0.3))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_cache_costs_what_its_shapes_say(block_size: int) -> None:
    kv = cache_of([KVShape(2, 8), KVShape(1, 16)], 10, block_size)
    stored = sum(t.numel() * t.element_size() for t in (*kv.keys, *kv.values))
    assert kv.num_bytes == stored == 10 * block_size * (2 * 16 + 2 * 16) * 4
