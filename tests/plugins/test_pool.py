"""Blocks, bytes and promises against counting them one by one, over drawn pools."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ullage_vllm import pool

from tests.plugins.vllm_core import (
    BYTES_PER_BLOCK,
    EngineCore,
    FullAttentionManager,
    MambaSpec,
    Request,
    Scheduler,
    SlidingWindowManager,
    core_of,
)


def filled(core: EngineCore, draw: random.Random, requests: int) -> Scheduler:
    """Requests that share prefixes, windows that gave blocks back, some preempted and resumed."""
    scheduler = core.scheduler
    for number in range(requests):
        request = Request(f"r{number}", 100.0 + draw.randint(0, 50))
        shared: tuple = ()
        computed = 0
        if scheduler.running and draw.random() < 0.5:
            # The blocks that another has filled, of every group.
            other = draw.choice(scheduler.running)
            size = max(group.block_size for group in scheduler.groups)
            computed = draw.randint(0, other.num_computed_tokens // size) * size
            shared = tuple(
                group.req_to_blocks[other.request_id][: computed // group.block_size]
                for group in scheduler.groups
            )
        scheduler.add(request, shared=shared)
        request.num_computed_tokens = computed
        scheduler.compute(request, draw.randint(1, 60))
        for group in scheduler.groups:
            if isinstance(group, SlidingWindowManager):
                blocks = group.req_to_blocks[request.request_id]
                for at in range(draw.randint(0, max(len(blocks) - 2, 0))):
                    group.block_pool.release(blocks[at])
                    blocks[at] = group.block_pool.null_block
    return scheduler


CORES = st.sampled_from(
    [
        ((16,), (FullAttentionManager,)),
        ((16, 16), (FullAttentionManager, SlidingWindowManager)),
        ((16, 32), (FullAttentionManager, FullAttentionManager)),
        ((16,), (SlidingWindowManager,)),
    ]
)


def counted(scheduler: Scheduler) -> tuple[int, int] | None:
    """Tokens in each block, one block at a time."""
    held = room = 0
    for group in scheduler.groups:
        fullest: dict[int, int] = {}
        for request in scheduler.running:
            for at, block in enumerate(group.req_to_blocks[request.request_id]):
                if block.is_null:
                    continue
                inside = sum(
                    at * group.block_size <= token < (at + 1) * group.block_size
                    for token in range(request.num_computed_tokens)
                )
                fullest[block.block_id] = max(inside, fullest.get(block.block_id, 0))
        held += sum(fullest.values())
        room += len(fullest) * group.block_size
    return (held, room) if room else None


@given(CORES, st.integers(0, 6), st.randoms(use_true_random=False))
def test_page_use_counts_each_block_once(kind: tuple, requests: int, draw: random.Random) -> None:
    core = core_of(257, *kind)
    scheduler = filled(core, draw, requests)
    assert pool.slots(scheduler) == counted(scheduler)


@given(st.integers(1, 6), st.randoms(use_true_random=False))
def test_one_group_is_measured_without_a_walk_and_gives_the_same(
    requests: int, draw: random.Random
) -> None:
    scheduler = filled(core_of(257), draw, requests)
    paged = scheduler.groups
    assert pool._all_held_by_running(scheduler, paged)
    by_walk = pool._slots_block_by_block(scheduler, paged)
    assert pool._slots_of_one_group(scheduler, paged[0]) == by_walk
    # Blocks that a connector or a window may hold elsewhere want the walk.
    scheduler.connector = object()
    assert not pool._all_held_by_running(scheduler, paged)
    assert pool.slots(scheduler) == by_walk


def test_states_are_no_tokens_and_host_blocks_are_not_the_pools() -> None:
    core = core_of(65, (16, 16), (FullAttentionManager, FullAttentionManager))
    scheduler = core.scheduler
    scheduler.groups[1].kv_cache_spec = MambaSpec()
    scheduler.add(request := Request("r", 0.0))
    scheduler.compute(request, 20)
    assert pool.slots(scheduler) == (20, 32)
    scheduler.groups[0].kv_cache_spec = MambaSpec()
    assert pool.slots(scheduler) is None
    assert len(pool.blocks_of(scheduler, request)) == 4
    host = core_of(9).scheduler.groups[0].block_pool
    scheduler.groups[1].block_pool = host
    assert len(pool.blocks_of(scheduler, request)) == 2


@given(CORES, st.integers(1, 6), st.randoms(use_true_random=False))
def test_an_end_frees_what_it_promised(kind: tuple, requests: int, draw: random.Random) -> None:
    core = core_of(257, *kind)
    scheduler = filled(core, draw, requests)
    count = draw.randint(1, requests)
    came = sorted(one.arrival_time for one in scheduler.running)
    free = scheduler.groups[0].block_pool.get_num_free_blocks()
    dry, _ = pool.cancel(scheduler, count, None, True)
    assert (dry["freed_blocks"], scheduler.groups[0].block_pool.get_num_free_blocks()) == (0, free)
    done, ended = pool.cancel(scheduler, count, None, False)
    assert done["freed_blocks"] == done["promised_blocks"] == dry["promised_blocks"]
    assert scheduler.groups[0].block_pool.get_num_free_blocks() == free + done["freed_blocks"]
    assert [one.request_id for one in ended] == done["request_ids"] == dry["request_ids"]
    assert [one.arrival_time for one in ended] == came[:count]
    pool.cancel(scheduler, requests, None, False)
    assert scheduler.running == []
    assert scheduler.groups[0].block_pool.get_num_free_blocks() == 256


def test_blocks_that_a_step_still_writes_are_not_promised() -> None:
    scheduler = core_of().scheduler
    for name in ("a", "b"):
        scheduler.add(request := Request(name, 0.0))
        scheduler.compute(request, 40)
    scheduler.not_yet.add("a")
    done, _ = pool.cancel(scheduler, 2, None, False)
    assert (done["promised_blocks"], done["freed_blocks"]) == (3, 3)


def test_with_a_connector_nothing_is_promised_and_what_came_free_is_told() -> None:
    scheduler = core_of().scheduler
    scheduler.add(request := Request("a", 0.0))
    scheduler.compute(request, 40)
    scheduler.connector = object()
    done, _ = pool.cancel(scheduler, 1, None, False)
    assert (done["promised_blocks"], done["freed_blocks"]) == (None, 3)


def test_only_who_runs_is_ended_and_no_more_than_run() -> None:
    scheduler = core_of().scheduler
    assert pool.cancel(scheduler, 3, None, False)[0]["request_ids"] == []
    for name in ("a", "b"):
        scheduler.add(Request(name, 0.0))
    scheduler.preempt(scheduler.running[0])
    done, ended = pool.cancel(scheduler, 3, None, False)
    assert done["request_ids"] == [one.request_id for one in ended] == ["b"]
    assert list(scheduler.requests) == ["a"]


@pytest.mark.parametrize(
    ("sizes", "num_blocks", "expected"),
    [
        ([4096 * 10], 10, 4096),
        ([4096 * 10, 4096 * 10], 10, 4096),  # two groups over one allocation
        ([4096 * 10, 8192 * 10], 10, None),
        ([4096 * 10 + 1], 10, None),
        ([], 10, None),
        ([4096], 0, None),
    ],
)
def test_bytes_of_a_block(sizes: list[int], num_blocks: int, expected: int | None) -> None:
    config = SimpleNamespace(
        kv_cache_tensors=[SimpleNamespace(size=size) for size in sizes], num_blocks=num_blocks
    )
    assert pool.bytes_per_block(config) == expected


def test_host_tensors_are_not_device_bytes() -> None:
    config = SimpleNamespace(
        kv_cache_tensors=[
            SimpleNamespace(size=4096 * 10, host_resident=False),
            SimpleNamespace(size=9999, host_resident=True),
        ],
        num_blocks=10,
    )
    assert pool.bytes_per_block(config) == 4096


@given(CORES, st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_report_adds_up(kind: tuple, requests: int, draw: random.Random) -> None:
    scheduler = filled(core_of(257, *kind), draw, requests)
    report = pool.report(scheduler, 200.0)
    free = [block for block in scheduler.groups[0].block_pool.blocks if block.ref_cnt == 0]
    assert report["num_blocks"] - report["used_blocks"] == len(free) - 1  # the null block
    assert report["running"] == len(report["holders"]) == requests
    assert sum(h["own_bytes"] for h in report["holders"]) <= report["used_blocks"] * BYTES_PER_BLOCK
    for holder, request in zip(report["holders"], scheduler.running, strict=True):
        assert holder["own_bytes"] <= holder["num_bytes"]
        assert holder["age_s"] == 200.0 - request.arrival_time
    arrivals = [request.arrival_time for request in scheduler.running]
    assert report["oldest_arrival_s"] == min(arrivals, default=None)
