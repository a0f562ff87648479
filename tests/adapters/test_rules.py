"""Every rule about adapters fires on what it is for, and is clear on ten sound adapters or more."""

from __future__ import annotations

import pytest

from tests.adapters.cases import Case, write
from tests.adapters.rule_cases import FIRES, SILENT
from tests.adapters.test_cases import spec_of
from ullage.adapters.check import check
from ullage.adapters.rules.table import RULES, Base
from ullage.adapters.verdict import Judgement, ServeOptions
from ullage.anatomy.adapters.read import read_adapter
from ullage.findings.finding import Finding, Severity

LEAST_CLEAR = 10
# Of these the twins know too little: no base is named to a check that is given none.
LACKING = {"L025"}


def judged(case: Case, folder, base: Base | None = None) -> Judgement:
    options = ServeOptions(engine=case.engine, **case.options)
    return check(read_adapter(write(case, folder)), spec_of(case.base), options, base)


def finding(judgement: Judgement, rule_id: str) -> Finding:
    return next(found for found in judgement.findings if found.id == rule_id)


def test_every_rule_has_its_case_and_every_case_a_rule():
    assert sorted(FIRES) == [rule.id for rule in RULES]


@pytest.mark.parametrize("rule_id", FIRES)
def test_a_rule_fires_on_what_it_is_for(rule_id, tmp_path):
    case, says, base = FIRES[rule_id]
    found = finding(judged(case, tmp_path / "adapter", base), rule_id)
    assert found.state == "fired", found
    assert says in found.cause
    assert found.cause.rstrip()[-1] == "." and found.remedy.rstrip()[-1] == "."
    assert found.evidence and all(item.source for item in found.evidence)


@pytest.fixture(scope="module")
def silent(tmp_path_factory) -> list[Judgement]:
    root = tmp_path_factory.mktemp("silent")
    return [judged(case, root / str(number)) for number, case in enumerate(SILENT.values())]


@pytest.mark.parametrize("rule_id", sorted(set(FIRES) - LACKING))
def test_a_rule_is_evaluated_and_clear_on_sound_adapters(rule_id, silent):
    states = [finding(judgement, rule_id).state for judgement in silent]
    assert states.count("clear") >= LEAST_CLEAR


def test_a_base_of_the_same_name_is_clear(tmp_path):
    case = FIRES["L025"][0]
    for name in ("Qwen/Qwen3-8B-Base", "Qwen--Qwen3-8B-Base_config.json", "/models/Qwen3-8B-Base"):
        judgement = judged(case, tmp_path / name.replace("/", "_"), Base(name=name))
        assert finding(judgement, "L025").state == "clear"


def test_nothing_graver_than_a_hint_fires_on_a_sound_adapter(silent):
    fired = [f for j in silent for f in j.findings if f.state == "fired"]
    assert [f.id for f in fired if f.severity > Severity.info] == []
