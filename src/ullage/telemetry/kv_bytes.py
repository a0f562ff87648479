"""KV bytes where no engine says them: from a model and what the engine tells of its pool.

Holds the derivation and its proof against the server's own figures. What a page weighs is
`planning.vllm` for vLLM and `costs.kv` for the others; what cannot be sure is absent, with why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ullage.anatomy.spec import Anatomy, ModelSpec
from ullage.costs.deployment import Deployment, Platform
from ullage.costs.hardware import HardwareSpec
from ullage.costs.kv import kv_bytes_per_token, layers_kv
from ullage.errors import BadInput
from ullage.planning.vllm import VERIFIED, Allocation, allocate
from ullage.telemetry.snapshot import Gauge, Identity, Name, Snapshot

PROBE_BYTES = 1 << 40
"""Any size tells the bytes of a block; this one holds one of every model."""
MOST_DERIVED = 1024
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")
RULES = "vLLM 0.32's rules"
# The flags by which engines name the cache's format, where they say it.
FORMAT_SETTINGS = ("cache_dtype", "kv_cache_dtype")


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


def with_model(
    snapshot: Snapshot,
    anatomy: Anatomy,
    *,
    deployment: Deployment | None = None,
    hardware: HardwareSpec | None = None,
) -> Snapshot:
    """The snapshot with the bytes, and where the engine tells none the tokens, of its KV cache.

    `deployment` says what the user knows of the server's flags (parallel sizes, dtype). Fields that
    the engine says itself stay. Raises nothing: what cannot be derived keeps its reason and gets
    another.
    """
    return ModelBytes(anatomy, deployment, hardware).of(snapshot)


class ModelBytes:
    """`with_model` for many snapshots of one model: a pool is derived once for each setting."""

    def __init__(
        self,
        anatomy: Anatomy,
        deployment: Deployment | None = None,
        hardware: HardwareSpec | None = None,
    ) -> None:
        self._anatomy = anatomy
        self._deployment = deployment
        self._hardware = hardware
        self._derived: dict[_Asked, Pool | str] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """As `with_model`."""
        if {"kv_used_bytes", "kv_total_bytes"} <= snapshot.gauges.keys():
            return snapshot
        asked = _asked(snapshot)
        pool = self._derived.get(asked)
        if pool is None:
            if len(self._derived) >= MOST_DERIVED:
                self._derived.clear()
            pool = self._derived[asked] = self._pool(asked)
        return _without(snapshot, pool) if isinstance(pool, str) else _filled(snapshot, pool)

    def _pool(self, asked: _Asked) -> Pool | str:
        anatomy = self._anatomy
        specs = [anatomy.spec] if anatomy.low is anatomy.high else [anatomy.low, anatomy.high]
        try:
            pools = [_pool_of(spec, asked, self._deployment, self._hardware) for spec in specs]
        except Unsure as why:
            return str(why)
        except BadInput as error:
            return f"of this model no bytes can be said: {error}"
        if len({pool.total_bytes for pool in pools}) > 1:
            low, high = sorted(pool.total_bytes for pool in pools)
            return f"the model's configuration leaves open whether {low:,.0f} or {high:,.0f} bytes"
        return pools[0]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What of a snapshot decides the pool."""

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


def _asked(snapshot: Snapshot) -> _Asked:
    who = snapshot.identity
    named = who.settings
    budget = named.get("kv_cache_memory_bytes", "")
    # An override of the blocks cuts the tie between them and the memory.
    free = named.get("num_gpu_blocks_override", "None") == "None"
    caching = named.get("enable_prefix_caching", "")
    return _Asked(
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
    )


def _format(who: Identity) -> str:
    for name in FORMAT_SETTINGS:
        if who.settings.get(name):
            return who.settings[name]
    return ""


def _pool_of(
    spec: ModelSpec,
    asked: _Asked,
    deployment: Deployment | None,
    hardware: HardwareSpec | None,
) -> Pool:
    if asked.engine == "vllm":
        return _vllm_pool(spec, asked, deployment, hardware)
    return _token_pool(spec, asked, deployment)


# --- vLLM: blocks ---------------------------------------------------------------------------------


def _vllm_pool(
    spec: ModelSpec,
    asked: _Asked,
    deployment: Deployment | None,
    hardware: HardwareSpec | None,
) -> Pool:
    if not asked.num_blocks or asked.num_blocks % asked.num_engines:
        raise Unsure("the server does not tell how many KV blocks each of its engines has")
    each = asked.num_blocks // asked.num_engines
    made = _agreed(spec, asked, deployment, hardware, each)
    parallel = (deployment or Deployment()).parallel
    ranks = parallel.tensor * parallel.pipeline
    if asked.budget_bytes is not None and asked.budget_bytes // made.bytes_per_block != each:
        raise Unsure(
            f"{asked.budget_bytes:,} bytes hold {asked.budget_bytes // made.bytes_per_block:,} "
            f"blocks of this model, and the server has {each:,}: another model, dtype or "
            "parallel size than was named"
        )
    block = made.bytes_per_block * ranks
    at = f"{ranks} ranks × " if ranks > 1 else ""
    source = (
        f"num_gpu_blocks × {at}{made.bytes_per_block:,} bytes of a block of this model in "
        f"{_words(made)}, by {RULES}"
    )
    tokens = None if made.kv_cache_tokens is None else made.kv_cache_tokens * asked.num_engines
    if asked.max_model_len is None and len(made.groups) > 1:
        tokens = None
    return Pool(
        total_bytes=asked.num_blocks * block,
        # Usage is a share of all blocks but the null block (vLLM 0.32, v1/core/block_pool.py).
        usable_bytes=(asked.num_blocks - asked.num_engines) * block,
        tokens=tokens,
        source=source,
        sure=asked.budget_bytes is not None and made.basis == VERIFIED,
    )


def _words(made: Allocation) -> str:
    return made.dtype if made.kv_cache_dtype == "auto" else made.kv_cache_dtype


def _agreed(
    spec: ModelSpec,
    asked: _Asked,
    deployment: Deployment | None,
    hardware: HardwareSpec | None,
    num_blocks: int,
) -> Allocation:
    """vLLM's allocation with the server's block size and tokens; one, whatever it runs on."""
    platforms = PLATFORMS if deployment is None else (deployment.platform,)
    made, why = [], []
    for platform in platforms:
        try:
            one = _allocated(spec, asked, deployment, hardware, platform, num_blocks)
        except BadInput as error:
            why.append(str(error))
            continue
        reason = _differs(one, asked)
        if reason:
            why.append(reason)
        else:
            made.append(one)
    if not made:
        raise Unsure("; ".join(dict.fromkeys(why)))
    if len({one.bytes_per_block for one in made}) > 1:
        raise Unsure("the bytes of a block depend on what the server runs on")
    return made[0]


def _allocated(
    spec: ModelSpec,
    asked: _Asked,
    deployment: Deployment | None,
    hardware: HardwareSpec | None,
    platform: Platform,
    num_blocks: int,
) -> Allocation:
    base = deployment or Deployment()
    flags = replace(
        base,
        platform=platform,
        max_model_len=asked.max_model_len or base.max_model_len,
        kv_cache_memory_bytes=None,
        kv_cache_dtype=asked.format or base.kv_cache_dtype,
        block_size=asked.block_size if asked.block_size_is_flag else base.block_size,
        enable_prefix_caching=asked.prefix_caching,
    )
    probe = allocate(spec, flags, PROBE_BYTES, hardware=hardware)
    if not probe.bytes_per_block:
        raise Unsure("this model keeps nothing that grows in a KV cache")
    return allocate(spec, flags, num_blocks * probe.bytes_per_block, hardware=hardware)


def _differs(made: Allocation, asked: _Asked) -> str:
    """Why this is not what the server allocated; "" when its own figures do not contradict."""
    if made.basis == "unsupported":
        return "; ".join(made.warnings)
    if made.refusals:
        return f"{RULES} would not start it: {made.refusals[0]}"
    if asked.block_size is not None and made.block_size != asked.block_size:
        return (
            f"a block would have {made.block_size} tokens and the server's has {asked.block_size}"
        )
    if asked.total_tokens is None or asked.max_model_len is None:
        return ""
    tokens = (made.kv_cache_tokens or 0) * asked.num_engines
    if tokens == asked.total_tokens:
        return ""
    return (
        f"the server's blocks would hold {tokens:,} tokens of this model and it says "
        f"{asked.total_tokens:,.0f}: it serves another model or with other flags"
    )


# --- the others: tokens ---------------------------------------------------------------------------


def _token_pool(spec: ModelSpec, asked: _Asked, deployment: Deployment | None) -> Pool:
    if asked.total_tokens is None:
        raise Unsure("the engine does not tell how many tokens its KV cache holds")
    base = deployment or Deployment()
    kept = asked.format or (base.kv_cache_dtype if deployment is not None else "")
    if not kept:
        raise Unsure("the engine does not tell in which format it keeps KV")
    if any(row.window or row.state_bytes for row in layers_kv(spec, base.parallel, kept)):
        raise Unsure("its layers keep windows or states, so tokens do not tell bytes")
    ranks = base.parallel.tensor * base.parallel.pipeline
    each = kv_bytes_per_token(spec, base.parallel, kept, base.dtype) * ranks
    if not each:
        raise Unsure("this model keeps nothing that grows in a KV cache")
    total = asked.total_tokens * each
    source = f"kv_total_tokens × {each:,} bytes of a token of this model, KV in {kept}"
    return Pool(total, total, asked.total_tokens, source, sure=False)


# --- the snapshot ---------------------------------------------------------------------------------


def _filled(snapshot: Snapshot, pool: Pool) -> Snapshot:
    gauges, sources = dict(snapshot.gauges), dict(snapshot.sources)
    absent = dict(snapshot.absent)
    near: set[Name] = set(snapshot.approximate)

    def add(name: Gauge, value: float, source: str, *, exact: bool) -> None:
        if name in gauges:
            return
        gauges[name], sources[name] = value, source
        absent.pop(name, None)
        if not exact:
            near.add(name)

    add("kv_total_bytes", pool.total_bytes, pool.source, exact=pool.sure)
    if pool.tokens is not None:
        add("kv_total_tokens", pool.tokens, f"num_gpu_blocks, by {RULES}", exact=pool.sure)
    ratio = gauges.get("kv_used_ratio")
    if ratio is None:
        absent.setdefault("kv_used_bytes", "the share in use is not known")
    else:
        usage = f"{sources['kv_used_ratio']} × kv_total_bytes"
        add("kv_used_bytes", ratio * pool.usable_bytes, usage, exact=pool.sure)
        if pool.tokens is not None:
            usage = f"{sources['kv_used_ratio']} × kv_total_tokens"
            add("kv_used_tokens", ratio * pool.tokens, usage, exact=False)
    return replace(
        snapshot, gauges=gauges, sources=sources, absent=absent, approximate=frozenset(near)
    )


def _without(snapshot: Snapshot, why: str) -> Snapshot:
    names: tuple[Name, ...] = ("kv_used_bytes", "kv_total_bytes")
    reasons = {name: f"{snapshot.absent[name]}; {why}" for name in names if name in snapshot.absent}
    return replace(snapshot, absent={**snapshot.absent, **reasons})
