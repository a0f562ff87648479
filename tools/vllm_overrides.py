"""Ask vLLM what --hf-overrides makes of a configuration; run by vLLM's own Python.

Reads cases `[{"config": {...}, "overrides": {...}}]` from stdin and writes a line for each:
what decides (longest request, layers, KV heads, rotary settings, quantisation), or the refusal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
from vllm.config import ModelConfig


def answer(config: dict, overrides: dict) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(config))
        try:
            made = ModelConfig(
                model=place, tokenizer=place, hf_overrides=overrides, skip_tokenizer_init=True
            )
        except Exception as error:
            return {"refused": type(error).__name__}
        text = made.hf_text_config
        rope = getattr(text, "rope_parameters", None) or {}
        return {
            "max_model_len": made.max_model_len,
            "num_layers": made.get_total_num_hidden_layers(),
            "num_kv_heads": made.get_total_num_kv_heads(),
            # vllm 0.32: rotary_embedding/__init__.py, get_rope
            "rope_theta": rope.get("rope_theta", 10_000),
            "rope_type": rope.get("rope_type", "default"),
            "factor": rope.get("factor", 1.0),
            "quantization": made.quantization,
        }


def main() -> int:
    cases = json.load(sys.stdin)
    for case in cases:
        print(json.dumps(answer(case["config"], case["overrides"])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
