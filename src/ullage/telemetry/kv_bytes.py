"""KV bytes where no engine says them: from a model and what the engine tells of its pool.

Holds the derivation for engines that count tokens, and what becomes of a snapshot. vLLM's pool is
`kv_pool_vllm.py`'s; what cannot be sure is absent, with why.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.anatomy.spec import Anatomy, ModelSpec
from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import HardwareSpec
from ullage.costs.kv import kv_bytes_per_token, layers_kv
from ullage.errors import BadInput
from ullage.telemetry.kv_pool import Asked, Pool, Unsure, asked_of
from ullage.telemetry.kv_pool_vllm import RULES, Rules, vllm_pool
from ullage.telemetry.snapshot import Gauge, Name, Snapshot

MOST_DERIVED = 1024


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
        self._deployment = deployment
        self._derived: dict[Asked, Pool | str] = {}
        specs = [anatomy.spec] if anatomy.low is anatomy.high else [anatomy.low, anatomy.high]
        self._rules = [Rules(spec, hardware) for spec in specs]

    def of(self, snapshot: Snapshot) -> Snapshot:
        """As `with_model`."""
        if {"kv_used_bytes", "kv_total_bytes"} <= snapshot.gauges.keys():
            return snapshot
        asked = asked_of(snapshot)
        pool = self._derived.get(asked)
        if pool is None:
            if len(self._derived) >= MOST_DERIVED:
                self._derived.clear()
            pool = self._derived[asked] = self._pool(asked)
        return _without(snapshot, pool) if isinstance(pool, str) else _filled(snapshot, pool)

    def _pool(self, asked: Asked) -> Pool | str:
        try:
            pools = [_pool_of(rules, asked, self._deployment) for rules in self._rules]
        except Unsure as why:
            return str(why)
        except BadInput as error:
            return f"of this model no bytes can be said: {error}"
        if len({pool.total_bytes for pool in pools}) > 1:
            low, high = sorted(pool.total_bytes for pool in pools)
            return f"the model's configuration leaves open whether {low:,.0f} or {high:,.0f} bytes"
        return pools[0]


def _pool_of(rules: Rules, asked: Asked, deployment: Deployment | None) -> Pool:
    if asked.engine == "vllm":
        return vllm_pool(rules, asked, deployment)
    return _token_pool(rules.spec, asked, deployment)


# --- the others: tokens ---------------------------------------------------------------------------


def _token_pool(spec: ModelSpec, asked: Asked, deployment: Deployment | None) -> Pool:
    if asked.total_tokens is None:
        raise Unsure("the engine does not tell how many tokens its KV cache holds")
    base = deployment or Deployment()
    kept = asked.format or (base.kv_cache_dtype if deployment is not None else "")
    if not kept:
        raise Unsure("the engine does not tell in which format it keeps KV")
    parallel = base.parallel
    if deployment is None and asked.tensor is not None:
        parallel = Parallel(tensor=asked.tensor)
    dtype = base.dtype or asked.dtype or None
    if asked.engine == "sglang" and dtype is None and spec.dtype == "float32":
        dtype = "float16"  # SGLang 0.5, srt/server_args.py: what --dtype auto makes of float32
    if any(row.window or row.state_bytes for row in layers_kv(spec, parallel, kept, dtype)):
        raise Unsure("its layers keep windows or states, so tokens do not tell bytes")
    ranks = parallel.tensor * parallel.pipeline
    each = kv_bytes_per_token(spec, parallel, kept, dtype) * ranks
    if not each:
        raise Unsure("this model keeps nothing that grows in a KV cache")
    total = asked.total_tokens * each
    source = f"kv_total_tokens × {each:,} bytes of a token of this model, KV in {kept}"
    if kept == "auto":
        source += f" ({dtype or f'{spec.dtype}, as its configuration has it'})"
    if ranks > 1:
        source += f", on {ranks} ranks together"
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
