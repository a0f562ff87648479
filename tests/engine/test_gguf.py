"""GGUF files run as llama.cpp runs them, architecture by architecture, and others are refused.

llama.cpp's answers for the same files are recorded; where it is installed they are asked for anew.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.gguf_models import GGUF_CASES, TOKENS, recorded, tolerance, write_gguf
from ullage.anatomy import load
from ullage.engine.engine import Engine
from ullage.engine.linear import LINEARS
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import GGUF_ARCHITECTURES, Weights
from ullage.engine.options import EngineOptions
from ullage.errors import UnsupportedModel

LLAMA_CPP = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ullage" / "llama-cpp"


def logits(file: Path) -> NDArray[np.float32]:
    """Ours at every position, [tokens, vocab]."""
    model = load(file)
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_model_len=256)
    decoder = Decoder(model.anatomy.spec, Weights(model), LINEARS["none"], 256)
    found: NDArray[np.float32] = (
        Engine(decoder, None, options, 256).prompt_logits(tuple(TOKENS.tolist())).numpy()
    )
    return found


@pytest.mark.parametrize("name", GGUF_CASES)
def test_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    found = logits(write_gguf(name, tmp_path / "m.gguf"))[-1]
    np.testing.assert_allclose(found, recorded(name), rtol=0, atol=tolerance(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", GGUF_CASES)
def test_llama_cpp_says_so_today(name: str, tmp_path: Path) -> None:
    python = LLAMA_CPP / "bin" / "python"
    if not python.exists():
        pytest.skip(f"llama-cpp-python is not installed in {LLAMA_CPP}")
    file, tokens, out = (tmp_path / part for part in ("m.gguf", "tokens.npy", "out.npy"))
    write_gguf(name, file)
    np.save(tokens, TOKENS)
    script = Path(__file__).with_name("llama_cpp_logits.py")
    subprocess.run([python, script, file, tokens, out], check=True)
    np.testing.assert_allclose(logits(file), np.load(out), rtol=0, atol=tolerance(name))


def test_every_architecture_that_runs_was_compared() -> None:
    compared = {name.partition(":")[0].partition(",")[0] for name in GGUF_CASES}
    assert compared == GGUF_ARCHITECTURES


def test_an_architecture_that_was_not_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_gguf("qwen2", tmp_path / "m.gguf"))
    monkeypatch.setattr("ullage.engine.model.weights.GGUF_ARCHITECTURES", frozenset({"llama"}))
    with pytest.raises(UnsupportedModel, match=r"general\.architecture: qwen2"):
        Weights(model)
