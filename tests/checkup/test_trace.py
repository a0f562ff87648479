"""The trace slice: what ships, and that scaling does exactly what its account says."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.traffic.trace import (
    MIN_OUTPUT_TOKENS,
    MIN_PROMPT_TOKENS,
    Rates,
    TraceRow,
    recorded_rows,
    scale_to_machine,
)

ROWS = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.integers(1, 20_000), st.integers(1, 2_000)),
    min_size=1,
    max_size=40,
)


def rows_of(gaps: list[tuple[float, int, int]]) -> tuple[TraceRow, ...]:
    at, rows = 0.0, []
    for i, (gap, prompt, output) in enumerate(gaps):
        at += gap if i else 0.0
        rows.append(TraceRow(at, prompt, output))
    return tuple(rows)


def test_the_slice_that_ships_is_the_traces_beginning() -> None:
    rows = recorded_rows()
    assert len(rows) == 128
    assert rows[0] == TraceRow(0.0, 374, 44)
    # 18:15:46.6805900 and 18:15:50.9951690; datetime keeps microseconds.
    assert rows[1].arrival_s == pytest.approx(4.314579, abs=2e-6)
    assert (rows[1].prompt_tokens, rows[1].output_tokens) == (396, 109)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))


def test_the_slice_ships_with_its_licence() -> None:
    licence = files("ullage.traffic") / "data" / "azure-2023-conv-128.LICENSE.md"
    text = licence.read_text(encoding="utf-8")
    assert "Creative Commons Attribution 4.0" in text
    assert "Azure" in text


def test_a_fast_engine_gets_the_recorded_lengths() -> None:
    workload = scale_to_machine(
        recorded_rows(),
        num_requests=32,
        duration_s=40,
        max_model_len=8192,
        rates=Rates(1e6, 1e5),
    )
    assert workload.scaling.length_factor == 1.0
    assert [r.prompt_tokens for r in workload.rows] == [
        max(MIN_PROMPT_TOKENS, r.prompt_tokens) for r in recorded_rows()[:32]
    ]


def test_a_slow_engine_gets_lengths_cut_by_one_stated_factor() -> None:
    """1000 prompt tokens at 100/s, 100 output tokens at 10/s: 20 s of work where 7 are wanted."""
    rows = (TraceRow(0.0, 500, 50), TraceRow(3.0, 500, 50))
    workload = scale_to_machine(
        rows, num_requests=2, duration_s=10, max_model_len=8192, rates=Rates(100, 10)
    )
    assert workload.scaling.length_factor == pytest.approx(7 / 20)
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.rows] == [(175, 18), (175, 18)]
    assert workload.rows[1].arrival_s == pytest.approx(9.0)
    assert workload.scaling.speed_up == pytest.approx(3.0 / 9.0)


@given(
    gaps=ROWS,
    num_requests=st.integers(1, 50),
    duration_s=st.floats(1.0, 100.0),
    max_model_len=st.integers(8, 5_000),
    prefill=st.floats(1.0, 1e6),
    decode=st.floats(1.0, 1e6),
)
def test_scaling_keeps_its_promises(
    gaps: list[tuple[float, int, int]],
    num_requests: int,
    duration_s: float,
    max_model_len: int,
    prefill: float,
    decode: float,
) -> None:
    rows = rows_of(gaps)
    workload = scale_to_machine(
        rows,
        num_requests=num_requests,
        duration_s=duration_s,
        max_model_len=max_model_len,
        rates=Rates(prefill, decode),
    )
    scaling, planned = workload.scaling, workload.rows
    assert len(planned) == min(num_requests, len(rows)) == scaling.num_rows
    assert all(min(r.prompt_tokens, r.output_tokens) >= 1 for r in planned)
    assert all(r.prompt_tokens + r.output_tokens <= max_model_len for r in planned)
    assert 0 < scaling.length_factor <= 1
    assert planned[-1].arrival_s <= 0.9 * duration_s * (1 + 1e-9)
    arrivals = [r.arrival_s for r in planned]
    assert arrivals == sorted(arrivals)
    assert scaling.planned_prompt_tokens == sum(r.prompt_tokens for r in planned)
    untouched = scaling.num_clipped == scaling.num_raised == 0
    for recorded, row in zip(rows, planned, strict=False):
        if untouched:
            assert row.prompt_tokens == round(recorded.prompt_tokens * scaling.length_factor)
        assert row.prompt_tokens <= max(recorded.prompt_tokens, MIN_PROMPT_TOKENS)
        assert row.output_tokens <= max(recorded.output_tokens, MIN_OUTPUT_TOKENS)
