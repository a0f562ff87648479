"""A real `ullage watch` in a process of its own, and what its rounds said, rule by rule.

Holds the process and the counting. What should and should not have been said is for the callers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from plugin_server import KEY

Round = dict[str, Any]
STOP_S = 60.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ullage", "watch", *arguments, "--api-key", KEY]


@dataclass
class Watch:
    """`rounds` grows while the process runs; `said` is what it wrote on stderr, once it ended."""

    process: subprocess.Popen[str]
    rounds: list[Round] = field(default_factory=list)
    said: str = ""

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.rounds.append(json.loads(line))

    def await_round(self, num: int, limit_s: float = 120) -> Round:
        """The round of that number, from 0."""
        end = time.monotonic() + limit_s
        while len(self.rounds) <= num:
            assert time.monotonic() < end, f"{len(self.rounds)} rounds in {limit_s} s"
            if self.process.poll() is not None:
                assert self.process.stderr is not None
                raise AssertionError(f"the watch ended: {self.process.stderr.read()[-2000:]}")
            time.sleep(0.05)
        return self.rounds[num]


@contextmanager
def watching(*arguments: str) -> Iterator[Watch]:
    """`ullage watch` with JSON, until the block ends."""
    asked = command(*arguments, "--output", "json")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(asked, text=True, **pipes) as process:
        watch = Watch(process)
        reading = threading.Thread(target=watch.read, daemon=True)
        reading.start()
        try:
            yield watch
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            reading.join()
            assert process.stderr is not None
            watch.said = process.stderr.read()


@dataclass
class Heard:
    """What one rule said in all rounds; `last` is its last finding that fired, `why` the last
    reason for which it could not be evaluated."""

    states: Counter[str] = field(default_factory=Counter)
    last: dict[str, Any] | None = None
    why: str = ""


def heard(rounds: Sequence[Round]) -> dict[str, Heard]:
    """Rule by rule."""
    found: dict[str, Heard] = {}
    for one in rounds:
        for finding in one["findings"]:
            rule = found.setdefault(finding["id"], Heard())
            rule.states[finding["state"]] += 1
            if finding["state"] == "fired":
                rule.last = finding
            if finding["state"] == "not_evaluable":
                rule.why = "; ".join(finding["missing"])
    return dict(sorted(found.items()))


def evidence(finding: dict[str, Any]) -> str:
    """`name value unit` of each fact, on one line."""
    return "; ".join(f"{e['name']} {e['value']} {e['unit']}".strip() for e in finding["evidence"])


def spread(rounds: Sequence[Round], name: str) -> tuple[float, float, float]:
    """(least, mean, most) of a figure of the first replica, over the rounds that know it."""
    values = [v for one in rounds if (v := one["replicas"][0][name]) is not None]
    if not values:
        return 0.0, 0.0, 0.0
    return min(values), sum(values) / len(values), max(values)
