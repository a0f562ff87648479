"""No verdict but `works` comes without a finding that says why, whatever the engine."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
from cases import ALL, write
from peft_adapters import CASES, make_adapter, save_base
from test_cases import spec_of

from ullage.adapters.adapter import Adapter
from ullage.adapters.check import check
from ullage.adapters.engines import ENGINES
from ullage.adapters.read import read_adapter
from ullage.adapters.verdict import Judgement, ServeOptions
from ullage.anatomy import load
from ullage.anatomy.spec import ModelSpec
from ullage.errors import BadInput
from ullage.findings.finding import Severity

BAD = ("partial", "no_effect", "rejected")


def explained(judgement: Judgement) -> None:
    graver = [f.id for f in judgement.findings if f.state == "fired" and f.severity >= 3]
    if judgement.verdict in BAD:
        assert graver, (judgement.engine, judgement.verdict, judgement.modules[:1])


def test_an_error_is_graver_than_a_warning() -> None:
    assert Severity.error == 3


@pytest.mark.parametrize("name", ALL)
def test_every_case_of_the_field(name: str, tmp_path: Path) -> None:
    for number, case in enumerate(ALL[name]):
        adapter = read_adapter(write(case, tmp_path / str(number)))
        for engine in ENGINES:
            explained(check(adapter, spec_of(case.base), ServeOptions(engine=engine)))
            options = ServeOptions(engine=engine, **case.options)
            explained(check(adapter, spec_of(case.base), options))


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory: pytest.TempPathFactory):
    @lru_cache
    def spec(kind: str) -> ModelSpec:
        return load(save_base(kind, tmp_path_factory.mktemp(kind))).anatomy.spec

    return spec


def made(name: str, folder: Path) -> Adapter | None:
    """The adapter, or None for one whose files are refused before any engine is asked."""
    path = make_adapter(name, folder)
    try:
        return read_adapter(path)
    except BadInput:
        return None


@pytest.mark.parametrize("name", CASES)
def test_every_adapter_of_the_real_peft(name: str, tmp_path: Path, of_kind) -> None:
    adapter = made(name, tmp_path)
    if adapter is None:
        pytest.skip("not read at all")
    for engine in ENGINES:
        explained(check(adapter, of_kind(CASES[name].base), ServeOptions(engine=engine)))
        options = ServeOptions(engine=engine, max_lora_rank=64)
        explained(check(adapter, of_kind(CASES[name].base), options))
