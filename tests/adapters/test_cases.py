"""Every case of the field gets its verdict, and every twin stays silent."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from tests.adapters.cases import ALL, BASES, OTHERS, REPORTED, Case, write
from ullage.adapters.check import check
from ullage.adapters.verdict import Judgement, ServeOptions
from ullage.anatomy import read_config
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.spec import ModelSpec


@lru_cache
def spec_of(base: str) -> ModelSpec:
    return read_config(json.loads(json.dumps(BASES[base])), file=base).spec


def judged(case: Case, folder) -> Judgement:
    options = ServeOptions(engine=case.engine, **case.options)
    return check(read_adapter(write(case, folder)), spec_of(case.base), options)


def agrees(case: Case, judgement: Judgement) -> None:
    assert judgement.verdict == case.verdict, (judgement.message, judgement.modules[:2])
    assert (judgement.matched, judgement.total) == (case.matched, case.total)
    if case.message is not None:
        assert judgement.message is not None
        assert case.message in judgement.message
    if case.verdict != "rejected":
        assert judgement.message is None
    if case.states:
        assert {module.state.value for module in judgement.modules} == set(case.states)


@pytest.mark.parametrize("name", ALL)
def test_a_case_gets_its_verdict(name, tmp_path):
    case = ALL[name][0]
    agrees(case, judged(case, tmp_path / "adapter"))


@pytest.mark.parametrize("name", ALL)
def test_its_twin_stays_silent(name, tmp_path):
    twin = ALL[name][1]
    judgement = judged(twin, tmp_path / "adapter")
    assert twin.verdict == "works"
    agrees(twin, judgement)
    assert not [f.id for f in judgement.findings if f.state == "fired" and f.severity >= 2]


def test_there_are_as_many_cases_of_other_kinds_as_were_reported():
    assert len(OTHERS) >= len(REPORTED)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "peft", "ullage"])
def test_no_engine_leaves_a_case_unknown(name, engine, tmp_path):
    pytest.importorskip(f"ullage.adapters.engines.{engine.replace('-', '_')}")
    for number, case in enumerate(ALL[name]):
        adapter = read_adapter(write(case, tmp_path / str(number)))
        options = ServeOptions(engine=engine, max_lora_rank=case.options.get("max_lora_rank"))
        judgement = check(adapter, spec_of(case.base), options)
        assert judgement.verdict != "unknown"
        assert judgement.total == case.total
