"""W026: what the server's own probe says of its model, place by place, and where it is silent."""

from __future__ import annotations

import pytest

from tests.watch.rules.cases import World
from ullage.findings.finding import Finding, Severity
from ullage.probes.baseline.rules import RULES as PROBE_RULES
from ullage.probes.baseline.rules import Rule
from ullage.telemetry.snapshot import ProbeFinding
from ullage.watch.rule import judge
from ullage.watch.rules.probe import MOST_TOLD, RULES, WARNING


def judged(*told: ProbeFinding) -> Finding:
    return judge(RULES[0], World(probed=told).subject()).finding


def test_what_only_warns_is_what_only_warns_in_the_server() -> None:
    assert set(WARNING) == {r.id for r in PROBE_RULES if r.severity is not Severity.error}


@pytest.mark.parametrize("rule", PROBE_RULES, ids=lambda rule: rule.id)
@pytest.mark.parametrize(
    ("layer", "where"),
    [("12", "layer 12"), ("many", "several layers"), ("", "outside of the layers")],
)
def test_a_rule_that_fires_there_is_told_with_kind_and_layer(
    rule: Rule, layer: str, where: str
) -> None:
    kind = rule.kinds[-1]
    found = judged(ProbeFinding(rule.id, kind, layer, "fired"))
    assert (found.state, found.severity) == ("fired", rule.severity)
    assert f"{rule.id}, {kind}, {where}" in found.cause
    (fact,) = found.evidence
    assert (fact.name, fact.value) == (f"{rule.id} fires", f"{kind}, {where}")
    assert "GET /ullage/entropy" in found.remedy and "ullage probe check URL" in found.remedy
    assert ("out of service" in found.remedy) == (rule.severity is Severity.error)


def test_a_rule_that_is_not_known_here_is_an_error() -> None:
    found = judged(ProbeFinding("P042", "", "", "fired"))
    assert (found.state, found.severity) == ("fired", Severity.error)


def test_one_error_among_warnings_is_told_first_and_makes_it_an_error() -> None:
    found = judged(
        ProbeFinding("P008", "entropy", "1", "fired"), ProbeFinding("P009", "size", "1", "fired"),
        ProbeFinding("P010", "new", "1", "fired"),
    )  # fmt: skip
    assert found.severity is Severity.error
    assert [fact.name for fact in found.evidence] == ["P010 fires", "P008 fires", "P009 fires"]


def test_many_places_are_counted_not_listed() -> None:
    found = judged(*(ProbeFinding("P001", "q", str(n), "fired") for n in range(32)))
    assert "layer 0, and 31 more" in found.cause
    assert len(found.evidence) == MOST_TOLD


def test_of_a_probe_that_has_read_nothing_or_is_off_nothing_is_clear() -> None:
    found = judged(*(ProbeFinding(rule.id, "", "", "not_evaluable") for rule in PROBE_RULES))
    assert found.state == "not_evaluable"
    assert "evaluate none of P001, P002" in found.missing[0]


def test_what_it_cannot_evaluate_is_named_beside_what_is_clear() -> None:
    found = judged(
        ProbeFinding("P001", "", "", "clear"), ProbeFinding("P006", "", "", "not_evaluable")
    )
    assert found.state == "clear"
    assert [fact.value for fact in found.evidence] == ["P001", "P006"]
