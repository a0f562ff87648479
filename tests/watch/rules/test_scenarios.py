"""Each fault of a simulated fleet is told by its own rules, and by no others."""

from __future__ import annotations

import pytest

from tests.watch.rules.scenarios import FAULT_S, SCENARIOS, Scenario, watch
from tests.watch.rules.simulator import START_S
from ullage.watch.rules.table import RULES


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_fault_is_told_by_its_rules_alone(scenario: Scenario):
    seen = watch(scenario.make(), scenario.end_s)
    first = seen.views[0].url
    here = {incident.finding.id for incident in seen.incidents if incident.url == first}
    elsewhere = [(i.url, i.finding.id) for i in seen.incidents if i.url != first]
    assert scenario.fires <= here <= scenario.fires | scenario.may
    assert elsewhere == []
    if not scenario.from_the_start:
        assert min(incident.since_s for incident in seen.incidents) >= START_S + FAULT_S
    for incident in seen.incidents:
        finding = incident.finding
        assert finding.cause.endswith(".") and finding.remedy.rstrip().endswith(".")
        assert finding.evidence and all(item.source for item in finding.evidence)
        severity = scenario.severities.get(finding.id)
        assert severity in (None, finding.severity.name)


def test_every_rule_has_a_fault_that_it_tells_of():
    told = {rule_id for scenario in SCENARIOS for rule_id in scenario.fires}
    # Silence is in test_rules.py, pods in test_pods.py.
    assert told == {rule.id for rule in RULES} - {"W017", "W025"}
