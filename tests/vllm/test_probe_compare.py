"""`ullage probe compare` against a real vLLM on CPU: one model is one, a faulty one is not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from plugin_server import CPU
from safetensors.torch import load_file, save_file
from tests.engine.families import write_model

from ullage.probes.sameness.fingerprints import of_model, of_server
from ullage.probes.sameness.marks import Fingerprint
from ullage.probes.sameness.sameness import compare

pytestmark = pytest.mark.vllm
START_S = 400


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A healthy model and a copy whose first key projection is zero."""
    healthy = write_model("llama-wide-heads", tmp_path_factory.mktemp("probed"))
    faulty = tmp_path_factory.mktemp("faulty") / "model"
    shutil.copytree(healthy, faulty)
    tensors = load_file(healthy / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 0
    save_file(tensors, faulty / "model.safetensors", metadata={"format": "pt"})
    return healthy, faulty


@contextmanager
def served(python: Path, model: Path, dtype: str, log: Path) -> Iterator[str]:
    """The URL of a vLLM that serves `model` in `dtype`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    flags = ("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager",
             "--max-model-len", "512", "--served-model-name", "tiny")  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags],
            cwd=log.parent, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **CPU},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    ("dtype", "verdict"),
    [("float32", "same_answers"), ("bfloat16", "same_model_other_precision")],
)
def test_a_server_is_told_from_a_faulty_model(
    vllm_python: Path, models: tuple[Path, Path], tmp_path: Path, dtype: str, verdict: str
) -> None:
    healthy, faulty = (of_model(model) for model in models)
    with served(vllm_python, models[0], dtype, tmp_path / "log") as url:
        there = of_server(url, None, None)
    assert there.source.endswith("#tiny")
    assert there.precision is None  # vLLM does not tell
    found = compare(healthy, there)
    assert found.verdict == verdict, found
    assert compare(faulty, there).verdict == "not_the_same_model"
    assert _tokens(there) == _tokens(healthy)


def _tokens(mark: Fingerprint) -> list[int]:
    return [one.num_tokens for one in mark.answers]
