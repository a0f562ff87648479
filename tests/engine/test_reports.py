"""What the engine says of its pool and its steps, against counts made by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import finish, greedy_params
from ullage.engine.engine import Engine, StepReport
from ullage.engine.options import EngineOptions
from ullage.engine.reports import PoolHistory, oldest
from ullage.engine.request import FinishReason, Request, SamplingParams, State
from ullage.engine.scheduling.admission import Pace

FamilyDir = Callable[[str], Path]
PROMPT = tuple(range(10, 30))


@pytest.fixture
def make(family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    monkeypatch.setenv("ULLAGE_CHECK", "1")

    def engine(**options: Any) -> Engine:
        return Engine.load(
            family_dir("llama"), EngineOptions(**{"kv_cache_memory_bytes": 1 << 22, **options})
        )

    return engine


def add(engine: Engine, name: str, prompt: tuple[int, ...] = PROMPT, **more: Any) -> Request:
    (request,) = engine.add_request(name, prompt, greedy_params(more.pop("num_new", 30)), **more)
    return request


def run(engine: Engine) -> list[StepReport]:
    reports = []
    while engine.has_work:
        reports.append(engine.step())
    return reports


# --- the pool ------------------------------------------------------------------------------------


def test_holders_and_what_each_alone_holds(make: Callable[..., Engine]) -> None:
    engine = make()
    add(engine, "first", tuple(range(40)))
    engine.step()
    add(engine, "second", (*range(40), 7))  # two full blocks are the first's
    engine.step()
    report = engine.kv_report()
    size = engine.kv.bytes_per_block
    first, second = report.holders
    assert (first.request_id, first.num_tokens, first.num_blocks) == ("first", 41, 3)
    assert (second.request_id, second.num_tokens, second.num_blocks) == ("second", 41, 3)
    assert first.num_bytes == second.num_bytes == 3 * size
    assert first.own_bytes == second.own_bytes == size
    assert first.age_s >= second.age_s > 0
    assert report.used_blocks == 4
    assert report.used_bytes == 4 * size
    assert report.free_blocks == report.num_blocks - 4
    assert report.total_bytes == engine.kv.num_bytes
    # Two full pages that both hold, and two begun ones of nine tokens each.
    assert report.page_utilization_ratio == pytest.approx((16 + 16 + 9 + 9) / (4 * 16))
    assert (report.running, report.waiting) == (2, 0)
    finish(engine)
    report = engine.kv_report()
    assert report.holders == ()
    assert report.page_utilization_ratio is None
    assert report.used_blocks == 0
    assert report.cached_blocks == engine.pool.num_cached > 0


def test_time_to_full_follows_the_growth_of_the_last_half_minute() -> None:
    history = PoolHistory()
    assert history.blocks_per_s(0.0, 0) is None
    for second in range(100):
        history.record(float(second), 3 * second)
    assert history.blocks_per_s(99.0, 297) == pytest.approx(3.0)
    for second in range(100, 200):
        history.record(float(second), 300)
    assert history.blocks_per_s(199.0, 300) == 0


def test_time_to_full_is_said_only_while_the_pool_grows(make: Callable[..., Engine]) -> None:
    engine = make()
    assert engine.kv_report().seconds_to_full is None
    add(engine, "a", num_new=100)
    for _ in range(40):
        engine.step()
    growing = engine.kv_report()
    assert growing.growth_bytes_per_s is not None
    assert growing.growth_bytes_per_s > 0
    assert growing.seconds_to_full == pytest.approx(
        growing.free_blocks * growing.bytes_per_block / growing.growth_bytes_per_s
    )
    finish(engine)
    assert engine.kv_report().seconds_to_full is None


# --- cancels and deadlines -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "percent", "count"),
    [
        (4, 25, 1),
        (4, 26, 2),
        (5, 50, 3),
        (3, 1, 1),
        (3, 100, 3),
        (0, 50, 0),
        (25, 28, 7),
        (1, 1, 1),
    ],
)
def test_a_share_of_the_oldest_rounded_up(running: int, percent: float, count: int) -> None:
    requests = [Request(str(i), (1,), SamplingParams(), arrival=i) for i in range(running)]
    assert oldest(requests[::-1], percent) == requests[:count]


@pytest.mark.parametrize("percent", [0, -1, 100.1, float("nan")])
def test_a_share_that_is_none_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        oldest([], percent)


def test_cancelling_frees_what_was_promised_and_a_dry_run_nothing(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    requests = []
    for index in range(4):
        requests.append(add(engine, str(index), (*range(40), index)))
        engine.step()
    size = engine.kv.bytes_per_block
    dry = engine.cancel_oldest(50, dry_run=True)
    assert dry.request_ids == ("0", "1")
    # Each holds one block alone; two are held by the others too, who go on.
    assert (dry.promised_bytes, dry.freed_bytes, dry.dry_run) == (2 * size, 0, True)
    assert all(r.state is State.RUNNING for r in requests)
    done = engine.cancel_oldest(50)
    assert done.request_ids == dry.request_ids
    assert done.promised_bytes == done.freed_bytes == 2 * size
    assert [r.finish_reason for r in requests[:2]] == [FinishReason.ABORT] * 2
    rest = engine.cancel_oldest(100)
    assert rest.promised_bytes == rest.freed_bytes == 4 * size  # the shared ones with the last
    assert not engine.has_work


def test_a_deadline_ends_a_request_running_or_waiting(make: Callable[..., Engine]) -> None:
    engine = make(max_num_seqs=1)
    running = add(engine, "running", num_new=480, deadline_s=time.monotonic() + 0.03)
    waiting = add(engine, "waiting", deadline_s=time.monotonic() - 1)
    free = add(engine, "free")
    ended = {o.request: o for report in run(engine) for o in report.outputs if o.finished}
    assert set(ended) == {running, waiting, free}
    for late in (running, waiting):
        assert late.expired
        assert late.finish_reason is FinishReason.ABORT
        assert ended[late].token_id is None
    assert waiting.output_ids == []
    assert not free.expired
    assert free.finish_reason is FinishReason.LENGTH
    assert engine.pool.num_used == 0


def test_a_deadline_that_was_met_means_nothing_later(make: Callable[..., Engine]) -> None:
    engine = make()
    request = add(engine, "quick", num_new=2, deadline_s=time.monotonic() + 0.3)
    run(engine)
    time.sleep(0.35)
    other = add(engine, "other", num_new=2)
    run(engine)
    assert not request.expired
    assert other.finish_reason is FinishReason.LENGTH


def test_requests_that_met_a_far_deadline_are_not_kept(make: Callable[..., Engine]) -> None:
    engine = make()
    last = add(engine, "last", num_new=400, deadline_s=time.monotonic() + 3600)
    for index in range(300):
        one = add(engine, str(index), num_new=1, deadline_s=time.monotonic() + 3600)
        engine.abort(one)
    assert len(engine._deadlines) < 100
    assert last in {request for _, _, request in engine._deadlines}
    finish(engine)


# --- steps ---------------------------------------------------------------------------------------


def test_recomputed_tokens_are_those_that_were_computed_before(
    make: Callable[..., Engine],
) -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4
    engine = make(
        kv_cache_memory_bytes=96 * token_bytes,
        max_model_len=96,
        block_size=4,
        enable_prefix_caching=False,
    )
    requests = [add(engine, str(i), PROMPT[i:], num_new=50) for i in range(3)]
    reports = run(engine)
    computed = sum(report.plan.num_tokens for report in reports)
    needed = sum(len(r.prompt_ids) + 49 for r in requests)
    assert sum(report.num_recomputed for report in reports) == computed - needed > 0
    assert sum(len(report.plan.preempted) for report in reports) > 0
    # All that was ever taken was given back.
    assert sum(report.num_freed for report in reports) == engine.pool.num_freed


def test_waits_add_up_to_the_time_that_requests_waited(make: Callable[..., Engine]) -> None:
    engine = make(max_num_seqs=1)
    started_s = time.monotonic()
    add(engine, "a", num_new=20)
    late = add(engine, "b", num_new=2)
    reports = run(engine)
    waited_s = sum(report.waits_s.get("max_num_seqs", 0.0) for report in reports)
    assert late.first_scheduled_s is not None
    assert waited_s == pytest.approx(late.first_scheduled_s - started_s, abs=0.02)
    assert {cause for report in reports for cause in report.waits_s} == {"max_num_seqs"}
    for report in reports:
        assert report.started_s <= report.scheduled_s <= report.forwarded_s <= report.ended_s


def test_the_pace_says_how_long_a_newcomer_waits() -> None:
    pace = Pace()
    assert pace.wait_s(10, 0.0) is None
    for second in range(11):
        pace.ended(second * 0.5)
    assert pace.wait_s(6, 5.0) == pytest.approx(3.0)
    assert pace.wait_s(6, 10.0) == pytest.approx(6.0)  # nothing ended since: slower


def test_retry_after_is_known_once_requests_have_ended(make: Callable[..., Engine]) -> None:
    engine = make(max_num_seqs=1)
    assert engine.retry_after_s() is None
    for index in range(8):
        add(engine, str(index), num_new=4)
    while engine.scheduler.waiting[2:]:
        engine.step()
    started_s, said_s = time.monotonic(), engine.retry_after_s()
    assert said_s is not None
    run(engine)
    took_s = time.monotonic() - started_s
    assert took_s / 5 < said_s < took_s * 5


# --- numbers that are not finite -----------------------------------------------------------------


def test_bad_numbers_are_found_by_nobody_and_end_all_choices(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(max_num_batched_tokens=64)
    prompt = tuple(range(100))
    params = SamplingParams(n=2, max_tokens=4, temperature=0.0, ignore_eos=True)
    healthy = engine.add_request("healthy", prompt, params)
    finish(engine)
    forward = engine._decoder.forward
    bad = lambda *a: torch.full_like(forward(*a), float("nan"))  # noqa: E731
    for chunks in (1, 2):
        engine.reset_prefix_cache()
        sick = engine.add_request("sick", prompt, params)
        for _ in range(chunks - 1):
            engine.step()
        monkeypatch.setattr(engine._decoder, "forward", bad)
        report = engine.step()
        monkeypatch.undo()
        assert {o.request for o in report.outputs if o.finished} == set(sick)
        assert {r.finish_reason for r in sick} == {FinishReason.ERROR}
        assert engine.pool.num_used == engine.pool.num_cached == 0
    again = engine.add_request("again", prompt, params)
    finish(engine)
    assert again[0].num_cached_tokens == 0
    assert [r.output_ids for r in again] == [r.output_ids for r in healthy]


def test_bad_numbers_of_one_leave_what_others_share(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    other = add(engine, "other", tuple(range(40)), num_new=20)
    engine.step()
    sick = add(engine, "sick", (*range(40), 7))
    forward = engine._decoder.forward

    def one_bad(batch: Any, *rest: Any) -> torch.Tensor:
        logits = forward(batch, *rest).clone()
        logits[batch.sampled.index(sick)] = float("nan")
        return logits

    monkeypatch.setattr(engine._decoder, "forward", one_bad)
    engine.step()
    monkeypatch.undo()
    assert sick.finish_reason is FinishReason.ERROR
    finish(engine)
    alone = make()
    same = add(alone, "other", tuple(range(40)), num_new=20)
    finish(alone)
    assert other.output_ids == same.output_ids


def test_no_end_before_min_tokens(make: Callable[..., Engine]) -> None:
    engine = make()
    whole = add(engine, "whole", num_new=12)
    finish(engine)
    stops = tuple(set(whole.output_ids[:3]))
    params = SamplingParams(
        max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=stops, min_tokens=6
    )
    (request,) = engine.add_request("r", PROMPT, params)
    finish(engine)
    assert len(request.output_ids) >= 6
    assert not set(request.output_ids[:5]) & set(stops)
