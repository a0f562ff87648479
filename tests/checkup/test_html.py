"""Drawing and wording: numbers as people read them, charts that hold for any data."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.checkup.html import charts
from ullage.pages import svg, words
from ullage.pages.markup import NARROW, WIDE

WIDTHS = st.sampled_from([WIDE, NARROW])
# A monotonic clock resolves a nanosecond.
TIMES = st.lists(st.just(0.0) | st.floats(1e-9, 1e4), min_size=1, max_size=60)
COUNTS = st.none() | st.integers(0, 500)


def drawn(text: str, width: float) -> ElementTree.Element:
    """The drawing parsed, and held to have no number outside of its canvas or out of the world."""
    root = ElementTree.fromstring(text)  # noqa: S314 - ours
    assert "nan" not in text and "inf" not in text
    for element in root.iter():
        if element.tag == "text":
            assert -1 <= float(element.get("x", "0")) <= width + 1
    return root


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (1, "1.00"),
        (12.345, "12.3"),
        (46_080, "46,080"),
        (0.00123, "0.00123"),
        (-5.5, "−5.50"),
        (999.9, "1,000"),
    ],
)
def test_three_significant_digits(value: float, said: str) -> None:
    assert words.significant(value) == said


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (96_600_000, "bytes", "96.6 MB"),
        (999, "bytes", "999 B"),
        (26.5e9, "bytes/s", "26.5 GB/s"),
        (46_080, "bytes/token", "46,080 B/token"),
        (0.0021, "s", "2.10 ms"),
        (1.5, "s", "1.50 s"),
        (0.785, "ratio", "78.5%"),
        (989.4e12, "FLOP/s", "989 TFLOP/s"),
        (134_515_008, "parameters", "135 M"),
        (17.25, "tokens/s", "17.2 tokens/s"),
        (30, "", "30"),
        (16, "tokens", "16 tokens"),
    ],
)
def test_quantities_carry_their_unit(value: float, unit: str, said: str) -> None:
    assert words.quantity(value, unit) == said


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(0, "0%"), (0.001, "+0.1%"), (0.0001, "0.0%"), (-0.058, "−5.8%"), (1.954, "+195%")],
)
def test_errors_are_signed(ratio: float, said: str) -> None:
    assert words.signed_percent(ratio) == said


def test_a_figure_that_is_not_known_says_so() -> None:
    assert words.figure_text(None) == "not known"
    assert words.figure_text({"value": None, "unit": "s"}) == "not known"
    assert words.figure_text({"min": 1e6, "max": 2e6, "unit": "bytes"}) == "1.00 MB to 2.00 MB"


@given(st.text())
def test_escaped_text_is_text_in_xml(text: str) -> None:
    root = ElementTree.fromstring(f'<a b="{words.escape(text)}">{words.escape(text)}</a>')  # noqa: S314
    kept = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    assert (root.text or "") == kept


@given(st.floats(0, 1e12), st.floats(1e-9, 1e12), st.integers(1, 10))
def test_ticks_are_round_and_inside(low: float, size: float, wanted: int) -> None:
    high = low + size
    ticks = svg.linear_ticks(low, high, wanted)
    assert len(ticks) <= 2 * wanted + 2
    slack = 1e-6 * max(size, abs(high) * 1e-9)
    assert all(low - slack <= t <= high + slack for t in ticks)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5), st.floats(1, 10))
def test_labels_are_moved_apart_in_order(positions: list[float], gap: float) -> None:
    placed = svg.spread(positions, gap, 0.0, 200.0)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    for a, b in pairwise(order):
        assert placed[b] - placed[a] >= gap - 1e-9
    assert all(-1e-9 <= p <= 200.0 + 1e-9 for p in placed)


@given(
    st.lists(st.integers(0, 10**13), min_size=1, max_size=6).filter(lambda v: sum(v) > 0), WIDTHS
)
def test_the_ledger_bar_fills_its_width(sizes: list[int], width: float) -> None:
    rows = [{"name": f"part {i}", "kind": "kv", "bytes": b} for i, b in enumerate(sizes)]
    root = drawn(charts.ledger_bar(rows, width), width)
    widths = [float(r.get("width", "0")) for r in root.iter("rect")]
    assert sum(widths) == pytest.approx(width, abs=0.01 * len(sizes))


@given(TIMES, WIDTHS)
def test_a_histogram_holds_every_value(values: list[float], width: float) -> None:
    marks = [("p50", sorted(values)[len(values) // 2]), ("p99", max(values))]
    root = drawn(charts.histogram(values, marks, "time", width), width)
    seen = sum(int((title.text or "").split()[0]) for title in root.iter("title"))
    assert seen == len(values)


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e5), st.floats(1.0, 1e16)), min_size=1, max_size=4),
    st.floats(1e6, 1e14),
    st.floats(1e6, 1e17),
    WIDTHS,
)
def test_a_roofline_is_drawn_for_any_machine(
    points: list[tuple[float, float]], bandwidth: float, flops: float, width: float
) -> None:
    given_points = [
        {"name": "decode, one sequence", "short": "decode", "flops_per_byte": x, "flops_per_s": y}
        for x, y in points
    ]
    root = drawn(charts.roofline(bandwidth, flops, given_points, width), width)
    for dot in root.iter("circle"):
        assert 0 <= float(dot.get("cx", "-1")) <= width
        assert 0 <= float(dot.get("cy", "-1")) <= 300


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 1), COUNTS, COUNTS), min_size=1, max_size=40),
    WIDTHS,
)
def test_series_are_drawn_with_and_without_gaps(
    samples: list[tuple[float, float, int | None, int | None]], width: float
) -> None:
    times = sorted(s[0] for s in samples)
    drawn(charts.occupancy(times, [s[1] for s in samples], 50.0, width), width)
    lines = [
        ("running", "measured", [s[2] for s in samples]),
        ("waiting", "waiting", [s[3] for s in samples]),
    ]
    drawn(charts.queue(times, lines, 50.0, width), width)


@given(st.integers(1, 400), st.integers(1, 128), st.integers(1, 10**6), WIDTHS)
def test_growth_is_drawn_for_any_block(tokens: int, block: int, each: int, width: float) -> None:
    stairs = [(float(t), float(-(-t // block) * block * each)) for t in range(0, tokens + 1, block)]
    stairs.append((float(tokens), float(-(-tokens // block) * block * each)))
    drawn(charts.kv_growth(stairs, stairs, float(each), width), width)


@given(st.integers(2, 2000), st.integers(2, 400))
def test_thinning_keeps_both_ends(count: int, most: int) -> None:
    points = [(float(i), 0.0) for i in range(count)]
    kept = charts.thinned(points, most)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert len(kept) <= max(most, 2)
    assert [p[0] for p in kept] == sorted({p[0] for p in kept})


def test_an_error_bar_ends_at_its_limit() -> None:
    for ratio in (0.0, 0.5, -0.5, 40.0, -40.0):
        assert math.isfinite(ratio)
        root = drawn(charts.error_bar(ratio, 1.0), 120.0)
        (bar,) = root.iter("rect")
        x, wide = float(bar.get("x", "-1")), float(bar.get("width", "0"))
        assert x >= 0 and x + wide <= 120
