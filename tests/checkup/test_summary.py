"""What a load amounted to, against brute force and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.traffic.load import RequestResult
from ullage.traffic.summary import Distribution, decode_rate, summarise


def result(
    *times: float, sent: float = 0.0, error: str | None = None, tokens: int | None = None
) -> RequestResult:
    end = sent + (times[-1] if times else 0.0)
    return RequestResult(
        sent, sent, 0.0, 10, len(times), 10, tokens, tuple(times), end, "length", error
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_is_the_least_value_with_that_share_at_or_below(
    values: list[float], share: float
) -> None:
    ordered = tuple(sorted(values))
    expected = next(
        v for v in ordered if sum(w <= v for w in ordered) >= share * len(ordered) - 1e-9
    )
    assert Distribution(ordered).quantile(share) == expected


def test_failures_are_counted_by_reason_and_give_no_times() -> None:
    summary = summarise(
        [
            result(0.5, 0.6, 0.8),
            result(0.1, 9.0, sent=1.0, error="dropped"),
            result(sent=2.0, error="dropped"),
            result(sent=3.0, error="HTTP 500"),
        ]
    )
    assert (summary.num_planned, summary.num_succeeded, summary.num_failed) == (4, 1, 3)
    assert summary.errors == (("dropped", 2), ("HTTP 500", 1))
    assert summary.ttft is not None and summary.ttft.values == (0.5,)
    assert summary.inter_token is not None
    assert summary.inter_token.values == pytest.approx((0.1, 0.2))
    # The tokens of the dropped request were produced all the same.
    assert summary.output_tokens == 5
    assert summary.wall_s == 10.0


def test_the_servers_count_wins_over_events_and_short_answers_are_told() -> None:
    summary = summarise([result(0.1, 0.2, 0.3, tokens=3), result(0.1, 0.2, 0.3, tokens=2)])
    assert summary.output_tokens == 5
    assert summary.counted_by_events == 0
    assert summary.num_short == 1


def test_an_empty_load_has_no_times_and_no_rates() -> None:
    summary = summarise([])
    assert summary.ttft is None
    assert summary.output_tokens_per_s is None


def test_the_decode_rate_counts_only_while_all_decode_together() -> None:
    """From 1.0 (the later first token) to 2.0 (the earlier end): 4 + 2 tokens in one second."""
    first = result(0.5, 1.25, 1.5, 1.75, 2.0)
    second = result(1.0, 1.5, 2.0, 2.5)
    assert decode_rate([first, second]) == pytest.approx(6.0)


@pytest.mark.parametrize(
    "results",
    [
        [],
        [result(0.1, 0.2, 0.3, error="dropped")],
        [result(0.1, 0.2, 0.3), result(0.1, 0.2, 0.3, sent=5.0)],
        [result(0.1)],
    ],
    ids=["none", "failed", "never together", "too short"],
)
def test_no_decode_rate_where_none_was_seen(results: list[RequestResult]) -> None:
    assert decode_rate(results) is None
