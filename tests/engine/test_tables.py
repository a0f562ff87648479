"""Blocks, prefixes, forks and windows against a memory that says what each slot really holds.

The model: a slot holds the group, the salt and all tokens up to its position, as whoever computed
it had them. Whatever the pool does, every row must see exactly its own sequence's past.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.layout import FREED, KVGroup
from ullage.engine.paging.prefix import Hit, chain, salt_of
from ullage.engine.paging.tables import Tables, blocks_of_group, held_blocks
from ullage.engine.request import Request, SamplingParams, State
from ullage.engine.scheduling.scheduler import Limits, Plan, Scheduler, Work

Slot = tuple[int, int]
Content = tuple[int, bytes, tuple[int, ...]]
MAX_TOKENS = 40
# Shrinking what fails here takes longer than the test may; switch it on to look at a failure.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


class Memory:
    """What a KV cache would hold, and who may look at it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.pool = scheduler.pool
        self.groups = scheduler.tables.groups
        self.slots: dict[Slot, Content] = {}

    def run(self, plan: Plan) -> None:
        """Copy, write, and look: each row at everything that its window lets it see."""
        size = self.pool.block_size
        assert len({target for _, target in plan.copies}) == len(plan.copies)
        copied = {
            (target, offset): self.slots[source, offset]
            for source, target in plan.copies
            for offset in range(size)
            if (source, offset) in self.slots
        }
        self.slots.update(copied)
        written: Counter[Slot] = Counter()
        for work in plan.work:
            for position in range(work.start, work.start + work.count):
                for group in range(len(self.groups)):
                    slot = self.slot(work, group, position)
                    assert self.pool.references(slot[0]) == 1, "written while others hold it"
                    assert not self.pool.is_published(slot[0]), "written after it was published"
                    self.slots[slot] = self.content(work, group, position)
                    written[slot] += 1
        assert all(times == 1 for times in written.values()), "two rows in one slot"
        for work in plan.work:
            for position in range(work.start, work.start + work.count):
                for group, layers in enumerate(self.groups):
                    first = 0 if layers.window is None else max(position - layers.window + 1, 0)
                    for seen in range(first, position + 1):
                        found = self.slots.get(self.slot(work, group, seen))
                        assert found == self.content(work, group, seen)

    def slot(self, work: Work, group: int, position: int) -> Slot:
        block = work.tables[group][position // self.pool.block_size]
        assert block != FREED, "a block that is still seen was given back"
        return block, position % self.pool.block_size

    def content(self, work: Work, group: int, position: int) -> Content:
        request = work.request
        return group, request.salt, tuple(request.tokens(0, position + 1))


class TablesMachine(RuleBasedStateMachine):
    """Arrivals with few tokens and salts, so that much is shared; steps, ends, failures, resets."""

    BLOCK_SIZE, NUM_BLOCKS, CHUNK, SEQS = 3, 44, 7, 4
    WINDOWS: tuple[int | None, ...] = (None, 5, 1)
    POLICY: ClassVar[dict[str, object]] = {"long_prefill_token_threshold": 3}

    def __init__(self) -> None:
        super().__init__()
        groups = [KVGroup((index,), window) for index, window in enumerate(self.WINDOWS)]
        pool = BlockPool(self.NUM_BLOCKS, self.BLOCK_SIZE)
        tables = Tables(pool, groups, self.CHUNK)
        assert tables.most_blocks(MAX_TOKENS) <= self.NUM_BLOCKS
        self.scheduler = Scheduler(tables, Limits(self.SEQS, self.CHUNK, **self.POLICY))  # type: ignore[arg-type]
        self.memory = Memory(self.scheduler)
        self.live: list[Request] = []
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=25),
        num_new=st.integers(1, 8),
        n=st.integers(1, 3),
        salt=st.sampled_from([b"", b"x"]),
        priority=st.integers(0, 2),
    )
    def arrive(self, prompt: list[int], num_new: int, n: int, salt: bytes, priority: int) -> None:
        self.count += 1
        params = SamplingParams(n=n, max_tokens=num_new)
        requests = [
            Request(f"{self.count}-{i}", tuple(prompt), params, priority=priority, salt=salt)
            for i in range(n)
        ]
        self.scheduler.add(*requests)
        self.live += requests

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        plan = self.scheduler.schedule()
        assert plan.work, "somebody lives, so somebody must run"
        assert plan.num_tokens <= self.CHUNK
        assert sum(plan.waits.values()) == len(self.scheduler.waiting)
        self.memory.run(plan)
        for work in plan.work:
            work.request.num_computed += work.count
        for work in plan.work:
            self.scheduler.tables.publish(work.request)
            if work.samples:
                # Forks choose different tokens, as sampled answers do.
                for index, one in enumerate((work.request, *self.scheduler.fork(work.request))):
                    one.output_ids.append((token + index) % 2)
                    if len(one.output_ids) >= one.params.max_tokens:
                        self.end(one)

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.live.remove(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        free, own = self.scheduler.pool.num_free, set(held_blocks(one))
        alone = sum(self.scheduler.pool.references(block) == 1 for block in own)
        self.end(one)
        assert self.scheduler.pool.num_free == free + alone

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def turn_out_not_finite(self, data: st.DataObject) -> None:
        """What it held is wiped and must never be found: a later sight of it would fail."""
        one = data.draw(st.sampled_from(self.scheduler.running))
        for block in self.scheduler.tables.discard(one):
            for offset in range(self.BLOCK_SIZE):
                self.memory.slots.pop((block, offset), None)
        self.end(one)

    @rule()
    def reset(self) -> None:
        self.scheduler.pool.forget_all()
        assert self.scheduler.pool.num_cached == 0

    @invariant()
    def everything_agrees(self) -> None:
        self.scheduler.check()
        known = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(r.id for r in known) == sorted(r.id for r in self.live)
        for request in self.scheduler.running:
            most = self.scheduler.tables.most_blocks(request.num_tokens)
            assert len(held_blocks(request)) <= most
        pool = self.scheduler.pool
        assert pool.num_used + pool.num_free == self.NUM_BLOCKS
        used = {block for r in self.scheduler.running for block in held_blocks(r)}
        assert len(used) == pool.num_used

    def teardown(self) -> None:
        for _ in range(5_000):
            if not self.live:
                break
            self.step(0)
        assert not self.live, "not everybody finished"
        assert self.scheduler.pool.num_used == 0


class TightMachine(TablesMachine):
    """One full group and hardly more room than one request needs: much is preempted."""

    NUM_BLOCKS, WINDOWS = 14, (None,)


class PriorityMachine(TablesMachine):
    """The lower in priority make way."""

    NUM_BLOCKS, WINDOWS = 22, (None, 4)
    POLICY: ClassVar[dict[str, object]] = {"by_priority": True}


class StaticMachine(TablesMachine):
    """One batch after the other."""

    NUM_BLOCKS, WINDOWS = 24, (2, None)
    POLICY: ClassVar[dict[str, object]] = {"static": True}


TestTables = TablesMachine.TestCase
TestTight = TightMachine.TestCase
TestPriority = PriorityMachine.TestCase
TestStatic = StaticMachine.TestCase
SHORT = settings(max_examples=25, stateful_step_count=30, deadline=None, phases=PHASES)
TestTables.settings = TestTight.settings = TestPriority.settings = TestStatic.settings = SHORT


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TablesMachine, TightMachine, PriorityMachine, StaticMachine])
def test_the_same_for_long(machine: type[TablesMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    long = settings(max_examples=400, stateful_step_count=50, deadline=None, phases=PHASES)
    run_state_machine_as_test(machine, settings=long)  # type: ignore[no-untyped-call]


# --- prefixes, by hand ---------------------------------------------------------------------------


def tables(num_blocks: int = 30, windows: tuple[int | None, ...] = (None,)) -> Tables:
    groups = [KVGroup((index,), window) for index, window in enumerate(windows)]
    return Tables(BlockPool(num_blocks, 4), groups, chunk=64)


def request(tokens: int | list[int], salt: bytes = b"") -> Request:
    ids = tuple(range(tokens)) if isinstance(tokens, int) else tuple(tokens)
    return Request("r", ids, SamplingParams(), salt=salt)


def computed(held: Tables, tokens: int | list[int], salt: bytes = b"") -> Request:
    """A request that was computed to its end, and published."""
    one = request(tokens, salt)
    held.begin(one, held.hit(one))
    held.extend(one, one.num_uncomputed)
    one.num_computed = one.num_tokens
    held.publish(one)
    return one


@pytest.mark.parametrize(("num_tokens", "hit"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (14, 3)])
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(num_tokens: int, hit: int) -> None:
    held = tables()
    first = computed(held, 13)
    found = held.hit(request(num_tokens))
    assert found.num_blocks == hit
    assert list(found.tables[0]) == first.tables[0][:hit]


def test_a_prefix_outlives_its_request_until_the_room_is_needed() -> None:
    held = tables(num_blocks=6)
    one = computed(held, 16)
    blocks = list(one.tables[0])
    held.release(one)
    assert held.pool.num_free == 6
    assert held.pool.num_cached == 4
    again = computed(held, 17)
    assert again.tables[0][:4] == blocks
    assert held.pool.num_free == 1


def test_the_tail_of_a_chain_is_evicted_before_its_head_and_the_longest_unused_first() -> None:
    held = tables(num_blocks=8)
    old, young = computed(held, 16), computed(held, [9] * 16)
    kept = list(old.tables[0])
    held.release(young)
    held.release(old)  # released last: the other goes first, though it came later
    held.pool.allocate(2)
    assert held.hit(request([9] * 17)).num_blocks == 2
    held.pool.allocate(3)
    assert held.hit(request([9] * 17)).num_blocks == 0
    found = held.hit(request(17))
    assert list(found.tables[0]) == kept[:3]


def test_what_differs_anywhere_before_is_another_prefix() -> None:
    held = tables()
    computed(held, [1, 2, 3, 4, 5, 6, 7, 8])
    assert held.hit(request([0, 2, 3, 4, 5, 6, 7, 8, 9])).num_blocks == 0
    assert held.hit(request([1, 2, 3, 4, 5, 6, 7, 0, 9])).num_blocks == 1
    assert held.hit(request([5, 6, 7, 8, 9])).num_blocks == 0


def test_other_salts_share_nothing() -> None:
    held = tables()
    salts = [salt_of(None, ""), salt_of(1, ""), salt_of(2, ""), salt_of(None, "tenant")]
    for salt in salts:
        assert held.hit(request(9, salt)).num_blocks == 0
        computed(held, 9, salt)
    assert len({held.hit(request(9, salt)).tables for salt in salts}) == len(salts)
    assert all(held.hit(request(9, salt)).num_blocks == 2 for salt in salts)


def test_a_chain_tells_apart_what_concatenates_alike() -> None:
    assert chain(b"", [1, 2]) != chain(b"", [1]) != chain(b"", [12])
    assert chain(chain(b"a", [1]), [2]) != chain(chain(b"a", [2]), [1])


def test_caching_may_be_off() -> None:
    held = Tables(BlockPool(9, 4), caching=False)
    computed(held, 16)
    assert held.hit(request(17)) == Hit(0, ((),))


def test_what_was_computed_twice_at_once_is_published_once() -> None:
    held = tables()
    one, two = request(9), request(9)
    for same in (one, two):
        held.extend(same, 9)
        same.num_computed = 9
    held.publish(one)
    held.publish(two)
    assert list(held.hit(request(9)).tables[0]) == one.tables[0][:2]
    held.release(one)
    held.release(two)
    assert held.pool.num_cached == 2
    held.check([])


# --- windows -------------------------------------------------------------------------------------


def test_a_window_gives_back_what_the_next_row_cannot_see() -> None:
    held = tables(windows=(None, 6))
    one = request(40)
    held.extend(one, 17)
    one.num_computed = 17
    held.slide(one)  # position 17 sees 12 … 17: blocks 0 … 2 are over
    assert one.tables[1][:3] == [FREED] * 3
    assert FREED not in one.tables[1][3:]
    assert FREED not in one.tables[0]
    assert held.pool.num_used == 5 + 2
    held.check([one])


def test_a_hit_needs_of_a_window_only_what_is_seen() -> None:
    held = tables(windows=(None, 6))
    one = computed(held, 24)
    held.slide(one)
    held.release(one)
    # The row at 24 sees 19 … 24; of the window's blocks only the fifth is needed.
    held.pool.forget(held.hit(request(30)).tables[1][:0])
    found = held.hit(request(30))
    assert found.num_blocks == 6
    assert found.tables[1][:4] == (FREED,) * 4
    assert FREED not in found.tables[1][4:]
    # Without it a shorter hit is found, of which all that is seen is there.
    held.pool.forget([found.tables[1][5]])
    shorter = held.hit(request(30))
    assert shorter.num_blocks == 5
    assert shorter.tables[1][:3] == (FREED,) * 3
    # A hole in the full group's chain ends everything behind it.
    held.pool.forget([found.tables[0][1]])
    assert held.hit(request(30)).num_blocks == 1


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 64])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_the_most_that_a_window_holds_is_never_exceeded(
    window: int, chunk: int, block_size: int
) -> None:
    """By brute force, whatever the sizes of the chunks."""
    num_tokens, most = 50, 0
    for size in range(1, chunk + 1):
        held = Tables(BlockPool(200, block_size), [KVGroup((0,), window)], chunk)
        one = request(num_tokens)
        while one.num_uncomputed:
            count = min(size, one.num_uncomputed)
            held.slide(one)
            held.extend(one, count)
            most = max(most, len(held_blocks(one)))
            one.num_computed += count
    assert most <= blocks_of_group(num_tokens, window, chunk, block_size)
    # Not far above either: a bound of everything would refuse requests that fit.
    assert blocks_of_group(num_tokens, window, chunk, block_size) <= most + 1


# --- forks ---------------------------------------------------------------------------------------


def test_forks_share_all_and_copy_only_the_begun_block_on_writing() -> None:
    held = tables()
    leader, follower = computed(held, 10), request(10)
    held.fork(leader, follower)
    assert follower.tables == leader.tables
    assert held.pool.num_used == 3
    for one in (leader, follower):
        one.output_ids.append(5)
        assert held.missing(one, 1) == (one is leader)
        copies = held.extend(one, 1)
        assert len(copies) == (one is leader)
    assert leader.tables[0][:2] == follower.tables[0][:2]
    assert leader.tables[0][2] != follower.tables[0][2]
    held.check([leader, follower])
    held.release(follower)
    held.check([leader])


def test_forks_of_a_prompt_of_whole_blocks_copy_nothing() -> None:
    held = tables()
    leader, follower = computed(held, 8), request(8)
    held.fork(leader, follower)
    follower.output_ids.append(5)
    assert held.extend(follower, 1) == []
    assert follower.tables[0][:2] == leader.tables[0]


def test_who_finds_no_seat_after_a_fork_waits_and_finds_the_prompt() -> None:
    scheduler = Scheduler(Tables(BlockPool(30, 4), chunk=64), Limits(2, 64))
    leader, *followers = (request(10) for _ in range(3))
    scheduler.add(leader, *followers)
    assert scheduler.waiting == (leader, *followers)
    (work,) = scheduler.schedule().work
    leader.num_computed += work.count
    scheduler.tables.publish(leader)
    assert scheduler.fork(leader) == followers
    assert [r.state for r in followers] == [State.RUNNING, State.WAITING]
    for one in (leader, *followers):
        one.output_ids.append(1)
    scheduler.finish(leader)
    plan = scheduler.schedule()
    assert [(w.request, w.start) for w in plan.work] == [(followers[0], 10), (followers[1], 8)]
    scheduler.check()


def test_when_a_leader_is_cancelled_a_follower_leads() -> None:
    scheduler = Scheduler(Tables(BlockPool(30, 4), chunk=4), Limits(4, 4))
    leader, *followers = (request(10) for _ in range(3))
    scheduler.add(leader, *followers)
    scheduler.schedule()
    assert scheduler.running == [leader]
    scheduler.finish(followers[0])
    scheduler.finish(leader)
    assert scheduler.pool.num_used == 0
    assert scheduler.waiting == (followers[1],)
    assert scheduler.schedule().work[0].request is followers[1]
