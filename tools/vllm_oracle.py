"""Asks a real vLLM (CPU) what KV cache it allocates for given configurations and limits.

Run with the Python of vLLM's own environment (tools/vllm_setup.sh). Reads one JSON list of cases on
stdin, writes one JSON line per case on stdout: what was allocated, or why vLLM refused. Each case
is a whole engine start with dummy weights, in this process, one after the other.

A case: {"name": str, "config": {…config.json…}, "limits": {…EngineArgs fields…},
"usage": "server" | "library"}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes


def main() -> None:
    cases = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints on stdout; answers alone belong there
    for case in cases:
        started = time.monotonic()
        answer = {"name": case["name"], **ask(case)}
        answer["seconds"] = round(time.monotonic() - started, 2)
        print(json.dumps(answer), file=answers, flush=True)


def ask(case: dict) -> dict:
    """Start an engine for one case; its allocation, or {"refused": sentence}."""
    with tempfile.TemporaryDirectory(prefix="ullage-oracle-") as folder:
        Path(folder, "config.json").write_text(json.dumps(case["config"]))
        try:
            return start(folder, case["limits"], case.get("usage", "server"))
        except Exception as error:
            return {"refused": reason(error)}
        finally:
            clean_up()


def reason(error: BaseException) -> str:
    """The sentence of the innermost cause, with the kind of exception."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return f"{type(error).__name__}: {error}"


def start(folder: str, limits: dict, usage: str) -> dict:
    """Start a whole engine and read what it allocated."""
    from vllm import __version__
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "disable_log_stats": True,
        **limits,
    }
    context = UsageContext.LLM_CLASS if usage == "library" else UsageContext.OPENAI_API_SERVER
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=folder, **arguments), usage_context=context
    )
    try:
        core = engine.engine_core.engine_core
        return {"version": __version__, **describe(core.vllm_config, core.scheduler)}
    finally:
        with contextlib.suppress(Exception):
            engine.engine_core.shutdown()


def describe(config, scheduler) -> dict:
    """What the engine decided, in the names of vllm:cache_config_info where it has them."""
    cache = config.cache_config
    kv = scheduler.kv_cache_config
    return {
        "num_gpu_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "kv_cache_size_tokens": cache.kv_cache_size_tokens,
        "kv_cache_max_concurrency": cache.kv_cache_max_concurrency,
        "cache_dtype": cache.cache_dtype,
        "mamba_block_size": cache.mamba_block_size,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "kv_cache_layout": cache.kv_cache_layout,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_in_flight_tokens": config.max_in_flight_tokens,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_bytes": max((tensor.size for tensor in kv.kv_cache_tensors), default=0),
        "groups": [group(g) for g in kv.kv_cache_groups],
    }


def group(kv_group) -> dict:
    spec = kv_group.kv_cache_spec
    return {
        "kind": type(spec).__name__,
        "layers": len(kv_group.layer_names),
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
    }


def clean_up() -> None:
    """Give back what a start leaves in the process, so that the next one begins afresh."""
    with contextlib.suppress(Exception):
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory(shutdown_ray=False)
    gc.collect()


if __name__ == "__main__":
    main()
