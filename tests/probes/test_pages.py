"""docs/probes.md names each flag, way of building and verdict of rope, fingerprint and compare."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from tests.probes.test_rope import llama
from ullage.anatomy import load
from ullage.cli.probe import ACTIONS
from ullage.probes.rope.rope import probe_rope
from ullage.probes.sameness.answers import PROMPTS
from ullage.probes.sameness.fingerprints import ROUGHER
from ullage.probes.sameness.sameness import Verdict

PAGE = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()
MINE = ("rope", "fingerprint", "compare")


def section(beginning: str) -> str:
    found = re.search(rf"^## {beginning}.*?$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, beginning
    return found[1]


def test_every_action_is_in_the_first_example() -> None:
    example = PAGE.split("```")[1]
    for action in ACTIONS:
        assert f"ullage probe {action} " in example


@pytest.mark.parametrize("action", MINE)
def test_every_flag_is_told(action: str) -> None:
    parser = argparse.ArgumentParser()
    import_module(f"ullage.cli.probe_{action}").add_arguments(parser)
    text = section("Positions" if action == "rope" else "The same model")
    for option in parser._actions:
        for flag in option.option_strings:
            if flag not in ("-h", "--help", "--output"):
                assert re.search(rf"{flag}\b", text), flag


def test_every_way_of_building_has_its_row(tmp_path: Path) -> None:
    reading = probe_rope(load(llama(tmp_path)))
    rows = re.findall(r"^\| `([\w-]+)` \|", section("Positions"), re.M)
    assert sorted(rows) == sorted({one.built_by for one in reading.tables[0].readings})


def test_every_verdict_and_precision_has_its_row() -> None:
    text = section("The same model")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert [row for row in rows if row in get_args(Verdict)] == list(get_args(Verdict))
    for precision in ROUGHER:
        assert precision in text
    assert f"{len(PROMPTS)} fixed prompts" in text
