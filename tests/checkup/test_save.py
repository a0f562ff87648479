"""The report is written whole or not at all, and what forbids it is known before the run."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ullage.checkup import save
from ullage.checkup.save import check_place, write_report
from ullage.cli.main import main
from ullage.errors import BadUsage


def test_a_place_that_does_not_exist_yet_is_fine_and_is_not_made(tmp_path: Path) -> None:
    check_place(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["file", "file/below", "file/below/that"])
def test_a_place_under_a_file_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadUsage, match="--save: cannot be written"):
        check_place(tmp_path / below)


def test_a_directory_where_the_report_goes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(BadUsage, match=r"report\.html in it is a directory"):
        check_place(tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is Linux's")
def test_a_place_that_nobody_can_write_is_refused() -> None:
    with pytest.raises(BadUsage, match="cannot be written"):
        check_place(Path("/proc/self/nothing"))


def test_a_bad_place_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    assert main(["checkup", str(tmp_path / "no model"), "--save", str(taken)]) == 2
    error = capsys.readouterr().err
    assert "--save" in error
    assert "reading the model" not in error


def test_a_disk_that_turns_read_only_is_one_sentence_and_no_half_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(save, "render", lambda _: "page")
    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(BadUsage, match=r"--save: cannot be written \(Read-only file system\)"):
        write_report({}, tmp_path)
    assert list(tmp_path.iterdir()) == []
