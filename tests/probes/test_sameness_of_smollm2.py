"""Real weights: SmolLM2 beside its widened copy, and faults behind a bfloat16 one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.references import smollm2_reference_dir
from ullage.probes.sameness.fingerprints import of_model
from ullage.probes.sameness.marks import Fingerprint
from ullage.probes.sameness.sameness import Sameness, compare

pytestmark = pytest.mark.slow
Tensors = dict[str, torch.Tensor]


def layer(index: int, name: str) -> str:
    return f"model.layers.{index}.{name}.weight"


def scale(name: str, rows: slice, factor: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][rows] *= factor

    return change


def swap(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def flip(name: str, element: int, bit: int) -> Callable[[Tensors], None]:
    """One bit of a bfloat16: 7 is the lowest of the exponent."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.int16).view(-1)[element] ^= 1 << bit

    return change


FAULTS: dict[str, tuple[Callable[[Tensors], None], int, str]] = {
    "one head's q times 4": (scale(layer(7, "self_attn.q_proj"), slice(64, 128), 4), 7, "q"),
    "k zeroed": (scale(layer(12, "self_attn.k_proj"), slice(None), 0), 12, "k"),
    "an exponent bit of a norm": (flip(layer(15, "input_layernorm"), 100, 7), 15, "norm"),
    "gate and up swapped": (swap(layer(3, "mlp.gate_proj"), layer(3, "mlp.up_proj")), 3, "mlp"),
    "down one percent larger": (scale(layer(25, "mlp.down_proj"), slice(None), 1.01), 25, "mlp"),
}


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Path:
    return smollm2_reference_dir(smollm2)


@pytest.fixture(scope="module")
def mark(smollm2: Path) -> Fingerprint:
    """Of the GGUF file: Q4_1 and Q8_0."""
    return of_model(smollm2, answers=False)


def rounded(reference: Path, to: Path, change: Callable[[Tensors], None]) -> Path:
    """A bfloat16 copy with a fault in it."""
    to.mkdir()
    shutil.copy(reference / "config.json", to)
    tensors = {k: v.bfloat16() for k, v in load_file(reference / "model.safetensors").items()}
    change(tensors)
    held = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    return to


def judged(mark: Fingerprint, path: Path) -> Sameness:
    return compare(mark, of_model(path, answers=False))


def test_a_gguf_file_and_its_widened_copy_hold_the_same_numbers(
    mark: Fingerprint, reference: Path
) -> None:
    assert judged(mark, reference).verdict == "same_values"


def test_a_fault_is_located_behind_bfloat16(reference: Path, tmp_path: Path) -> None:
    wide = of_model(reference, answers=False)
    healthy = rounded(reference, tmp_path / "healthy", lambda _: None)
    assert judged(wide, healthy).verdict == "same_model_other_precision"
    for number, (name, (change, at, kind)) in enumerate(FAULTS.items()):
        bad = rounded(reference, tmp_path / str(number), change)
        found = judged(wide, bad)
        assert found.verdict == "not_the_same_model", name
        places = {(one.layer, one.kind) for one in found.differences}
        assert places == {(at, kind)}, name
        shutil.rmtree(bad)
