"""The scheduler: decodes first, one budget, chunks, preemption of the newest, nothing leaked."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.tables import Tables
from ullage.engine.request import Request, SamplingParams, State
from ullage.engine.scheduling.scheduler import Limits, Plan, Scheduler


def make(num_blocks: int = 100, block_size: int = 4, seqs: int = 8, tokens: int = 16) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(Tables(pool, chunk=tokens, caching=False), Limits(seqs, tokens))


def request(name: str, num_prompt: int, max_tokens: int = 1000) -> Request:
    return Request(name, tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens))


def run(scheduler: Scheduler, plan: Plan) -> None:
    """What the engine does with a plan: compute, and sample where the plan says so."""
    for work in plan.work:
        work.request.num_computed += work.count
        if work.samples:
            work.request.output_ids.append(7)


def shape(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(w.request.id, w.start, w.count, w.samples) for w in plan.work]


def test_a_long_prompt_runs_in_chunks_and_samples_at_its_end() -> None:
    scheduler = make(tokens=16)
    scheduler.add(request("a", 40))
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen += shape(plan)
        run(scheduler, plan)
    assert seen == [
        ("a", 0, 16, False),
        ("a", 16, 16, False),
        ("a", 32, 8, True),
        ("a", 40, 1, True),
    ]


def test_decodes_come_before_prefills_and_both_share_the_budget() -> None:
    scheduler = make(tokens=16)
    scheduler.add(request("a", 4))
    run(scheduler, scheduler.schedule())
    scheduler.add(request("b", 100))
    scheduler.add(request("c", 3))
    plan = scheduler.schedule()
    assert shape(plan) == [("a", 4, 1, True), ("b", 0, 15, False)]
    assert plan.num_tokens == 16


def test_a_long_prompt_leaves_what_it_does_not_need_to_the_next() -> None:
    scheduler = make(tokens=16)
    scheduler.add(request("b", 10))
    scheduler.add(request("c", 30))
    assert shape(scheduler.schedule()) == [("b", 0, 10, True), ("c", 0, 6, False)]


def test_no_more_sequences_than_allowed() -> None:
    scheduler = make(seqs=2)
    for name in "abc":
        scheduler.add(request(name, 2))
    assert [w.request.id for w in scheduler.schedule().work] == ["a", "b"]


def test_nobody_is_admitted_whose_known_tokens_do_not_fit() -> None:
    scheduler = make(num_blocks=4, block_size=4, tokens=16)
    scheduler.add(request("a", 10))  # 3 of 4 blocks
    scheduler.add(request("b", 8))  # 2 blocks: not now
    assert shape(scheduler.schedule()) == [("a", 0, 10, True)]
    assert scheduler.pool.num_free == 1


def test_blocks_promised_to_a_running_prefill_are_not_promised_again() -> None:
    scheduler = make(num_blocks=8, block_size=4, tokens=8)
    scheduler.add(request("a", 24))  # 6 blocks, 2 of them taken by its first chunk
    run(scheduler, scheduler.schedule())
    scheduler.add(request("b", 12))  # 3 blocks: 6 are free, but 4 of them are a's
    assert shape(scheduler.schedule()) == [("a", 8, 8, False)]


def test_the_newest_is_preempted_keeps_its_output_and_comes_back_first() -> None:
    scheduler = make(num_blocks=4, block_size=4, tokens=16)
    old, new = request("old", 8), request("new", 8)
    scheduler.add(old)
    scheduler.add(new)
    run(scheduler, scheduler.schedule())  # both hold two blocks, all of the pool
    later = request("later", 1)
    scheduler.add(later)
    plan = scheduler.schedule()  # old needs a third block
    assert plan.preempted == (new,)
    assert shape(plan) == [("old", 8, 1, True)]
    assert (new.state, new.num_computed, new.tables, new.output_ids) == (State.WAITING, 0, [], [7])
    assert new.num_preemptions == 1
    assert list(scheduler.waiting) == [new, later]
    run(scheduler, plan)
    scheduler.finish(old)
    plan = scheduler.schedule()  # 8 prompt tokens and 1 of output are computed anew
    assert shape(plan)[0] == ("new", 0, 9, True)


def test_a_victim_that_was_already_planned_leaves_the_plan() -> None:
    scheduler = make(num_blocks=4, block_size=4, tokens=16)
    a, b = request("a", 7), request("b", 7)
    scheduler.add(a)
    scheduler.add(b)
    run(scheduler, scheduler.schedule())
    b.output_ids += [7, 7]  # b must recompute a few: it is a prefill now
    b.num_computed = 4
    plan = scheduler.schedule()
    run(scheduler, plan)
    plan = scheduler.schedule()
    assert {w.request.id for w in plan.work}.isdisjoint({r.id for r in plan.preempted})
    scheduler.check()


def test_finishing_frees_blocks_wherever_the_request_stands() -> None:
    scheduler = make()
    running, waiting = request("r", 4), request("w", 4)
    scheduler.add(running)
    run(scheduler, scheduler.schedule())
    scheduler.add(waiting)
    scheduler.finish(running)
    scheduler.finish(waiting)
    assert scheduler.pool.num_used == 0
    assert not scheduler.running
    assert not scheduler.waiting
    assert running.state is waiting.state is State.FINISHED


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps, ends and cancels over a pool that is far too small for all."""

    NUM_BLOCKS, BLOCK_SIZE, SEQS, TOKENS = 10, 4, 5, 12

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(self.NUM_BLOCKS, self.BLOCK_SIZE, self.SEQS, self.TOKENS)
        self.live: list[Request] = []
        self.count = 0

    @rule(num_prompt=st.integers(1, 30), num_new=st.integers(1, 10))
    def arrive(self, num_prompt: int, num_new: int) -> None:
        self.count += 1
        one = request(str(self.count), num_prompt, num_new)
        self.scheduler.add(one)
        self.live.append(one)

    @precondition(lambda self: self.live)
    @rule()
    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan.work, "somebody lives, so somebody must run"
        assert plan.num_tokens <= self.TOKENS
        assert len(plan.work) <= self.SEQS
        seen_prefill = False
        for work in plan.work:
            assert work.request.state is State.RUNNING
            assert work.start == work.request.num_computed
            assert work.samples == (work.start + work.count == work.request.num_tokens)
            # The table holds exactly the blocks up to the last token of this step.
            assert len(work.tables[0]) == -(-(work.start + work.count) // self.BLOCK_SIZE)
            assert work.request.state is State.RUNNING
            is_decode = work.request.num_uncomputed == 1 and bool(work.request.output_ids)
            assert not (is_decode and seen_prefill), "a decode after a prefill"
            seen_prefill |= work.request.num_uncomputed > 1
        run(self.scheduler, plan)
        for work in plan.work:
            if len(work.request.output_ids) >= work.request.params.max_tokens:
                self.scheduler.finish(work.request)
                self.live.remove(work.request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        self.scheduler.finish(one)
        self.live.remove(one)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check()
        known = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(r.id for r in known) == sorted(r.id for r in self.live)

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.live:
                break
            self.step()
        assert not self.live, "not everybody finished"
        assert self.scheduler.pool.num_used == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    block_size=st.integers(1, 8),
    tokens=st.integers(4, 40),
)
def test_the_oldest_never_loses_what_it_computed(
    prompts: list[int], block_size: int, tokens: int
) -> None:
    scheduler = make(-(-45 // block_size), block_size, seqs=4, tokens=tokens)
    oldest = request("0", prompts[0], 10)
    scheduler.add(oldest)
    for index, num_prompt in enumerate(prompts[1:]):
        scheduler.add(request(str(index + 1), num_prompt, 10))
    steps = 0
    while len(oldest.output_ids) < 10:
        before = oldest.num_computed
        run(scheduler, scheduler.schedule())
        assert oldest.num_computed > before
        steps += 1
    assert steps == -(-prompts[0] // tokens) + 9


def test_deciding_needs_no_torch() -> None:
    modules = (
        *("paging.blocks", "paging.layout", "paging.prefix", "paging.tables"),
        *("scheduling.admission", "scheduling.scheduler", "request", "reports", "options"),
    )
    imports = "; ".join(f"import ullage.engine.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
