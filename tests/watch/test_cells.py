"""Figures as short text: exact where it matters, and harmless whatever a server sends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.telemetry.histogram import Quantile
from ullage.watch import cells
from ullage.watch.figures import TimeToFull

INF = math.inf


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.25, 0.5, "0.25–0.5 s"),
        (0.01, 0.025, "10–25 ms"),
        (0.0, 0.01, "≤ 10 ms"),
        (2.0, INF, "> 2 s"),
        (0.0, 0.00005, "≤ 50 µs"),
        (0.075, 0.1, "0.075–0.1 s"),
    ],
)
def test_a_quantile_is_the_bucket_that_holds_it(low, high, text):
    assert cells.time_range(Quantile(low, high, low)) == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (TimeToFull(40, 55), "full in 40–55 s"),
        (TimeToFull(41, 41.2), "full in 41 s"),
        (TimeToFull(110, 300), "full in 110 s–5 min"),
        (TimeToFull(300, INF), "full in over 5 min"),
        (TimeToFull(0.05, 0.9), "full in < 1 s"),
        (TimeToFull(0.5, INF), "full in over 0.5 s"),
        (TimeToFull(0, 0), "full"),
        (TimeToFull(1e9, 1e9), "full in > 30 days"),
    ],
)
def test_time_to_full_keeps_its_range(found, text):
    assert cells.to_full(found) == text


@given(st.floats(0, 1), st.integers(2, 60))
def test_only_a_full_cache_has_a_full_bar(ratio, width):
    drawn = cells.bar(ratio, width)
    assert len(drawn) == width
    assert (drawn == cells.FULL * width) == (ratio == 1)
    assert (drawn == cells.EMPTY * width) == (ratio == 0)


@given(st.floats(0, 1))
def test_only_a_full_cache_is_a_hundred_per_cent(ratio):
    assert (cells.percent(ratio) == "100%") == (ratio == 1)
    assert (cells.percent(ratio) == "0%") == (ratio == 0)


@given(st.text())
def test_text_of_a_server_steers_no_terminal(text):
    shown = cells.clean(text, 40)
    assert len(shown) <= 40
    assert shown.isprintable()


@given(st.text(max_size=80), st.integers(1, 60))
def test_a_shortened_name_keeps_its_end(text, width):
    shown = cells.shorten(text, width)
    assert len(shown) <= width
    assert text.endswith(shown.removeprefix("…"))


def test_bytes_share_their_unit():
    assert cells.used_of(60e9, 80e9) == "60.0 of 80.0 GB"
    assert cells.used_of(900e6, 80e9) == "900 MB of 80.0 GB"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.4, "0.4/s"), (0.004, "0.004/s"), (1e-9, "<0.001/s"), (1234.5, "1,234/s")],
)
def test_a_rate_that_is_not_nothing_is_not_shown_as_nothing(value, text):
    assert cells.rate(value) == text
