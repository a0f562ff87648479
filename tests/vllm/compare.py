"""What vLLM answered beside what ullage says, in the same words, for one case."""

from __future__ import annotations

from typing import Any

from ullage.anatomy import read_config
from ullage.costs.deployment import Deployment
from ullage.planning.vllm import Allocation, allocate

FIELDS = {
    "num_gpu_blocks": "num_blocks",
    "block_size": "block_size",
    "kv_cache_size_tokens": "kv_cache_tokens",
    "kv_cache_max_concurrency": "max_concurrency",
    "kv_cache_bytes": "kv_cache_bytes",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "dtype": "dtype",
}
"""vLLM's names (of vllm:cache_config_info where it exports them) and ours. No tolerance."""

BEYOND_SIZING = {
    "not supported for now": "the architecture is not in vLLM's registry",
    "does not recognize this architecture": "transformers lacks the model without remote code",
    "failed to be inspected": "the model's file imports what a CPU build lacks",
    "No module named": "the model's file imports what this environment lacks",
    "does not dispatch through the Transformers attention interface": "no implementation here",
    "is supported only for CUDA": "the CPU has no experts without a gate",
    "Sparse Attention is not supported on CPU": "the CPU has no such kernel",
    "_OpNamespace": "an operator that is not compiled into the CPU build",
    "module 'triton' has no attribute": "a Triton kernel without a CPU counterpart",
    "'_lib_fn_wrapper' object has no attribute": (
        "vLLM's search for Triton kernels (triton_utils/dispatcher.py) trips over llvmlite's "
        "objects, which some multimodal models' processors import"
    ),
    "does not support float16": "the model is unstable in float16; vLLM knows that by its name",
    "process ended with status": "a kernel crashed, or the start took longer than the oracle waits",
}
"""Parts of refusals that have nothing to do with the cache, and what they mean: vLLM cannot run the
model here."""


def sized(case: dict[str, Any]) -> Allocation:
    """ullage's allocation for a case, on the CPU as the oracle runs."""
    limits = {k: v for k, v in case["limits"].items() if k != "language_model_only"}
    kv_bytes = limits.pop("kv_cache_memory_bytes")
    spec = read_config(case["config"], file="config.json").spec
    deployment = Deployment(platform="cpu", **limits)
    return allocate(spec, deployment, kv_bytes, usage=case["usage"])


def differences(case: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    """What differs, a line each; empty when all agree. A refusal must meet a refusal."""
    ours = sized(case)
    if "refused" in answer:
        return [] if ours.refusals else [f"vLLM refuses ({answer['refused']}), ullage does not"]
    if ours.refusals:
        return [f"ullage refuses ({'; '.join(ours.refusals)}), vLLM starts"]
    lines = [
        f"{theirs}: vLLM {answer[theirs]}, ullage {getattr(ours, mine)}"
        for theirs, mine in FIELDS.items()
        if answer[theirs] != getattr(ours, mine)
    ]
    theirs = sorted((g["layers"], g["block_size"], g["page_size_bytes"]) for g in answer["groups"])
    mine = sorted((g.num_layers, g.block_size, g.scheduler_page_bytes) for g in ours.groups)
    if theirs != mine:
        lines.append(f"groups: vLLM {theirs}, ullage {mine}")
    return lines


def beyond_sizing(answer: dict[str, Any]) -> bool:
    """Whether vLLM refused for a reason that no sizing could know."""
    return any(part in answer.get("refused", "") for part in BEYOND_SIZING)
