"""One engine in a process of its own, asked by lines of JSON: prefill, decode, trace, score.

Runs in each peer's environment, so standard library only. What an engine must offer is `Peer`;
the asking side is `process.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Json = dict[str, Any]


class Peer(Protocol):
    """What is measured, the same for all. Greedy, and no end-of-sequence ends anything."""

    def describe(self) -> Json:
        """Versions and settings, in the engine's own words."""

    def prefill(self, prompt_ids: list[int]) -> float:
        """Seconds until the first token of one prompt, alone; nothing of it stays."""

    def add(self, prompts: list[list[int]]) -> None:
        """Take prompts in and run until each has its first token; they stay."""

    def decode(self, steps: int) -> list[float]:
        """Seconds of each step in which every sequence that stays gets one token."""

    def clear(self) -> None:
        """End all sequences that stay."""

    def trace(self, rows: list[tuple[list[int], int]], concurrency: int) -> Json:
        """Run (prompt, answer length) rows, all waiting at the start, `concurrency` at a time."""

    def score(self, windows: list[list[int]], chunk: int) -> list[Json]:
        """Of each position but the first: log-probability of what stands there, and the argmax.

        A window runs in chunks of `chunk` tokens, so that most keys and values are read from the
        cache as it stores them.
        """


class TraceClock:
    """Times of one trace run: when each row got its first and its last token."""

    def __init__(self, num_rows: int) -> None:
        self._started = time.perf_counter()
        self.first_s: list[float | None] = [None] * num_rows
        self.last_s: list[float] = [0.0] * num_rows
        self.tokens = [0] * num_rows

    def token(self, row: int, count: int = 1) -> None:
        now = time.perf_counter() - self._started
        if self.first_s[row] is None:
            self.first_s[row] = now
        self.last_s[row] = now
        self.tokens[row] += count

    def result(self, rows: list[tuple[list[int], int]]) -> Json:
        """Raises AssertionError unless every row got exactly what it asked for."""
        wall_s = time.perf_counter() - self._started
        assert self.tokens == [asked for _, asked in rows], "a row got another number of tokens"
        return {
            "wall_s": wall_s,
            "prompt_tokens": sum(len(prompt) for prompt, _ in rows),
            "output_tokens": sum(self.tokens),
            "first_s": self.first_s,
            "last_s": self.last_s,
        }


def serve(make: Callable[[Json], Peer]) -> None:
    """Answer lines on stdin until it ends. argv[1] is the settings as JSON.

    Engines print what they like: the real stdout is kept for answers, theirs becomes stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(body: Json) -> None:
        answers.write(json.dumps(body) + "\n")
        answers.flush()

    started = time.perf_counter()
    try:
        peer = make(json.loads(sys.argv[1]))
        answer({"ok": {**peer.describe(), "start_s": round(time.perf_counter() - started, 1)}})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer({"ok": getattr(peer, name)(*arguments)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
