"""docs/audit.md: each command is run, and must print what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from audit_pool import OWN

from ullage.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_prints_what_the_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    Path("llama/config.json").write_text((OWN / "llama.json").read_text())
    ran = 0
    for kind, file, text in BLOCK.findall(PAGE):
        if file:
            Path(file).write_text(text)
            continue
        assert kind == "console"
        command, _, expected = text.partition("\n")
        program, *arguments = shlex.split(command.removeprefix("$ "))
        assert program == "ullage"
        main(arguments)
        said = capsys.readouterr()
        assert said.err + said.out == expected, command
        ran += 1
    assert ran == 5


@pytest.mark.parametrize("form", ["table", "json", "sarif", "junit", "github"])
def test_the_page_names_every_format(form):
    assert f"`{form}`" in PAGE
