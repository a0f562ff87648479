"""Relations: zero but for rounding on every family that can be tapped, whichever code computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.families import FAMILIES, VARIATIONS
from tests.probes.planting import PROMPTS, read_all, tappable
from ullage.engine.linear import Int8Linear
from ullage.engine.options import EngineOptions
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline.judging import z_of
from ullage.probes.baseline.live import LiveReading
from ullage.probes.baseline.relation_sums import rounded
from ullage.probes.baseline.relations import KINDS, Relations, cells

FLOAT32 = 2.0**-24
# Residuals in units of their size: sums of some hundred numbers, each rounded once or twice.
MOST = {"float32": 1e-5, "bfloat16": 0.03}
# Other than how weights are multiplied: what attention reads back from a rougher cache is exactly
# what the engine attended to, so nothing is rougher there.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "kv-int8": {"kv_cache_dtype": "int8_per_token_head"},
    "kv-int4": {"kv_cache_dtype": "int4_per_token_head"},
}


def held(readings: list[LiveReading], relations: Relations) -> dict[str, float]:
    """Of each part the largest residual in units of its size, beyond its floor."""
    found: dict[str, float] = {}
    for one in readings:
        residuals = relations.in_numpy(one.row)
        beyond = np.maximum(residuals.residual - residuals.floor, 0.0) / residuals.size
        for cell, share in zip(relations.cells, beyond, strict=True):
            if not np.isnan(share):
                found[cell.part] = max(found.get(cell.part, 0.0), float(share))
    return found


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - VARIATIONS))
def test_they_hold_on_every_healthy_family(family: str, family_dir: Callable[[str], Path]) -> None:
    engine = tappable(family_dir(family))
    if engine is None:
        pytest.skip("experts, parallel parts or norms elsewhere: cannot be tapped")
    relations = Relations(sketches.take(engine.decoder), FLOAT32)
    found = held(read_all(engine, relations, PROMPTS[:2], 6), relations)
    assert {part: share for part, share in found.items() if share > MOST["float32"]} == {}
    form = relations.form
    unread = {"gate"} if not form.gated else set()
    unread |= {"head_norm"} if not relations.sketch.q_norm_LD.shape[-1] else set()
    unread |= {"lm_head"} if form.logit_cap is not None else set()
    assert set(KINDS) - set(found) == unread


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("eager", [True, False], ids=["torch", "compiled"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window", "llama3-rope"])
def test_they_hold_however_numbers_are_kept(
    family: str, eager: bool, way: str, family_dir: Callable[[str], Path]
) -> None:
    engine = tappable(family_dir(family), EngineOptions(enforce_eager=eager, **WAYS[way]))
    assert engine is not None
    rounding = 2.0**-9 if way == "bfloat16" else FLOAT32
    relations = Relations(sketches.take(engine.decoder), rounding)
    readings = read_all(engine, relations, PROMPTS[:2], 6)
    assert any(one.compiled for one in readings) is not eager
    found = held(readings, relations)
    most = MOST["bfloat16" if way == "bfloat16" else "float32"]
    # Keys and values are attended before they are rounded by nobody: the cache is what is read.
    assert {part: share for part, share in found.items() if share > most} == {}


@pytest.mark.parametrize("way", ["float32", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama-biases", "gpt2", "gemma"])
def test_machine_code_gives_what_numpy_gives(
    family: str, way: str, family_dir: Callable[[str], Path]
) -> None:
    pytest.importorskip("numba")
    engine = tappable(family_dir(family), EngineOptions(**WAYS[way]))
    assert engine is not None
    relations = Relations(sketches.take(engine.decoder), FLOAT32)
    for one in read_all(engine, relations, PROMPTS[:1], 3):
        mine, other = relations.of(one.row), relations.in_numpy(one.row)
        for name in ("size", "made", "said", "floor", "adapted"):
            a, b = getattr(mine, name), getattr(other, name)
            assert (np.isnan(a) == np.isnan(b)).all()
            assert np.nanmax(np.abs(a - b) / (np.abs(b) + other.size), initial=0) < 1e-5, name
        off = np.abs(mine.residual - other.residual) / other.size
        assert np.nanmax(off) < 1e-5


@pytest.mark.parametrize("numba", [True, False], ids=["machine-code", "numpy"])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_of_a_sum_over_many_keys_more_rounding_is_allowed_and_no_more(
    family: str, numba: bool, family_dir: Callable[[str], Path]
) -> None:
    """A baseline's prompts are short; SmolLM2's heads over 2,032 healthy keys were off by 2√n."""
    if numba:
        pytest.importorskip("numba")
    engine = tappable(family_dir(family))
    assert engine is not None
    relations = Relations(sketches.take(engine.decoder), FLOAT32)
    row = read_all(engine, relations, PROMPTS[:1], 2)[-1].row
    mixed = row.places["mixed"].reshape(relations.form.layers, relations.form.heads, -1)
    windows = np.array([one or 10**9 for one in relations.form.windows])
    own = [number for number, cell in enumerate(relations.cells) if cell.part == "attention"]

    def z_at(position: int, off: float) -> np.ndarray[Any, Any]:
        far = replace(row, position=position, attended=(mixed * (1 - off)).astype(np.float32))
        found = relations.of(far) if numba else relations.in_numpy(far)
        z = z_of(found, np.full(len(relations.cells), 2.0**-22))[own]
        return z.reshape(relations.form.layers, -1)

    for position in (63, 511, 2_031, 8_191):
        keys = np.minimum(windows, position + 1)
        for layer, count in enumerate(keys.tolist()):
            assert z_at(position, 2 * count**0.5 * FLOAT32)[layer].max() < 1
        assert z_at(position, 1e-3).min() > 20
    assert (z_at(8_191, 1e-5).max(axis=1) < z_at(63, 1e-5).max(axis=1)).tolist() == [
        window > 64 for window in windows.tolist()
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 200), st.floats(-30, 30))
def test_an_int8_product_is_held_to_what_it_really_multiplies(
    seed: int, width: int, power: float
) -> None:
    """Inputs rounded as the kernels round them leave float32 rounding of the product alone."""
    pytest.importorskip("numba")
    random = torch.Generator().manual_seed(seed)
    x_I = torch.randn(width, generator=random) * torch.rand(width, generator=random) * 2.0**power
    linear = Int8Linear(torch.randn(8, width, generator=random))
    whole_OI = linear.weight_OI[:, :width].double() * linear.scales_O[:, None].double()
    made_O = linear(x_I[None])[0].double()
    taken_I = torch.from_numpy(rounded(x_I.numpy()[None])[0]).double()
    size = float((whole_OI.abs() @ taken_I.abs()).max()) + 1e-30
    assert float((whole_OI @ taken_I - made_O).abs().max()) < 1e-6 * size


def test_every_part_has_cells_in_the_order_of_a_layer(family_dir: Callable[[str], Path]) -> None:
    engine = tappable(family_dir("llama"))
    assert engine is not None
    form = sketches.form_of(engine.decoder)
    found = cells(form)
    assert len(set(found)) == len(found)
    assert list(dict.fromkeys(cell.part for cell in found)) == list(KINDS)
    counts = {part: sum(cell.part == part for cell in found) for part in KINDS}
    assert counts["q"] == counts["attention"] == form.layers * form.heads
    assert counts["k"] == counts["v"] == form.layers * form.kv_heads
    assert counts["embedding"] == counts["final_norm"] == counts["lm_head"] == 1
