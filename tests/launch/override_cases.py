"""Overrides that are put to vLLM, and the answers recorded of it (`fixtures/overrides.jsonl`).

Run `python tests/launch/override_cases.py` with vLLM's environment in place to record them anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MODELS = HERE.parent / "audit" / "models"
ORACLE = HERE.parents[1] / "tools" / "vllm_overrides.py"
ANSWERS = HERE / "fixtures" / "overrides.jsonl"
VENV = Path(os.environ.get("ULLAGE_VLLM_VENV", Path.home() / ".cache/ullage/vllm-0.32"))

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 9,
    "text_config": json.loads((MODELS / "qwen3.json").read_text()),
    "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 2},
}
"""A model whose language part lies in text_config."""

CASES: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in ("llama", "qwen3", "gemma3", "deepseek-v3", "llama-yarn", "mixtral")),
    *((name, {"max_position_embeddings": 131072}) for name in ("llama", "qwen3", "deepseek-v3")),
    *((name, {"rope_theta": 5e6}) for name in ("llama", "qwen3", "llama-yarn", "qwen3-moe")),
    *((name, {key: YARN}) for name in ("llama", "qwen3", "mixtral")
      for key in ("rope_scaling", "rope_parameters")),
    *((name, {"rope_parameters": {**YARN, "rope_theta": 1e6}}) for name in ("llama", "qwen3")),
    *((name, {"rope_scaling": {**YARN, "rope_theta": 1e6}, "max_position_embeddings": 32768})
      for name in ("llama", "qwen3", "qwen3-moe")),
    ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
    ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}),
    ("llama-yarn", {"rope_scaling": None}),
    ("llama-long", {"rope_parameters": None}),
    ("llama", {"num_hidden_layers": 1}),
    ("qwen3", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    ("gemma3", {"num_hidden_layers": 1}),
    ("gemma3", {"max_position_embeddings": 777}),
    ("gemma3", {"text_config": {"max_position_embeddings": 777}}),
    ("llava", {}),
    ("llava", {"max_position_embeddings": 777}),
    ("llava", {"rope_scaling": YARN}),
    ("llava", {"num_hidden_layers": 1}),
    ("llava", {"text_config": {"max_position_embeddings": 777, "num_hidden_layers": 1}}),
    ("llava", {"text_config": {"rope_scaling": YARN}}),
    ("llava", {"text_config": {"rope_parameters": YARN}}),
    ("llava", {"text_config": {"rope_theta": 5e6}}),
    ("llava", {"text_config": {"rope_parameters": None}}),
    ("llama", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}),
    ("llama", {"nothing_that_is_known": 3}),
    ("llama", {"nothing_that_is_known": {"a": 1}}),
    ("llama", {"num_experts": 4}),
    ("mixtral", {"num_local_experts": 2}),
    ("qwen2", {"sliding_window": 64}),
    ("llama", {"architectures": ["Qwen3ForCausalLM"]}),
    ("llama", {"hidden_size": 64}),
]  # fmt: skip


def config_of(name: str) -> dict:
    return LLAVA if name == "llava" else json.loads((MODELS / f"{name}.json").read_text())


def questions() -> list[dict]:
    return [{"config": config_of(name), "overrides": overrides} for name, overrides in CASES]


def ask() -> list[dict]:
    done = subprocess.run(
        ["nice", "-n", "5", str(VENV / "bin/python"), str(ORACLE)],
        input=json.dumps(questions()), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def recorded() -> list[dict]:
    return [json.loads(line) for line in ANSWERS.read_text().splitlines()]


if __name__ == "__main__":
    lines = (
        json.dumps({"model": name, "overrides": overrides, **answer})
        for (name, overrides), answer in zip(CASES, ask(), strict=True)
    )
    ANSWERS.write_text("".join(f"{line}\n" for line in lines))
    sys.exit(0)
