"""A drain that several API processes share through a folder; nothing stays for the next server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from ullage_vllm import draining
from ullage_vllm.draining import Draining, InFlight


def processes(folder: Path, count: int = 3) -> list[Draining]:
    return [Draining(folder / "shared", index, count) for index in range(count)]


def test_what_one_begins_all_refuse_at_once(tmp_path: Path) -> None:
    first, *others = processes(tmp_path)
    assert not any(one.asked for one in (first, *others))
    first.begin()
    assert all(one.asked for one in (first, *others))


def test_counts_of_all_are_added_and_the_silent_are_named(tmp_path: Path) -> None:
    one, two, three = processes(tmp_path)
    for process, count in ((one, 1), (two, 2), (three, 4)):
        for _ in range(count):
            process.enter()
    one.begin()
    assert one.in_flight() == InFlight(1, 2)
    two.tell()
    assert one.in_flight() == InFlight(3, 1)
    three.tell()
    assert one.in_flight() == InFlight(7, 0)
    ticket = three.enter()
    three.leave(ticket)
    three.tell()
    assert one.in_flight() == two.in_flight() == InFlight(7, 0)


def test_a_count_that_is_old_is_not_known(tmp_path: Path) -> None:
    one, two, _ = processes(tmp_path)
    one.begin()
    two.tell()
    past = time.time() - draining.ACKNOWLEDGED_S - 1
    os.utime(tmp_path / "shared" / "in_flight.1", (past, past))
    assert one.in_flight() == InFlight(0, 2)


@pytest.mark.parametrize("content", ["", "many", "3 4"])
def test_a_count_that_is_none_is_not_known(tmp_path: Path, content: str) -> None:
    one, *_ = processes(tmp_path, 2)
    one.begin()
    (tmp_path / "shared" / "in_flight.1").write_text(content)
    assert one.in_flight() == InFlight(0, 1)


def test_nothing_is_written_until_it_drains(tmp_path: Path) -> None:
    one, two, _ = processes(tmp_path)
    two.enter()
    two.tell()
    one.tell()
    assert list(tmp_path.iterdir()) == []


def test_one_process_needs_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert draining.shared_folder(1) is None
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    with pytest.raises(RuntimeError, match="2 API processes"):
        draining.shared_folder(2)


def test_the_folder_is_that_of_the_process_that_started_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    mine = draining.shared_folder(2)
    assert mine is not None and mine.parent == tmp_path
    assert mine == draining.shared_folder(2)
    # Another server with the same process id, started at another time.
    monkeypatch.setattr(draining, "_started", lambda pid: "another")
    assert draining.shared_folder(2) != mine


def test_the_oldest_request_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(draining.time, "time", lambda: now_s[0])
    one = Draining()
    assert one.oldest_s is None
    first = one.enter()
    now_s[0] = 105.0
    second = one.enter()
    assert one.oldest_s == 100.0
    one.leave(first)
    assert one.oldest_s == 105.0
    one.leave(second)
    assert one.oldest_s is None
