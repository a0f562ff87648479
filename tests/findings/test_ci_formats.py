"""SARIF, JUnit and GitHub commands, read back by others' readers, hostile names included."""

from __future__ import annotations

import io
import json
import re
from urllib.parse import unquote
from urllib.request import url2pathname
from xml.etree import ElementTree

from fluidattacks_core.sarif import SarifLog
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Failure, JUnitXml, Skipped

from ullage.findings import Evidence, Finding, Severity
from ullage.findings.github import escape_data, escape_property, workflow_commands
from ullage.findings.junit import junit
from ullage.findings.place import Place, RuleText, uri_of
from ullage.findings.sarif import sarif

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)
PATH = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)
IDS = [f"A{number:03}" for number in range(1, 9)]
RULES = {
    i: RuleText(i, f"Title, of {i}", Severity.warning, "cat", "Why.", "Fix.", "Source.")
    for i in IDS
}


@st.composite
def some(draw) -> list[Finding]:
    made = []
    for rule in draw(st.lists(st.sampled_from(IDS), unique=True, max_size=6)):
        state = draw(st.sampled_from(["fired", "clear", "not_evaluable"]))
        fired = state == "fired"
        evidence = (Evidence(draw(TEXT), draw(st.floats() | TEXT), "", draw(TEXT)),)
        made.append(
            Finding(
                rule, draw(TEXT), draw(st.sampled_from(list(Severity))), state,
                () if state == "not_evaluable" else evidence,
                draw(TEXT) if fired else "", draw(TEXT) if fired else "",
                (draw(TEXT),) if state == "not_evaluable" else (),
                fired and draw(st.booleans()),
            )
        )  # fmt: skip
    return made


PLACES = st.none() | st.builds(Place, PATH, st.none() | st.integers(1, 10**6))


@given(some(), PLACES, st.booleans())
def test_sarif_is_what_the_schema_says(findings, place, compared):
    made = sarif(findings, RULES, lambda f: place, version="1", compared=compared)
    text = json.dumps(made, allow_nan=False)
    log = SarifLog.model_validate_json(text)
    (run,) = log.runs
    fired = [f for f in findings if f.state == "fired"]
    assert [r.rule_id for r in run.results] == [f.id for f in fired]
    for result, finding in zip(run.results, fired, strict=True):
        assert run.tool.driver.rules[result.rule_index].id == finding.id
        assert (
            result.level.value
            == {"error": "error", "warning": "warning", "info": "note"}[finding.severity.name]
        )
        assert bool(result.suppressions) == finding.accepted
    for result in made["runs"][0]["results"]:
        if place is None:
            assert "locations" not in result
        else:
            physical = result["locations"][0]["physicalLocation"]
            assert physical.get("region") == (place.line and {"startLine": place.line})
    notes = run.invocations[0].tool_execution_notifications
    assert len(notes) == sum(f.state == "not_evaluable" for f in findings)


@given(PATH)
def test_a_path_as_uri_is_plain_and_comes_back(path):
    import os

    uri = uri_of(path)
    assert re.fullmatch(r"(file:///)?[A-Za-z0-9._~/%-]*", uri)
    assert not re.match(r"[a-z]+:(?!///)", uri)
    back = url2pathname(uri.removeprefix("file://"))
    normal = os.path.normpath(path)
    assert back == ("/" + normal.lstrip("/") if normal.startswith("/") else normal)
    assert unquote(uri.removeprefix("file://")) == back


@given(TEXT, some(), PLACES)
def test_junit_is_read_by_others(name, findings, place):
    text = junit(name, findings, RULES, lambda f: place)
    root = ElementTree.fromstring(text.encode())  # noqa: S314 (our own)
    assert len(root.findall(".//testcase")) == len(findings)
    suites = JUnitXml.fromroot(JUnitXml.fromstring(text.encode())._elem)
    (suite,) = suites
    assert (suite.tests, suite.errors) == (len(findings), 0)
    kinds = [type(case.result[0]) if case.result else None for case in suite]
    expected = [
        Skipped
        if f.state == "not_evaluable"
        else Failure
        if f.state == "fired" and not f.accepted
        else None
        for f in findings
    ]
    assert kinds == expected
    assert suite.failures == kinds.count(Failure) and suite.skipped == kinds.count(Skipped)


def legal(text: str) -> str:
    """What XML 1.0 can hold of a text, by its own list of ranges."""
    bad = "[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
    return re.sub(bad, "\ufffd", text)


@given(TEXT)
def test_junit_keeps_every_character_that_xml_can_hold(text):
    finding = Finding("A001", text, Severity.error, "not_evaluable", missing=(text,))
    root = ElementTree.fromstring(junit(text, [finding], RULES, lambda f: None).encode())  # noqa: S314
    assert root.find("testsuite").get("name") == legal(text)
    assert root.find(".//testcase").get("name") == f"A001 {legal(text)}"
    assert root.find(".//skipped").get("message") == f"for want of {legal(text)}"


def runner(line: str) -> tuple[str, dict[str, str], str] | None:
    """A workflow command as GitHub's runner reads one: command, properties, message."""
    if not line.startswith("::") or "::" not in line[2:]:
        return None
    head, _, message = line[2:].partition("::")
    command, _, rest = head.partition(" ")
    pairs = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)

    def unescape(text: str, extra: bool) -> str:
        marks = [("%0D", "\r"), ("%0A", "\n"), *([("%3A", ":"), ("%2C", ",")] if extra else [])]
        for mark, plain in [*marks, ("%25", "%")]:
            text = text.replace(mark, plain)
        return text

    return command, {k: unescape(v, True) for k, v in pairs.items()}, unescape(message, False)


@given(some(), PLACES)
def test_each_annotation_is_one_command_that_says_what_was_found(findings, place):
    text = workflow_commands(findings, lambda f: place)
    assert text.endswith("\n") and "\r" not in text
    commands = [parsed for line in text.split("\n") if (parsed := runner(line))]
    shown = sorted(
        (f for f in findings if f.state == "fired" and not f.accepted),
        key=lambda f: (-f.severity, f.id),
    )
    assert len(commands) == len(shown)
    for (command, properties, message), finding in zip(commands, shown, strict=True):
        kinds = {"error": "error", "warning": "warning", "info": "notice"}
        assert command == kinds[finding.severity.name]
        assert message == f"{finding.cause}\n{finding.remedy}"
        assert properties["title"] == f"{finding.id} {finding.title}"
        assert properties.get("file") == (place.file if place else None)
        assert properties.get("line") == (str(place.line) if place and place.line else None)


def test_escapes_by_the_letter():
    assert escape_data("50% a:b,c\r\nd") == "50%25 a:b,c%0D%0Ad"
    assert escape_property("a:b,c%") == "a%3Ab%2Cc%25"
    assert io.StringIO(escape_data("\n")).readlines() == ["%0A"]
