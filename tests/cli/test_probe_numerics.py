"""`ullage probe numerics`: exit codes, documents, sentences; docs/probes.md names every flag."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.families import write_model

from ullage.cli import probe_numerics
from ullage.cli.main import main
from ullage.probes.numerics.bundle_compare import Verdict
from ullage.probes.numerics.kernels import KERNELS
from ullage.probes.numerics.run import DTYPES

PAGE = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


def test_a_sound_model_and_two_runs_of_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file in files:
        asked = ["probe", "numerics", str(model), "--backward", "--save", file]
        assert main([*asked, "--output", "json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert document["sound"]
    assert document["first"] is None
    assert {norm["eps_fits"] for norm in document["norms"]} == {True}
    assert main(["probe", "numerics", "compare", *files]) == 0
    assert capsys.readouterr().out.startswith("the same bits")
    assert main(["probe", "numerics", "compare", *files, "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "same_bits"


def test_a_nan_in_a_file_is_a_finding(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.2.self_attn.v_proj.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert main(["probe", "numerics", str(tmp_path), "--dtype", "float16"]) == 1
    line = capsys.readouterr().out.splitlines()[1]
    assert re.match(r"NaN +layer 2 v  model\.layers\.2\.self_attn\.v_proj \(Linear\)", line)
    assert "its weight holds some" in line


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["compare", "a.json"], "1 files"),
        (["compare", "a.json", "b.json", "--backward"], "--backward"),
        (["compare", "nowhere.json", "nowhere.json"], "nowhere.json"),
        (["MODEL", "more"], "'more'"),
        (["MODEL", "--device", "nothing"], "--device"),
        (["MODEL", "--prompt", "x", "--save", "/nowhere/a.json"], "/nowhere/a.json"),
        (["MODEL", "--prompt", "x", "--backward"], "prompt"),
        (["MODEL", "--prompt", ""], "prompt"),
        (["/nowhere"], "nowhere"),
    ],
)
def test_bad_input_gets_a_sentence(
    asked: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model) if word == "MODEL" else word for word in asked]
    assert main(["probe", "numerics", *words]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert not told.out


def test_the_page_names_flags_verdicts_kernels_and_dtypes() -> None:
    section = re.search(r"^## Numerics.*?$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert section
    parser = argparse.ArgumentParser()
    probe_numerics.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for flag in flags - {"-h", "--help", "--output"}:
        assert re.search(rf"{flag}\b", section[1]), flag
    for word in (*get_args(Verdict), *KERNELS):
        assert f"`{word}`" in section[1]
    for dtype in DTYPES:
        assert dtype in section[1]
    assert set(DTYPES) == set(probe_numerics.DTYPES)
