"""`ullage audit`: exit codes, the JSON document, the table, choices of rules, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from audit_pool import OWN, config_of, side_files, write_directory, write_whole
from deep_models import fill
from launch_cases import SOUND_POD

from ullage.audit import RULES
from ullage.cli.main import main

LLAMA = str(OWN / "llama.json")


def document(capsys, *arguments: str) -> tuple[int, dict]:
    code = main(["audit", *arguments, "--output", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_model_exits_0(capsys):
    code, made = document(capsys, LLAMA)
    assert code == 0
    assert made["counts"]["fired"] == 0
    assert made["model"] == LLAMA
    assert made["deployment"]["engine"] == "vllm"
    assert made["unknowns"] == [] and made["unread"] == []


def test_the_document_has_the_promised_keys(capsys):
    _, made = document(capsys, LLAMA, "--tp", "3")
    assert {"schema", "model", "findings", "counts", "unknowns", "unread"} <= set(made)
    for finding in made["findings"]:
        assert set(finding) == {
            "id", "title", "severity", "state", "evidence", "cause", "remedy", "missing",
            "accepted",
        }  # fmt: skip
        assert finding["state"] in ("fired", "clear", "not_evaluable")
        assert bool(finding["missing"]) == (finding["state"] == "not_evaluable")
        assert bool(finding["cause"]) == bool(finding["remedy"]) == (finding["state"] == "fired")
        assert all(set(e) == {"name", "value", "unit", "source"} for e in finding["evidence"])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--tp", "3"], 1),
        (["--tp", "3", "--fail-on", "never"], 0),
        (["--tp", "4"], 0),
        (["--tp", "4", "--fail-on", "info"], 1),
        (["--tp", "4", "--fail-on", "warning"], 0),
        (["--tp", "3", "--ignore", "A061,A062,A064,A066"], 0),
        (["--tp", "3", "--select", "A001"], 0),
        (["--dtype", "float16", "--fail-on", "warning"], 1),
    ],
)
def test_the_exit_code_follows_fail_on(arguments, code, capsys):
    assert main(["audit", LLAMA, *arguments]) == code


def test_select_and_ignore_choose_rules(capsys):
    _, made = document(capsys, LLAMA, "--select", "a001,A003", "--ignore", "A003")
    assert [finding["id"] for finding in made["findings"]] == ["A001"]


@pytest.mark.parametrize("flag", ["--select", "--ignore"])
def test_an_unknown_rule_is_bad_usage(flag, capsys):
    assert main(["audit", LLAMA, flag, "A001,B7"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "B7" in said.err and len(said.err.splitlines()) == 1


def test_devices_without_sizes_become_ranks(capsys):
    _, made = document(capsys, LLAMA, "--gpu", "H100:2")
    assert made["deployment"]["tensor_parallel_size"] == 2
    assert "tensor_parallel_size 2" in made["decisions"][0]


def test_sizes_that_the_planner_refuses_leave_memory_open(capsys):
    code, made = document(capsys, LLAMA, "--gpu", "H100:4", "--tp", "3")
    states = {f["id"]: f for f in made["findings"]}
    assert code == 1 and states["A061"]["state"] == "fired"
    assert states["A142"]["state"] == "not_evaluable"
    assert "do not divide" in states["A142"]["missing"][0]


def test_the_table_puts_the_gravest_first_and_says_what_was_missing(capsys):
    main(["audit", LLAMA, "--tp", "3", "--dtype", "float16"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    first = [line for line in out.splitlines() if line[:1].isalpha()]
    assert first[0].startswith("error") and "warning A052" in out
    assert out.index("error") < out.index("warning A052") < out.index("Not evaluated")
    assert "for want of --gpu NAME" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "Clear (" not in out


def test_verbose_lists_clear_rules_with_their_evidence(capsys):
    main(["audit", LLAMA, "-v"])
    out = capsys.readouterr().out
    assert "Clear (" in out and "A026  Rotary dimensions per head" in out


def test_what_is_not_understood_is_said_and_never_clear(tmp_path, capsys):
    config = {**config_of("llama"), "model_type": "nobody_knows_me", "architectures": ["Nobody"]}
    place = write_directory(tmp_path, config)
    _, made = document(capsys, str(place))
    assert made["unknowns"]
    main(["audit", str(place)])
    assert "Not understood" in capsys.readouterr().out


def test_a_whole_directory_evaluates_all_but_the_hardware(tmp_path, capsys):
    place = write_whole(tmp_path, config_of("llama"))
    fill(place / "model.safetensors")
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(SOUND_POD)
    arguments = ("--gpu", "H100", "--deep", "--deployment", str(manifest))
    _, made = document(capsys, str(place), *arguments)
    open_rules = {f["id"]: f["missing"] for f in made["findings"] if f["state"] == "not_evaluable"}
    # Two layers have no others to be compared with.
    assert open_rules == {"A160": ["norm weights of one role in 3 layers or more"]}
    assert made["counts"]["clear"] == len(RULES) - len(open_rules)
    sums = {tensor["sum64"] for tensor in made["deep"]["tensors"]}
    assert made["deep"]["num_bytes"] > 0 and all(len(text) == 16 for text in sums)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", "[1, 2]", "tokenizer_config.json"),
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", '{"a": 1, "a": 2}', "twice"),
        ("config.json", '{"model_type": "llama", "hidden_size": -4}', "hidden_size"),
    ],
)
def test_bad_files_give_one_sentence_and_exit_2(name, content, says, tmp_path, capsys):
    write_directory(tmp_path, config_of("llama"), {name: content})
    assert main(["audit", str(tmp_path), "--output", "json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and says in said.err and len(said.err.splitlines()) == 1


ODD = [None, True, -1, 10**30, 1e308, "x", [], [None], {}, {"content": 5}, [{"name": 3}]]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_values_in_side_files_never_crash(odd, tmp_path, capsys):
    files = side_files(config_of("llama"))
    files["generation_config.json"] = {"eos_token_id": odd, "pad_token_id": odd}
    files["tokenizer_config.json"] = {
        "added_tokens_decoder": odd,
        "eos_token": odd,
        "chat_template": odd,
        "auto_map": odd,
    }
    config = {**config_of("llama"), "auto_map": odd, "pad_token_id": odd, "eos_token_id": odd}
    write_directory(tmp_path, config, files)
    code = main(["audit", str(tmp_path), "--output", "json"])
    said = capsys.readouterr()
    assert code in (0, 1, 2)
    if code == 2:
        assert said.out == "" and len(said.err.splitlines()) == 1
    else:
        json.loads(said.out)


def test_json_is_one_document_on_a_narrow_terminal():
    """Nothing wraps the document, whatever the terminal's width says."""
    out = subprocess.run(
        [sys.executable, "-m", "ullage", "audit", LLAMA, "--output", "json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "20"},
    ).stdout
    assert len(out.splitlines()) == 1
    json.loads(out)


def test_the_audit_loads_nothing_heavy():
    code = (
        "import sys, ullage.cli.main as m; m.main(['audit', sys.argv[1], '--output', 'json']);"
        "print([n for n in ('torch','transformers','numpy','rich','asyncio','urllib.request')"
        " if n in sys.modules], file=sys.stderr)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, LLAMA], capture_output=True, text=True, check=True
    )
    assert said.stderr.strip() == "[]"
