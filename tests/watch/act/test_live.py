"""A policy against the embedded engine: what it promised is freed, what is drained is finished."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.engine.driving import slow_steps
from tests.engine.families import write_model
from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server
from ullage.telemetry.scrape import DirectSource
from ullage.watch.act.actor import Actor
from ullage.watch.act.conditions import parse_condition
from ullage.watch.act.journal import Journal
from ullage.watch.act.perform import Performer
from ullage.watch.act.policy import Action, Do, Limits, Policy
from ullage.watch.watcher import Watcher

KEY = "secret"
INTERVAL_S = 0.2
MAX_ROUNDS = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("acted"))


@pytest.fixture
def server(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerHandle]:
    slow_steps(monkeypatch)
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_seqs=4)
    handle = start_server(model_dir, options, api_key=KEY, enable_control_routes=True)
    yield handle
    handle.stop()


class Callers:
    """Four callers, each of whom asks again as soon as it is answered, until told to stop or
    refused: whatever the machine's speed, requests are running when it is acted."""

    def __init__(self, server: ServerHandle) -> None:
        self._url = f"{server.url}/v1/completions"
        room = server.engine.max_model_len - 8
        self._body = {"prompt": "hello", "max_tokens": room, "temperature": 0, "ignore_eos": True}
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._asking = [self._pool.submit(self._ask) for _ in range(4)]

    def _ask(self) -> list[str]:
        became = []
        with httpx2.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            while not self._stop.is_set():
                answer = client.post(self._url, json=self._body).json()
                if "error" in answer:
                    became.append(answer["error"]["type"])
                    if became[-1] == "Draining":
                        break
                else:
                    became.append(answer["choices"][0]["finish_reason"])
        return became

    def ask_no_more(self, _: str = "") -> None:
        self._stop.set()

    def stop(self) -> list[list[str]]:
        """What became of each caller's requests, in order: a finish reason or an error's type."""
        self.ask_no_more()
        found = [asking.result() for asking in self._asking]
        self._pool.shutdown()
        return found


@pytest.fixture
def callers(server: ServerHandle) -> Iterator[Callers]:
    made = Callers(server)
    yield made
    made.stop()


def watched(
    url: str, log: Path, do: Do, *, until: str, say: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The journal of a watch that goes on until that has come of it."""
    when = (parse_condition("running > 0"),)
    percent = 50.0 if do == "cancel_oldest" else None
    policy = Policy((Action("it", when, INTERVAL_S, do, percent),), Limits(min_answering=0))

    async def watch() -> None:
        source = DirectSource([url], interval_s=INTERVAL_S, api_key=KEY)
        performer = Performer(api_key=KEY, dry_run=False)
        with Journal(str(log)) as journal:
            actor = Actor(policy, performer, journal, say, now_s=0.0)
            num = 0
            async for sight in Watcher(source, INTERVAL_S).rounds():
                await actor.take(sight)
                num += 1
                if f'"{until}"' in log.read_text() or num == MAX_ROUNDS:
                    break
        await source.close()
        await performer.close()

    asyncio.run(watch())
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_half_of_what_runs_is_ended_and_frees_what_it_promised(server, callers, tmp_path):
    log = watched(server.url, tmp_path / "log", "cancel_oldest", until="seen")
    done = [entry for entry in log if entry["outcome"] == "done"]
    became = [one for mine in callers.stop() for one in mine]
    assert done
    for entry in done:
        assert 1 <= entry["num_requests"] <= 2
        assert entry["freed_bytes"] == entry["promised_bytes"] > 0
    assert became.count("Cancelled") == sum(entry["num_requests"] for entry in done)
    assert set(became) == {"Cancelled", "length"}


def test_draining_loses_nothing(server, callers, tmp_path):
    """Whatever was taken is answered in full; what comes later is refused, not cut."""
    log = watched(server.url, tmp_path / "log", "drain", until="done", say=callers.ask_no_more)
    done = next(entry for entry in log if entry["outcome"] == "done")
    assert 1 <= done["num_requests"] <= 4
    for mine in callers.stop():
        assert set(mine[:-1]) <= {"length"}
        assert mine[-1] in ("length", "Draining")
