"""What an adapter changes is measured on a real engine, and nothing passes for something."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.adapters import load_adapted, write_adapter
from tests.engine.families import write_model
from tests.engine.references import load_reference
from ullage.checkup.adapter_diff import embedded
from ullage.cli.main import main
from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server

PROMPTS = ("one two three", "def f(x):", "Ω ≠ 7")
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(model, tmp_path_factory.mktemp("adapter"), layers_to_transform=[0, 2])


@pytest.fixture(scope="module")
def null(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter as it was before training: B is zero."""
    folder = tmp_path_factory.mktemp("null") / "null"
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    zeros = {k: v if "lora_A" in k else torch.zeros_like(v) for k, v in tensors.items()}
    save_file(zeros, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def run(model: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(adapter: Path, *flags: str) -> tuple[int, str]:
        code = main(["adapter", "diff", str(adapter), "--base", str(model), *flags])
        captured = capsys.readouterr()
        return code, captured.out or captured.err

    return call


def test_divergence_is_that_of_the_logits_under_peft(model: Path, adapter: Path) -> None:
    found = embedded(model, adapter, PROMPTS)
    assert not found.identical
    from ullage.anatomy import load
    from ullage.engine.text.loading import load_tokenizer

    tokenizer = load_tokenizer(load(model))
    reference, adapted = load_reference(model), load_adapted(model, adapter)
    for divergence, prompt in zip(found.prompts, PROMPTS, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.inference_mode():
            base_TV, adapted_TV = reference(ids).logits[0], adapted(ids).logits[0]
        p, q = base_TV.double().log_softmax(-1), adapted_TV.double().log_softmax(-1)
        kl_T = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        assert divergence.kl_mean_nats == pytest.approx(float(kl_T.mean()), abs=1e-3)
        assert divergence.kl_max_nats == pytest.approx(float(kl_T.max()), abs=1e-3)
        largest = float((base_TV - adapted_TV).abs().max())
        assert divergence.max_logit_difference == pytest.approx(largest, abs=1e-3)


def test_changes_per_layer_are_frobenius_norms(model: Path, adapter: Path, run: Run) -> None:
    code, said = run(adapter, "--output", "json")
    assert code == 0
    document = json.loads(said)
    assert [entry["layer"] for entry in document["layers"]] == [0, 2]
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), {}
    for file in model.glob("*.safetensors"):
        weights |= load_file(file)
    for entry in document["modules"]:
        key = f"base_model.model.{entry['module']}"
        delta = 4 * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
        assert entry["change_norm"] == pytest.approx(float(delta.norm()), rel=1e-5)
        weight = weights[f"{entry['module']}.weight"]
        assert entry["weight_norm"] == pytest.approx(float(weight.norm()), rel=1e-5)


def test_identical_to_the_base_is_a_failure(null: Path, run: Run) -> None:
    code, said = run(null)
    assert code == 1
    assert said.startswith("IDENTICAL to the base")


@pytest.fixture(scope="module")
def server(model: Path, adapter: Path, null: Path) -> Iterator[ServerHandle]:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, enable_lora=True)
    modules = {"tuned": str(adapter), "null": str(null)}
    handle = start_server(model, options, served_model_name="base", lora_modules=modules)
    yield handle
    handle.stop()


def test_a_running_server_is_asked_for_both(server: ServerHandle, adapter: Path, run: Run) -> None:
    url = ("--engine-url", server.url)
    code, said = run(adapter, *url, "--lora-name", "tuned", "--output", "json")
    assert code == 0
    document = json.loads(said)
    assert document["source"] == f"{server.url}: tuned against base"
    assert all(prompt["max_logprob_difference"] > 0.01 for prompt in document["prompts"])
    assert run(adapter, *url, "--lora-name", "null")[0] == 1
    code, said = run(adapter, *url, "--lora-name", "other")
    assert (code, "one of its adapters: tuned, null" in said) == (2, True)
    assert run(adapter, *url)[0] == 2
    assert run(adapter, "--engine-url", "http://127.0.0.1:9", "--lora-name", "x")[0] == 3


def test_prompts_come_from_a_file(adapter: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\nsecond\n")
    _, said = run(adapter, "--prompts", str(file), "--output", "json")
    assert [prompt["prompt"] for prompt in json.loads(said)["prompts"]] == ["first", "second"]
    file.write_text("\n")
    assert run(adapter, "--prompts", str(file))[0] == 2
    assert run(adapter, "--prompts", str(tmp_path / "none"))[0] == 2
