"""Asks a real vLLM (CPU) what KV cache it allocates for given configurations and limits.

Run with the Python of vLLM's own environment (tools/vllm_setup.sh). Reads one JSON list of cases on
stdin, writes one JSON line per case on stdout: what was allocated, or why vLLM refused. Each case
is a whole engine start with dummy weights, in a child of this process, one after the other.

A case: {"name": str, "config": {…config.json…}, "limits": {…EngineArgs fields…},
"usage": "server" | "library"}.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import tempfile
import time
import types
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


CASE_TIMEOUT_S = 300


def main() -> None:
    cases = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints on stdout; answers alone belong there
    prepare()
    for case in cases:
        # A child per case: what one start leaves behind must not reach the next.
        child = os.fork()
        if child == 0:
            signal.alarm(CASE_TIMEOUT_S)
            started = time.monotonic()
            answer = {"name": case["name"], **ask(case)}
            answer["seconds"] = round(time.monotonic() - started, 2)
            os.write(answers, (json.dumps(answer) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            answer = {"name": case["name"], "refused": f"the process ended with status {status}"}
            os.write(answers, (json.dumps(answer) + "\n").encode())


def prepare() -> None:
    """Make starts cheap without touching what is asked.

    vLLM looks at each architecture's class in a fresh process, 12 s each; the same look in this
    process is free. Files of multimodal models import torchvision for images, which has no CPU
    wheel that matches; no image is ever processed here, so empty modules stand in for it.
    """
    import torch
    import transformers.utils
    import vllm.v1.engine.llm_engine  # noqa: F401 (imported once, for all children)
    from vllm.model_executor.models import registry
    from vllm.v1.attention.backends import cpu_attn

    registry._run_in_subprocess = lambda look: look()
    # Without AVX-512 vLLM refuses 8-bit caches for want of a kernel; their sizes are the same.
    find_kernel = cpu_attn._get_attn_isa
    cpu_attn._get_attn_isa = lambda *given, **named: _any_kernel(find_kernel, given, named)
    # Where the processor multiplies bfloat16, vLLM's kernel for gated delta nets keeps their states
    # in float32 (vllm/platforms/cpu.py); asked is what any other platform keeps.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    if not transformers.utils.is_torchvision_available():
        sys.meta_path.append(AbsentTorchvision())


def _any_kernel(find_kernel, given: tuple, named: dict) -> str:
    try:
        return find_kernel(*given, **named)
    except NotImplementedError as error:
        if "AVX-512" not in str(error):
            raise
        return "vec"


class AbsentTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets `import torchvision…` succeed; whatever is taken from it is an empty class."""

    def find_spec(self, name, _path=None, _target=None):
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _absent
        return module

    def exec_module(self, module):
        pass


class _Absent(type):
    """The class of stand-in classes: each attribute is another one."""

    def __getattr__(cls, name: str) -> type:
        return _absent(name)


def _absent(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


def ask(case: dict) -> dict:
    """Start an engine for one case; its allocation, or {"refused": sentence}."""
    with tempfile.TemporaryDirectory(prefix="ullage-oracle-") as folder:
        Path(folder, "config.json").write_text(json.dumps(case["config"]))
        try:
            return start(folder, case["limits"], case.get("usage", "server"))
        except Exception as error:
            return {"refused": reason(error)}


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
    core = engine.engine_core.engine_core
    return {"version": __version__, **describe(core.vllm_config, core.scheduler)}


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


if __name__ == "__main__":
    main()
