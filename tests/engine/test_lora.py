"""Adapters in the embedded engine change what PEFT changes, for their own requests only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.adapters import EVERYWHERE, load_adapted, write_adapter
from tests.engine.driving import finish, greedy_params
from tests.engine.families import COMMON
from tests.engine.references import is_greedy, load_reference
from ullage.engine.attention import ATTENTION_PATHS
from ullage.engine.batch import build_batch
from ullage.engine.engine import Engine
from ullage.engine.lora import LoraAdapter, LoraRefused
from ullage.engine.options import EngineOptions
from ullage.engine.request import Request
from ullage.engine.scheduling.scheduler import Plan, Work
from ullage.errors import BadInput

NUM_NEW = 24
FamilyDir = Callable[[str], Path]
PROMPTS = [[(7 * i + 3 * n) % 90 + 3 for i in range(n)] for n in (1, 5, 17, 40)]
WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention_only": {"target_modules": ["q_proj", "v_proj"]},
    "one_of_a_fused_pair": {"target_modules": ["up_proj"]},
    "rslora": {"use_rslora": True, "r": 8},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 64}},
    "some_layers": {"layers_to_transform": [1]},
}


def engine(directory: Path, **options: Any) -> Engine:
    options = {"kv_cache_memory_bytes": 16 << 20, "enable_lora": True, **options}
    return Engine.load(directory, EngineOptions(**options))


@pytest.fixture(scope="module")
def model(family_dir: FamilyDir) -> Path:
    return family_dir("llama")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(model, root / name, seed, **config)
        for seed, (name, config) in enumerate(WRITTEN.items())
    }


@pytest.fixture(scope="module")
def references(model: Path, adapters: dict[str, Path]) -> dict[str | None, Any]:
    found: dict[str | None, Any] = {None: load_reference(model)}
    return found | {name: load_adapted(model, path) for name, path in adapters.items()}


def check_mixed(
    served: Engine, loras: dict[str | None, LoraAdapter | None], references: dict[str | None, Any]
) -> None:
    """Every adapter and the base, each prompt, all at once: each answer is its own model's."""
    requests = [
        (name, request)
        for n, prompt in enumerate(PROMPTS)
        for name, lora in loras.items()
        for request in served.add_request(
            f"{name}-{n}", tuple(prompt), greedy_params(NUM_NEW), lora
        )
    ]
    finish(served)
    answers: dict[int, set[tuple[int, ...]]] = {}
    for name, request in requests:
        prompt = list(request.prompt_ids)
        assert is_greedy(references[name], prompt, request.output_ids), (name, len(prompt))
        answers.setdefault(len(prompt), set()).add(tuple(request.output_ids))
    # If they all said the same the adapters would show nothing.
    assert all(len(different) > len(loras) // 2 for different in answers.values())


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}])
def test_each_request_is_answered_by_its_own_adapter(
    options: dict[str, int],
    model: Path,
    adapters: dict[str, Path],
    references: dict[str | None, Any],
) -> None:
    served = engine(model, **options)
    loras = {name: served.load_lora(name, path) for name, path in adapters.items()}
    check_mixed(served, {None: None, **loras}, references)


def test_preemption_and_recompute_keep_the_adapter(
    model: Path, adapters: dict[str, Path], references: dict[str | None, Any]
) -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4
    served = engine(model, max_model_len=96, block_size=4, kv_cache_memory_bytes=96 * token_bytes)
    loras = {name: served.load_lora(name, adapters[name]) for name in ("plain", "rslora")}
    preempted: list[int] = []
    schedule = served.scheduler.schedule

    def watched() -> Any:
        plan = schedule()
        preempted.extend(request.num_preemptions for request in plan.preempted)
        return plan

    served.scheduler.schedule = watched  # type: ignore[method-assign]
    check_mixed(served, {None: None, **loras}, references)
    assert preempted


def test_int8_weights_get_the_whole_change(model: Path, adapters: dict[str, Path]) -> None:
    """The change is computed in float32, so int8 with it errs no more than int8 without."""
    plans = Plan(
        (Work(Request("r", tuple(PROMPTS[3]), greedy_params(1)), 0, 40, ((0, 1, 2),), True),)
    )

    def logits(quantization: str, name: str | None) -> torch.Tensor:
        served = engine(model, quantization=quantization)
        plans.work[0].request.lora = (
            None if name is None else served.load_lora(name, adapters[name])
        )
        batch = build_batch(plans, 16)
        attention = ATTENTION_PATHS["gathered"](served.kv)
        return served._decoder.forward(batch, served.kv, attention)

    def error(name: str | None) -> float:
        exact = logits("none", name)
        return float((logits("int8", name) - exact).norm() / exact.norm())

    without = error(None)
    assert error("plain") < 2 * without
    change = logits("none", "plain") - logits("none", None)
    assert float(change.norm() / logits("none", None).norm()) > 5 * without


def test_unloading_spares_those_who_run(model: Path, adapters: dict[str, Path]) -> None:
    served = engine(model)
    lora = served.load_lora("plain", adapters["plain"])
    (alone,) = served.add_request("alone", tuple(PROMPTS[2]), greedy_params(NUM_NEW), lora)
    finish(served)
    (again,) = served.add_request("again", tuple(PROMPTS[2]), greedy_params(NUM_NEW), lora)
    served.step()
    served.unload_lora("plain")
    assert not served.loras
    served.load_lora("plain", adapters["rslora"])
    finish(served)
    assert again.output_ids == alone.output_ids


def changed(directory: Path, adapter: Path, config: dict[str, Any], keys: Any = None) -> Path:
    """A copy of `adapter` with other config values, and tensors as `keys` makes them."""
    shutil.copytree(adapter, directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if keys is not None:
        weights = directory / "adapter_model.safetensors"
        save_file(keys(load_file(weights)), weights)
    return directory


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


def wider(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.zeros(value.shape[0], value.shape[1] + 1) if "lora_A" in key else value
        for key, value in tensors.items()
    }


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "DoRA": ({"use_dora": True}, None, "DoRA"),
    "biases": ({"bias": "all"}, None, "biases"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
    "another method": ({"peft_type": "IA3"}, None, "other than LoRA"),
    "an init that changes the base": ({"init_lora_weights": "pissa"}, None, "init"),
    "a rank above the limit": ({"r": 4}, None, "--max-lora-rank"),
    "no module of this model": ({}, renamed("model.layers", "h"), "21 of 21 modules"),
    "some modules of another": ({}, renamed("layers.1.", "layers.7."), "7 of 21 modules"),
    "half a pair": (
        {},
        lambda tensors: {k: v for k, v in tensors.items() if "1.mlp.up_proj.lora_B" not in k},
        "half of a pair",
    ),
    "another width": ({}, wider, "lora_A [4, 97]"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_would_do_nothing_or_the_wrong_thing_is_refused(
    fault: str, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    config, keys, said = REFUSED[fault]
    bad = changed(tmp_path / "bad", adapters["plain"], config, keys)
    served = engine(model, max_lora_rank=2 if "rank" in fault else 16)
    with pytest.raises(BadInput, match=re.escape(said)):
        served.load_lora("bad", bad)
    assert not served.loras


def test_a_part_is_taken_when_it_is_asked_for(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    part = changed(tmp_path / "part", adapters["plain"], {}, renamed("layers.1.", "layers.7."))
    lora = engine(model).load_lora("part", part, allow_partial=True)
    assert lora.num_modules == (COMMON["num_hidden_layers"] - 1) * len(EVERYWHERE)


def test_adapters_need_a_flag_a_name_and_room(model: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(LoraRefused, match="--enable-lora"):
        engine(model, enable_lora=False).load_lora("plain", adapters["plain"])
    served = engine(model, max_loras=1)
    served.load_lora("plain", adapters["plain"])
    with pytest.raises(LoraRefused, match="already been loaded"):
        served.load_lora("plain", adapters["rslora"])
    with pytest.raises(LoraRefused, match="--max-loras"):
        served.load_lora("rslora", adapters["rslora"])


FUSED = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "falcon-40b": ["query_key_value"],
    "opt": ["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "qwen3-moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.mark.parametrize("family", FUSED)
def test_fused_and_turned_matrices_are_changed_as_peft_changes_them(
    family: str, family_dir: FamilyDir, tmp_path: Path
) -> None:
    """Also in another order of heads, where the adapter's rows must follow the weights'."""
    base = family_dir(family)
    path = write_adapter(
        base, tmp_path / "adapter", target_modules=FUSED[family], fan_in_fan_out=family == "gpt2"
    )
    served = engine(base)
    lora = served.load_lora("fused", path)
    prompt = PROMPTS[3]
    with torch.inference_mode():
        adapted_TV = load_adapted(base, path)(torch.tensor([prompt])).logits[0]
    found_TV = served.prompt_logits(tuple(prompt), lora)
    torch.testing.assert_close(found_TV, adapted_TV, atol=1e-4, rtol=0)
    assert (served.prompt_logits(tuple(prompt)) - found_TV).abs().max() > 0.1
