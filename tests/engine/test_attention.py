"""Every path against the formula in float64, over ragged batches, rules, storages and tables.

The oracle is written here, position by position, from the raw storage; it shares no code with the
paths.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.hadamard import hadamard
from ullage.engine.attention import AUTO, PATHS, AttentionPath, choose_path
from ullage.engine.attention import table as path_table
from ullage.engine.attention.paged import LEAST_GATHERED, PagedAttention
from ullage.engine.batch import Batch, Span, build_batch
from ullage.engine.kv import KV_FORMATS, KVCache, KVShape
from ullage.engine.paging.layout import FREED, kv_layout
from ullage.engine.request import Request, SamplingParams
from ullage.engine.rule import AttentionRule
from ullage.engine.scheduling.scheduler import Plan, Work
from ullage.errors import BadUsage

NAMES = [path.name for path in PATHS]
NUM_BLOCKS = 160

# --- the oracle ----------------------------------------------------------------------------------


def numbers(stored: torch.Tensor, scales: torch.Tensor, name: str) -> npt.NDArray[np.float64]:
    """What a layer's storage stands for, [blocks, block_size, kv_heads, dim]."""
    if name == "bfloat16":
        return stored.double().numpy()
    raw = stored.numpy()
    if name == "int4_per_token_head":
        raw = np.concatenate([raw & 15, raw >> 4], axis=-1).astype(np.int64) - 8
    found = raw.astype(np.float64)
    if scales.numel():
        found = found * scales.double().numpy()[..., None]
    return found @ hadamard(found.shape[-1]) if name == "int4_per_token_head" else found


def expected(
    kv: KVCache, batch: Batch, layer: int, q_THD: torch.Tensor, rule: AttentionRule
) -> npt.NDArray[np.float64]:
    """The formula for each row and head: softmax over the positions that the rule shows."""
    keys = numbers(kv.keys[layer], kv.key_scales[layer], kv.format.name)
    values = numbers(kv.values[layer], kv.value_scales[layer], kv.format.name)
    out = np.empty(q_THD.shape)
    for span in batch.decodes + batch.prefills:
        table = span.tables[kv.layout.group_of[layer]]
        for row in range(span.count):
            t = span.start + row
            low = 0 if rule.window is None else max(0, t - rule.window + 1)
            seen = range(low, t + 1)
            assert all(table[s // kv.block_size] != FREED for s in seen)
            places = [(table[s // kv.block_size], s % kv.block_size) for s in seen]
            k_SKD = np.stack([keys[place] for place in places])
            v_SKD = np.stack([values[place] for place in places])
            for head in range(q_THD.shape[1]):
                kv_head = head * k_SKD.shape[1] // q_THD.shape[1]
                scores = k_SKD[:, kv_head] @ q_THD[span.first + row, head].double().numpy()
                scores = scores * rule.scale
                if rule.soft_cap is not None:
                    scores = rule.soft_cap * np.tanh(scores / rule.soft_cap)
                if rule.slopes:
                    scores = scores + rule.slopes[head] * (np.arange(low, t + 1) - t)
                weights = np.exp(scores - scores.max())
                out[span.first + row, head] = weights @ v_SKD[:, kv_head] / weights.sum()
    return out


# --- batches over scattered blocks ---------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """A cache with something in every block, a batch over it, and this step's q, k, v."""

    kv: KVCache
    batch: Batch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rules: list[AttentionRule]

    def run(self, path: AttentionPath, layer: int = 0) -> torch.Tensor:
        return path.prepare(self.batch)(layer, self.q, self.k, self.v, self.rules[layer])


def make_case(
    work: list[tuple[int, int]],
    rules: list[AttentionRule],
    *,
    block_size: int = 16,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    name: str = "float32",
    seed: int = 0,
) -> Case:
    """Work of (start, count) each, one layer for each rule, blocks in a random order.

    What windows hide may be gone: such blocks are FREED. Blocks that are nobody's hold NaN.
    """
    torch.manual_seed(seed)
    shapes = [KVShape(heads[1], dim)] * len(rules)
    layout = kv_layout([rule.window for rule in rules], shapes)
    kv = KVCache(shapes, layout, NUM_BLOCKS, block_size, KV_FORMATS[name])
    every = torch.arange(NUM_BLOCKS * block_size)
    for layer in range(len(rules)):
        kv.write(layer, every, *torch.randn(2, len(every), heads[1], dim))
    order = iter(torch.randperm(NUM_BLOCKS).tolist())
    planned = []
    for index, (start, count) in enumerate(work):
        tables = []
        for group in layout.groups:
            table = [next(order) for _ in range(-(-(start + count) // block_size))]
            hidden = max(0, start - group.window + 1) if group.window is not None else 0
            table[: hidden // block_size] = [FREED] * (hidden // block_size)
            tables.append(tuple(table))
        request = Request(str(index), tuple(range(start + count)), SamplingParams())
        planned.append(Work(request, start, count, tuple(tables), samples=True))
    batch = build_batch(Plan(tuple(planned)), block_size)
    num_rows = len(batch.token_ids_T)
    q, (k, v) = torch.randn(num_rows, heads[0], dim), torch.randn(2, num_rows, heads[1], dim)
    used = {b for w in planned for table in w.tables for b in table}
    unused = [b for b in range(NUM_BLOCKS) if b not in used]
    for layer in range(len(rules)):
        kv.write(layer, batch.slots[layout.group_of[layer]], k, v)
        fill_with_nan(kv, layer, unused)
    return Case(kv, batch, q, k, v, rules)


def fill_with_nan(kv: KVCache, layer: int, blocks: list[int]) -> None:
    shape = kv.shapes[layer]
    slots = torch.tensor([b * kv.block_size + o for b in blocks for o in range(kv.block_size)])
    nan = torch.full((len(slots), shape.num_kv_heads, shape.head_dim), math.nan)
    kv.write(layer, slots, nan, nan)


def assert_right(case: Case, name: str) -> None:
    _, path = choose_path(name, case.kv)
    for layer, rule in enumerate(case.rules):
        found = case.run(path, layer)
        wanted = expected(case.kv, case.batch, layer, case.q, rule)
        np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5, rtol=1e-4)


WORK = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 60), st.just(1)),
        st.tuples(st.integers(0, 40), st.integers(1, LEAST_GATHERED + 8)),
    ),
    min_size=1,
    max_size=4,
)
HEADS = st.sampled_from([(4, 4), (6, 2), (5, 1), (2, 2)])


@st.composite
def rules_for(draw: st.DrawFn, num_heads: int) -> AttentionRule:
    slopes = draw(st.sampled_from(["none", "alibi"]))
    return AttentionRule(
        draw(st.sampled_from([0.125, 0.3, 1.0])),
        draw(st.sampled_from([None, 1, 5, 16, 33])),
        draw(st.sampled_from([None, 2.5, 50.0])),
        tuple(-(2.0 ** -(h + 1)) for h in range(num_heads)) if slopes == "alibi" else (),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), work=WORK, heads=HEADS)
def test_a_path_equals_the_formula(
    name: str, data: st.DataObject, work: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    rules = data.draw(st.lists(rules_for(heads[0]), min_size=1, max_size=2))
    case = make_case(
        work,
        rules,
        block_size=data.draw(st.sampled_from([5, 8, 16])),
        heads=heads,
        dim=data.draw(st.sampled_from([16, 64, 80])),
        name=data.draw(st.sampled_from(sorted(KV_FORMATS))),
        seed=data.draw(st.integers(0, 1000)),
    )
    assert_right(case, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", sorted(KV_FORMATS))
def test_long_contexts_are_cut_into_parts(name: str, stored: str) -> None:
    """One sequence and many positions: threads share the context, with and without a window."""
    rules = [AttentionRule(0.3), AttentionRule(0.3, window=200)]
    assert_right(make_case([(900, 1)], rules, heads=(3, 1), dim=64, name=stored), name)


@pytest.mark.parametrize("name", NAMES)
def test_huge_scores_neither_overflow_nor_lose_small_ones(name: str) -> None:
    case = make_case([(70, 1), (20, 6)], [AttentionRule(40.0)])
    assert_right(case, name)
    case.q *= 1e-6
    assert_right(case, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", sorted(KV_FORMATS))
@pytest.mark.parametrize(
    ("where", "bad"), [("key", math.nan), ("value", math.nan), ("value", math.inf)]
)
def test_what_is_not_finite_reaches_its_own_rows_only(
    name: str, stored: str, where: str, bad: float
) -> None:
    """It must reach them, for only so does the engine end that request with an error."""
    case = make_case([(40, 1), (33, 1), (10, 4)], [AttentionRule(0.3)], name=stored)
    wrong = case.batch.decodes[1]
    slot = torch.tensor([wrong.tables[0][1] * 16 + 3])
    k, v = torch.randn(2, 1, 2, 16)
    (k if where == "key" else v)[0, 0, 5] = bad
    case.kv.write(0, slot, k, v)
    _, path = choose_path(name, case.kv)
    found = case.run(path)
    # Heads 0 and 1 share KV head 0.
    assert not torch.isfinite(found[wrong.first, :2]).all(dim=-1).any()
    found[wrong.first, :2] = 0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("stored", sorted(KV_FORMATS))
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_depend_on_how_a_prompt_was_cut(name: str, stored: str) -> None:
    """A lossy cache too: each row sees what is stored, not what has yet to be."""
    whole = make_case([(0, 48)], [AttentionRule(0.3)], name=stored)
    _, path = choose_path(name, whole.kv)
    wanted = whole.run(path)
    (span,) = whole.batch.prefills
    for start, count in ((0, 40), (40, 8), (47, 1)):
        part = Span(0, count, start, span.tables)
        decodes, prefills = ((part,), ()) if count == 1 else ((), (part,))
        chunk = dataclasses.replace(whole.batch, decodes=decodes, prefills=prefills)
        rows = slice(start, start + count)
        found = path.prepare(chunk)(
            0, whole.q[rows], whole.k[rows], whole.v[rows], AttentionRule(0.3)
        )
        torch.testing.assert_close(found, wanted[rows], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", ["float32", "int8_per_token_head"])
def test_a_path_looks_behind_no_sequence(name: str, stored: str) -> None:
    """Not even at the rest of a block that is not yet full: its last owner may have left NaN."""
    work = [(20, 1), (28, 1), (3, 5), (5, LEAST_GATHERED)]
    case = make_case(work, [AttentionRule(0.3), AttentionRule(0.3, window=9)], name=stored)
    for span in case.batch.decodes + case.batch.prefills:
        for layer, table in enumerate(span.tables):
            rest = torch.arange(span.context % 16, 16) + 16 * table[-1]
            nan = torch.full((len(rest), 2, 16), math.nan)
            case.kv.write(layer, rest, nan, nan)
    assert_right(case, name)


# --- the table -----------------------------------------------------------------------------------


def cache(dim: int, name: str = "float32") -> KVCache:
    return KVCache([KVShape(1, dim)], kv_layout([None], [1]), 2, 4, KV_FORMATS[name])


@pytest.mark.parametrize(
    ("dim", "stored", "chosen"),
    [
        (64, "float32", "paged"),
        (64, "int4_per_token_head", "paged"),
        (24, "int8_per_token_head", "paged"),
        (24, "int4_per_token_head", "gathered"),
        (12, "float32", "gathered"),
    ],
)
def test_the_first_path_that_runs_is_chosen(dim: int, stored: str, chosen: str) -> None:
    assert choose_path(AUTO, cache(dim, stored))[0] == chosen


def test_without_numba_blocks_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_table, "available", lambda: False)
    assert choose_path(AUTO, cache(64))[0] == "gathered"
    with pytest.raises(BadUsage, match=r"attention.*numba"):
        choose_path("paged", cache(64))


def test_a_path_is_refused_by_name() -> None:
    with pytest.raises(BadUsage, match="12"):
        choose_path("paged", cache(12))
    with pytest.raises(BadUsage, match="reference"):
        choose_path("quick", cache(64))


def test_the_paged_path_keeps_its_room() -> None:
    """No memory is asked for in later steps of the same size."""
    case = make_case([(40, 1)] * 3, [AttentionRule(0.3)])
    path = PagedAttention(case.kv)
    case.run(path)
    room = path._states
    case.run(path)
    assert path._states is room
