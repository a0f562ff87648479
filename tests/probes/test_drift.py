"""Sizes at norms and residuals against transformers'; the files, the command and the page."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.references import load_reference, smollm2_reference_dir
from ullage.anatomy import load
from ullage.cli.main import main
from ullage.errors import BadInput, UnsupportedModel
from ullage.probes.drift import drift
from ullage.probes.drift import file as drift_file
from ullage.probes.drift.drift import DriftReading, Spot, SpotReading, compare, spots
from ullage.probes.drift.take import take
from ullage.probes.sensitivity.changes import LADDERS

Family = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]


def prompts_of(seed: int, count: int = 12) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(seed)
    return [
        tuple(generator.integers(3, 300, int(generator.integers(12, 40))).tolist())
        for _ in range(count)
    ]


def read(path: Path, seed: int = 0, count: int = 12) -> DriftReading:
    return take(load(path), prompts_of(seed, count), 512, name=path.name)


def changed(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# --- readings ------------------------------------------------------------------------------------


def by_hooks(path: Path, prompts: Sequence[Sequence[int]]) -> dict[Spot, list[torch.Tensor]]:
    """What transformers' own modules are given and give, each prompt apart."""
    model = load_reference(path)
    found: dict[Spot, list[torch.Tensor]] = {}
    layers = model.model.layers

    def keep(place: str, layer: int) -> Callable[..., None]:
        def hook(module: Any, given: Any, made: Any = None) -> None:
            value = given[0] if made is None else made
            found.setdefault(Spot(place, layer), []).append(value[0].detach())

        return hook

    for number, layer in enumerate(layers):
        layer.input_layernorm.register_forward_pre_hook(keep("x", number))
        layer.input_layernorm.register_forward_hook(keep("normed", number))
        layer.self_attn.o_proj.register_forward_pre_hook(keep("mixed", number))
        layer.post_attention_layernorm.register_forward_pre_hook(keep("middle", number))
        layer.post_attention_layernorm.register_forward_hook(keep("mlp_normed", number))
        layer.mlp.down_proj.register_forward_pre_hook(keep("hidden", number))
        for part in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, part).register_forward_hook(keep(part, number))
    model.model.norm.register_forward_pre_hook(keep("x", len(layers)))
    model.model.norm.register_forward_hook(keep("normed", len(layers)))
    with torch.inference_mode():
        for ids in prompts:
            model(torch.tensor([ids]), use_cache=False)
    for number in range(len(layers)):
        parts = (found.pop(Spot(name, number)) for name in ("q_proj", "k_proj", "v_proj"))
        found[Spot("qkv", number)] = [torch.cat(three, -1) for three in zip(*parts, strict=True)]
    return found


@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen3", "smollm3", "mistral-window"])
def test_every_figure_is_what_transformers_modules_show(family: str, family_dir: Family) -> None:
    path, prompts = family_dir(family), prompts_of(1, 5)
    found = take(load(path), prompts, 512, name="tiny")
    expected = by_hooks(path, prompts)
    columns = np.split(
        found.log_rms_PC,
        np.cumsum([found.widths[spot.place] for spot in spots(found.num_layers)])[:-1],
        axis=1,
    )
    assert [one.spot for one in found.spots] == list(spots(found.num_layers))
    for one, log_rms_PW in zip(found.spots, columns, strict=True):
        values = [value.double() for value in expected[one.spot]]
        rest = torch.cat([value[1:] for value in values])
        assert one.rms == pytest.approx(float(rest.square().mean().sqrt()), rel=1e-3), one.spot
        assert one.mean == pytest.approx(float(rest.mean()), rel=2e-3, abs=1e-4)
        at = one.largest
        every = torch.cat(values)
        assert abs(at.value) == pytest.approx(float(every.abs().max()), rel=1e-3)
        assert at.value == pytest.approx(
            float(values[at.prompt][at.position, at.channel]), rel=1e-3
        )
        own = torch.stack([value[1:].square().mean(0).sqrt().log() for value in values])
        np.testing.assert_allclose(log_rms_PW, own, rtol=1e-3, atol=5e-3)
        assert one.not_finite == 0


def dead_and_massive(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.gate_proj.weight"][7] = 0.0
    tensors["model.layers.0.mlp.down_proj.weight"][11] *= 400.0


def test_channels_that_are_dead_or_massive_are_named(family_dir: Family, tmp_path: Path) -> None:
    found = read(changed(family_dir("llama"), tmp_path / "model", dead_and_massive))
    by = {one.spot: one for one in found.spots}
    dead = {spot: one.dead for spot, one in by.items() if one.dead}
    assert dead == {Spot("hidden", 1): (7,)}
    massive = by[Spot("x", 1)].massive
    assert [channel for channel, _ in massive] == [11]
    # The median of the other channels, by hand.
    rms = np.exp(2 * _columns(found, Spot("x", 1))).mean(0) ** 0.5
    assert massive[0][1] == pytest.approx(rms[11] / float(torch.tensor(rms).median()), rel=1e-3)
    assert not by[Spot("x", 0)].massive


def _columns(found: DriftReading, wanted: Spot) -> Any:
    first = 0
    for spot in spots(found.num_layers):
        if spot == wanted:
            return found.log_rms_PC[:, first : first + found.widths[spot.place]]
        first += found.widths[spot.place]
    raise AssertionError(wanted)


def huge(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][5] *= 3e5


def test_what_would_overflow_in_float16_is_told(family_dir: Family, tmp_path: Path) -> None:
    path = changed(family_dir("llama"), tmp_path / "model", huge)
    found = read(path)
    by = {one.spot: one for one in found.spots}
    values = torch.cat(by_hooks(path, prompts_of(0))[Spot("x", 2)])
    share = float((values.abs() > 65504 / 8).double().mean())
    assert by[Spot("x", 2)].near["float16"] == pytest.approx(share) and share > 0
    assert by[Spot("x", 2)].near["bfloat16"] == by[Spot("x", 1)].near["float16"] == 0
    assert not found.overflows  # float32 holds it
    assert Spot("x", 2) in {one.spot for one in replace(found, dtype="float16").overflows}


def test_a_model_is_held_to_the_type_that_it_will_be_served_in(
    family_dir: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(family_dir("llama"), tmp_path / "model", huge)
    assert main(["probe", "drift", str(path)]) == 0
    config = json.loads((path / "config.json").read_text())
    config[next(key for key in ("dtype", "torch_dtype") if key in config)] = "float16"
    (path / "config.json").write_text(json.dumps(config))
    assert read(path).dtype == "float16"
    assert main(["probe", "drift", str(path)]) == 1
    assert "OVERFLOWS" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_counted_where_they_begin(
    family_dir: Family, tmp_path: Path
) -> None:
    def break_it(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][4, 4] = torch.inf

    found = read(changed(family_dir("llama"), tmp_path / "model", break_it))
    assert found.not_finite[0].spot == Spot("hidden", 1)
    drift_file.to_document(found)  # holds no NaN


@pytest.mark.parametrize("family", ["olmo2", "mixtral", "falcon-7b"])
def test_what_cannot_be_read_is_one_sentence(
    family: str, family_dir: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedModel):
        read(family_dir(family))
    capsys.readouterr()
    assert main(["probe", "drift", str(family_dir(family))]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- files and the command -----------------------------------------------------------------------


def zero_k(tensors: Tensors) -> None:
    tensors["model.layers.2.self_attn.k_proj.weight"].zero_()


def test_a_saved_reading_is_read_again(family_dir: Family, tmp_path: Path) -> None:
    found = read(family_dir("llama"), count=3)
    file = tmp_path / "reading.json"
    drift_file.write(found, file)
    again = drift_file.read(file)
    assert drift_file.to_document(again) == drift_file.to_document(found)
    np.testing.assert_allclose(again.log_rms_PC, found.log_rms_PC, atol=0.00051)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "another"),
        ("num_layers", 10**9),
        ("num_layers", -1),
        ("widths", {"x": 64}),
        ("widths", None),
        ("heads", [4, 2]),
        ("tokens", []),
        ("prompts", ["one"]),
        ("dtype", "int3"),
        ("log_rms", "AAAA"),
        ("log_rms", "no base64!"),
        ("log_rms", 7),
        ("spots", []),
        ("spots", [{"spot": 3}]),
    ],
)
def test_a_file_that_is_no_reading_is_refused(
    path: str, value: object, family_dir: Family, tmp_path: Path
) -> None:
    file = tmp_path / "reading.json"
    drift_file.write(read(family_dir("llama"), count=2), file)
    document = json.loads(file.read_text())
    document[path] = value
    file.write_text(json.dumps(document))
    with pytest.raises(BadInput):
        drift_file.read(file)


def test_the_command_saves_and_compares(
    family_dir: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = str(family_dir("llama")), str(tmp_path / "reading.json")
    assert main(["probe", "drift", path, "--save", file]) == 0
    assert "massive" in capsys.readouterr().out
    assert main(["probe", "drift", path, "--against", file, "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["compared"]["drifted"] == [] and document["compared"]["p"] > 0.01
    broken = str(changed(family_dir("llama"), tmp_path / "model", zero_k))
    assert main(["probe", "drift", broken, "--against", path, "--output", "json"]) == 1
    first = json.loads(capsys.readouterr().out)["compared"]["drifted"][0]
    assert (first["layer"], first["kind"]) == (2, "k")
    assert main(["probe", "drift", broken, "--against", file]) == 1
    assert "layer 2" in capsys.readouterr().out
    assert main(["probe", "drift", path, "--against", file, "--prompt", "one text"]) == 1
    assert "not decided" in capsys.readouterr().out


def test_bad_input_is_one_sentence(
    family_dir: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(family_dir("llama"))
    text = tmp_path / "one.txt"
    text.write_text("a text of some words\n")
    capsys.readouterr()
    for flags in (
        ["--prompt", "a"],
        ["--against", "/nowhere"],
        ["--prompts", "/nowhere"],
        ["--prompt", "some text", "--prompts", str(text)],
        ["--save", "/nowhere/file.json"],
    ):
        assert main(["probe", "drift", path, *flags]) == 2, flags
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, flags


# --- real weights --------------------------------------------------------------------------------


def one_exponent_bit(tensors: Tensors) -> None:
    """Of bfloat16, as a norm weight of this model is most often stored."""
    tensors["model.layers.15.input_layernorm.weight"].view(torch.int32)[100] ^= 1 << 23


def test_a_model_that_memory_does_not_hold_is_one_sentence(
    family_dir: Family, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(family_dir("llama"))
    capsys.readouterr()
    monkeypatch.setattr("ullage.probes.sameness.fingerprints.MEMORY_MARGIN", 1e9)
    assert main(["probe", "drift", path]) == 2
    told = capsys.readouterr().err
    assert "in float32" in told and told.count("\n") == 1


def round_all(tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = tensors[name].bfloat16().float()


@pytest.mark.slow
def test_smollm2_over_other_texts_is_itself_and_a_flipped_bit_is_located(
    smollm2: Path, tmp_path: Path
) -> None:
    from ullage.engine.text.loading import load_tokenizer
    from ullage.probes.baseline.prompts import CHECKED, LEARNED

    encode = load_tokenizer(load(smollm2)).encode

    def of(path: Path, texts: Sequence[str]) -> DriftReading:
        return take(load(path), [tuple(encode(text))[:64] for text in texts], 512, name=path.name)

    before, now = of(smollm2, LEARNED), of(smollm2, CHECKED)
    assert before.dtype == "float32"
    found = compare(now, before)
    assert found.drifted == () and not found.paired
    # Healthy, and yet: massive channels, and a first token a hundred times the others.
    assert any(one.massive for one in before.spots)
    # The same weights from other files, and each rounded to bfloat16: nothing drifted.
    reference = smollm2_reference_dir(smollm2)
    assert compare(of(reference, LEARNED), before).drifted == ()
    rounded = compare(of(changed(reference, tmp_path / "rounded", round_all), LEARNED), before)
    assert rounded.paired and rounded.drifted == ()
    assert rounded.visible_factor is not None and rounded.visible_factor < 1.3
    broken = changed(reference, tmp_path / "broken", one_exponent_bit)
    first = compare(of(broken, LEARNED), before).drifted[0]
    assert (first.layer, first.kind, first.channel) == (15, "norm", 100)
    assert first.channels == 1


# --- the page ------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()
SECTIONS = {"drift": "Norms and residuals", "sensitivity": "Which weights matter"}


@pytest.mark.parametrize("action", SECTIONS)
def test_every_flag_is_told_on_the_page(action: str) -> None:
    parser = argparse.ArgumentParser()
    import_module(f"ullage.cli.probe_{action}").add_arguments(parser)
    text = PAGE.partition(f"## {SECTIONS[action]}")[2].partition("\n## ")[0]
    for option in parser._actions:
        for flag in option.option_strings:
            assert flag in ("-h", "--help", "--output") or f"{flag}" in text, flag


def test_every_field_of_a_spot_is_told_on_the_page() -> None:
    text = PAGE.partition("## Norms and residuals")[2].partition("\n## ")[0]
    for field in fields(SpotReading):
        assert field.name == "spot" or f"`{field.name}`" in text
    for place in drift.PLACES:
        assert f"`{place}`" in text
    for number in ("1%", "0.02 nats", "0.2 nats", "499", "2,000", "20 times"):
        assert number in text


def test_every_step_is_told_on_the_page() -> None:
    text = PAGE.partition("## Which weights matter")[2].partition("\n## ")[0]
    for perturbation, steps in LADDERS.items():
        assert f"| `{perturbation}` |" in text
        assert perturbation == "scale" or ", ".join(f"{step:g}" for step in steps) in text
