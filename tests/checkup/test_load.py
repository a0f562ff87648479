"""The load generator against a server that misbehaves: all that was planned is reported truly."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.checkup.fake_server import FakeServer, serving
from ullage.errors import Unreachable
from ullage.traffic.load import (
    PlannedRequest,
    RequestResult,
    Target,
    accepted_extras,
    run_closed,
    run_load,
    served_model,
    tokenize,
)


def planned(first: int = 9, *, at: float = 0.0, prompt: int = 5, output: int = 6) -> PlannedRequest:
    return PlannedRequest(at, (first, *range(10, 9 + prompt)), prompt, output)


def load(server: FakeServer, *requests: PlannedRequest, **limits: float) -> list[RequestResult]:
    target = Target(server.url, "fake")
    limit_s = limits.pop("limit_s", 10.0)
    return list(asyncio.run(run_load(target, requests, limit_s=limit_s, **limits)))


def test_a_good_answer_is_counted_by_the_servers_own_count_and_timed_by_events() -> None:
    with serving(FakeServer(first_s=0.05, token_s=0.01)) as server:
        (result,) = load(server, planned())
    assert result.error is None
    assert result.finish_reason == "length"
    assert (result.prompt_tokens, result.output_tokens) == (5, 6)
    # Least times only: a busy machine may make anything later, nothing makes it earlier.
    assert result.ttft_s is not None and result.ttft_s >= 0.05
    assert len(result.event_times_s) == 6
    assert len(result.inter_token_s) == 5
    assert result.event_times_s[-1] >= 0.05 + 5 * 0.01
    assert sum(result.inter_token_s) == pytest.approx(result.event_times_s[-1] - result.ttft_s)


def test_requests_are_streamed_greedy_and_with_usage() -> None:
    with serving(FakeServer()) as server:
        load(server, planned())
        body = server.bodies[0]
    assert body["prompt"] == [9, 10, 11, 12, 13]
    assert body["stream"] is True
    assert body["temperature"] == 0.0
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 6


@pytest.mark.parametrize(
    ("fault", "said", "events"),
    [
        (501, "HTTP 500: boom <script>", 0),
        (502, "RemoteProtocolError", 0),
        (503, "ended without a finish reason", 2),
        (505, "without a finish reason", 6),
        (506, "not a completion", 1),
        (507, "out of memory", 1),
        (508, "without a single token", 0),
    ],
)
def test_a_failed_request_is_reported_with_its_reason_and_what_it_had_seen(
    fault: int, said: str, events: int
) -> None:
    with serving(FakeServer()) as server:
        bad, good = load(server, planned(fault), planned())
    assert bad.error is not None
    assert said in bad.error
    assert bad.error.isprintable()
    assert len(bad.event_times_s) == events
    assert good.error is None, "one request's trouble is not another's"


@pytest.mark.parametrize("manner", [509, 510])
@pytest.mark.parametrize("output", [1, 4])
def test_an_empty_last_event_counts_only_where_it_carried_a_token(manner: int, output: int) -> None:
    """vLLM sends tokens whose text is empty; others close with an empty event of its own."""
    with serving(FakeServer()) as server:
        (result,) = load(server, planned(manner, output=output))
    assert result.error is None
    assert len(result.event_times_s) == output == result.output_tokens


def test_a_stream_that_stalls_is_cut_off_at_the_requests_timeout() -> None:
    with serving(FakeServer()) as server:
        (result,) = load(server, planned(504), request_timeout_s=0.3)
    assert result.error is not None and "ReadTimeout" in result.error
    assert len(result.event_times_s) == 1


def test_what_still_runs_at_the_limit_is_reported_and_the_limit_holds() -> None:
    begin = time.perf_counter()
    with serving(FakeServer()) as server:
        slow, never_sent = load(server, planned(504), planned(at=60.0), limit_s=0.5)
    assert time.perf_counter() - begin < 5.0
    for result in (slow, never_sent):
        assert result.error == "cut off: the load's limit of 0 s was reached"
    assert len(slow.event_times_s) == 1
    assert never_sent.event_times_s == ()


def test_arrivals_do_not_wait_for_answers() -> None:
    """Open loop: ten requests arrive 20 ms apart although each takes a second."""
    with serving(FakeServer(first_s=1.0)) as server:
        results = load(server, *(planned(at=0.02 * i) for i in range(10)))
    for i, result in enumerate(results):
        assert result.error is None
        assert result.sent_s == pytest.approx(0.02 * i + result.lag_s, abs=1e-6)
        assert result.sent_s < results[0].end_s


def test_a_server_without_usage_leaves_the_counts_unknown() -> None:
    with serving(FakeServer(usage=False)) as server:
        (result,) = load(server, planned())
    assert result.error is None
    assert result.output_tokens is None
    assert result.prompt_tokens is None


def test_ignore_eos_is_kept_where_it_is_taken_and_dropped_where_it_is_refused() -> None:
    for takes in (True, False):
        with serving(FakeServer(takes_ignore_eos=takes)) as server:
            target, result = asyncio.run(accepted_extras(Target(server.url, "fake"), planned()))
        assert result.error is None
        assert dict(target.extras) == ({"ignore_eos": True} if takes else {})


def test_what_is_served_and_how_it_tokenizes() -> None:
    with serving(FakeServer(max_model_len=77)) as server:
        assert asyncio.run(served_model(server.url, None)) == ("fake", 77)
        target = Target(server.url, "fake")
        assert asyncio.run(tokenize(target, "one three")) == (1003, 1005)
    with serving(FakeServer(tokenizes=False)) as server:
        assert asyncio.run(tokenize(Target(server.url, "fake"), "one three")) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9:", "http://[bad"])
def test_nothing_there_is_unreachable_in_one_sentence(url: str) -> None:
    with pytest.raises(Unreachable, match="no answer from /v1/models") as caught:
        asyncio.run(served_model(url, None))
    assert "\n" not in str(caught.value)


# --- closed loop ---------------------------------------------------------------------------------


def closed(
    server: FakeServer, *requests: PlannedRequest, **how: float | bool
) -> list[RequestResult]:
    target = Target(server.url, "fake")
    how = {"limit_s": 10.0, **how}
    return list(asyncio.run(run_closed(target, requests, **how)))  # type: ignore[arg-type]


def most_at_once(results: list[RequestResult]) -> int:
    moments = sorted([(r.sent_s, 1) for r in results] + [(r.end_s, -1) for r in results])
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return most


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_never_has_more_than_so_many_at_once(concurrency: int) -> None:
    with serving(FakeServer(first_s=0.02)) as server:
        results = closed(server, *(planned(output=2) for _ in range(7)), concurrency=concurrency)
    assert [result.error for result in results] == [None] * 7
    assert most_at_once(results) == concurrency


def test_a_free_place_is_taken_at_once_but_for_whole_groups() -> None:
    requests = [planned(output=2), planned(output=60), planned(output=2), planned(output=2)]
    with serving(FakeServer(token_s=0.005)) as server:
        free = closed(server, *requests, concurrency=2)
        grouped = closed(server, *requests, concurrency=2, whole_groups=True)
    assert free[2].sent_s < free[1].end_s
    assert min(grouped[2].sent_s, grouped[3].sent_s) >= max(grouped[0].end_s, grouped[1].end_s)


def test_a_closed_loop_cuts_off_what_is_not_done_in_time_and_reports_it() -> None:
    with serving(FakeServer()) as server:
        results = closed(server, planned(504), planned(), concurrency=1, limit_s=0.3)
    assert len(results) == 2
    assert all("cut off" in (result.error or "") for result in results)
    assert len(results[0].event_times_s) == 1, "what it had seen is kept"
