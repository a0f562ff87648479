"""`ullage probe`: its table of actions."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from ullage.cli.main import main
from ullage.cli.probe import ACTIONS


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_a_module_and_a_help(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module(f"ullage.cli.probe_{action.replace('-', '_')}")
    assert module.__doc__ is not None
    assert module.__doc__.startswith(f"`ullage probe {action} ")
    with pytest.raises(SystemExit) as left:
        main(["probe", action, "--help"])
    assert left.value.code == 0
    assert "--output" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["attention"], ["rope", "--nope", "x"]])
def test_what_is_not_understood_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("ullage probe: ")


def test_a_bad_path_is_refused_before_anything_heavy_is_loaded() -> None:
    code = (
        "import sys; from ullage.cli.main import main;"
        "main(['probe', 'attention', '/nowhere', '--prompt', 'a']);"
        "heavy = {'torch', 'transformers', 'numba'} & set(sys.modules);"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "/nowhere" in done.stderr
