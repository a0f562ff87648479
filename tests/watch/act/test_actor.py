"""A policy at work: what is decided is done once, logged before and after, and looked at again."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from tests.watch import sights
from ullage.errors import BadInput
from ullage.watch.act.actor import Actor
from ullage.watch.act.conditions import parse_condition
from ullage.watch.act.journal import Journal
from ullage.watch.act.perform import Outcome
from ullage.watch.act.policy import Action, Limits, Policy

SHED = Action("shed", (parse_condition("kv_used_ratio > 0.95"),), 5.0, "cancel_oldest", 10.0)
DONE = Outcome("done", "ended 2 requests", 2, 100.0, 90.0)


class Engine:
    """Stands for an engine: what was asked of it, and what it answers."""

    def __init__(self, *outcomes: Outcome, dry_run: bool = False) -> None:
        self.dry_run = dry_run
        self.asked: list[str] = []
        self._outcomes = list(outcomes) or [DONE]

    async def perform(self, action: Action, url: str) -> Outcome:
        self.asked.append(url)
        return self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]


def play(path: Path, engine: Engine, ratios: list[float], **limits) -> tuple[list[dict], list[str]]:
    """(the journal, what was said) of a replica that is so full, every five seconds."""
    policy = Policy((SHED,), Limits(**{"min_pause_s": 1.0, **limits}))
    said: list[str] = []

    async def played() -> None:
        with Journal(str(path)) as journal:
            actor = Actor(policy, engine, journal, said.append, now_s=sights.NOW_S)
            for at, ratio in enumerate(ratios):
                time_s = sights.NOW_S + 5 * at
                gauges = {**sights.GAUGE_VALUES, "kv_used_ratio": ratio}
                view = sights.view(now=sights.snapshot(time_s, gauges=gauges))
                await actor.take(sights.sight(view, time_s=time_s))

    asyncio.run(played())
    return [json.loads(line) for line in path.read_text().splitlines()], said


def test_what_is_done_is_written_before_after_and_when_it_was_seen(tmp_path):
    log, said = play(tmp_path / "log", Engine(), [0.99, 0.99, 0.5])
    assert [entry["outcome"] for entry in log] == ["begun", "done", "seen"]
    done, seen = log[1:]
    assert (done["url"], done["action"], done["percent"]) == (sights.URL, "shed", 10.0)
    assert (done["promised_bytes"], done["freed_bytes"], done["num_requests"]) == (100.0, 90.0, 2)
    assert "kv_used_ratio is 0.99" in done["why"]
    assert (seen["before"]["kv_used_ratio"], seen["after"]["kv_used_ratio"]) == (0.99, 0.5)
    assert "freed 90.0 B, 100 B promised" in said[0]
    assert "was 99% full before shed, and is 50% now" in said[1]


def test_a_dry_run_says_what_would_be_and_leaves_no_attempt(tmp_path):
    would = Outcome("would", "would end 2 requests", 2, 100.0)
    log, said = play(tmp_path / "log", Engine(would, dry_run=True), [0.99, 0.99])
    assert [(entry["outcome"], entry["dry_run"]) for entry in log] == [("would", True)]
    assert "would end 2 requests" in said[0]
    with Journal(str(tmp_path / "log")) as journal:
        assert journal.attempts(sights.NOW_S + 60) == ()


def test_an_engine_that_cannot_is_asked_once(tmp_path):
    engine = Engine(Outcome("cannot", "HTTP 404"))
    log, _ = play(tmp_path / "log", engine, [0.99] * 10)
    assert engine.asked == [sights.URL]
    assert [entry["outcome"] for entry in log] == ["begun", "cannot", "blocked"]


def test_failures_count_as_attempts(tmp_path):
    engine = Engine(Outcome("failed", "HTTP 500"))
    play(tmp_path / "log", engine, [0.99] * 30, per_replica_per_hour=2)
    assert len(engine.asked) == 2


def test_limits_hold_across_restarts(tmp_path):
    first, second = Engine(), Engine()
    play(tmp_path / "log", first, [0.99] * 20, per_hour=3)
    log, _ = play(tmp_path / "log", second, [0.99] * 20, per_hour=3)
    assert (len(first.asked), len(second.asked)) == (3, 0)
    assert log[-1]["outcome"] == "blocked"


def test_what_is_no_entry_of_ours_is_passed_over(tmp_path):
    path = tmp_path / "log"
    play(path, Engine(), [0.99, 0.99])
    begun = json.loads(path.read_text().splitlines()[0])
    odd = [
        "", "[]", "{}", "nonsense", "[" * 10_000, json.dumps({**begun, "time_s": "now"}),
        json.dumps({**begun, "url": None}), json.dumps({**begun, "time_s": True}),
        json.dumps({**begun, "time_s": sights.NOW_S - 4000}),
        json.dumps({**begun, "time_s": sights.NOW_S + 4000}),
    ]  # fmt: skip
    with path.open("a") as stream:
        stream.write("\n".join(odd))
    with Journal(str(path)) as journal:
        (only,) = journal.attempts(sights.NOW_S + 60)
    assert (only.url, only.action, only.time_s) == (sights.URL, "shed", begun["time_s"])


def test_a_journal_may_be_a_pipe(tmp_path):
    """A container's log is /dev/stdout."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with Journal(str(pipe)) as journal:
        journal.write({"a": 1})
    assert os.read(reader, 100) == b'{"a": 1}\n'
    os.close(reader)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_journal_that_is_full_is_named():
    with pytest.raises(OSError) as raised, Journal("/dev/full") as journal:
        journal.write({"a": 1})
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "/dev/full")


def test_without_a_journal_nothing_is_done(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "log"):
        with pytest.raises(BadInput, match="cannot be written"):
            Journal(str(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_what_cannot_be_logged_is_not_done():
    engine = Engine()
    with pytest.raises(OSError, match="No space left"):
        play(Path("/dev/full"), engine, [0.99, 0.99])
    assert engine.asked == []
