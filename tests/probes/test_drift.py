"""Sizes at norms and residuals against transformers'; what drifted, and how often sound ones do."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.engine.references import load_reference, smollm2_reference_dir
from ullage.anatomy import load
from ullage.cli.main import main
from ullage.errors import BadInput, BadUsage, UnsupportedModel
from ullage.probes import drift, drift_file
from ullage.probes.drift import DriftReading, Spot, SpotReading, compare, spots
from ullage.probes.drift_take import take
from ullage.probes.sensitivity_changes import LADDERS

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


# --- comparisons ---------------------------------------------------------------------------------


def test_other_prompts_of_one_model_are_no_drift(family_dir: Family) -> None:
    found = compare(read(family_dir("llama"), seed=1), read(family_dir("llama"), seed=2))
    assert found.drifted == () and found.p is not None and found.p > drift.FALSE_ALARMS
    assert found.visible_factor is not None and found.visible_factor < 3


def scale_head(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"][16:32] *= 4


def zero_k(tensors: Tensors) -> None:
    tensors["model.layers.2.self_attn.k_proj.weight"].zero_()


def double_norm(tensors: Tensors) -> None:
    tensors["model.layers.1.post_attention_layernorm.weight"][9] *= 4


def last_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"][3] *= 4


def dead_gate(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.gate_proj.weight"][50] = 0


FAULTS: dict[str, tuple[Callable[[Tensors], None], int | None, str, set[int], float]] = {
    "one head's q times 4": (scale_head, 1, "q", set(range(16, 32)), 4.0),
    "k zeroed": (zero_k, 2, "k", set(range(64, 96)), 0.0),
    "one norm weight times 4": (double_norm, 1, "norm", {9}, 4.0),
    "the last norm": (last_norm, None, "norm", {3}, 4.0),
    "a dead channel": (dead_gate, 0, "mlp", {50}, 0.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_located_though_the_prompts_are_others(
    fault: str, family_dir: Family, tmp_path: Path
) -> None:
    change, layer, kind, channels, factor = FAULTS[fault]
    before = read(family_dir("llama"), seed=1)
    now = read(changed(family_dir("llama"), tmp_path / "model", change), seed=2)
    found = compare(now, before)
    first = found.drifted[0]
    assert (first.layer, first.kind) == (layer, kind)
    assert set(first.some) <= channels and first.channels == len(channels)
    assert first.factor == pytest.approx(factor, rel=0.6, abs=1e-6)
    assert first.died == (factor == 0.0)
    assert found.p is not None and found.p <= drift.FALSE_ALARMS


def made(table: np.ndarray[Any, Any], prompts: tuple[str, ...] = ()) -> DriftReading:
    """A reading of one layer whose channels are these; of other prompts than all others."""
    made.count += 1  # type: ignore[attr-defined]
    prompts = prompts or (str(made.count),) * len(table)  # type: ignore[attr-defined]
    count, width = table.shape
    widths = dict.fromkeys(drift.PLACES, 1) | {"hidden": width - 8}
    return DriftReading(
        "made", "", "float32", 1, widths, (1, 1, 1), (2,) * count, prompts, (),
        table.astype(np.float32),
    )  # fmt: skip


made.count = 0  # type: ignore[attr-defined]


def test_sound_models_raise_no_more_alarms_than_stated() -> None:
    """Channels that depend on each other and on the sort of text, with heavy tails: 400 times."""
    generator = np.random.default_rng(5)
    alarms = 0
    for _ in range(400):
        common = generator.standard_t(3, (20, 3)) @ generator.normal(size=(3, 300))
        kinds = generator.integers(0, 3, 20)[:, None] * generator.normal(size=(1, 300))
        table = np.clip(common * 0.3 + kinds + generator.standard_t(2, (20, 300)) * 0.2, -20, 32)
        alarms += bool(compare(made(table[:8]), made(table[8:])).drifted)
    # Of 400 at a rate of 0.01, 13 or more have a chance below 0.0003.
    assert alarms <= 12


def test_sound_models_over_the_same_prompts_raise_no_more_alarms_than_stated() -> None:
    """Differences far above the least change, that channels share, of heavy tails: 400 times."""
    generator, marks = np.random.default_rng(6), tuple("abcdefghijkl")
    alarms = 0
    for _ in range(400):
        table = generator.normal(size=(12, 300))
        noise = generator.standard_t(3, (12, 3)) @ generator.normal(size=(3, 300))
        noise += generator.standard_t(2, (12, 300))
        found = compare(made(table, marks), made(np.clip(table + noise, -20, 32), marks))
        assert found.paired
        alarms += bool(found.drifted)
    assert alarms <= 12


@pytest.mark.parametrize("count", [8, 12])
def test_the_same_prompts_show_what_other_prompts_hide(count: int) -> None:
    generator, marks = np.random.default_rng(7), tuple("abcdefghijkl"[:count])
    table = generator.normal(0, 1.0, (count, 60))
    moved = table + generator.normal(0, 0.005, table.shape)
    moved[:, 20] += 0.4
    # Rounding of another kind: small, and always to one side.
    moved[:, 40] += 0.1
    found = compare(made(moved, marks), made(table, marks))
    assert [(one.spot.place, one.some) for one in found.drifted] == [("hidden", (14,))]
    assert found.drifted[0].factor == pytest.approx(math.exp(0.4), rel=0.02)
    assert compare(made(moved), made(table)).drifted == ()


def test_seven_prompts_are_too_few_to_be_held_against_themselves() -> None:
    table, marks = np.random.default_rng(7).normal(size=(7, 60)), tuple("abcdefg")
    assert not compare(made(table, marks), made(table, marks)).paired


@settings(deadline=None, max_examples=20)
@given(st.integers(5, 12), st.integers(5, 12), st.integers(0, 2**31))
def test_a_shift_far_beyond_the_spread_is_found(before: int, now: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    table = generator.normal(0, 0.1, (before + now, 60))
    table[before:, 33] += 3.0
    found = compare(made(table[before:]), made(table[:before]))
    # Channel 33 is the 27th of the feed-forward, behind six places of one channel.
    assert any(one.spot.place == "hidden" and 27 in one.some for one in found.drifted)


def test_too_few_prompts_decide_nothing(family_dir: Family) -> None:
    one, two = read(family_dir("llama"), 1, count=4), read(family_dir("llama"), 2, count=3)
    found = compare(one, two)
    assert found.p is None and found.drifted == () and found.why_not is not None


@pytest.mark.parametrize(("before", "now"), [(5, 5), (15, 2), (4, 6), (99, 1)])
def test_as_few_prompts_as_can_decide_do(before: int, now: int) -> None:
    """With all ways of telling the prompts apart looked at, the true one is the extreme one."""
    table = np.random.default_rng(1).normal(0, 0.1, (before + now, 60))
    table[before:, 33] += 5.0
    found = compare(made(table[before:]), made(table[:before]))
    assert found.drifted and found.p is not None
    ways = math.comb(before + now, now) / (2 if before == now else 1)
    assert found.p == pytest.approx(1 / ways, rel=1e-6)


def test_t_is_that_of_scipys_formula() -> None:
    """Written out for one channel: pooled variance, and the least spread beside it."""
    generator = np.random.default_rng(3)
    table = generator.normal(size=(11, 5)).astype(np.float32)
    labels = np.zeros((1, 11), np.float32)
    labels[0, 6:] = 1
    t, _ = drift._t_of_two(table, labels)
    before, now = table[:6].astype(float), table[6:].astype(float)
    pooled = (before.var(0, ddof=1) * 5 + now.var(0, ddof=1) * 4) / 9 + drift.LEAST_SPREAD**2
    expected = (now.mean(0) - before.mean(0)) / np.sqrt(pooled * (1 / 6 + 1 / 5))
    np.testing.assert_allclose(t[0], expected, rtol=1e-4)


def test_t_of_differences_is_that_of_the_formula() -> None:
    table = np.random.default_rng(3).normal(size=(9, 5)).astype(np.float32)
    t, _ = drift._t_of_one(table, np.ones((1, 9), np.float32))
    wide = table.astype(float)
    expected = wide.mean(0) / np.sqrt((wide.var(0, ddof=1) + drift.LEAST_SPREAD**2) / 9)
    np.testing.assert_allclose(t[0], expected, rtol=1e-4)


def test_unlike_models_are_refused(family_dir: Family) -> None:
    with pytest.raises(BadUsage, match="widths"):
        compare(read(family_dir("llama")), read(family_dir("llama-wide-heads")))


# --- files and the command -----------------------------------------------------------------------


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
    monkeypatch.setattr("ullage.probes.fingerprints.MEMORY_MARGIN", 1e9)
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
    from ullage.probes.prompts import CHECKED, LEARNED

    encode = load_tokenizer(load(smollm2)).encode

    def of(path: Path, texts: Sequence[str]) -> DriftReading:
        return take(load(path), [tuple(encode(text))[:64] for text in texts], 512, name=path.name)

    before, now = of(smollm2, LEARNED), of(smollm2, CHECKED)
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
