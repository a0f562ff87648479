"""Files that are written whole or not at all, and what is not a file."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from ullage.errors import BadUsage
from ullage.findings.written import write_whole


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_whole(tmp_path / "rules.yml", text, field="--out")
        assert (tmp_path / "rules.yml").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["rules.yml"]


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "text", field="--out")
    reader.join(60)
    assert read == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_device_stays_one(tmp_path: Path) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        null.open("w").close()
    except OSError:
        pytest.skip("devices can be made by root only, where the file system lets them be")
    write_whole(null, "text", field="--out")
    assert stat.S_ISCHR(null.stat().st_mode)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "rules.yml", tmp_path / "link.yml"
    if is_there:
        target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "text", field="--out")
    assert link.is_symlink() and target.read_text() == "text"


@pytest.mark.parametrize("path", ["", "no/such/folder/file", "a\0b", "."])
def test_what_cannot_be_written_is_said_with_its_flag(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadUsage, match="--out: cannot be written"):
        write_whole(path, "text", field="--out")
    assert not list(tmp_path.iterdir())
