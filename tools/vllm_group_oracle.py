"""Asks vLLM's own grouping and pool code about given layer caches, without any model or device.

Run with the Python of vLLM's environment. Reads a JSON list of questions on stdin, writes one JSON
line per question. It reaches what no CPU start can: packed layouts (CUDA's sparse kernels),
pipeline ranks, two batches in flight.

A question: {"slots": [[rank, kind, block_size, state_bytes, tokens_per_state, bound,
padded_bytes, extra_states], …], "ranks", "layout", "hybrid_manager", "aligned", "max_model_len"
(−1: fit, with "derived_max_model_len"), "in_flight", "kv_bytes"}.
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
        try:
            answer = pool(question)
        except (ValueError, AssertionError, NotImplementedError) as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def pool(question: dict) -> dict:
    """get_kv_cache_configs and the capacity of its answer, on a stand-in configuration."""
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

    fit = question["max_model_len"] == -1
    model = SimpleNamespace(
        max_model_len=question["derived_max_model_len"] if fit else question["max_model_len"],
        original_max_model_len=-1 if fit else question["max_model_len"],
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        cache_config=SimpleNamespace(
            mamba_cache_mode="align" if question["aligned"] else "none",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[question["layout"]],
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not question["hybrid_manager"]
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=question["in_flight"],
    )
    workers: list[dict] = [{} for _ in range(question["ranks"])]
    for index, (rank, *page) in enumerate(question["slots"]):
        workers[rank][f"layers.{index}"] = cache_spec(*page)
    configs = utils.get_kv_cache_configs(config, workers, [question["kv_bytes"]] * len(workers))
    scheduler = utils.generate_scheduler_kv_cache_config(configs)
    tokens, concurrency = utils.get_kv_cache_capacity(config, scheduler)
    return {
        "num_blocks": scheduler.num_blocks,
        "kv_cache_tokens": tokens,
        "max_concurrency": concurrency,
        "max_model_len": model.max_model_len,
        "block_size": min(g.kv_cache_spec.block_size for g in scheduler.kv_cache_groups),
        "groups": [len(g.layer_names) for g in configs[0].kv_cache_groups],
        "bytes": max(t.size for c in configs for t in c.kv_cache_tensors),
    }


def cache_spec(kind, block_size, state_bytes, tokens_per_state, bound, padded_bytes, extra_states):
    """vLLM's spec with that page: one head of state_bytes one-byte elements."""
    import torch
    from vllm.v1 import kv_cache_interface as specs

    attention = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": state_bytes,
        "head_size_v": 0,
        "dtype": torch.uint8,
        "page_size_padded": padded_bytes or None,
        "tokens_per_state": tokens_per_state,
    }
    match kind:
        case "full":
            return specs.FullAttentionSpec(**attention)
        case "mla":
            return specs.MLAAttentionSpec(**attention)
        case "window":
            return specs.SlidingWindowSpec(**attention, sliding_window=bound)
        case "window_mla":
            return specs.SlidingWindowMLASpec(**attention, sliding_window=bound)
        case "chunk":
            return specs.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=bound)
        case "state":
            return specs.MambaSpec(
                block_size=block_size,
                shapes=((state_bytes,),),
                dtypes=(torch.uint8,),
                page_size_padded=padded_bytes or None,
                num_prefill_checkpoint_blocks=extra_states,
            )
    raise ValueError(f"no cache of kind {kind}")


if __name__ == "__main__":
    main()
