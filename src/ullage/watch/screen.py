"""Where a round is written: a live screen, plain text, or a JSON document per line.

Holds writing to streams. What stands in it is `terminal.py`'s and `document.py`'s.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ullage.watch import cells
from ullage.watch.document import document
from ullage.watch.sight import Sight
from ullage.watch.terminal import lines

PLAIN_WIDTH = 120


def write_json(sight: Sight, stream: TextIO) -> None:
    """One document on one line, whole before the next is begun."""
    stream.write(json.dumps(document(sight), allow_nan=False) + "\n")
    stream.flush()


def write_table(sight: Sight, stream: TextIO, *, verbose: bool = False) -> None:
    """The whole view as text: in colour on a terminal, in ASCII where no more can be spelled."""
    on_terminal = stream.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else PLAIN_WIDTH
    found = lines(sight, width=width, verbose=verbose)
    if on_terminal:
        console = Console(file=stream, highlight=False, markup=False)
        for line in found:
            console.print(line, soft_wrap=True)
    else:
        text = "".join(f"{line.plain.rstrip()}\n" for line in found)
        stream.write(text if spells(stream, text) else cells.plain(text))
    stream.flush()


def spells(stream: TextIO, text: str) -> bool:
    """Whether the stream's encoding has every character of the text."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class Screen:
    """A terminal that shows the last round, redrawn for each and when the window changes.

    The screen is the terminal's alternate one: what was there before comes back at the end. Till
    then it is hidden, so `standing` lines of it are drawn beneath every round.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        verbose: bool = False,
        standing: Sequence[str] = (),
    ) -> None:
        self._verbose = verbose
        self._standing = tuple(standing)
        self._console = Console(file=stream or sys.stdout, highlight=False, markup=False)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            vertical_overflow="crop",
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._sight: Sight | None = None
        self._notes: Sequence[str] = ()

    def __enter__(self) -> Screen:
        self._live.start()
        head = [Text("ullage watch", "bold"), Text("the first round is under way", "dim")]
        self._draw([*head, *self._below()])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, sight: Sight, notes: Sequence[str] = ()) -> None:
        """Draw the round; `notes` stand beneath it."""
        self._sight, self._notes = sight, notes
        self.redraw()

    def redraw(self) -> None:
        """Draw the last round again, in the size that the window has now."""
        if self._sight is None:
            return
        width, height = self._console.size
        below = self._below()
        room = max(height - len(below), 1)
        found = lines(self._sight, width=width, height=room, verbose=self._verbose)
        self._draw([*found, *below])

    def _below(self) -> list[Text]:
        width = self._console.size.width
        return [Text(cells.clean(note, width)) for note in (*self._standing, *self._notes)]

    def _draw(self, found: list[Text]) -> None:
        for line in found:
            line.no_wrap = True
            line.overflow = "ellipsis"
        if not spells(self._console.file, "".join(line.plain for line in found)):  # type: ignore[arg-type]
            found = [Text(cells.plain(line.plain)) for line in found]
        self._live.update(Group(*found), refresh=True)
