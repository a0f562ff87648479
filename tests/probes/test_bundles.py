"""Bundles of one machine are equal; an operator that computes otherwise is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.probes.test_numerics import IDS, loaded
from ullage.cli.main import main
from ullage.errors import BadUsage
from ullage.probes.numerics.bundle import Bundle, OperatorMark, read, write
from ullage.probes.numerics.bundle_compare import compare
from ullage.probes.numerics.bundle_take import bundle_of
from ullage.probes.numerics.trace import digest_of, trace


def taken(model: Any, ids: tuple[int, ...] = IDS, backward: bool = False) -> Bundle:
    traced = trace(model, ids, backward=backward, marks=True)
    return bundle_of(model, ids, traced, source="tiny", backward=backward)


class Planted(TorchDispatchMode):
    """A machine on which one operator gives something else."""

    def __init__(self, target: OperatorMark, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.target, self.change, self.times = target, change, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._schema.name != f"aten::{self.target.name}":
            return output
        first = output[0] if isinstance(output, tuple) else output
        if self.times or digest_of(first) != self.target.outputs[0]:
            return output
        self.times += 1
        changed = self.change(first)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_two_bundles_of_one_machine_are_equal(family: str, tmp_path: Path) -> None:
    model = loaded(family, torch.bfloat16)
    a, b = taken(model, backward=True), taken(model, backward=True)
    write(a, tmp_path / "a.json")
    found = compare(read(tmp_path / "a.json"), b)
    assert found.verdict == "same_bits"
    assert found.compared == len(b.operators) > 100
    assert not found.environment
    assert {one.backward for one in b.operators} == {False, True}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_planted_difference_of_one_operator_is_located(family: str, dtype: torch.dtype) -> None:
    model = loaded(family, dtype)
    a = taken(model)
    kinds = set()
    for index in range(3, len(a.operators), 9):
        target = a.operators[index]
        if a.tensors[target.outputs[0]].norm == 0 or "float" not in _dtype(a, target):
            continue
        earlier = [n for n, one in enumerate(a.operators) if one.outputs == target.outputs]
        with Planted(target, lambda output: output * 1.5) as planted:
            b = taken(model)
        assert planted.times == 1
        first = compare(a, b).first
        assert first is not None
        assert first.index == min(n for n in earlier if a.operators[n].name == target.name)
        assert first.inputs_apart == 0
        kinds.add(first.operator.kind)
    assert len(kinds) >= 4


def _dtype(bundle: Bundle, operator: OperatorMark) -> str:
    return bundle.tensors[operator.outputs[0]].dtype


def test_a_nan_on_one_machine_is_located() -> None:
    model = loaded("llama", torch.bfloat16)
    a = taken(model)
    target = next(one for one in a.operators if one.kind == "v" and one.layer == 1)
    with Planted(target, lambda output: output * float("nan")):
        b = taken(model)
    first = compare(a, b).first
    assert first is not None
    assert (first.operator.kind, first.operator.layer) == ("v", 1)
    assert "NaN" in first.what


def test_rounding_is_told_from_a_fault() -> None:
    model = loaded("llama", torch.float32)
    a = taken(model)
    target = next(one for one in a.operators if one.kind == "o" and one.layer == 0)
    with Planted(target, lambda output: output * (1 + 2.0**-23)):
        b = taken(model)
    found = compare(a, b)
    assert found.verdict == "rounding_only"
    assert found.first is None
    assert found.first_bits is not None
    assert found.first_bits.operator == target


def test_what_cannot_be_compared_is_said() -> None:
    a = taken(loaded("llama", torch.bfloat16))
    others = (
        (taken(loaded("llama", torch.float32)), "dtype"),
        (taken(loaded("llama", torch.bfloat16), IDS[:-1]), "token_ids"),
        (taken(loaded("llama", torch.bfloat16), backward=True), "backward"),
        (taken(loaded("gemma2", torch.bfloat16)), "model.embed_tokens.weight"),
    )
    for other, word in others:
        with pytest.raises(BadUsage, match=word):
            compare(a, other)


def test_broken_files_get_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write(taken(loaded("gpt2", torch.bfloat16)), file)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    whole = json.loads(file.read_text())
    for broken in (
        {**whole, "format": "other"},
        {**whole, "tensors": whole["tensors"][1:]},
        {key: value for key, value in whole.items() if key != "operators"},
        {**whole, "operators": [3]},
        {**whole, "environment": None},
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(BadUsage, match=r"a\.json"):
            read(file)
    file.write_text("{")
    assert main(["probe", "numerics", "compare", str(file), str(file)]) == 2


def test_operators_of_one_side_are_named() -> None:
    a = taken(loaded("llama", torch.bfloat16))
    without = [one for one in a.operators if one.name != "silu"]
    b = Bundle(a.source, a.dtype, a.token_ids, False, (("torch", "1"),), a.parameters,
               tuple(without), a.tensors)  # fmt: skip
    found = compare(a, b)
    assert found.verdict == "same_bits"
    assert len(found.unmatched) == len(a.operators) - len(without)
    assert found.unmatched[0].startswith("A: silu in model.layers.0.mlp")
    assert ("torch", dict(a.environment)["torch"], "1") in found.environment
