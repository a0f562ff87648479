"""Adapters applied in part are found as such, and nothing else beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.adapters import write_adapter
from tests.probes.planting import OTHERS, PROMPTS, Judged, judged
from ullage.engine.engine import Engine
from ullage.engine.lora import LoraAdapter
from ullage.engine.options import EngineOptions
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.learning import learn

Known = tuple[Engine, Baseline, LoraAdapter]


@pytest.fixture(scope="module", params=["none", "int8"])
def known(
    request: pytest.FixtureRequest,
    family_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Known:
    """A model that is well, with one adapter, and the baseline of both."""
    model = family_dir("llama")
    adapter = write_adapter(model, tmp_path_factory.mktemp("adapter"))
    options = EngineOptions(quantization=request.param)
    baseline = learn(model, PROMPTS, options, {"tuned": str(adapter)}, new_tokens=24)
    engine = Engine.load(model, replace(options, enable_lora=True))
    return engine, baseline, engine.load_lora("tuned", adapter)


def with_adapter(known: Known, adapter: LoraAdapter, *, every: int = 4) -> Judged:
    """Requests of the base and of the adapter in one batch."""
    engine, baseline, _ = known
    return judged(engine, baseline, OTHERS, loras=(None, adapter), every=every)


def test_the_whole_adapter_beside_the_base_raises_nothing(known: Known) -> None:
    found = with_adapter(known, known[2], every=1)
    assert found.rows > 40 and not found.fired, found.places


def test_layers_that_are_left_out_are_named(known: Known) -> None:
    whole = known[2]
    half = replace(whole, deltas={at: d for at, d in whole.deltas.items() if at[0] != 2})
    (one,) = with_adapter(known, half).fired
    assert (one.finding.id, one.kind, one.layers) == ("P006", "lora", (2,))
    assert "not applied" in one.finding.cause


def test_an_adapter_that_is_not_there_at_all_is_one_finding(known: Known) -> None:
    (one,) = with_adapter(known, replace(known[2], deltas={})).fired
    assert (one.kind, one.layers) == ("lora", (0, 1, 2))


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_another_scale_is_told(share: float, known: Known) -> None:
    whole = known[2]
    deltas = {
        at: tuple(replace(delta, b_OR=delta.b_OR * share) for delta in found)
        for at, found in whole.deltas.items()
    }
    (one,) = with_adapter(known, replace(whole, deltas=deltas)).fired
    assert (one.finding.id, one.kind) == ("P006", "lora")
    assert f"{share:.3g} times" in one.finding.cause


def test_a_site_that_is_left_out_is_named(known: Known) -> None:
    whole = known[2]
    half = replace(whole, deltas={at: d for at, d in whole.deltas.items() if at[1] != "down"})
    (one,) = with_adapter(known, half).fired
    assert one.kind == "lora" and "down" in one.finding.cause


def test_the_default_sampling_finds_it_in_64_tokens_of_one_request(known: Known) -> None:
    engine, baseline, whole = known
    half = replace(whole, deltas={at: d for at, d in whole.deltas.items() if at[0] != 1})
    found = judged(engine, baseline, loras=(half,))
    assert found.places == {("lora", (1,))} and found.tokens is not None and found.tokens <= 64


def test_requests_of_an_adapter_that_the_baseline_does_not_know_are_left_out(
    known: Known, tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    """Their products are not judged; all that no adapter changes is."""
    engine, _, _ = known
    other = engine.load_lora("other", write_adapter(family_dir("llama"), tmp_path, seed=9))
    try:
        found = with_adapter(known, other)
    finally:
        engine.unload_lora("other")
    assert not found.fired, found.places
