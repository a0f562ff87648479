"""A real server on loopback over a tiny random model, for all serving tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.families import write_model
from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server

MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model("llama", tmp_path_factory.mktemp("served"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": TEMPLATE})
    )
    return directory


@pytest.fixture(scope="session")
def options() -> EngineOptions:
    return EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def server(model_dir: Path, options: EngineOptions) -> Iterator[ServerHandle]:
    handle = start_server(model_dir, options, served_model_name=MODEL, max_num_queued_reqs=4)
    yield handle
    handle.stop()
    assert handle.engine.pool.num_used == 0
    assert not handle.engine.has_work
