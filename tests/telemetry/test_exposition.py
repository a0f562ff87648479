"""Expositions: read as prometheus_client reads them, and of a broken page never a wrong number."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from ullage.telemetry import exposition
from ullage.telemetry.exposition import Dropped, page_of, rows_of, settled

Flat = dict[tuple[str, tuple[tuple[str, str], ...]], float]
VALUES = st.floats() | st.integers(-(10**12), 10**12)
COUNTS = st.floats(0, 1e9)
TEXTS = st.text(
    st.characters(exclude_categories=("Cs",)) | st.sampled_from('\\"\n{},= #'), max_size=12
)


def flat(body: bytes) -> Flat:
    return {
        (name, labels): value
        for name, series in page_of(body).samples.items()
        for labels, value in series.items()
    }


def same(ours: Flat, theirs: Flat) -> bool:
    return ours.keys() == theirs.keys() and all(
        value == theirs[key] or (math.isnan(value) and math.isnan(theirs[key]))
        for key, value in ours.items()
    )


@st.composite
def registries(draw: st.DrawFn) -> CollectorRegistry:
    registry = CollectorRegistry()
    gauge = Gauge("engine:things", "help with \\ and \n", ("a", "b"), registry=registry)
    for a, b, value in draw(st.lists(st.tuples(TEXTS, TEXTS, VALUES), max_size=5)):
        gauge.labels(a, b).set(value)
    counter = Counter("other_things", "help", ("reason",), registry=registry)
    for reason, value in draw(st.lists(st.tuples(TEXTS, COUNTS), max_size=4)):
        counter.labels(reason).inc(value, exemplar={"trace": "x # y} 1"} if value > 1 else None)
    histogram = Histogram("time_seconds", "", buckets=(0.1, 1, 10), registry=registry)
    for value in draw(st.lists(COUNTS, max_size=4)):
        histogram.observe(value, exemplar={"trace": "z"} if value > 5 else None)
    return registry


@given(registries())
@settings(max_examples=150, deadline=None)
def test_text_reads_as_prometheus_own_parser_reads_it(registry: CollectorRegistry) -> None:
    body = generate_latest(registry)
    expected = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert same(flat(body), expected)
    assert page_of(body).dropped == Dropped()


@given(registries())
@settings(max_examples=150, deadline=None)
def test_openmetrics_reads_as_prometheus_own_parser_reads_it(registry: CollectorRegistry) -> None:
    body = generate_openmetrics(registry)
    expected = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in openmetrics_families(body.decode())
        for sample in family.samples
    }
    assert same(flat(body), expected)
    assert page_of(body).dropped == Dropped()


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ("m 1", {}, 1.0),
        ("m 1 1700000000000", {}, 1.0),
        ("m\t2", {}, 2.0),
        ("m  \t 2  ", {}, 2.0),
        ("  m 3", {}, 3.0),
        ("m 4\r", {}, 4.0),
        ("m{} 5", {}, 5.0),
        ('m{a="1"}6', {"a": "1"}, 6.0),
        ('m {a="1",} 7', {"a": "1"}, 7.0),
        ('m{ a = "1" , b="2" } 8 9', {"a": "1", "b": "2"}, 8.0),
        ('m{a="x } 1"} 9', {"a": "x } 1"}, 9.0),
        (r'm{a="q\"\\\n\t"} 10', {"a": 'q"\\\n\\t'}, 10.0),
        ('m 1.5 # {t="x y"} 0.3 1.0', {}, 1.5),
        ("m +Inf", {}, math.inf),
        ("m -inf", {}, -math.inf),
        ("m 1e-3", {}, 0.001),
        ('{"m",a="1"} 11', {"a": "1"}, 11.0),
        ('{"m"} 12', {}, 12.0),
        ('m{"a.b"="1"} 13', {"a.b": "1"}, 13.0),
    ],
)
def test_a_line_is_read_however_it_is_spaced(
    line: str, labels: dict[str, str], value: float
) -> None:
    body = line.encode() + b"\n"
    assert flat(body) == {("m", tuple(sorted(labels.items()))): value}
    assert flat(body) == flat(body), "the second time from what was kept"


@pytest.mark.parametrize(
    "line",
    [
        "m",
        "5",
        "m x",
        "m 1_0",
        "m 0x10",
        "m 1 2 3",
        "m 1,2",
        'm{a="1" 2',
        'm{a="1} 2',
        "m{a=1} 2",
        "m{a} 2",
        'm{a="1"b="2"} 3',
        'm{a="1",a="2"} 3',
        'm{,a="1"} 3',
        'm{"x"} 3',
        "{} 3",
        '{a="1"} 3',
        "1m 3",
        "m-n 3",
        "m} 3",
        "m # 1",
        'm{a="1"} # {t="x"} 1',
    ],
)
def test_a_line_that_is_no_sample_is_counted_and_gives_no_number(line: str) -> None:
    page = page_of(line.encode() + b"\nn 1\n")
    assert page.samples == {"n": {(): 1.0}}
    assert page.dropped == Dropped(malformed=1)


def test_a_name_whose_line_is_malformed_is_named() -> None:
    found = settled(rows_of(b'm{a="1"} 1\nm{a="2"} x\n# m x\n\nn{ 1\n'))
    assert found.damaged == {"m", "n"}
    assert not found.plain


def test_an_unfinished_last_line_is_left_and_counted() -> None:
    assert page_of(b"a 1\nb 23").samples == {"a": {(): 1.0}}
    assert page_of(b"a 1\nb 23").dropped == Dropped(truncated=4)
    assert page_of(b"").dropped == Dropped()
    assert "unfinished" in page_of(b"a 1").dropped.in_words()


def test_the_first_of_repeated_samples_stays_whatever_the_order_of_labels() -> None:
    page = page_of(b'm{a="1",b="2"} 1\nm{b="2",a="1"} 2\n')
    assert page.samples == {"m": {(("a", "1"), ("b", "2")): 1.0}}
    assert page.dropped == Dropped(duplicates=1)


def test_a_gigantic_page_is_read_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MOST_LINES", 3)
    page = page_of(b"a 1\nb 2\nc 3\nd 4\ne 5\n")
    assert set(page.samples) == {"a", "b", "c"}
    assert page.dropped == Dropped(beyond=2)
    monkeypatch.setattr(exposition, "MOST_KEY_BYTES", 20)
    page = page_of(b'm{a="' + b"x" * 40 + b'"} 1\nn 1\n')
    assert page.samples == {"n": {(): 1.0}}
    assert page.dropped == Dropped(malformed=1)


def test_what_is_kept_between_pages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MOST_KEPT", 10)
    for number in range(50):
        body = b"".join(b'm{a="%d"} %d\n' % (number * 3 + i, i) for i in range(3))
        assert len(flat(body)) == 3
        assert len(exposition._KEPT) <= 10


PAGE = generate_latest(
    (lambda registry: (Histogram("t", "h", ("e",), registry=registry).labels('x" y'), registry)[1])(
        CollectorRegistry()
    )
)
NUMBER = re.compile(rb"[-+.0-9a-zA-Z]+")


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(PAGE)),
            st.integers(0, 12),
            st.binary(max_size=3) | st.sampled_from([b"\n", b'"', b"{", b"}", b" ", b"\\", b"#"]),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=300, deadline=None)
def test_a_mutilated_page_never_raises_nor_gives_a_number_that_is_not_in_it(
    cuts: list[tuple[int, int, bytes]],
) -> None:
    body = PAGE
    for at, length, instead in cuts:
        body = body[:at] + instead + body[at + length :]
    spelled = set()
    for word in NUMBER.findall(body):
        try:
            spelled.add(float(word))
        except ValueError:
            continue
    for value in flat(body).values():
        assert value in spelled or (math.isnan(value) and any(map(math.isnan, spelled)))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_without_an_error(body: bytes) -> None:
    page_of(body)
