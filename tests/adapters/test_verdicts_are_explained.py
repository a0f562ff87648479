"""No verdict but `works` comes without a finding that says why, and `works` comes without blame."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from tests.adapters.cases import ALL, Case, names, pairs, write
from tests.adapters.peft_adapters import CASES, make_adapter, save_base
from tests.adapters.test_cases import spec_of
from ullage.adapters.check import check
from ullage.adapters.engines.table import ENGINES
from ullage.adapters.verdict import Judgement, ServeOptions
from ullage.anatomy import load
from ullage.anatomy.adapters.adapter import Adapter
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.spec import ModelSpec
from ullage.errors import BadInput
from ullage.findings.finding import Severity

# What is true of the files or the base however well the engine applies the adapter.
OF_ANY_ENGINE = {"L025", "L026", "L028", "L050", "L051", "L053"}
BAD = ("partial", "no_effect", "rejected")


def explained(judgement: Judgement) -> None:
    graver = [f.id for f in judgement.findings if f.state == "fired" and f.severity >= 3]
    if judgement.verdict in BAD:
        assert graver, (judgement.engine, judgement.verdict, judgement.modules[:1])
    if judgement.verdict == "works":
        blamed = [f for f in judgement.findings if f.state == "fired" and f.severity >= 2]
        assert {f.id for f in blamed} <= OF_ANY_ENGINE, (judgement.engine, blamed)


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


_Q, _V = names("self_attn.q_proj"), names("self_attn.v_proj")
# rule → an adapter, the engine that takes it whole, and the one that does not. Only "info" or
# nothing is said for the first.
TAKEN: dict[str, tuple[Case, str, str]] = {
    "L046": (
        Case("llama", pairs(_Q + _V, stem="_orig_mod.base_model.model."), "", 0, 0),
        "tensorrt-llm", "vllm"),
    "L043": (
        Case("llama", pairs(_Q + _V) | {"base_model.model.lm_head.weight": (256, 64)}, "", 0, 0,
             config={"modules_to_save": ["lm_head"]}),
        "tensorrt-llm", "vllm"),
    "L044": (
        Case("llama", pairs(_Q + _V), "", 0, 0, config={"bias": "all"}), "sglang", "vllm"),
    "L021": (
        Case("phi3", pairs(_Q + _V), "", 0, 0, config={"target_modules": ["q_proj", "v_proj"]}),
        "tensorrt-llm", "vllm"),
    "L049": (
        Case("llama", pairs(_Q + _V), "", 0, 0, config={"r": 4}), "tensorrt-llm", "vllm"),
}  # fmt: skip


@pytest.mark.parametrize("rule_id", TAKEN)
def test_what_one_engine_takes_is_no_fault_there_and_is_one_elsewhere(
    rule_id: str, tmp_path: Path
) -> None:
    case, takes, refuses = TAKEN[rule_id]
    adapter = read_adapter(write(case, tmp_path / "a"))

    def said(engine: str):
        judgement = check(adapter, spec_of(case.base), ServeOptions(engine=engine))
        return judgement.verdict, next(f for f in judgement.findings if f.id == rule_id)

    verdict, found = said(takes)
    assert verdict == "works"
    assert found.state == "clear" or (found.state == "fired" and found.severity is Severity.info)
    verdict, found = said(refuses)
    assert verdict != "works"
    assert found.state == "fired"
    assert found.severity > Severity.info
