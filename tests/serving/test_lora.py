"""Adapters over HTTP: loaded and unloaded while requests run, each request its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.engine.adapters import load_adapted, write_adapter
from tests.engine.references import greedy, load_reference
from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server

PROMPT = [5, 17, 33, 80, 12]
NUM_NEW = 16


@pytest.fixture(scope="module")
def adapter(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(model_dir, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[ServerHandle]:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, enable_lora=True, max_loras=2)
    handle = start_server(model_dir, options, served_model_name="tiny")
    yield handle
    handle.stop()


@pytest.fixture
def client(server: ServerHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        for name in list(server.engine.loras):
            server.engine.unload_lora(name)


def load(client: httpx.Client, path: Path, name: str = "tuned", **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return client.post("/v1/load_lora_adapter", json=body)


def complete(client: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **more}
    return client.post("/v1/completions", json={"max_tokens": NUM_NEW, **body})


def test_an_adapter_is_a_model_that_answers_as_peft_does(
    client: httpx.Client, server: ServerHandle, model_dir: Path, adapter: Path
) -> None:
    assert load(client, adapter).status_code == 200
    models = {entry["id"]: entry for entry in client.get("/v1/models").json()["data"]}
    assert models["tuned"]["parent"] == "tiny"
    assert models["tuned"]["root"] == str(adapter)
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    answers = {}
    for name, reference in (
        ("tiny", load_reference(model_dir)),
        ("tuned", load_adapted(model_dir, adapter)),
    ):
        answer = complete(client, name).json()
        assert answer["model"] == name
        stream = tokenizer.stream(())
        text = "".join(map(stream.push, greedy(reference, PROMPT, NUM_NEW))) + stream.close()
        answers[name] = answer["choices"][0]["text"]
        assert answers[name] == text
    assert answers["tiny"] != answers["tuned"]


def test_loading_and_unloading_leaves_running_requests_alone(
    client: httpx.Client, server: ServerHandle, adapter: Path
) -> None:
    load(client, adapter)
    alone = complete(client, "tuned", max_tokens=200).json()["choices"][0]["text"]
    answers: list[str] = []

    def ask() -> None:
        answers.append(complete(client, "tuned", max_tokens=200).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(server.engine.scheduler.running) < len(threads) and not answers:
        pass
    for _ in range(5):
        unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"})
        assert unloaded.status_code == 200
        assert load(client, adapter).status_code == 200
    for thread in threads:
        thread.join()
    assert answers == [alone] * len(threads)


def test_refusals_are_sentences(client: httpx.Client, adapter: Path, tmp_path: Path) -> None:
    assert load(client, adapter).status_code == 200
    again = load(client, adapter)
    assert again.status_code == 400
    assert "has already been loaded" in again.json()["error"]["message"]
    assert load(client, tmp_path, "empty").status_code == 400
    assert load(client, tmp_path / "nowhere", "nowhere").status_code == 400
    assert load(client, adapter, "tiny").status_code == 400
    assert load(client, adapter, "other", rank=3).status_code == 400
    missing = client.post("/v1/unload_lora_adapter", json={"lora_name": "other"})
    assert missing.status_code == 404
    assert complete(client, "other").status_code == 404
    assert complete(client, "tuned").status_code == 200


def test_running_adapters_are_in_the_metrics(client: httpx.Client, adapter: Path) -> None:
    load(client, adapter)
    complete(client, "tuned")
    lines = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("vllm:lora_requests_info{")
    ]
    assert len(lines) == 1
    assert 'max_lora="2"' in lines[0]


def test_without_the_flag_there_are_no_such_routes(model_dir: Path, adapter: Path) -> None:
    handle = start_server(model_dir, EngineOptions(kv_cache_memory_bytes=1 << 22))
    try:
        with httpx.Client(base_url=handle.url) as client:
            assert load(client, adapter).status_code == 404
            assert "vllm:lora_requests_info" not in client.get("/metrics").text
    finally:
        handle.stop()
