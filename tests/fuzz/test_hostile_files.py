"""A few of the hostile files of benchmarks/fuzz: one document or one sentence, and nothing done.

The watch itself is tried too: what it must see, it sees.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mutations import FORMATS, write_case
from run import Watch, fuzz

FILES = 40


@pytest.mark.parametrize("kind", FORMATS)
def test_hostile_files_end_in_a_document_or_one_sentence(kind: str) -> None:
    total = fuzz(kind, FILES, jobs=1, first_seed=1_000_000)
    assert total.faults == []
    assert total.files == FILES and sum(total.codes.values()) == 2 * FILES
    assert set(total.codes) <= {0, 2}


@pytest.mark.parametrize(("kind", "number"), [("config.json", 8655), ("gguf", 4897)])
def test_what_a_full_run_once_found_stays_mended(kind: str, number: int) -> None:
    assert fuzz(kind, 1, jobs=1, first_seed=number).faults == []


@pytest.mark.parametrize("kind", FORMATS)
def test_a_case_is_made_again_from_its_number(kind: str, tmp_path: Path) -> None:
    name = write_case(tmp_path / "a", kind, 7).name
    write_case(tmp_path / "b", kind, 7)
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in "ab")
    assert one == other and (name == "a" or name in one)


def opened(watch: Watch, path: object, mode: str = "r") -> list[str]:
    watch.faults = []
    watch.hook("open", (path, mode, 0))
    return watch.faults


def test_the_watch_sees_files_outside_and_lets_those_inside(tmp_path: Path) -> None:
    watch = Watch(place=str(tmp_path), on=True)
    (tmp_path / "in").write_text("x")
    (tmp_path / "out").symlink_to("/etc/hostname")
    assert opened(watch, tmp_path / "in") == []
    assert opened(watch, str(tmp_path / "in"), "w") != []
    assert opened(watch, "/etc/hostname") != []
    assert opened(watch, tmp_path / ".." / "elsewhere") != []
    assert opened(watch, str(tmp_path / "out")) != []
    assert opened(watch, str(tmp_path) + "-beside/x") != []
    assert opened(watch, os.__file__) == []


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("os.system", (b"true",)),
        ("subprocess.Popen", ("true", [], None, None)),
        ("socket.connect", (None, ("127.0.0.1", 1))),
        ("compile", (b"1 + 1", "<string>")),
        ("exec", (compile("1 + 1", "config.json", "eval"),)),
        ("import", ("a_module_of_the_checkpoint", None, None, None, None)),
        ("pickle.find_class", ("os", "system")),
        ("marshal.loads", (b"",)),
        ("os.remove", ("x", -1)),
    ],
)
def test_the_watch_sees_what_reading_never_needs(event, arguments) -> None:
    watch = Watch(place="/nowhere", on=True)
    watch.hook(event, arguments)
    assert watch.faults
    watch = Watch(place="/nowhere", on=False)
    watch.hook(event, arguments)
    assert not watch.faults
