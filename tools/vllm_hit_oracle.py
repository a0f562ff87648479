"""Asks vLLM's own prefix cache what it would find, and how much of a window it holds.

Run with the Python of vLLM's environment. Reads a JSON list of questions on stdin, writes one JSON
line per question: {"hit": blocks found, "kept": which of them are held, "most": most blocks of a
request}. A question: {"window": tokens or null, "block_size", "cached": [is block i cached, …],
"chunk", "max_model_len"}. The hit is for a prompt of len(cached) full blocks and one more token.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    questions = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for question in questions:
        print(json.dumps(hit(question)), file=answers, flush=True)


def hit(question: dict) -> dict:
    """find_longest_cache_hit of the manager for this kind of layer, over a stand-in pool."""
    import torch
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    size, window, cached = question["block_size"], question["window"], question["cached"]
    common = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if window is None:
        spec, manager = FullAttentionSpec(**common), managers.FullAttentionManager
    else:
        spec = SlidingWindowSpec(**common, sliding_window=window)
        manager = managers.SlidingWindowManager
    pool = SimpleNamespace(
        hash_block_size=size,
        null_block="null",
        get_cached_block=lambda index, _: [f"block {index}"] if cached[index] else None,
    )
    blocks, _ = manager.find_longest_cache_hit(
        block_hashes=list(range(len(cached))),
        max_length=size * len(cached),
        kv_cache_group_ids=[0],
        block_pool=pool,
        kv_cache_spec=spec,
        drop_eagle_block=False,
        alignment_tokens=size,
    )
    most = None
    if window is not None:
        most = spec.max_admission_blocks_per_request(question["chunk"], question["max_model_len"])
    return {
        "hit": len(blocks[0]),
        "kept": [block != "null" for block in blocks[0]],
        "most": most,
    }


if __name__ == "__main__":
    main()
