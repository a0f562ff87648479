"""The entry point: verbs, help, exit codes, and that only the chosen verb is paid for."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ullage.cli.main import VERBS, main

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def test_no_verb_prints_help_to_stderr(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for verb in VERBS:
        assert verb in printed.err


def test_version_and_help_exit_0(capsys):
    for arguments in (["--version"], ["--help"], ["size", "--help"], ["audit", "--help"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
    assert "--tensor-parallel-size" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["fit"], ["--nope"], ["size"], ["size", "a", "b", "c"]])
def test_what_is_not_understood_is_one_sentence(capsys, arguments):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("ullage")


def test_flags_are_not_guessed_from_their_beginnings(capsys, tmp_path):
    assert main(["size", str(tmp_path), "--tensor-par", "2"]) == 2
    assert "--tensor-par" in capsys.readouterr().err


def test_sizing_imports_nothing_that_is_heavy():
    """What `ullage size` may not load: each of these costs more than the sizing itself."""
    code = (
        "import sys; from ullage.cli.main import main; main(['size', '/nowhere']);"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'asyncio', 'urllib.request',"
        " 'http', 'ssl', 'multiprocessing', 'xml', 'email'} & set(sys.modules);"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_is_no_error():
    """`ullage … | head -c 1` ends quietly: the reader is gone before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from ullage.cli.main import main; sys.exit(main(['size', sys.argv[1]]))"
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(LLAMA))
        done = subprocess.run(
            [sys.executable, "-c", code, place],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def _run_llama(tail: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`ullage size` on a small model in a shell, with `tail` after the command."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(LLAMA))
        words = " ".join((f'"{sys.executable}" -m ullage size {place}', *flags))
        return subprocess.run(
            ["/bin/sh", "-c", f"{words} {tail}"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environment},
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_under_stdout_is_one_sentence_and_no_finding():
    done = _run_llama("> /dev/full")
    assert done.returncode == 2  # 1 would say that a finding fired
    assert done.stderr == "ullage size: No space left on device\n"


def test_a_closed_stdout_leaves_the_exit_code():
    done = _run_llama(">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_spells_only_ascii_gets_the_table():
    done = _run_llama("", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "weights" in done.stdout


def test_an_unknown_flag_points_to_the_help_of_its_verb(capsys, tmp_path):
    assert main(["size", str(tmp_path), "--nonsense"]) == 2
    assert "--nonsense (see ullage size --help)" in capsys.readouterr().err


def test_the_garbage_collector_is_as_it_was(tmp_path: Path) -> None:
    """It rests while a verb answers, also one that fails, and only then."""
    for arguments in (["size", str(tmp_path / "nothing")], ["explain", "A001"], ["explain", "X"]):
        main(arguments)
        assert gc.isenabled()
    gc.disable()
    try:
        main(["explain", "A001"])
        assert not gc.isenabled()
    finally:
        gc.enable()
