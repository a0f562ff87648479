"""What vLLM 0.32 allocates for the KV cache: blocks, tokens, concurrency, or why it refuses.

Holds `allocate`, exact for the same KV bytes, limits, platform and block size. Settings left open
are `vllm_decisions.py`, pages `vllm_pages.py`, groups `vllm_groups.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ullage.anatomy.spec import ModelSpec
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import HardwareSpec
from ullage.costs.kv import pipeline_stages
from ullage.errors import BadUsage
from ullage.planning.vllm_decisions import (
    Decision,
    Decisions,
    Usage,
    decide,
)
from ullage.planning.vllm_groups import Group, Slot, Ungroupable
from ullage.planning.vllm_kinds import architecture_settings, kinds_of
from ullage.planning.vllm_pages import PageRules, stack_pages
from ullage.planning.vllm_pool import Pool, pool_of

Basis = Literal["vllm 0.32 rule, verified on CPU", "modelled", "unsupported"]
VERIFIED: Basis = "vllm 0.32 rule, verified on CPU"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One block table: the kinds of its layers, how many they are, tokens per block, the distinct
    page sizes, the blocks of the pool that one request of max_model_len takes, and the page of its
    first layer, by which vLLM's scheduler describes the group."""

    kinds: tuple[str, ...]
    num_layers: int
    block_size: int
    page_bytes: tuple[int, ...]
    blocks_per_request: int
    scheduler_page_bytes: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the engine allocates on one rank, in vLLM's words.

    `block_size`, `num_blocks` and `kv_cache_tokens` are `block_size`, `num_gpu_blocks` and
    `kv_cache_size_tokens` of vllm:cache_config_info, `max_concurrency` its
    `kv_cache_max_concurrency`. The last two are None where nothing is cached (encoders).
    `kv_cache_bytes` = num_blocks × bytes_per_block, all layers of the fullest rank.
    `request_bytes` is what one request of max_model_len tokens takes, `max_model_len_that_fits` the
    longest, up to the model's own maximum, of which one fits: 0 if not even one token does. With
    `refusals` vLLM does not start; the figures then say what the pool would have been.
    """

    basis: Basis
    block_size: int
    num_blocks: int
    kv_cache_tokens: int | None
    max_concurrency: float | None
    bytes_per_block: int
    kv_cache_bytes: int
    request_bytes: int
    groups: tuple[CacheGroup, ...]
    max_model_len: int
    max_model_len_that_fits: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    dtype: str
    kv_cache_dtype: str
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


def allocate(
    spec: ModelSpec,
    deployment: Deployment,
    kv_cache_memory_bytes: int,
    *,
    hardware: HardwareSpec | None = None,
    usage: Usage = "server",
) -> Allocation:
    """What vLLM 0.32 makes of this many bytes for the KV cache on every rank.

    `hardware` is the device of each rank (defaults and attention kernels depend on it); `usage`
    whether vLLM is a server or used as a library. Raises BadUsage for formats without a rule.
    """
    decisions = decide(spec, deployment, hardware=hardware, usage=usage)
    warnings = list(decisions.warnings)
    refusals = list(decisions.refusals)
    basis = _basis(spec, deployment, warnings)
    pool = None
    try:
        pool = _pool(spec, deployment, decisions)
    except Ungroupable as reason:
        refusals.append(str(reason))
    else:
        if pool is None and decisions.enable_prefix_caching:
            # Its coordinator for all but one group asserts that there is any
            # (HybridKVCacheCoordinator, v1/core/kv_cache_coordinator.py).
            refusals.append("vLLM does not start with prefix caching on where nothing is cached")
    if pool is None:
        return _nothing_cached(decisions, basis, warnings, refusals)

    refusals.extend(_rejected_blocks(pool, decisions.rules))
    most = max(decisions.longest_model_len, decisions.max_model_len)
    longest = pool.longest_that_fits(kv_cache_memory_bytes, most)
    length = decisions.max_model_len
    if decisions.fit_max_model_len:
        length = min(length, longest)
        if longest == 0:
            refusals.append("the KV memory does not hold a request of one token")
    elif longest < length:
        refusals.append(
            f"one request of max_model_len {length:,} tokens does not fit: the longest that does "
            f"has {longest:,}"
        )
    num_blocks = pool.num_blocks(kv_cache_memory_bytes)
    request_blocks = pool.request_blocks(max(length, 1))
    concurrency = num_blocks / request_blocks
    return Allocation(
        basis=basis,
        block_size=min(group.block_size for group in pool.groups),
        num_blocks=num_blocks,
        kv_cache_tokens=int(concurrency * length),
        max_concurrency=concurrency,
        bytes_per_block=pool.block_bytes,
        kv_cache_bytes=num_blocks * pool.block_bytes,
        request_bytes=request_blocks * pool.block_bytes,
        groups=tuple(_describe(pool, group, max(length, 1)) for group in pool.groups),
        max_model_len=length,
        max_model_len_that_fits=longest,
        max_num_seqs=decisions.max_num_seqs,
        max_num_batched_tokens=decisions.max_num_batched_tokens,
        enable_prefix_caching=decisions.enable_prefix_caching,
        dtype=decisions.dtype,
        kv_cache_dtype=decisions.kv_cache_dtype,
        decisions=decisions.notes,
        warnings=tuple(warnings),
        refusals=tuple(refusals),
    )


def _basis(spec: ModelSpec, deployment: Deployment, warnings: list[str]) -> Basis:
    version = ".".join(deployment.engine_version.split(".")[:2])
    if deployment.engine != "vllm" or version != "0.32":
        raise BadUsage(
            f"no allocation rules for {deployment.engine} {deployment.engine_version}",
            field="--engine-version",
            expected="vllm 0.32",
        )
    if spec.kind == "encoder-decoder":
        warnings.append("the cross-attention cache of encoder-decoders is not reproduced")
        return "unsupported"
    if deployment.parallel.context > 1:
        warnings.append("context parallelism is not reproduced")
        return "unsupported"
    settings = architecture_settings(spec.architecture)
    if (settings or {}).get("states") == "assumed" and not kinds_of(spec).states:
        warnings.append(
            f"vLLM 0.32 grows the blocks of {spec.architecture} for a state that no layer here "
            "keeps: that is not reproduced"
        )
        return "unsupported"
    if settings is None:
        warnings.append(
            f"vLLM 0.32 does not register {spec.architecture or 'this architecture'}: its rules "
            "are applied to the mechanisms of the model, not verified for it"
        )
        return "modelled"
    return VERIFIED if deployment.platform == "cpu" else "modelled"


def _pool(spec: ModelSpec, deployment: Deployment, decisions: Decisions) -> Pool | None:
    pages = stack_pages(spec, decisions.rules)
    stages = pipeline_stages(len(pages), deployment.parallel.pipeline)
    slots = [
        Slot(rank, page)
        for rank, stage in enumerate(stages)
        for index in stage
        for page in pages[index]
    ]
    return pool_of(
        slots,
        len(stages),
        block_outermost=decisions.block_outermost,
        in_flight_tokens=decisions.in_flight_tokens,
        aligned_states=decisions.aligned_states,
    )


def _rejected_blocks(pool: Pool, rules: PageRules) -> list[str]:
    """Groups whose blocks the attention kernels do not take (select_common_block_size), after
    pages were made equal: that may have grown a block that was too small."""
    kernel = rules.kernel_block
    sizes = {
        slot.page.block_size
        for group in pool.groups
        for slot in group.slots
        if slot.page.kind in ("full", "mla", "window", "chunk")
    }
    return [
        f"a block of {size} tokens is none that the attention kernels take: multiples of {kernel}"
        for size in sorted(sizes)
        if size % kernel
    ]


def _describe(pool: Pool, group: Group, length: int) -> CacheGroup:
    pages = [slot.page for slot in group.slots]
    return CacheGroup(
        kinds=tuple(dict.fromkeys(page.kind for page in pages)),
        num_layers=len(pages),
        block_size=group.block_size,
        page_bytes=tuple(dict.fromkeys(page.page_bytes for page in pages)),
        blocks_per_request=pool.group_blocks(group, length),
        scheduler_page_bytes=pages[0].page_bytes,
    )


def _nothing_cached(
    decisions: Decisions, basis: Basis, warnings: list[str], refusals: list[str]
) -> Allocation:
    """Encoders cache nothing; vLLM still counts its one null block."""
    return Allocation(
        basis=basis,
        block_size=decisions.rules.block_size,
        num_blocks=1,
        kv_cache_tokens=None,
        max_concurrency=None,
        bytes_per_block=0,
        kv_cache_bytes=0,
        request_bytes=0,
        groups=(),
        max_model_len=decisions.max_model_len,
        max_model_len_that_fits=decisions.max_model_len,
        max_num_seqs=decisions.max_num_seqs,
        max_num_batched_tokens=decisions.max_num_batched_tokens,
        enable_prefix_caching=decisions.enable_prefix_caching,
        dtype=decisions.dtype,
        kv_cache_dtype=decisions.kv_cache_dtype,
        decisions=decisions.notes,
        warnings=tuple(warnings),
        refusals=tuple(refusals),
    )
