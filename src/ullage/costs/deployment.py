"""Where and how a model runs: `Deployment`, with vLLM's names and None for "the engine decides".

Holds data only. What an engine makes of a None is that engine's rule, in `planning/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Platform = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel sizes. A model replica spans `tensor × pipeline × context` ranks; `data` replicas.

    With `expert` whole experts are dealt over tensor × data ranks (vLLM's
    --enable-expert-parallel); without it each expert is cut over those same ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Deployment:
    """The engine and its flags, named as vLLM names them; sizes in bytes, lengths in tokens."""

    engine: str = "vllm"
    engine_version: str = "0.32"
    platform: Platform = "cuda"
    parallel: Parallel = Parallel()
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
