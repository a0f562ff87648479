"""Changing weights one at a time: what moves, what is ranked first, and that all comes back."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.engine.families import write_model
from tests.engine.references import load_reference
from ullage.anatomy import load
from ullage.cli import probe_sensitivity
from ullage.cli.main import main
from ullage.engine.linear import FloatLinear
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.errors import BadUsage
from ullage.probes.sensitivity import changes as changes
from ullage.probes.sensitivity.changes import LADDERS, PERTURBATIONS, Target, changed, targets
from ullage.probes.sensitivity.passes import Moved, Prompts, Runner, apart, run
from ullage.probes.sensitivity.sensitivity import (
    DEFAULT_BUDGET,
    Change,
    Ladder,
    Sensitivity,
    read,
    spread,
)

Family = Callable[[str], Path]
PROMPTS = ((5, 9, 200, 17, 31, 4), (77, 8, 300, 12), tuple(range(20, 60)))
# Windows, biases, ALiBi, parallel parts, norms behind parts, experts, learned positions, soft caps.
FORMS = (
    *("llama", "llama-tied-mha", "llama-biases", "mistral-window", "qwen3", "gemma2", "olmo2"),
    *("gpt2", "opt-post", "bloom", "falcon-7b", "phi", "mixtral", "smollm3"),
)


def decoder_of(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = load(path)
    return Decoder(model.anatomy.spec, Weights(model), FloatLinear, 512, dtype)


def reading(path: Path, **settings: object) -> Sensitivity:
    return read(load(path), PROMPTS, 512, name="tiny", **settings)  # type: ignore[arg-type]


# --- the pass ------------------------------------------------------------------------------------


@torch.inference_mode()
def by_transformers(path: Path, change: Callable[[object], None] = lambda _: None) -> list[object]:
    """Logits and attention weights of each prompt alone."""
    reference = load_reference(path)
    change(reference)
    return [
        reference(torch.tensor([ids]), output_attentions=True, use_cache=False) for ids in PROMPTS
    ]


@pytest.mark.parametrize("family", FORMS)
def test_a_pass_gives_the_logits_that_transformers_gives(family: str, family_dir: Family) -> None:
    found = run(decoder_of(family_dir(family)), Prompts(PROMPTS)).logits_TV
    outputs = by_transformers(family_dir(family))
    expected = torch.cat([one.logits[0] for one in outputs])  # type: ignore[attr-defined]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def scaled_q(model: object) -> None:
    model.model.layers[1].self_attn.q_proj.weight.mul_(1.3)  # type: ignore[attr-defined]


def entropy_of(outputs: Sequence[object]) -> torch.Tensor:
    """Of rows that see two keys or more, [layers, rows, heads], from the weights themselves."""
    rows = []
    for one in outputs:
        weights = torch.stack(one.attentions)[:, 0].double()  # type: ignore[attr-defined]
        rows.append(-torch.special.xlogy(weights, weights).sum(-1)[:, :, 1:].transpose(1, 2))
    return torch.cat(rows, 1)


def test_what_moves_is_what_moves_in_transformers(family_dir: Family) -> None:
    path = family_dir("llama")
    decoder = decoder_of(path)
    (target,) = targets(decoder, ["layers.1.q"])
    runner = Runner(decoder, Prompts(PROMPTS))
    with changed(target, "scale", 0.3, seed=0):
        found = runner.moved(target.first_layer(3))
    before, after = by_transformers(path), by_transformers(path, scaled_q)
    one, two = (
        torch.cat([out.logits[0] for out in outs]).double().log_softmax(-1)  # type: ignore[attr-defined]
        for outs in (before, after)
    )
    following = torch.cat([torch.tensor([*ids[1:], -1]) for ids in PROMPTS])
    rows = (following >= 0).nonzero()[:, 0]
    gap = (one - two)[rows, following[rows]].abs().mean()
    assert found.kl_nats == pytest.approx(float((one.exp() * (one - two)).sum(-1).mean()), rel=1e-3)
    assert found.logprob_nats == pytest.approx(float(gap), rel=1e-3)
    entropy = (entropy_of(before) - entropy_of(after)).abs().mean()
    assert found.entropy_nats == pytest.approx(float(entropy), rel=1e-3)
    same = (one.argmax(-1) == two.argmax(-1)).double().mean()
    assert found.agreement == pytest.approx(float(same))
    assert found.logprob_nats > 0.001


@pytest.mark.parametrize("family", FORMS)
def test_a_pass_from_a_layer_on_is_the_whole_pass(family: str, family_dir: Family) -> None:
    """Whatever is changed, nothing in front of it moves; so both must say the same."""
    decoder, layout = decoder_of(family_dir(family)), Prompts(PROMPTS)
    runner = Runner(decoder, layout)
    for target in targets(decoder):
        if not target.name.startswith(("layers.2.", "layers.1.", "final_norm", "lm_head")):
            continue
        with changed(target, "noise", 0.3, seed=1):
            short = runner.moved(target.first_layer(len(decoder.layers)))
            whole = runner.moved(None)
        assert whole.kl_nats == short.kl_nats, target.name
        assert whole.logprob_nats == short.logprob_nats
        assert whole.entropy_nats == pytest.approx(short.entropy_nats, rel=1e-9)


def test_numbers_that_are_not_finite_are_told_so(family_dir: Family) -> None:
    decoder = decoder_of(family_dir("llama"))
    runner = Runner(decoder, Prompts(PROMPTS))
    (target,) = targets(decoder, ["layers.1.down"])
    before = target.weight.clone()
    target.weight[3, 3] = torch.inf
    broken = runner.moved(1)
    target.weight.copy_(before)
    assert (broken.kl_nats, broken.logprob_nats, broken.entropy_nats) == (None, None, None)
    assert runner.moved(1) == Moved(0.0, 0.0, 0.0, 1.0)


# --- changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FORMS)
def test_every_change_is_taken_back_to_the_last_bit(family: str, family_dir: Family) -> None:
    decoder = decoder_of(family_dir(family))
    before = changes.checksum(decoder)
    for target in (*targets(decoder), *targets(decoder, ["*.head.1"])):
        for perturbation in PERTURBATIONS:
            with changed(target, perturbation, LADDERS[perturbation][-1], seed=3):
                assert changes.checksum(decoder) != before, (target.name, perturbation)
    assert changes.checksum(decoder) == before


def test_a_change_is_taken_back_when_the_pass_fails(family_dir: Family) -> None:
    decoder = decoder_of(family_dir("llama"))
    before = changes.checksum(decoder)
    with pytest.raises(KeyboardInterrupt), changed(targets(decoder)[0], "noise", 1.0, seed=0):
        raise KeyboardInterrupt
    assert changes.checksum(decoder) == before


@given(
    st.sampled_from(("noise", "scale")),
    st.sampled_from((0.01, 0.1, 1.0)),
    st.integers(0, 2**40),
    st.floats(1e-4, 1e4),
)
def test_steps_of_noise_and_scale_are_shares_of_the_weight(
    perturbation: str, step: float, seed: int, unit: float
) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(7)) * unit
    target = Target("layers.0.up", 0, "mlp", weight)
    with changed(target, perturbation, step, seed) as size:
        again = weight.clone()
    assert size == pytest.approx(step, rel=0.1)
    with changed(target, perturbation, step, seed):
        assert torch.equal(weight, again)


@given(st.sampled_from(LADDERS["bitflip"]), st.integers(0, 2**40))
def test_one_bit_of_one_bfloat16_is_flipped(bit: float, seed: int) -> None:
    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(9)).bfloat16().float()
    before = weight.view(torch.int32).clone()
    with changed(Target("layers.0.up", 0, "mlp", weight), "bitflip", bit, seed):
        flipped = before ^ weight.view(torch.int32)
    # bfloat16 is the upper half of float32.
    assert flipped[flipped != 0].tolist() == [1 << (int(bit) + 16)]


def test_a_head_is_its_rows_of_q_and_its_columns_of_o(family_dir: Family) -> None:
    decoder = decoder_of(family_dir("llama"))
    q, o = targets(decoder, ["layers.1.q.head.2", "layers.1.o.head.2"])
    layer = decoder.layers[1]
    (qkv,), (output,) = layer.qkv.tensors, layer.output.tensors
    assert q.weight.data_ptr() == qkv[32:].data_ptr() and q.weight.shape == (16, 64)
    assert o.weight.data_ptr() == output[:, 32:].data_ptr() and o.weight.shape == (64, 16)


@given(st.sampled_from(LADDERS["scale"]), st.sampled_from(["", ".head.0"]))
def test_scores_grow_alike_by_their_queries_and_by_their_keys(step: float, head: str) -> None:
    """q·k is as much larger whichever of the two is; of one head where each has its own keys."""
    runner, by_name = _equal_heads()
    moved = []
    for part in ("q", "k"):
        with changed(by_name[f"layers.1.{part}{head}"], "scale", step, seed=0):
            moved.append(runner.moved(1))
    q, k = moved
    assert q.logprob_nats == pytest.approx(k.logprob_nats, rel=1e-2, abs=1e-6)
    assert q.entropy_nats == pytest.approx(k.entropy_nats, rel=1e-2, abs=1e-6)
    assert q.entropy_nats


@cache
def _equal_heads() -> tuple[Runner, dict[str, Target]]:
    with TemporaryDirectory() as directory:
        decoder = decoder_of(write_model("llama-tied-mha", Path(directory)))
    names = ("layers.1.*", "layers.1.*.head.*")
    return Runner(decoder, Prompts(PROMPTS)), {one.name: one for one in targets(decoder, names)}


# --- the plan ------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1), st.data())
def test_what_a_budget_picks_covers_every_part_alike(
    sizes: dict[str, int], data: st.DataObject
) -> None:
    nothing = torch.empty(0)
    chosen = [
        Target(f"layers.{n}.{part}", n, part, nothing) for part in sizes for n in range(sizes[part])
    ]
    count = data.draw(st.integers(1, len(chosen) + 3))
    picked = spread(chosen, count)
    assert len(picked) == len({one.name for one in picked}) == min(count, len(chosen))
    counts = {part: sum(one.kind == part for one in picked) for part in sizes}
    open_ = [counts[part] for part, size in sizes.items() if counts[part] < size]
    assert all(max(counts.values()) <= least + 1 for least in open_)


def planted(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def quiet_but_one(tensors: dict[str, torch.Tensor]) -> None:
    """Every part adds a fiftieth of what it did, but the feed-forward of layer 1."""
    for name, tensor in tensors.items():
        if name.endswith(("down_proj.weight", "o_proj.weight")) and ".1.mlp." not in name:
            tensor.div_(50)


def test_the_layer_that_matters_is_ranked_first(family_dir: Family, tmp_path: Path) -> None:
    path = planted(family_dir("llama"), tmp_path / "planted", quiet_but_one)
    found = reading(path, patterns=("layers.*",), perturbations=("noise",), budget=60)
    # The norm in front of a feed-forward is in everything that it does.
    parts = ("gate", "up", "down", "feed_forward_norm")
    assert {one.name for one in found.ranking[:4]} == {f"layers.1.{part}" for part in parts}
    assert [(one.layer, one.kind) for one in found.cells()[:2]] in (
        [(1, "mlp"), (1, "norm")],
        [(1, "norm"), (1, "mlp")],
    )


def test_ladders_end_where_answers_first_move_beyond_rounding(family_dir: Family) -> None:
    """Each bisection's answer is that of trying every step."""
    path = family_dir("llama")
    found = reading(path, perturbations=("scale", "noise", "bitflip"), budget=400)
    decoder, layout = decoder_of(path), Prompts(PROMPTS)
    runner = Runner(decoder, layout)
    other = run(decoder_of(path, torch.bfloat16), layout)
    yardstick = apart(layout, runner.exact, other)
    assert found.yardstick == yardstick
    assert not found.untested
    by_name = {target.name: target for target in targets(decoder)}
    for ladder in found.ladders:
        seen = []
        for step in LADDERS[ladder.perturbation]:
            with changed(by_name[ladder.name], ladder.perturbation, step, seed=0):
                moved = runner.moved(None)
            if moved.logprob_nats is None or moved.logprob_nats > yardstick.logprob_nats:
                seen.append(step)
        smallest = None if ladder.smallest is None else ladder.smallest.step
        assert smallest == (seen[0] if seen else None), ladder


def test_the_budget_is_kept_and_what_it_left_out_is_told(family_dir: Family) -> None:
    found = reading(family_dir("llama"), budget=20)
    assert found.passes == 20 and found.restored
    assert 0 < len(found.ranking) < found.selected == 30
    assert found.untested
    told = {one.kind for one in found.ladders} | {one.split(" ")[0] for one in found.untested}
    assert told


def test_two_runs_say_the_same(family_dir: Family) -> None:
    one, two = (reading(family_dir("llama"), budget=25, seed=4).to_json() for _ in range(2))
    assert one == two
    other = reading(family_dir("llama"), budget=25, seed=5).to_json()
    assert other["ranking"]["weights"] != one["ranking"]["weights"]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_one_document(
    family_dir: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(family_dir("llama"))
    assert main(["probe", "sensitivity", path, "--budget", "30", "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passes"] <= 30
    assert document["restored"]["same"] is True
    assert document["ranking"]["weights"][0]["logprob_nats"] > 0
    assert main(["probe", "sensitivity", path, "--budget", "30", "--tensors", "*.head.1"]) == 0
    shown = capsys.readouterr().out
    assert ".head.1" in shown and "the same bytes as before" in shown


@pytest.mark.parametrize("value", [1.0, -1.5])
def test_a_bit_that_makes_no_number_of_a_weight_is_told_so(
    value: float, family_dir: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exponent of what lies between 1 and 2 wants but its highest bit to say Inf or NaN."""

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.input_layernorm.weight"].fill_(value)

    path = str(planted(family_dir("llama"), tmp_path / "planted", fill))
    flags = ["--perturb", "bitflip", "--tensors", "layers.1.mixer_norm", "--budget", "9"]
    assert main(["probe", "sensitivity", path, *flags, "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (first,) = document["ranking"]["weights"]
    assert first["step"] == 14
    assert (first["relative_size"], first["logprob_nats"]) == (None, None)
    assert first["beyond_rounding"]
    assert main(["probe", "sensitivity", path, *flags]) == 0
    shown = capsys.readouterr().out
    assert "not finite" in shown and "nan" not in shown


def test_a_ladder_that_ends_in_no_number_says_so() -> None:
    change = Change("final_norm", None, "norm", 14, None, Moved(None, None, None, 0.0))
    told = probe_sensitivity._ladder(
        Ladder("bitflip", "norm", "most", "final_norm", (change,), change)
    )
    assert told.split("final_norm")[1].split() == [
        *("bit", "14", "a", "number", "that", "is", "none,", "not", "finite")
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensors", "layers.99.q"],
        ["--tensors", "layers.1.up.head.0"],
        ["--tensors", ""],
        ["--perturb", "wind"],
        ["--perturb", "noise,noise"],
        ["--budget", "0"],
        ["--seed", "-1"],
    ],
)
def test_bad_flags_are_one_sentence(
    flags: list[str], family_dir: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(family_dir("llama"))
    capsys.readouterr()
    assert main(["probe", "sensitivity", path, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_the_flags_say_what_the_probe_takes_for_itself() -> None:
    """They are written twice, so that the help starts without torch."""
    parser = argparse.ArgumentParser()
    probe_sensitivity.add_arguments(parser)
    args = parser.parse_args(["model"])
    assert args.perturb == PERTURBATIONS == tuple(LADDERS)
    assert args.budget == DEFAULT_BUDGET


def test_answers_that_are_not_finite_are_refused(family_dir: Family, tmp_path: Path) -> None:
    def break_it(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan

    with pytest.raises(BadUsage, match="NaN or Inf"):
        reading(planted(family_dir("llama"), tmp_path / "planted", break_it))


def test_a_model_that_memory_does_not_hold_is_one_sentence(
    family_dir: Family, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(family_dir("llama"))
    capsys.readouterr()
    monkeypatch.setattr("ullage.probes.sameness.fingerprints.MEMORY_MARGIN", 1e9)
    assert main(["probe", "sensitivity", path]) == 2
    told = capsys.readouterr().err
    assert "in float32" in told and told.count("\n") == 1


@pytest.mark.slow
def test_smollm2_within_its_default_budget(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "sensitivity", str(smollm2), "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["restored"]["same"]
    assert 0.01 < document["yardstick"]["logprob_nats"] < 0.2
    # No sane rounding stays below a whole matrix's tenth: the embedding is every token's first say.
    assert document["ranking"]["weights"][0]["logprob_nats"] > document["yardstick"]["logprob_nats"]
