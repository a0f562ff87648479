"""What everybody trains gets no complaint for any engine, and hostile settings take no time."""

from __future__ import annotations

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.cases import BASES, Case, names, pairs, write
from tests.adapters.peft_adapters import CASES, make_adapter, save_base
from ullage.adapters.check import check
from ullage.adapters.verdict import Judgement, ServeOptions
from ullage.anatomy import load, read_config
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.spec import ModelSpec
from ullage.errors import BadInput

OTHERS = ("sglang", "tensorrt-llm", "peft")
QV = names("self_attn.q_proj", "self_attn.v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERY = names(*(f"{'self_attn' if leaf in ALL[:4] else 'mlp'}.{leaf}" for leaf in ALL))
FUSED = names("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj")
STANDARD: dict[str, tuple[list[str], list[str]]] = {
    "llama": (EVERY, list(ALL)), "llama-tied": (EVERY, list(ALL)), "qwen2": (EVERY, list(ALL)),
    "qwen3": (EVERY, list(ALL)), "gemma2": (EVERY, list(ALL)), "mixtral": (QV, list(ALL[:3])),
    "qwen3-moe": (QV, ["q_proj", "v_proj"]), "gpt-oss": (QV, ["q_proj", "v_proj"]),
    "phi3": (FUSED, ["qkv_proj", "o_proj", "down_proj"]),
}  # fmt: skip


def judged(base: str, shapes: Any, folder: Path, config: dict[str, Any], engine: str) -> Judgement:
    path = write(Case(base, shapes, "", 0, 0, config=config), folder)
    spec = read_config(json.loads(json.dumps(BASES[base])), file=base).spec
    return check(read_adapter(path), spec, ServeOptions(engine=engine))


def silent(judgement: Judgement) -> None:
    assert judgement.verdict == "works", (judgement.message, judgement.modules[:1])
    assert not [f.id for f in judgement.findings if f.state == "fired" and f.severity >= 2]


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("base", STANDARD)
def test_of_every_usual_family(base: str, engine: str, tmp_path: Path) -> None:
    modules, targets = STANDARD[base]
    config = {"target_modules": targets}
    silent(judged(base, pairs(modules), tmp_path / "a", config, engine))


@lru_cache
def spec_of(kind: str, folder: Path) -> ModelSpec:
    return load(save_base(kind, folder)).anatomy.spec


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("name", ["plain", "plain bin", "attention only", "custom name",
                                  "moe attention"])  # fmt: skip
def test_of_the_real_peft(
    name: str, engine: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = CASES[name].base
    spec = spec_of(kind, tmp_path_factory.getbasetemp() / f"standard-{kind}")
    adapter = read_adapter(make_adapter(name, tmp_path))
    judgement = check(adapter, spec, ServeOptions(engine=engine))
    assert judgement.verdict == "works", judgement.message


HOSTILE: dict[str, dict[str, Any]] = {
    "an expression that backtracks": {"target_modules": r"(([a-z_.0-9])+)+!"},
    "an exclusion that backtracks": {"exclude_modules": r"(([a-z_.0-9])+)+!"},
    "an expression that is none": {"target_modules": "(("},
    "many targets": {"target_modules": [f"model.layers.{i}.q_proj" for i in range(100_000)]},
    "many modules to save": {"modules_to_save": [f"x{i}" for i in range(20_000)]},
    "a pattern that backtracks": {"alpha_pattern": {r"(([a-z_.0-9])+)+!": 2}},
}  # fmt: skip


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_configuration_takes_no_time(name: str, engine: str, tmp_path: Path) -> None:
    start = time.monotonic()
    try:
        judged("llama", pairs(QV), tmp_path / "a", HOSTILE[name], engine)
    except BadInput as error:
        assert "\n" not in str(error)
    assert time.monotonic() - start < 3
