"""What is written where: whole documents, text that every stream can spell, a screen that fits."""

from __future__ import annotations

import io
import json

import pytest

from tests.watch import sights
from ullage.watch.rule import Judged
from ullage.watch.screen import Screen, write_json, write_table

SIGHT = sights.sight(sights.view(), sights.down(), judged=(Judged(sights.URL, sights.fired()),))


class Terminal(io.StringIO):
    """A terminal of UTF-8, as rich sees it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def encoded(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def test_a_document_is_one_line():
    stream = io.StringIO()
    write_json(SIGHT, stream)
    write_json(SIGHT, stream)
    lines = stream.getvalue().splitlines()
    assert [json.loads(line)["time_s"] for line in lines] == [sights.NOW_S] * 2


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp437"])
def test_the_table_can_be_spelled_by_every_stream(encoding):
    stream = encoded(encoding)
    write_table(SIGHT, stream)
    text = stream.buffer.getvalue().decode(encoding)
    assert "75%" in text
    assert "running 12" in text
    assert ("█" in text) == (encoding == "utf-8")
    assert "?" not in text
    assert "\x1b" not in text


def test_no_colour_goes_into_a_file_and_some_onto_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = Terminal(), io.StringIO()
    write_table(SIGHT, terminal)
    write_table(SIGHT, file)
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()


def test_the_screen_is_drawn_in_its_size_and_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    terminal = Terminal()
    with Screen(terminal) as screen:
        assert "the first round is under way" in terminal.getvalue()
        screen.show(SIGHT, ("shed the oldest: ended 2 requests",))
        drawn = terminal.getvalue()
        screen.redraw()
    assert "\x1b[?1049h" in drawn
    assert "ended 2 requests" in drawn
    assert drawn.count("\n") <= 3 * 12
    assert terminal.getvalue().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.getvalue()


def test_where_it_listens_stands_on_the_screen_in_every_round(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    terminal, line = Terminal(), "page on http://127.0.0.1:40123"
    with Screen(terminal, standing=(line,)) as screen:
        assert terminal.getvalue().count(line) == 1
        screen.show(SIGHT, ("shed the oldest: ended 2 requests",))
        screen.redraw()
        assert terminal.getvalue().count(line) == 3
    assert "ended 2 requests" in terminal.getvalue().rpartition(line)[2]
