"""Findings as JSON values and as text: complete, ordered, wrapped, the same on every run."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.findings import Evidence, Finding, Severity, worst
from ullage.findings.json import counts_document, evidence_document, finding_document
from ullage.findings.table import lines, render, show_value, summary

LINE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=60)
EVIDENCE = st.builds(
    Evidence,
    LINE,
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), LINE),
    st.sampled_from(["", "bytes", "tokens", "token id"]),
    LINE,
)


@st.composite
def findings(draw) -> Finding:
    state = draw(st.sampled_from(["fired", "clear", "not_evaluable"]))
    fired = state == "fired"
    return Finding(
        draw(st.sampled_from(["A001", "A002", "B100"])),
        draw(LINE),
        draw(st.sampled_from(list(Severity))),
        state,
        tuple(draw(st.lists(EVIDENCE, max_size=4))),
        cause=draw(LINE) if fired else "",
        remedy=draw(LINE) if fired else "",
        missing=(draw(LINE),) if state == "not_evaluable" else (),
    )


@given(st.lists(findings(), max_size=8))
def test_any_findings_make_a_strict_json_document(some):
    text = json.dumps([finding_document(f) for f in some], allow_nan=False)
    assert [f["id"] for f in json.loads(text)] == [f.id for f in some]
    counts = counts_document(some)
    assert counts["fired"] + counts["clear"] + counts["not_evaluable"] == len(some)
    assert counts["error"] + counts["warning"] + counts["info"] == counts["fired"]


@given(st.lists(findings(), max_size=8), st.integers(0, 200), st.booleans())
def test_any_findings_make_a_table(some, width, verbose):
    text = render(some, width=width, verbose=verbose)
    assert text.splitlines()[-1] == summary(some)
    for finding in some:
        shown = finding.state != "clear" or verbose
        assert not shown or finding.id in text


def finding(rule_id: str, severity: Severity, state: str, **values: object) -> Finding:
    return Finding(rule_id, f"title of {rule_id}", severity, state, **values)


SOME = [
    finding("A005", Severity.info, "fired", cause="Small.", remedy="Look."),
    finding("A004", Severity.error, "fired", cause="Grave.", remedy="Fix it."),
    finding("A003", Severity.error, "not_evaluable", missing=("--gpu NAME",)),
    finding("A002", Severity.warning, "not_evaluable", missing=("--gpu NAME",)),
    finding("A001", Severity.error, "clear", evidence=(Evidence("heads", 4, "", "config"),)),
]


def test_the_gravest_comes_first_then_what_was_missing_then_a_count():
    text = render(SOME)
    assert text.index("A004") < text.index("A005") < text.index("Not evaluated (2)")
    assert "for want of --gpu NAME: A003 title of A003, A002 title of A002" in text
    assert "A001" not in text
    assert text.splitlines()[-1] == "1 error, 1 info; 1 clear; 2 not evaluated"


def test_verbose_shows_what_a_clear_rule_was_judged_on():
    text = render(SOME, verbose=True)
    assert "A001  title of A001" in text and "[config]" in text


def test_lines_carry_a_role_for_colour():
    roles = {text.split()[1]: role for text, role in lines(SOME) if text[:1] in "ewi" and text}
    assert roles == {"A004": "error", "A005": "info"}


def test_nothing_is_said_to_be_nothing():
    assert summary([]) == "Nothing fired; 0 clear; 0 not evaluated"


def test_the_worst_is_the_gravest_that_fired():
    assert worst(SOME) == Severity.error
    assert worst(SOME[2:]) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "not set"), (True, "yes"), (False, "no"), (1234567, "1,234,567"), (0.1, "0.1"),
     (1e-12, "1e-12"), ("word", "word")],
)  # fmt: skip
def test_values_read_well(value, shown):
    assert show_value(value) == shown


def test_numbers_that_json_lacks_become_words():
    assert evidence_document(Evidence("x", math.inf, "", "s"))["value"] == "inf"
    assert evidence_document(Evidence("x", math.nan, "", "s"))["value"] == "nan"
