"""The block pool against a simple model: no block free and used, references equal to uses."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ullage.engine.paging.blocks import BlockPool, OutOfBlocks

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables that allocate, share a prefix, grow and go; the model is the tables themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.tables: list[list[int]] = []

    def used(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        free_before = NUM_BLOCKS - len(self.used())
        if count > free_before:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert not self.used() & set(taken)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(prefix)
        self.tables.append(list(prefix))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def misuse_is_refused_and_changes_nothing(self, block: int) -> None:
        uses = sum(table.count(block) for table in self.tables)
        with pytest.raises(ValueError, match="references"):
            self.pool.release([block] * (uses + 1))
        if uses == 0:
            with pytest.raises(ValueError, match="free"):
                self.pool.share([block])

    @invariant()
    def agrees_with_the_tables(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_used == len(self.used())
        assert self.pool.num_free + self.pool.num_used == NUM_BLOCKS
        for block in range(NUM_BLOCKS):
            assert self.pool.references(block) == sum(t.count(block) for t in self.tables)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_check_finds_a_leaked_block() -> None:
    pool = BlockPool(4, 4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 uses"):
        pool.check([])


def test_check_finds_a_block_used_without_reference() -> None:
    pool = BlockPool(4, 4)
    with pytest.raises(AssertionError, match="0 references, 1 uses"):
        pool.check([[2]])


def test_check_finds_a_block_free_and_used() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(1)
    pool._free.append(table[0])
    with pytest.raises(AssertionError, match="free and used"):
        pool.check([table])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 4).blocks_for(tokens) == blocks


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_needs_blocks_of_tokens(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="blocks"):
        BlockPool(*sizes)
