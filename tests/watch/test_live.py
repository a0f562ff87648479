"""Watching a real engine over HTTP: what it did between two looks is what was asked of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

pytest.importorskip("torch", reason="the embedded engine needs torch")

from tests.engine.families import write_model
from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server
from ullage.telemetry.scrape import DirectSource
from ullage.watch.sight import Sight
from ullage.watch.watcher import Watcher

KEY = "k-1"
OPTIONS = EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("watched"))


def started(model_dir: Path, port: int = 0) -> ServerHandle:
    return start_server(model_dir, OPTIONS, served_model_name="tiny", api_key=KEY, port=port)


@pytest.fixture
def server(model_dir: Path) -> Iterator[ServerHandle]:
    handle = started(model_dir)
    yield handle
    handle.stop()


async def complete(url: str, tokens: int) -> int:
    """Prompt tokens, by the server's own count, of one completion of `tokens` tokens."""
    body = {"model": "tiny", "prompt": "hello" * 4, "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx2.AsyncClient(timeout=60, headers=headers) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    return int(json.loads(answer.content)["usage"]["prompt_tokens"])


def test_a_span_holds_what_was_asked_of_the_engine_in_it(server: ServerHandle) -> None:
    async def run() -> tuple[Sight, int]:
        source = DirectSource([server.url], interval_s=0.5, api_key=KEY)
        watcher = Watcher(source, 0.5)
        await complete(server.url, 7)  # before it was watched
        await watcher.round()
        prompt = sum([await complete(server.url, 20), await complete(server.url, 5)])
        sight = await watcher.round()
        await source.close()
        return sight, prompt

    sight, prompt = asyncio.run(run())
    (view,) = sight.views
    assert view.now and view.last and not view.error
    identity = view.now.identity
    assert (identity.engine, identity.models) == ("ullage", ("tiny",))
    assert view.last.rises["generation_tokens"] == 25
    assert view.last.rises["prompt_tokens"] == prompt
    assert view.last.labelled_rises["finished_by_reason"]["length"] == 2
    assert view.last.histograms["ttft_s"].count == 2
    assert view.last.histograms["request_generation_tokens"].sum == 25
    assert view.still_s["generation_tokens"] == 0 == view.unchanged_s
    assert view.now.gauges["kv_used_bytes"] == 0.0


def test_an_engine_that_is_started_anew_counts_from_zero(model_dir: Path) -> None:
    """Within one process here, so that its start time does not tell: the counters do."""
    first = started(model_dir)

    async def run() -> list[Sight]:
        source = DirectSource([first.url], interval_s=0.5, api_key=KEY)
        watcher = Watcher(source, 0.5)
        await complete(first.url, 30)
        sights = [await watcher.round()]
        first.stop()
        sights.append(await watcher.round())
        second = started(model_dir, port=int(first.url.rpartition(":")[2]))
        try:
            await complete(second.url, 9)
            sights.append(await watcher.round())
        finally:
            second.stop()
        await source.close()
        return sights

    up, down, again = asyncio.run(run())
    assert not up.views[0].error
    assert down.views[0].error == "connection refused"
    last = again.views[0].last
    assert last and last.resets == 1 and last.num_failed == 1
    assert last.rises["generation_tokens"] == 9
