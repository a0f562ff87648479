"""What a replica's KV cache is, and what of a snapshot decides it.

Holds the values and how an engine's own words for its flags are read. What follows from them and a
model is `kv_pool_vllm.py`'s for vLLM and `kv_bytes.py`'s for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.telemetry.snapshot import Identity, Snapshot

# The flags by which engines name the cache's format, where they say it.
FORMAT_SETTINGS = ("cache_dtype", "kv_cache_dtype")
STATE_FORMATS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
NOTHING = frozenset({"", "None", "[]", "()", "null"})


@dataclass(frozen=True, slots=True)
class Pool:
    """What a replica's KV cache is: bytes of its `held` parts together and of all of them.

    `usable_bytes` are those that usage is a share of. `tokens` None: not told by the rules.
    `source` says by what arithmetic, `sure` whether the server's own figures confirm it.
    """

    total_bytes: float
    usable_bytes: float
    tokens: float | None
    source: str
    sure: bool


class Unsure(Exception):
    """Why no bytes can be said, in words."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a snapshot decides the pool. None or "": the engine does not say.

    `format` is the cache's, `dtype` what the model computes in, `state_formats` those of recurrent
    states where they are not the usual ones, `skipped` the layers that keep another format.
    `tensor` are the ranks that share a token's KV.
    """

    engine: str
    version: str
    num_engines: int
    block_size: int | None
    num_blocks: int | None
    max_model_len: int | None
    total_tokens: float | None
    format: str
    budget_bytes: int | None
    block_size_is_flag: bool
    prefix_caching: bool | None
    dtype: str = ""
    tensor: int | None = None
    state_formats: str = ""
    skipped: str = ""


def asked_of(snapshot: Snapshot) -> Asked:
    """What the snapshot says of it."""
    who = snapshot.identity
    named = who.settings
    budget = named.get("kv_cache_memory_bytes", "")
    # An override of the blocks cuts the tie between them and the memory.
    free = named.get("num_gpu_blocks_override", "None") == "None"
    caching = named.get("enable_prefix_caching", "")
    states = {named.get(name, "auto") for name in STATE_FORMATS} - {"auto"} - NOTHING
    skipped = named.get("kv_cache_dtype_skip_layers", "")
    return Asked(
        engine=who.engine,
        version=who.version,
        num_engines=who.num_engines,
        block_size=who.block_size,
        num_blocks=who.num_blocks,
        max_model_len=who.max_model_len,
        total_tokens=snapshot.gauges.get("kv_total_tokens"),
        format=_format(who),
        budget_bytes=int(budget) if free and budget.isdecimal() else None,
        block_size_is_flag=named.get("user_specified_block_size") == "True",
        prefix_caching={"True": True, "False": False}.get(caching),
        dtype="" if named.get("dtype") == "auto" else named.get("dtype", ""),
        tensor=_tensor(who),
        state_formats=", ".join(sorted(states)),
        skipped="" if skipped in NOTHING else skipped,
    )


def _format(who: Identity) -> str:
    for name in FORMAT_SETTINGS:
        if who.settings.get(name):
            return who.settings[name]
    return ""


def _tensor(who: Identity) -> int | None:
    """Of SGLang's arguments (0.5, srt/server_args.py): with attention that is data-parallel each
    of its groups keeps the KV of its own requests."""
    ranks, groups = (who.settings.get(name, "") for name in ("tp_size", "dp_size"))
    if not ranks.isdecimal() or not int(ranks):
        return None
    if who.settings.get("enable_dp_attention") != "true":
        return int(ranks)
    if not groups.isdecimal() or not int(groups) or int(ranks) % int(groups):
        return None
    return int(ranks) // int(groups)
