"""Run by vLLM's Python: cos and sin of its rotary classes for the cases on stdin, as JSON.

A case is [head_dim, rope_parameters, interleaved, max_position, max_model_len, positions].
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope


def main() -> None:
    answers = []
    with set_current_vllm_config(VllmConfig()):
        for head_dim, parameters, interleaved, max_position, limit, positions in json.load(
            sys.stdin
        ):
            config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=limit))
            phi3_long_rope_scaled_rope.get_current_vllm_config = lambda config=config: config
            rotary_embedding._ROPE_DICT.clear()  # it does not know of max_model_len
            rope = rotary_embedding.get_rope(
                head_dim, max_position, not interleaved, parameters, torch.float32
            )
            if hasattr(rope, "long_short_cos_sin_cache"):
                first = rope.original_max_position_embeddings if rope.use_long_rope else 0
                cache = rope.long_short_cos_sin_cache[first:]
            else:
                cache = rope.cos_sin_cache
            answers.append(cache[positions].double().tolist())
    json.dump(answers, sys.stdout)


main()
