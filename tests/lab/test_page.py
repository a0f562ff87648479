"""The page is one file without outside references; it escapes what it shows, drawings fit."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.samples import HOSTILE, document, result
from ullage.lab.document import as_json
from ullage.lab.html import charts
from ullage.lab.html.page import render
from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import Axis, Bars, Lines, NotRun, Raster, Series, Stretch
from ullage.lab.text import as_text

VOID = {"meta", "br", "link"}
COORDINATES = {"x", "x1", "x2", "cx"}, {"y", "y1", "y2", "cy"}


class Balanced(HTMLParser):
    """Fails on tags that do not close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_page_refers_to_nothing_outside():
    page = render(document())
    for tag, attributes in parsed(page).seen:
        assert tag not in {"script", "link", "img", "iframe"}
        assert not {"src", "onclick", "onload"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_names_from_outside_are_escaped_wherever_they_stand():
    page = render(document(result(learnt=HOSTILE, words=HOSTILE), subject=HOSTILE))
    parser = parsed(page)
    assert "script" not in {tag for tag, _ in parser.seen}
    assert "\x1b" not in page


def test_every_outcome_is_named_with_its_sentence_or_the_reason():
    page = render(document(result(learnt="Seven."), NotRun("prefix", "the server is away")))
    assert "Seven." in page and "the server is away" in page
    assert EXPERIMENTS["prefix"].title in page


def test_every_column_says_its_source():
    page = render(document())
    assert "modelled: by hand" in page and "measured, where the system tells" in page


def test_what_is_not_known_is_a_dash_and_never_zero():
    row = next(line for line in as_text(result()).splitlines() if "plain" in line and "kB" in line)
    assert row.split() == ["plain", "2.05", "kB", "250", "ms", "–"]


def test_disturbed_figures_say_so():
    assert "other processes took 50% of the cores" in render(document())


def test_json_holds_every_number_unrounded():
    plain = json.loads(
        json.dumps(as_json(document(result(), NotRun("prefix", "why"))), allow_nan=False)
    )
    assert plain["schema"] == "ullage.lab/1"
    (one,) = plain["results"]
    assert one["data"] == {"answer": 42}
    assert one["tables"][0]["rows"][0] == ["plain", 2048, 0.25, None]
    assert [plot["kind"] for plot in one["plots"]] == ["lines", "bars", "raster"]
    assert plain["not_run"] == [{"name": "prefix", "reason": "why"}]


# --- drawings ------------------------------------------------------------------------------------

NUMBERS = st.floats(1e-6, 1e12)


@st.composite
def any_lines(draw):
    xs = sorted(draw(st.sets(st.floats(0.5, 1e6), min_size=1, max_size=6)))
    series = tuple(
        Series(
            f"line {i}",
            tuple((x, draw(NUMBERS)) for x in xs),
            draw(st.sampled_from(["measured", "modelled"])),
        )
        for i in range(draw(st.integers(1, 5)))
    )
    units = st.sampled_from(["", "s", "bytes", "ratio", "times", "tokens/s"])
    return Lines(
        "t",
        Axis("x", draw(units), draw(st.booleans())),
        Axis("y", draw(units), draw(st.booleans())),
        series,
    )


@st.composite
def any_bars(draw):
    groups = tuple(f"g{i}" for i in range(draw(st.integers(1, 4))))
    series = tuple(f"s{i}" for i in range(draw(st.integers(1, 4))))
    values = tuple(tuple(draw(st.none() | st.floats(0, 1e12)) for _ in groups) for _ in series)
    return Bars("t", draw(st.sampled_from(["s", "bytes", "tokens/s"])), groups, series, values)


@st.composite
def any_raster(draw):
    rows = draw(st.integers(1, 300))
    stretches = draw(
        st.lists(
            st.builds(
                lambda row, start, length, owner: Stretch(row, start, start + length, owner),
                st.integers(0, rows - 1),
                st.floats(0, 100),
                st.floats(0.1, 50),
                st.integers(0, 13),
            ),
            max_size=20,
        )
    )
    owners = tuple(f"{i + 1}: 100+20" for i in range(14))
    return Raster("t", Axis("steps"), Axis("blocks"), rows, owners, tuple(stretches))


@pytest.mark.parametrize("width", [348.0, 762.0])
@settings(max_examples=50)
@given(plot=any_lines() | any_bars() | any_raster())
def test_drawings_are_xml_and_stay_on_their_canvas(width, plot):
    drawn = ET.fromstring(charts.draw(plot, width))  # noqa: S314 - our own text
    assert float(drawn.attrib["width"]) == width
    height = float(drawn.attrib["height"])
    for element in drawn.iter():
        for names, end in zip(COORDINATES, (width, height), strict=True):
            for name in names & element.attrib.keys():
                assert -1 <= float(element.attrib[name]) <= end + 1, (element.tag, element.attrib)
        for x, y in re.findall(r"([-\d.e+na]+),([-\d.e+na]+)", element.attrib.get("points", "")):
            assert -1 <= float(x) <= width + 1 and -1 <= float(y) <= height + 1


def test_lines_are_named_once_and_predictions_are_dashed():
    drawn = charts.draw(result().plots[0], 762.0)
    assert drawn.count(">first, plain<") == 1 and drawn.count(">second<") == 1
    assert drawn.count("dashed") == 1
