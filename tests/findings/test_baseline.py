"""A baseline accepts what is known, tells what is stale, and survives moving numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.errors import BadInput, BadUsage
from ullage.findings import Evidence, Finding, Severity, worst
from ullage.findings.baseline import accept, fingerprint, read_baseline, write_baseline
from ullage.findings.table import render


def fired(rule: str = "A001", *names: str, value: int = 1) -> Finding:
    evidence = tuple(Evidence(name, value, "", "config") for name in names or ("heads",))
    return Finding(rule, "title", Severity.error, "fired", evidence, "Cause.", "Remedy.")


NAMES = st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True)


@given(NAMES, st.integers(), st.integers())
def test_numbers_and_order_do_not_change_the_identity(names, one, other):
    shuffled = fired("A001", *reversed(names), value=other)
    assert fingerprint(fired("A001", *names, value=one)) == fingerprint(shuffled)


@given(NAMES, NAMES)
def test_another_rule_or_another_thing_is_another_finding(names, others):
    same = set(names) == set(others)
    assert (fingerprint(fired("A001", *names)) == fingerprint(fired("A001", *others))) == same
    assert fingerprint(fired("A001", *names)) != fingerprint(fired("A002", *names))


def test_written_findings_are_accepted_and_not_counted(tmp_path):
    path = str(tmp_path / "base.json")
    clear = Finding("A002", "t", Severity.error, "clear", (Evidence("x", 1, "", "c"),))
    assert write_baseline(path, [fired(), clear]) == 1
    marked, stale = accept([fired(value=2), clear, fired("A003")], read_baseline(path))
    assert [f.accepted for f in marked] == [True, False, False] and stale == ()
    assert worst(marked[:2]) is None and worst(marked) == Severity.error
    assert "Accepted by the baseline (1)" in render(marked)
    assert render(marked).splitlines()[-1].startswith("1 error, 1 accepted;")


def test_entries_that_fire_no_more_are_stale_only_where_the_rule_was_evaluated(tmp_path):
    path = str(tmp_path / "base.json")
    write_baseline(path, [fired("A001"), fired("A002"), fired("A003"), fired("A004")])
    evidence = (Evidence("x", 1, "", "c"),)
    now = [
        Finding("A001", "t", Severity.error, "clear", evidence),
        Finding("A002", "t", Severity.error, "not_evaluable", missing=("--gpu",)),
        fired("A004", "something else"),
    ]
    marked, stale = accept(now, read_baseline(path))
    assert [entry.rule for entry in stale] == ["A001", "A004"]
    assert not any(f.accepted for f in marked)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no schema"),
        ('{"schema": "ullage.baseline/2", "accepted": []}', "no schema"),
        ('{"schema": "ullage.baseline/1"}', "accepted"),
        ('{"schema": "ullage.baseline/1", "accepted": [{"rule": "A001"}]}', "accepted[0]"),
        ('{"schema": "ullage.baseline/1", "accepted": [{"rule": 1, "fingerprint": "a"}]}', "[0]"),
    ],
)
def test_a_malformed_baseline_is_one_sentence(text, says, tmp_path):
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_baseline(str(path))
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_nothing_half_written_stays(tmp_path):
    (tmp_path / "place").mkdir()
    for bad in (tmp_path / "none" / "b.json", tmp_path / "place"):
        with pytest.raises(BadUsage):
            write_baseline(str(bad), [fired()])
    assert [p.name for p in tmp_path.rglob("*")] == ["place"]
    with pytest.raises(BadInput):
        read_baseline(str(tmp_path / "missing"))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda i: (
            st.lists(i)
            | st.dictionaries(st.sampled_from(["schema", "accepted", "rule", "fingerprint"]), i)
        ),
    )
)
def test_any_document_is_read_or_refused(tmp_path_factory, document):
    path = tmp_path_factory.mktemp("b") / "b.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BadInput):
        read_baseline(str(path))


def test_accepting_changes_nothing_else():
    (marked,), _ = accept([fired()], [])
    assert replace(marked, accepted=False) == fired()
