"""Tokens computed again, against remembering of every position whether it was computed before."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.vllm_core import Request, core_of


@given(st.integers(1, 5), st.integers(1, 60), st.randoms(use_true_random=False))
def test_every_position_that_is_computed_twice_counts(
    requests: int, steps: int, draw: random.Random
) -> None:
    core = core_of(2049)
    scheduler = core.scheduler
    everyone = [Request(f"r{number}", float(number)) for number in range(requests)]
    computed: dict[str, set[int]] = {one.request_id: set() for one in everyone}
    again = 0
    for one in everyone:
        scheduler.add(one)
    for _ in range(steps):
        one = draw.choice(everyone)
        if one in scheduler.waiting:
            # A hit finds full blocks that were computed; what it finds is not computed again.
            most = len(computed[one.request_id]) // 16
            scheduler.resume(one, 16 * draw.randint(0, most))
        elif draw.random() < 0.3:
            scheduler.preempt(one)
            continue
        start, count = one.num_computed_tokens, draw.randint(1, 40)
        known = computed[one.request_id]
        positions = set(range(start, start + count))
        again += len(positions & known)
        known |= positions
        scheduler.compute(one, count)
    statistics = core.ullage_statistics()
    assert statistics["recomputed_tokens"] == again


def test_a_resumption_counts_once_and_only_if_it_recomputes() -> None:
    core = core_of()
    scheduler = core.scheduler
    scheduler.add(one := Request("a", 0.0))
    scheduler.compute(one, 32)
    scheduler.preempt(one)
    scheduler.resume(one, 0)
    scheduler.compute(one, 10)
    scheduler.compute(one, 30)
    assert core.ullage_statistics()["recomputed_requests"] == 1
    scheduler.preempt(one)
    scheduler.resume(one, 40)  # all of it was still in the prefix cache
    scheduler.compute(one, 5)
    statistics = core.ullage_statistics()
    assert (statistics["recomputed_requests"], statistics["recomputed_tokens"]) == (1, 32)


def test_who_ends_while_preempted_is_forgotten() -> None:
    core = core_of()
    scheduler = core.scheduler
    scheduler.add(one := Request("a", 0.0))
    scheduler.compute(one, 32)
    scheduler.preempt(one)
    scheduler.finish_requests(["a"], None)
    core.ullage_statistics()
    # Another request of the same name starts anew.
    scheduler.add(other := Request("a", 1.0))
    scheduler.compute(other, 32)
    assert core.ullage_statistics()["recomputed_tokens"] == 0


def test_watching_twice_counts_once() -> None:
    core = core_of()
    assert core.ullage_attach() == []
    scheduler = core.scheduler
    scheduler.add(one := Request("a", 0.0))
    scheduler.compute(one, 32)
    scheduler.preempt(one)
    scheduler.resume(one)
    scheduler.compute(one, 32)
    assert core.ullage_statistics()["recomputed_tokens"] == 32
