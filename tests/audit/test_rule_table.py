"""Every rule fires on what it is for, and is evaluated and clear on ten other subjects or more."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from audit_pool import (
    NO_SHARED,
    SHARED,
    config_of,
    config_path,
    own_names,
    plain_model,
    shared_names,
    side_files,
    write_directory,
    write_whole,
)
from deep_models import deep_of, filled, tall
from launch_cases import started
from rule_cases import CASES, Case, Fires

from ullage.anatomy import load
from ullage.audit import RULES, find_rule, judge, prepare
from ullage.audit.subject import Subject
from ullage.costs.hardware import parse_gpus

LEAST_CLEAR = 10
READ = ("deep", "tall")
"""Pools whose tensors are read."""
FIRING = [
    pytest.param(rule_id, fires, name, id=f"{rule_id}-{number}-{name}")
    for rule_id, case in CASES.items()
    for number, fires in enumerate(case.fires)
    for name in fires.names
]


def test_every_rule_has_its_cases_and_every_case_a_rule():
    assert sorted(CASES) == [rule.id for rule in RULES]


@pytest.mark.parametrize(("rule_id", "fires", "name"), FIRING)
def test_the_mutation_fires(rule_id: str, fires: Fires, name: str, tmp_path: Path):
    if not config_path(name).is_file():
        pytest.skip(NO_SHARED)
    place = fires.write(tmp_path / name, name)
    model = load(place)
    deep = deep_of(place) if CASES[rule_id].pool in READ else None
    gpus = parse_gpus(fires.gpu) if fires.gpu else None
    rule = find_rule(rule_id)
    launch, deployment = started(fires.launch, fires.deployment, tmp_path)
    finding = judge(rule, prepare(model, deployment, gpus, deep=deep, launch=launch)[0])
    assert finding.state == "fired", finding
    assert finding.severity.name == (fires.severity or rule.severity.name)
    assert fires.says in finding.cause
    # A cause carries numbers or names, a remedy says what to do, both as sentences.
    assert finding.cause.rstrip()[-1] == "." and finding.remedy.rstrip()[-1] == "."
    assert all(item.source for item in finding.evidence)


@cache
def _dressed(root: Path) -> tuple[Path, ...]:
    names = [*own_names(), *shared_names()]
    return tuple(
        write_directory(root / name, config_of(name), side_files(config_of(name))) for name in names
    )


@cache
def _whole(root: Path) -> tuple[Path, ...]:
    return tuple(write_whole(root / name, config_of(name)) for name in own_names())


@cache
def _filled(root: Path) -> tuple[Path, ...]:
    return tuple(filled()(root / name, config_of(name)) for name in own_names())


@cache
def _tall(root: Path) -> tuple[Path, ...]:
    return tuple(tall()(root / name, config_of(name)) for name in own_names())


POOLS = {"dressed": _dressed, "whole": _whole, "deep": _filled, "tall": _tall}


def _pool(case: Case, root: Path) -> list[tuple[str, Subject]]:
    gpus = parse_gpus(case.gpu) if case.gpu else None
    launch, deployment = started(case.launch, case.deployment, root)
    if case.pool == "plain":
        models = [(name, plain_model(name)) for name in [*own_names(), *shared_names()]]
    else:
        places = POOLS[case.pool](root / case.pool)
        models = [(place.name, _load(place)) for place in places]
    return [
        (
            name,
            prepare(model, deployment, gpus, deep=_deep(case, root, name), launch=launch)[0],
        )
        for name, model in models
        if name not in case.leave_out
    ]


def _deep(case: Case, root: Path, name: str):
    return deep_of(root / case.pool / name) if case.pool in READ else None


@cache
def _load(place: Path):
    return load(place)


@pytest.fixture(scope="session")
def pool_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.mark.parametrize("rule_id", CASES)
def test_the_rule_is_evaluated_and_clear_elsewhere(rule_id: str, pool_root: Path):
    rule = find_rule(rule_id)
    findings = [(name, judge(rule, s)) for name, s in _pool(CASES[rule_id], pool_root)]
    clear = [name for name, finding in findings if finding.state == "clear"]
    assert len(clear) >= LEAST_CLEAR, [(n, f.state, f.missing, f.cause) for n, f in findings]
    assert all(f.evidence for _, f in findings if f.state == "clear")


@pytest.mark.skipif(not SHARED.is_dir(), reason=NO_SHARED)
@pytest.mark.parametrize("rule_id", CASES)
def test_a_mutation_of_a_real_configuration_fires(rule_id: str):
    names = {name for fires in CASES[rule_id].fires for name in fires.names}
    built = any(fires.build is not None for fires in CASES[rule_id].fires)
    assert built or names & set(shared_names()), f"{rule_id} is only tried on own models"
