"""A policy against the embedded engine: what it promised is freed, what is drained is finished."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

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
def server(model_dir: Path) -> Iterator[ServerHandle]:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_seqs=4)
    handle = start_server(model_dir, options, api_key=KEY, enable_control_routes=True)
    yield handle
    handle.stop()


@pytest.fixture
def asked(server: ServerHandle) -> Iterator[list[Future[Any]]]:
    """Four requests of as many tokens as the model can, running side by side."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with ThreadPoolExecutor(4) as pool, httpx2.Client(headers=headers, timeout=60) as client:
        room = server.engine.max_model_len - 8
        body = {"prompt": "hello", "max_tokens": room, "temperature": 0, "ignore_eos": True}
        yield [
            pool.submit(client.post, f"{server.url}/v1/completions", json=body) for _ in range(4)
        ]


def watched(url: str, log: Path, do: Do) -> list[dict[str, Any]]:
    """The journal of a watch that goes on until something was done and seen."""
    when = (parse_condition("running > 0"),)
    percent = 50.0 if do == "cancel_oldest" else None
    policy = Policy((Action("it", when, INTERVAL_S, do, percent),), Limits(min_answering=0))

    async def watch() -> None:
        source = DirectSource([url], interval_s=INTERVAL_S, api_key=KEY)
        performer = Performer(api_key=KEY, dry_run=False)
        with Journal(str(log)) as journal:
            actor = Actor(policy, performer, journal, lambda _: None, now_s=0.0)
            num = 0
            async for sight in Watcher(source, INTERVAL_S).rounds():
                await actor.take(sight)
                num += 1
                told = log.read_text()
                if '"seen"' in told or num == MAX_ROUNDS:
                    break
        await source.close()
        await performer.close()

    asyncio.run(watch())
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_half_of_what_runs_is_ended_and_frees_what_it_promised(server, asked, tmp_path):
    log = watched(server.url, tmp_path / "log", "cancel_oldest")
    done = next(entry for entry in log if entry["outcome"] == "done")
    seen = next(entry for entry in log if entry["outcome"] == "seen")
    assert done["num_requests"] == 2
    assert done["freed_bytes"] == done["promised_bytes"] > 0
    assert (seen["before"]["running"], seen["after"]["running"]) == (4, 2)
    assert sorted(future.result().status_code for future in asked) == [200, 200, 503, 503]


def test_draining_loses_nothing(server, asked, tmp_path):
    log = watched(server.url, tmp_path / "log", "drain")
    done = next(entry for entry in log if entry["outcome"] == "done")
    assert done["num_requests"] == 4
    reasons = [future.result().json()["choices"][0]["finish_reason"] for future in asked]
    assert reasons == ["length"] * 4
