"""Short prompts do not wait behind a long one, nor the long for ever: bounds, not averages."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.tables import Tables
from ullage.engine.request import Request, SamplingParams, State
from ullage.engine.scheduling.scheduler import PASSED_LOOKS, WAIT_CAUSES, Limits, Plan, Scheduler

BUDGET, SEQS, THRESHOLD, LONGS = 32, 8, 8, 1


def make(num_blocks: int = 4000, **limits: object) -> Scheduler:
    chosen = {
        "max_num_seqs": SEQS,
        "max_num_batched_tokens": BUDGET,
        "long_prefill_token_threshold": THRESHOLD,
        "max_long_partial_prefills": LONGS,
        **limits,
    }
    pool = BlockPool(num_blocks, 4)
    tables = Tables(pool, chunk=BUDGET, caching=False)
    return Scheduler(tables, Limits(**chosen))  # type: ignore[arg-type]


def request(num_prompt: int, max_tokens: int = 3, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request("r", tuple(range(num_prompt)), params, priority=priority)


def run(scheduler: Scheduler) -> Plan:
    """One step, and the end of those who have all their tokens."""
    plan = scheduler.schedule()
    scheduler.check()
    for work in plan.work:
        work.request.num_computed += work.count
    for work in plan.work:
        one = work.request
        if work.samples:
            one.output_ids.append(1)
            if len(one.output_ids) == one.params.max_tokens:
                scheduler.finish(one)
    return plan


def steps_to_first_token(scheduler: Scheduler, one: Request, limit: int) -> int:
    for step in range(1, limit + 1):
        run(scheduler)
        if one.output_ids or one.state is State.FINISHED:
            return step
    raise AssertionError(f"no token within {limit} steps")


def test_a_short_prompt_passes_between_the_chunks_of_a_long_one() -> None:
    scheduler = make()
    long, short = request(400), request(5)
    scheduler.add(long)
    run(scheduler)
    scheduler.add(short)
    plan = run(scheduler)
    assert {w.request: w.count for w in plan.work} == {long: BUDGET - 5, short: 5}
    assert short.output_ids


def test_without_a_threshold_it_would_wait() -> None:
    """So that the test before shows what the threshold does."""
    scheduler = make(long_prefill_token_threshold=0)
    scheduler.add(request(400))
    run(scheduler)
    short = request(5)
    scheduler.add(short)
    assert steps_to_first_token(scheduler, short, 100) == 12


def test_alone_a_long_prompt_gets_the_whole_budget() -> None:
    scheduler = make()
    long = request(400)
    scheduler.add(long)
    assert steps_to_first_token(scheduler, long, 100) == -(-400 // BUDGET)


def test_a_second_long_prompt_waits_for_the_first_and_short_ones_pass_it() -> None:
    scheduler = make()
    first, second, short = request(200), request(200), request(5)
    for one in (first, second, short):
        scheduler.add(one)
    plan = run(scheduler)
    assert {w.request for w in plan.work} == {first, short}
    assert plan.waits == {"long_prefill": 1}
    assert short.output_ids
    two = make(max_long_partial_prefills=2)
    for one in (request(200), request(200)):
        two.add(one)
    assert sum(w.count >= THRESHOLD for w in run(two).work) == 2


def test_the_last_chunk_of_a_long_prompt_leaves_its_rest_to_the_next() -> None:
    """So that a line of long prompts runs as fast as if there were no limit."""
    scheduler = make()
    longs = [request(BUDGET + 20, 1) for _ in range(8)]
    for one in longs:
        scheduler.add(one)
    steps = 0
    while scheduler.has_work:
        assert run(scheduler).num_tokens == BUDGET or not scheduler.has_work
        steps += 1
    assert steps == -(-8 * (BUDGET + 20) // BUDGET)


def test_a_static_batch_takes_long_prompts_together() -> None:
    scheduler = make(static=True)
    for _ in range(SEQS + 1):
        scheduler.add(request(50))
    assert run(scheduler).waits == {"max_num_seqs": 1}
    assert len(scheduler.running) == SEQS


@settings(max_examples=25, deadline=None)
@given(
    long_tokens=st.integers(THRESHOLD + 1, 500),
    shorts=st.lists(st.lists(st.integers(1, THRESHOLD), max_size=3), min_size=30, max_size=60),
)
def test_a_long_prompt_ends_within_its_bound_whatever_short_ones_come(
    long_tokens: int, shorts: list[list[int]]
) -> None:
    """Once it runs it comes before whoever came later, and decodes leave BUDGET − SEQS tokens."""
    scheduler = make()
    long = request(long_tokens)
    scheduler.add(long)
    bound = -(-long_tokens // min(THRESHOLD, BUDGET - SEQS))
    steps = 0
    while not long.output_ids:
        for num_prompt in shorts[steps % len(shorts)]:
            scheduler.add(request(num_prompt))
        run(scheduler)
        steps += 1
        assert steps <= bound


@settings(max_examples=100, deadline=None)
@given(
    # Many that are only just long: their last chunks and the next one's first meet in a step.
    longs=st.lists(st.integers(THRESHOLD + 1, 300) | st.integers(9, 24), min_size=1, max_size=6),
    ahead=st.lists(st.integers(1, THRESHOLD), max_size=3),
    own=st.integers(1, THRESHOLD),
)
@example(longs=[10, 20, 17, 21, 17, 17], ahead=[3, 8, 8], own=8)
def test_a_short_prompt_starts_within_its_bound_however_many_long_ones_wait(
    longs: list[int], ahead: list[int], own: int
) -> None:
    """Beside decodes and the long prompt's share there is room for all short ones before it.

    There are seats for everybody: who finds none waits for one, however short.
    """
    seats = 10
    scheduler = make(max_num_seqs=seats)
    for num_prompt in longs:
        scheduler.add(request(num_prompt))
    run(scheduler)
    for num_prompt in ahead:
        scheduler.add(request(num_prompt))
    short = request(own)
    scheduler.add(short)
    room = BUDGET - seats - LONGS * THRESHOLD
    bound = 1 + -(-(sum(ahead) + own) // room)
    assert steps_to_first_token(scheduler, short, bound) <= bound


@settings(max_examples=80, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 12), st.integers(-2, 2)),
        min_size=1,
        max_size=25,
    ),
    by_priority=st.booleans(),
    static=st.booleans(),
    num_blocks=st.integers(18, 60),
)
def test_the_first_in_order_always_gets_on_and_all_come_to_an_end(
    arrivals: list[tuple[int, int, int, int]], by_priority: bool, static: bool, num_blocks: int
) -> None:
    """18 blocks hold one request and no more. The first who runs computes in every step."""
    scheduler = make(num_blocks, by_priority=by_priority, static=static)
    everybody = []
    for pause, num_prompt, num_new, priority in arrivals:
        everybody.append(request(num_prompt, num_new, priority))
        scheduler.add(everybody[-1])
        for _ in range(pause):
            if scheduler.has_work:
                run(scheduler)
    work = sum(len(r.prompt_ids) + r.params.max_tokens for r in everybody)
    for _ in range(20 * work):
        if not scheduler.has_work:
            break
        first = scheduler.running[0] if scheduler.running else None
        plan = run(scheduler)
        assert plan.work
        assert set(plan.waits) <= set(WAIT_CAUSES)
        if first is not None and first not in plan.preempted:
            assert first in {w.request for w in plan.work}
        if not by_priority and first is not None:
            assert first not in plan.preempted
    assert all(r.state is State.FINISHED for r in everybody)
    assert scheduler.pool.num_used == 0


def test_the_urgent_takes_blocks_only_from_those_below_it_and_only_if_that_helps() -> None:
    scheduler = make(11, by_priority=True, watermark=0.0)
    low, high = request(12, 99, priority=5), request(20, 99, priority=1)
    for one in (low, high):
        scheduler.add(one)
        run(scheduler)
    assert scheduler.pool.num_free == 2
    same = request(12, 99, priority=1)
    scheduler.add(same)
    plan = run(scheduler)
    assert plan.preempted == (low,)
    assert same in {w.request for w in plan.work}
    # Nobody is thrown out in vain: the whole of the lower ones would not be enough.
    huge = request(38, 1, priority=3)
    scheduler.add(huge)
    plan = run(scheduler)
    assert plan.preempted == ()
    assert plan.waits == {"kv_blocks": 2}


def test_every_wait_has_its_cause() -> None:
    causes = {}
    scheduler = make(max_num_seqs=1)
    scheduler.add(request(4, 9))
    scheduler.add(request(4))
    causes["max_num_seqs"] = run(scheduler)
    scheduler = make(long_prefill_token_threshold=0)
    scheduler.add(request(100))
    scheduler.add(request(4))
    causes["token_budget"] = run(scheduler)
    scheduler = make(10, long_prefill_token_threshold=0)
    scheduler.add(request(30))
    scheduler.add(request(30))
    causes["kv_blocks"] = run(scheduler)
    scheduler = make()
    scheduler.add(request(100))
    scheduler.add(request(100))
    causes["long_prefill"] = run(scheduler)
    scheduler = make(static=True)
    scheduler.add(request(4))
    run(scheduler)
    scheduler.add(request(4))
    causes["static_batch"] = run(scheduler)
    scheduler = make()
    scheduler.add(request(100), request(100))
    causes["fork"] = run(scheduler)
    assert {cause: plan.waits for cause, plan in causes.items()} == {
        cause: {cause: 1} for cause in WAIT_CAUSES
    }


def test_a_long_line_of_long_prompts_costs_few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(4000, 4)
    tables = Tables(pool, chunk=BUDGET)
    scheduler = Scheduler(tables, Limits(SEQS, BUDGET, THRESHOLD, LONGS))
    looks = []
    hit = tables.hit
    monkeypatch.setattr(tables, "hit", lambda one: looks.append(one) or hit(one))
    for _ in range(200):
        scheduler.add(request(100))
    short = request(5)
    scheduler.add(short)
    plan = run(scheduler)
    assert short in {w.request for w in plan.work}
    assert plan.waits == {"long_prefill": 199}
    assert len(looks) <= 2 + PASSED_LOOKS
