"""What an engine says of its KV cache beside what is predicted: blocks, tokens, concurrency.

Holds the comparison with vLLM's own allocation (labels of vllm:cache_config_info) and with the
embedded engine's pool. The rules are `planning.vllm`; what a server leaves unsaid is a gap by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ullage.anatomy.spec import ModelSpec
from ullage.checkup.comparison import compared
from ullage.checkup.figures import figure
from ullage.checkup.metrics import CacheInfo
from ullage.costs.deployment import Deployment, Platform
from ullage.costs.hardware import HardwareSpec
from ullage.costs.kv import kv_bytes_per_token
from ullage.errors import BadInput
from ullage.planning.vllm import Allocation, allocate
from ullage.telemetry.dialects.vllm import CACHE_INFO

State = Literal["equal", "differs", "not_evaluable"]
WHAT = "the server's KV allocation"
BLOCKS, BLOCK_SIZE = "num_gpu_blocks", "block_size"
TOKENS, CONCURRENCY = "kv_cache_size_tokens", "kv_cache_max_concurrency"
# Label of vllm:cache_config_info → the row's name and unit.
LABELS: Mapping[str, tuple[str, str]] = {
    BLOCKS: ("KV blocks", ""),
    BLOCK_SIZE: ("KV block size", "tokens"),
    TOKENS: ("KV cache tokens", "tokens"),
    CONCURRENCY: ("max concurrency", "requests"),
}
PROBE_BYTES = 1 << 40  # any size tells the bytes of a block; this one holds one of every model


@dataclass(frozen=True, slots=True)
class Compared:
    """Rows of "predicted beside actual", (what, why) pairs that are missing, and what it means.

    `derived`: the number of blocks was taken from the server, since it does not tell its bytes.
    `assumed` names settings that no label tells and that were taken as vLLM's defaults.
    """

    rows: tuple[dict[str, Any], ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    derived: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        """Equal only when something was compared and every row agrees with no tolerance."""
        if not self.rows:
            return "not_evaluable"
        same = all(r["predicted"]["value"] == r["actual"]["value"] for r in self.rows)
        return "equal" if same else "differs"


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of a vLLM server from outside. `platform` and `hardware` None: nobody said.

    `kv_bytes_named` is what the user says the server was given, in bytes, for a server that does
    not export it.
    """

    cache: CacheInfo
    deployment: Deployment
    max_model_len: int | None
    platform: Platform | None
    hardware: HardwareSpec | None
    kv_bytes_named: int | None = None


def compare_with_vllm(spec: ModelSpec, server: Server) -> Compared:
    """Set `vllm:cache_config_info` beside what vLLM 0.32's rules give for the same KV bytes.

    Without bytes the blocks are taken from the server, and tokens and concurrency follow.
    """
    cache = server.cache
    if server.max_model_len is None:
        return _none("the server does not tell max_model_len; name it with --max-model-len")
    said = cache.kv_cache_memory_bytes or server.kv_bytes_named
    if said is None and not cache.num_blocks:
        return _none("the server exports neither kv_cache_memory_bytes nor num_gpu_blocks")
    if cache.num_blocks_override:
        return _none("num_gpu_blocks_override replaces what the memory would hold")
    candidates, reasons = _candidates(spec, server, said)
    if not candidates:
        return _none("; ".join(dict.fromkeys(reasons)))
    if len({_answers(made) for made in candidates}) > 1:
        return _none("it depends on what the server runs on; name it with --gpu")
    return _beside(spec, server, candidates[0], said)


def compare_with_embedded(
    spec: ModelSpec, cache: CacheInfo, total_bytes: float | None, dtype: str
) -> Compared:
    """The embedded engine's blocks and their bytes beside KV bytes // (block × bytes per token)."""
    each = kv_bytes_per_token(spec, kv_cache_dtype=dtype, dtype=dtype)
    if not each or not cache.block_size or not cache.num_blocks:
        return _none("the engine tells no blocks, or nothing in this model grows", "the KV pool")
    block_bytes = cache.block_size * each
    rows = []
    missing = []
    if (cache.kv_cache_memory_bytes or 0) >= block_bytes:
        assert cache.kv_cache_memory_bytes, "not less than a block"
        predicted = cache.kv_cache_memory_bytes // block_bytes
        source = f"modelled: {cache.kv_cache_memory_bytes:,} bytes / {block_bytes:,} of a block"
        rows.append(_row("KV blocks", predicted, cache.num_blocks, "", source))
    else:
        why = "the engine exports no kv_cache_memory_bytes that would hold a block"
        missing.append(("KV blocks from KV bytes", why))
    if total_bytes is None:
        missing.append(("bytes of all KV blocks", "no ullage_kv_cache_total_bytes is exported"))
    else:
        predicted = cache.num_blocks * block_bytes
        source = f"modelled: {cache.num_blocks:,} blocks × {block_bytes:,} bytes of a block"
        actual = figure(int(total_bytes), "bytes", "engine: ullage_kv_cache_total_bytes")
        rows.append(compared("KV bytes in all blocks", figure(predicted, "bytes", source), actual))
    return Compared(tuple(rows), tuple(missing))


def _candidates(
    spec: ModelSpec, server: Server, kv_bytes: int | None
) -> tuple[list[Allocation], list[str]]:
    """What vLLM may have allocated, by platform where none was named, and why others drop out."""
    candidates: list[Allocation] = []
    reasons: list[str] = []
    platforms: tuple[Platform, ...] = ("cpu", "cuda")
    if server.platform is not None:
        platforms = (server.platform,)
    for platform in platforms:
        try:
            made = _allocated(spec, server, platform, kv_bytes)
        except BadInput as error:
            reasons.append(str(error))
            continue
        if made.refusals:
            # The server runs, so whatever refuses here is not what runs there.
            reasons.append(f"on {platform} vLLM 0.32 would not start: {made.refusals[0]}")
        elif made.basis == "unsupported":
            reasons.append("; ".join(made.warnings))
        else:
            candidates.append(made)
    if server.platform is not None or not candidates:
        return candidates, reasons
    # Default blocks differ by platform, so the server's own tells them apart.
    sizes = ", ".join(str(made.block_size) for made in candidates)
    reasons.append(
        f"its block_size {server.cache.block_size} is none that vLLM 0.32 would choose by itself "
        f"({sizes}); say what the server runs on with --gpu"
    )
    return [made for made in candidates if made.block_size == server.cache.block_size], reasons


def _none(why: str, what: str = WHAT) -> Compared:
    return Compared(missing=((what, why),))


def _allocated(
    spec: ModelSpec, server: Server, platform: Platform, kv_bytes: int | None
) -> Allocation:
    """vLLM's answer for what the server tells of its flags; the rest is left to its rules."""
    cache = server.cache
    flags = replace(
        server.deployment,
        platform=platform,
        max_model_len=server.max_model_len,
        kv_cache_memory_bytes=None,
        kv_cache_dtype=cache.kv_cache_dtype or server.deployment.kv_cache_dtype,
        block_size=cache.block_size if cache.block_size_is_flag else server.deployment.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
    )
    if kv_bytes is None:
        assert cache.num_blocks, "asked only with blocks or bytes"
        per_engine = cache.num_blocks // cache.num_engines
        probe = allocate(spec, flags, PROBE_BYTES, hardware=server.hardware)
        kv_bytes = per_engine * probe.bytes_per_block
    return allocate(spec, flags, kv_bytes, hardware=server.hardware)


def _answers(made: Allocation) -> tuple[int, int, int | None, float | None]:
    return made.block_size, made.num_blocks, made.kv_cache_tokens, made.max_concurrency


def _beside(spec: ModelSpec, server: Server, made: Allocation, kv_bytes: int | None) -> Compared:
    cache = server.cache
    # The client of several engines sums their blocks; tokens and concurrency stay one engine's
    # (vLLM 0.32, v1/engine/core_client.py).
    predicted: dict[str, int | float | None] = {
        BLOCKS: made.num_blocks * cache.num_engines,
        BLOCK_SIZE: made.block_size,
        TOKENS: made.kv_cache_tokens,
        CONCURRENCY: made.max_concurrency,
    }
    actual: dict[str, int | float | None] = {
        BLOCKS: cache.num_blocks,
        BLOCK_SIZE: cache.block_size,
        TOKENS: cache.kv_cache_tokens,
        CONCURRENCY: cache.max_concurrency,
    }
    missing: list[tuple[str, str]] = []
    if kv_bytes is None:
        del predicted[BLOCKS]
        missing.append(
            (
                f"{BLOCKS} of the server",
                "it exports kv_cache_memory_bytes only when that flag is set, so how many bytes "
                "the blocks were cut from is not known; name them with --kv-cache-memory-bytes",
            )
        )
    if cache.block_size_is_flag or server.platform is None:
        # Then the size was asked for, or told the platform: no prediction to be right about.
        del predicted[BLOCK_SIZE]
    given = (
        f"the server's {cache.num_blocks:,} blocks"
        if kv_bytes is None
        else f"{kv_bytes:,} KV bytes"
    )
    source = f"modelled: vLLM 0.32's rules for {given} and {made.max_model_len:,} tokens a request"
    assumed = _assumed(spec, server, kv_bytes)
    rows: list[dict[str, Any]] = []
    for label, value in predicted.items():
        found = actual[label]
        if value is None or found is None:
            missing.append((f"{label} of the server", "it is not exported or not predicted"))
            continue
        note = label
        if assumed:
            note += f"; taken as vLLM's default: {', '.join(assumed)}"
        name, unit = LABELS[label]
        rows.append(_row(name, value, found, unit, source, note))
    return Compared(tuple(rows), tuple(missing), kv_bytes is None, assumed)


def _assumed(spec: ModelSpec, server: Server, kv_bytes: int | None) -> tuple[str, ...]:
    """Flags that matter for the answer and that neither the server nor the user tells."""
    assumed = []
    follows_dtype = (server.cache.kv_cache_dtype or "auto") == "auto"
    if kv_bytes is not None and server.deployment.dtype is None and follows_dtype:
        assumed.append("--dtype")
    windows = any(
        getattr(layer.mixer, "window", None) or getattr(layer.mixer, "chunk", None)
        for layer in spec.layers
    )
    if windows and server.deployment.max_num_batched_tokens is None:
        assumed.append("--max-num-batched-tokens")
    return tuple(assumed)


def _row(
    name: str, predicted: float | int, actual: float | int, unit: str, source: str, note: str = ""
) -> dict[str, Any]:
    said = f"engine: {CACHE_INFO}"
    return compared(name, figure(predicted, unit, source), figure(actual, unit, said), note)
