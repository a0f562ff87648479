"""Real weights: a server of SmolLM2 at default sampling names a part that was changed as it ran."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
import torch

from tests.engine.conftest import smollm2  # noqa: F401
from tests.serving.clients import metrics
from ullage.engine.options import EngineOptions
from ullage.probes.baseline import baseline as baselines
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.prompts import LEARNED
from ullage.serving.app import ServerHandle, start_server

pytestmark = pytest.mark.slow

KEY = "secret"
OPTIONS = EngineOptions(kv_cache_memory_bytes=1 << 28, max_model_len=1024)
TOKENS = 64
TEXTS = (
    "Explain how a lighthouse keeper spent a winter's day.",
    "class Stack:\n    def __init__(self):",
    "春天来了，山上的雪开始融化，",
)
HEAD_DIM = 64


@pytest.fixture(scope="module")
def server(
    smollm2: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerHandle]:
    file = tmp_path_factory.mktemp("baseline") / "smollm2.safetensors"
    baselines.save(learn(smollm2, LEARNED, OPTIONS, new_tokens=24), str(file))
    handle = start_server(
        smollm2, OPTIONS, api_key=KEY, enable_control_routes=True, probe_baseline=file
    )
    yield handle
    handle.stop()


@pytest.fixture(scope="module")
def http(server: ServerHandle) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=300, headers=headers) as client:
        yield client


def generate(http: httpx.Client, prompt: str) -> None:
    ask = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    http.post("/v1/completions", json=ask).raise_for_status()


def fired(http: httpx.Client) -> set[tuple[str, str, int | None]]:
    told = http.get("/ullage/entropy").json()
    return {
        (one["id"], one["kind"], one["layer"])
        for one in told["findings"]
        if one["state"] == "fired"
    }


def test_other_texts_fire_nothing_and_a_changed_head_is_named(
    server: ServerHandle, http: httpx.Client
) -> None:
    for text in TEXTS:
        generate(http, text)
    told = http.get("/ullage/entropy").json()
    assert told["rows"] >= 3 * TOKENS // 16
    assert fired(http) == set()
    assert metrics(http)["ullage_probe_findings|P001||"] == 0

    layer, head = 7, 5
    weight_OI = server.engine.decoder.layers[layer].qkv.weight_OI  # type: ignore[attr-defined]
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    healthy = weight_OI[rows].clone()
    weight_OI[rows] *= 4
    generate(http, "The committee met on Tuesday")
    assert fired(http) == {("P001", "q", layer)}
    (one,) = (
        one for one in http.get("/ullage/entropy").json()["findings"] if one["state"] == "fired"
    )
    assert one["heads"] == [head]
    assert "head 5 in layer 7" in one["cause"]
    series = metrics(http)
    assert series[f"ullage_probe_findings|P001|q|{layer}"] == 1
    assert not math.isnan(series["ullage_attn_entropy_p95_nats|7"])

    weight_OI[rows] = healthy
    assert torch.equal(weight_OI[rows], healthy)
    for text in TEXTS * 2:
        generate(http, text)
    assert fired(http) == set()  # an alarm ends where its cause has
    assert metrics(http)["ullage_probe_findings|P001||"] == 0
