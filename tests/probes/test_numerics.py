"""NaN, Inf and departures are traced to the module that makes them, in every kind of module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.engine.families import write_model
from ullage.probes.attention.through_transformers import load_model
from ullage.probes.numerics.apart import REFERENCES, departures
from ullage.probes.numerics.numerics import NumericsReading
from ullage.probes.numerics.places import place_of
from ullage.probes.numerics.run import read_models
from ullage.probes.numerics.trace import trace

IDS = tuple(range(5, 21))
FAMILIES = ("llama", "gpt2", "mixtral", "bloom", "gemma2", "gpt_neox")
KINDS = {"q", "k", "v", "qkv", "o", "attention", "mlp", "norm", "rope", "embedding", "layer"}


@cache
def loaded(family: str, dtype: torch.dtype) -> Any:
    with TemporaryDirectory() as directory:
        write_model(family, Path(directory), tokenizer=False)
        return load_model(directory, dtype)


def reference(family: str, dtype: torch.dtype) -> Any:
    model = loaded(family, REFERENCES[dtype])
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def called(model: Any) -> list[str]:
    """Modules that run: those of one layer and those outside, without whole stacks."""
    found: list[str] = []
    modules = dict(model.named_modules())
    handles = [
        module.register_forward_hook(lambda *_, name=name: found.append(name))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        model(torch.tensor([IDS]), use_cache=False)
    for handle in handles:
        handle.remove()
    places = [place_of(name, modules[name]) for name in dict.fromkeys(found)]
    return [one.path for one in places if one.layer in (None, 1) and one.kind != "model"]


@contextmanager
def planted(
    module: Any, change: Callable[[torch.Tensor], torch.Tensor], every: bool = False
) -> Iterator[None]:
    """The module's first output changed, or every one that has a gradient."""

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return change(output)
        if every:
            return tuple(
                change(one) if one is not None and one.requires_grad else one for one in output
            )
        return (change(output[0]), *output[1:])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def one_nan(output: torch.Tensor) -> torch.Tensor:
    changed = output.clone()
    changed.view(-1)[-1] = float("nan")
    return changed


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return one_nan(gradient)


def test_the_families_have_every_kind_of_module() -> None:
    found = {
        place_of(path, dict(model.named_modules())[path]).kind
        for family in FAMILIES
        for model in (loaded(family, torch.bfloat16),)
        for path in called(model)
    }
    assert found >= KINDS


@pytest.mark.parametrize(
    ("family", "path", "kind", "layer"),
    [
        ("llama", "model.layers.1.self_attn.k_proj", "k", 1),
        ("llama", "model.layers.1.self_attn", "attention", 1),
        ("llama", "model.layers.1", "layer", 1),
        ("llama", "lm_head", "embedding", None),
        ("gpt2", "transformer.h.1.attn.c_attn", "qkv", 1),
        ("gpt2", "transformer.h.1.attn.c_proj", "o", 1),
        ("gpt2", "transformer.h.1.mlp.c_proj", "mlp", 1),
        ("gpt2", "transformer.ln_f", "norm", None),
        ("bloom", "transformer.h.1.self_attention.dense", "o", 1),
        ("bloom", "transformer.h.1.self_attention.query_key_value", "qkv", 1),
        ("gpt_neox", "gpt_neox.layers.1.mlp.dense_4h_to_h", "mlp", 1),
        ("mixtral", "model.layers.1.mlp.experts", "mlp", 1),
    ],
)
def test_a_path_tells_layer_and_kind(family: str, path: str, kind: str, layer: int | None) -> None:
    place = place_of(path, loaded(family, torch.bfloat16).get_submodule(path))
    assert (place.kind, place.layer) == (kind, layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_in_any_module_is_traced_to_it(family: str) -> None:
    model = loaded(family, torch.bfloat16)
    for path in called(model):
        with planted(model.get_submodule(path), one_nan):
            (fault,) = trace(model, IDS).faults
        assert (fault.place.path, fault.what, fault.num_bad) == (path, "NaN", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_in_any_weight_is_traced_to_the_module_that_uses_it(family: str) -> None:
    model = loaded(family, torch.bfloat16)
    for path in called(model):
        module = model.get_submodule(path)
        for name, weight in module.named_parameters(recurse=False):
            held = weight.detach().clone()
            with torch.no_grad():
                # A row that the prompt has, whatever tokens and experts it is met by.
                every = place_of(path, module).kind == "embedding" or weight.ndim == 3
                weight[slice(None) if every else 1] = float("nan")
                (fault,) = trace(model, IDS).faults
                weight.copy_(held)
            first = path
            if path == "lm_head" and model.config.tie_word_embeddings:
                first = next(p for p in called(model) if "embed" in p or "wte" in p)
            assert fault.place.path == first, (path, name)
            assert name in fault.parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_in_any_modules_gradient_is_traced_to_it(family: str) -> None:
    model = loaded(family, torch.float32)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for path in called(model):
        if place_of(path, model.get_submodule(path)).kind == "rope":
            continue  # angles have no gradients
        with planted(model.get_submodule(path), NanGradient.apply, every=True):
            (fault,) = trace(model, IDS, backward=True).faults
        assert (fault.direction, fault.what) == ("backward", "NaN")
        tied = model.config.tie_word_embeddings and "embed" in place_of(path, None).kind
        # Of a matrix that is both, only the sum of both gradients is left.
        assert fault.place.path == path or (tied and fault.place.kind == "embedding")
    assert all(one.grad is None for one in model.parameters())


def test_an_overflow_names_the_operator() -> None:
    model = copy.deepcopy(loaded("llama", torch.float16))
    down = model.model.layers[1].mlp.down_proj
    down.weight.data.fill_(6e4)
    (fault,) = trace(model, IDS).faults
    assert (fault.place.path, fault.what) == ("model.layers.1.mlp.down_proj", "Inf")
    assert fault.operator in ("mm", "addmm", "linear")
    assert not fault.parameters


def test_what_a_module_computes_between_its_own_modules_is_its_own() -> None:
    model = copy.deepcopy(loaded("llama", torch.bfloat16))
    model.model.layers[2].self_attn.scaling = float("nan")
    (fault,) = trace(model, IDS).faults
    assert (fault.place.kind, fault.place.layer) == ("attention", 2)
    assert fault.operator is not None
    assert "attention" in fault.operator


@pytest.mark.parametrize("dtype", list(REFERENCES), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_models_stay_below_half_of_the_bound(family: str, dtype: torch.dtype) -> None:
    found = departures(loaded(family, dtype), reference(family, dtype), IDS, backward=True)
    assert not found.departures
    assert not found.not_judged
    assert {direction for direction, _ in found.ratios} == {"forward", "backward"}
    assert max(found.ratios.values()) < 0.5


@pytest.mark.parametrize("dtype", list(REFERENCES), ids=str)
@pytest.mark.parametrize("family", ["opt", "flex-olmo", "olmo-clip", "falcon-7b", "persimmon"])
def test_sound_models_that_cut_off_choose_or_write_in_place_are_sound(
    family: str, dtype: torch.dtype
) -> None:
    """ReLU, experts and clamps turn with rounding; falcon and olmo change results in place."""
    model = loaded(family, dtype)
    found = departures(model, reference(family, dtype), IDS, backward=True)
    assert not found.departures
    assert not found.not_judged
    assert not trace(model, IDS, backward=dtype != torch.float16).faults


@pytest.mark.parametrize("dtype", list(REFERENCES), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_that_is_off_is_charged_alone(family: str, dtype: torch.dtype) -> None:
    """Ten per cent too much, whatever the module: those after it get the reference's inputs."""
    model = loaded(family, dtype)
    for path in called(model):
        module = model.get_submodule(path)
        # The change must be seen however few experts or rows the module has.
        with planted(module, lambda output: output * 1.4):
            found = departures(model, reference(family, dtype), IDS).departures
        assert next(one.place.path for one in found if one.direction == "forward") == path
        within = [one.place.path for one in found if not path.startswith(one.place.path)]
        assert not within


def test_a_reading_is_one_document() -> None:
    model = copy.deepcopy(loaded("llama", torch.bfloat16))
    reading, _ = read_models(model, reference("llama", torch.bfloat16), IDS, name="tiny")
    assert isinstance(reading, NumericsReading)
    assert reading.sound
    assert reading.to_json()["first"] is None
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    reading, _ = read_models(model, reference("llama", torch.bfloat16), IDS, name="tiny")
    assert not reading.sound
    assert reading.not_finite_parameters == ("model.layers.0.mlp.up_proj.weight",)
    assert reading.to_json()["first"]["place"]["path"] == "model.layers.0.mlp.up_proj"
