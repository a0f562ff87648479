"""`ullage adapter check`: one JSON document, a table of few lines, exit codes, one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.adapters.cases import ALL, BASES, QV, Case, names, pairs, works, write
from ullage.cli.main import main

KEYS = {
    "adapter", "base", "engine", "engine_version", "verdict", "matched", "total", "basis",
    "source", "message", "slot_bytes", "limits", "notes", "modules", "findings",
}  # fmt: skip
MODULE_KEYS = {
    "key", "module", "target", "scale_expected", "scale_applied", "state", "detail"
}  # fmt: skip
# The flags of the verb, frozen: a change is one that users see.
FLAGS = {
    "--base", "--engine", "--engine-version", "--max-lora-rank", "--max-loras",
    "--lora-target-modules", "--lora-dtype", "--tensor-parallel-size", "--tp", "-tp",
    "--enable-tower-connector-lora", "--no-enable-tower-connector-lora",
    "--enable-mixed-moe-lora-format", "--no-enable-mixed-moe-lora-format",
    "--fully-sharded-loras", "--no-fully-sharded-loras", "--is-3d-lora-weight",
    "--no-is-3d-lora-weight", "--output", "-v", "--verbose", "-h", "--help",
}  # fmt: skip
PLAIN = works("llama", pairs(names(*QV)), 4)


@pytest.fixture
def place(tmp_path):
    """A function that writes a case and its base, and returns the command's first arguments."""

    def made(case: Case = PLAIN) -> list[str]:
        base = tmp_path / "base.json"
        base.write_text(json.dumps(BASES[case.base]))
        write(case, tmp_path / "adapter")
        return ["adapter", "check", str(tmp_path / "adapter"), "--base", str(base)]

    return made


def document(capsys, arguments: list[str]) -> tuple[int, dict]:
    code = main([*arguments, "--output", "json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    return code, json.loads(printed.out)


@pytest.mark.parametrize(
    "name", ["vllm#34186 text tree on a wrapper", "vllm#6983 DoRA", "half of it wrapped"]
)
def test_the_document_says_everything_and_the_exit_code_the_verdict(name, place, capsys):
    for case in ALL[name]:
        code, said = document(capsys, place(case))
        assert set(said) == KEYS
        assert all(set(module) == MODULE_KEYS for module in said["modules"])
        assert (said["verdict"], said["matched"], said["total"]) == (
            case.verdict, case.matched, case.total
        )  # fmt: skip
        assert len(said["modules"]) == case.total
        assert code == int(case.verdict != "works")
        assert (said["message"] is None) == (case.verdict != "rejected")
        assert {f["state"] for f in said["findings"]} <= {"fired", "clear", "not_evaluable"}


def test_the_table_is_what_an_engineer_on_call_wants(place, capsys):
    assert main(place(ALL["compiled model"][0])) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no_effect: ")
    assert "0 of 4 modules applied" in lines[1]
    assert any("ullage adapter fix" in line for line in lines)
    assert any(line.startswith("error   L001") for line in lines)
    assert len(lines) <= 20


def test_a_working_adapter_takes_three_lines(place, capsys):
    assert main(place()) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_verbose_lists_modules_and_clear_rules(place, capsys):
    assert main([*place(), "-v"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("lora_A.weight → model.layers") == 4
    assert "clear   L007" in printed


def test_flags_reach_the_judge(place, capsys):
    wide = place(ALL["ms-swift#4221 rank 64"][0])
    assert document(capsys, wide)[1]["verdict"] == "rejected"
    code, said = document(capsys, [*wide, "--max-lora-rank", "64", "--max-loras", "3"])
    assert (code, said["verdict"]) == (0, "works")
    assert said["limits"] == {"--max-lora-rank": 64, "--max-loras": 3}
    few = [*place(), "--lora-target-modules", "q_proj,mlp.gate_proj"]
    assert document(capsys, few)[1]["verdict"] == "works"  # qkv_proj is one module
    assert document(capsys, [*place(), "--lora-target-modules", "o_proj"])[1]["matched"] == 0


def test_the_flags_are_frozen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["adapter", "check", "--help"])
    words = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", capsys.readouterr().out))
    assert words == FLAGS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine-version", "9.9"], "--engine-version"),
        (["--engine", "tgi"], "--engine"),
        (["--max-lora-rank", "17"], "--max-lora-rank"),
        (["--max-lora-rank", "0"], "--max-lora-rank"),
        (["--base", "/nonexistent"], "/nonexistent"),
        (["--output", "xml"], "--output"),
    ],
)
def test_bad_input_is_one_sentence(arguments, says, place, capsys):
    assert main([*place(), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and says in printed.err


def test_an_adapter_that_is_none_is_one_sentence(place, capsys, tmp_path):
    arguments = place()
    arguments[2] = str(tmp_path / "nothing")
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_control_characters_of_keys_do_not_reach_the_terminal(place, capsys):
    nasty = {key.replace("q_proj", "q_\x1b[31mproj"): v for key, v in PLAIN.shapes.items()}
    assert main(place(replace(PLAIN, shapes=nasty))) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_check_imports_nothing_heavy(place, tmp_path):
    code = (
        "import sys; from ullage.cli.main import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'numpy', 'transformers', 'peft', 'rich', 'safetensors') "
        "if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *place(), "--output", "json"],
        capture_output=True, text=True, check=True, env=dict(os.environ),
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_revision_of_a_cached_base_is_compared(place, capsys, tmp_path):
    arguments = place(replace(PLAIN, config={"revision": "0a1b2c3"}))
    base = tmp_path / "models--o--n" / "snapshots"
    for commit, state in (("0a1b2c3" + "0" * 33, "clear"), ("f" * 40, "fired")):
        (base / commit).mkdir(parents=True)
        (base / commit / "config.json").write_text(json.dumps(BASES["llama"]))
        arguments[4] = str(base / commit)
        said = document(capsys, arguments)[1]
        found = next(f for f in said["findings"] if f["id"] == "L026")
        assert found["state"] == state


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "peft", "ullage"])
def test_a_base_that_names_no_dtype_costs_the_bytes_only(engine, place, capsys, tmp_path):
    arguments = place()
    unsaid = {key: value for key, value in BASES["llama"].items() if key != "torch_dtype"}
    (tmp_path / "base.json").write_text(json.dumps(unsaid))
    code, said = document(capsys, [*arguments, "--engine", engine])
    assert (code, said["verdict"]) == (0, "works")
    assert not [f for f in said["findings"] if f["state"] == "fired"]
    if engine == "vllm":
        assert said["slot_bytes"] is None
