"""The answer of `ullage size` as plain data: figures, ranges, provenance, ledger, decisions.

Holds `size_document`, which turns a Ledger into one JSON-ready mapping. No figure is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ullage.anatomy.open import Model
from ullage.anatomy.spec import ModelSpec
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import Gpus
from ullage.costs.kv import kv_bytes_per_token, state_bytes_per_sequence
from ullage.costs.weights import stored_bytes
from ullage.planning.ledger import KV_FIGURES, Case, Ledger, build_ledger, num_ranks
from ullage.planning.parallel_sizes import spread
from ullage.planning.vllm import allocate
from ullage.planning.vllm_kinds import Decision
from ullage.planning.workload import WorkloadAnswer, answer_workload

SCHEMA = "ullage.size/1"
WIDE = 0.05
"""A range wider than this, against its lower end, is listed with its reason."""

TOLERATED = 0.01
"""How far a checkpoint's bytes may be from what its configuration implies, unremarked."""

Number = int | float


def size_document(
    model: Model,
    deployment: Deployment,
    gpus: Gpus | None = None,
    *,
    name: str = "",
    choose_sizes: bool = True,
    context: int | None = None,
    concurrency: int | None = None,
) -> dict[str, object]:
    """Everything that `ullage size` says of a model on a deployment.

    Top-level figures are plain numbers, `{"min", "max"}` where the model itself is not wholly
    understood, and null where something to evaluate them is missing (`not_evaluable` says what).
    With `choose_sizes`, N devices and no sizes named become tensor-parallel ranks. Raises BadUsage
    for what the engine refuses to hear of; not fitting is in the document.
    """
    anatomy = model.anatomy
    chosen: list[Decision] = []
    if choose_sizes and gpus is not None and gpus.count > 1:
        deployment, words = spread(anatomy.high, deployment, gpus.count)
        chosen.append(Decision("parallel_sizes", _sizes_in_words(deployment), words))
    ledger = build_ledger(anatomy, deployment, gpus)
    workload = None
    if context is not None or concurrency is not None:
        workload = answer_workload(ledger, context, concurrency)
    checkpoint, mismatch = _checkpoint_document(model)
    figures = _figures(ledger)
    ranges = _ranges(ledger, figures, anatomy.low is not anatomy.high)
    provenance = _provenance(model, ledger, figures, ranges)
    if workload is not None:
        provenance["workload"] = f"{_rule(ledger)}; {_budget(ledger)}"
    return {
        "schema": SCHEMA,
        "model": name,
        "family": anatomy.spec.family,
        "engine": deployment.engine,
        "engine_version": deployment.engine_version,
        "platform": deployment.platform,
        "gpu": _gpu_document(gpus, deployment),
        "parallel": _parallel_document(deployment),
        "checkpoint": checkpoint,
        **{key: _top_level(pair, ledger) for key, pair in figures.items()},
        "fits": ledger.fits,
        "deficit_bytes": _deficit_document(ledger),
        "ranges": ranges,
        "provenance": provenance,
        "ledger": _ledger_document(ledger),
        "workload": None if workload is None else _workload_document(workload),
        "decisions": [
            {"name": d.name, "value": d.value, "source": d.source}
            for d in (*chosen, *_own_decisions(ledger), *ledger.decided.notes)
        ],
        "warnings": [*mismatch, *ledger.warnings],
        "refusals": list(ledger.refusals),
        "not_evaluable": _not_evaluable(ledger, figures),
        "unknowns": [
            {"field": u.field, "found": u.found, "widens": list(u.widens)}
            for u in anatomy.spec.unknowns
        ],
        "unread": list(anatomy.unread),
    }


# --- figures -------------------------------------------------------------------------------------

Pair = tuple[Number | None, Number | None]
"""A figure at the heaviest and at the lightest case; None where it cannot be evaluated."""


def _figures(ledger: Ledger) -> dict[str, Pair]:
    """Every top-level figure, in the order in which they are shown."""
    parallel, decided = ledger.deployment.parallel, ledger.decided

    def of_specs(figure: Callable[[ModelSpec], int]) -> Pair:
        heavy = figure(ledger.heavy.spec)
        same = ledger.light.spec is ledger.heavy.spec
        return heavy, heavy if same else figure(ledger.light.spec)

    def per_token(spec: ModelSpec) -> int:
        return kv_bytes_per_token(spec, parallel, decided.kv_cache_dtype, decided.dtype)

    def per_sequence(spec: ModelSpec) -> int:
        return state_bytes_per_sequence(spec, parallel, decided.dtype)

    figures: dict[str, Pair] = {
        "parameters": of_specs(_parameters),
        "weights_bytes": (ledger.heavy.weights.total, ledger.light.weights.total),
        "kv_bytes_per_token": of_specs(per_token),
        "state_bytes_per_sequence": of_specs(per_sequence),
        "block_size": (_block_size(ledger.heavy, ledger), _block_size(ledger.light, ledger)),
    }
    for key in KV_FIGURES:
        figures[key] = (_allocated(ledger.heavy, key), _allocated(ledger.light, key))
    return figures


def _parameters(spec: ModelSpec) -> int:
    """Elements of every tensor, packed or not, multi-token prediction left out."""
    return sum(t.num_elements for t in expected_tensors(spec) if t.stack != "mtp")


def _allocated(case: Case, key: str) -> Number | None:
    value: Number | None = None if case.allocation is None else getattr(case.allocation, key)
    return value


def _block_size(case: Case, ledger: Ledger) -> int:
    if case.allocation is not None:
        return case.allocation.block_size
    hardware = None if ledger.gpus is None else ledger.gpus.hardware
    return allocate(case.spec, ledger.deployment, 0, hardware=hardware).block_size


def _top_level(pair: Pair, ledger: Ledger) -> Number | dict[str, Number] | None:
    """The figure as planned; as a range where the model itself is not wholly understood."""
    heavy, light = pair
    if heavy is None or light is None or heavy == light:
        return heavy
    if ledger.heavy.spec is ledger.light.spec:
        # The model is known and only the engine's own memory is modelled: the plan's figure,
        # which is the cautious end. The other end is in `ranges`.
        return heavy
    return _bounds(heavy, light)


def _bounds(one: Number, other: Number) -> dict[str, Number]:
    return {"min": min(one, other), "max": max(one, other)}


def _ranges(
    ledger: Ledger, figures: Mapping[str, Pair], unknown: bool
) -> dict[str, dict[str, Number | str | bool]]:
    """Every figure that has two ends, with the reason."""
    # One that widens nothing (prediction layers, which are off) is no reason for these figures.
    unknowns = [u.field for u in ledger.heavy.spec.unknowns if u.widens]
    fields = ", ".join(dict.fromkeys(unknowns))
    modelled = "activations, runtime and graphs are modelled as a range (see ledger.terms)"
    ranges: dict[str, dict[str, Number | str | bool]] = {}
    for key, (heavy, light) in figures.items():
        if heavy is None or light is None or heavy == light:
            continue
        reasons = [modelled] if key in KV_FIGURES and ledger.utilization is not None else []
        if unknown and fields:
            reasons.append(f"not understood: {fields}")
        bounds = _bounds(heavy, light)
        wide = bounds["max"] > bounds["min"] * (1 + WIDE)
        ranges[key] = {**bounds, "wide": wide, "reason": "; ".join(reasons)}
    return ranges


def _deficit_document(ledger: Ledger) -> int | dict[str, Number] | None:
    deficit = ledger.deficit
    if deficit is None or (ledger.fits is None and not deficit.high):
        return None
    if deficit.exact:
        return deficit.low
    if ledger.fits is False and ledger.heavy.spec is ledger.light.spec:
        return deficit.high
    return _bounds(deficit.low, deficit.high)


def _not_evaluable(ledger: Ledger, figures: Mapping[str, Pair]) -> dict[str, str]:
    missing = dict(ledger.not_evaluable)
    for key, (heavy, _) in figures.items():
        if heavy is None and key not in missing:
            missing[key] = "nothing is cached: the model keeps no KV and no state"
    if ledger.fits is None and "fits" not in missing:
        missing["fits"] = "the device lies between the two ends of what is modelled: see ranges"
    if ledger.fits is False:
        missing.pop("fits", None)
    return missing


# --- where it all comes from ---------------------------------------------------------------------


def _provenance(
    model: Model,
    ledger: Ledger,
    figures: Mapping[str, Pair],
    ranges: Mapping[str, Mapping[str, object]],
) -> dict[str, str]:
    """Where each figure is from: a kind (config, engine, modelled), then the particulars."""
    decided, parallel = ledger.decided, ledger.deployment.parallel
    rank = f"one rank of {parallel.tensor} × {parallel.pipeline}"
    rule, budget = _rule(ledger), _budget(ledger)
    request = f"one request of {decided.max_model_len:,} tokens"
    sources = {
        "parameters": f"config: {_counted(model)}",
        "weights_bytes": f"config: tensors of the heaviest rank, {rank}, in {decided.dtype}",
        "kv_bytes_per_token": f"config: layers that grow, {rank}, KV in {decided.kv_cache_dtype}",
        "state_bytes_per_sequence": f"config: recurrent and convolution states, {rank}",
        "block_size": rule,
        **dict.fromkeys(KV_FIGURES, f"{rule}; {budget}"),
        "fits": f"{rule}; {budget}; {request}",
        "deficit_bytes": f"{rule}; {budget}; {request}",
    }
    for key in ranges:
        cautious, other = figures[key]
        assert cautious is not None
        assert other is not None
        share = f" ({(other / cautious - 1) * 100:+.1f}%)" if cautious and other else ""
        sources[key] += f"; the cautious end of a range, the other is {_number(other)}{share}"
    return sources


def _rule(ledger: Ledger) -> str:
    """How surely the engine's allocation is known."""
    allocation = ledger.heavy.allocation
    if allocation is None:
        return "not evaluated"
    if allocation.basis.startswith("vllm"):
        return f"engine: {allocation.basis}"
    if allocation.basis == "unsupported":
        return "modelled: vLLM 0.32 is not known to serve this model, its general rules are applied"
    return "modelled: vLLM 0.32's rules for CUDA, not confirmed on a GPU"


def _budget(ledger: Ledger) -> str:
    """Where the bytes of the KV cache come from."""
    if ledger.deployment.kv_cache_memory_bytes is not None:
        return "KV bytes from --kv-cache-memory-bytes"
    if ledger.utilization is not None:
        return f"KV bytes are {ledger.utilization:g} of the device less weights and engine"
    return "no KV bytes"


def _number(value: Number) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _counted(model: Model) -> str:
    if model.checkpoint is None:
        return "every tensor that it implies, multi-token prediction left out"
    return "every tensor that it implies, multi-token prediction left out; see checkpoint"


def _own_decisions(ledger: Ledger) -> list[Decision]:
    if ledger.utilization is None:
        return []
    flag = ledger.deployment.gpu_memory_utilization is not None
    source = "flag --gpu-memory-utilization" if flag else "vLLM 0.32: config/cache.py"
    return [Decision("gpu_memory_utilization", ledger.utilization, source)]


# --- parts of the document -----------------------------------------------------------------------


def _checkpoint_document(model: Model) -> tuple[dict[str, object] | None, list[str]]:
    """What the headers hold, and a warning where the configuration implies something else."""
    index = model.checkpoint
    if index is None:
        return None, []
    implied = stored_bytes(model.anatomy.spec).with_mtp
    warnings = []
    if abs(index.num_bytes - implied) > TOLERATED * implied:
        warnings.append(
            f"the headers hold {index.num_bytes:,} bytes of tensors and the configuration implies "
            f"{implied:,}: run ullage audit"
        )
    document: dict[str, object] = {
        "format": index.format,
        "tensors": len(index.tensors),
        "bytes": index.num_bytes,
        "implied_bytes": implied,
    }
    return document, warnings


def _gpu_document(gpus: Gpus | None, deployment: Deployment) -> dict[str, object] | None:
    """The devices named; as many as there are ranks where no number was."""
    if gpus is None:
        return None
    return {
        "name": gpus.hardware.name,
        "count": gpus.count if gpus.counted else num_ranks(deployment.parallel),
        "memory_bytes": gpus.hardware.memory_bytes,
        "source": gpus.hardware.source("memory_bytes"),
    }


def _parallel_document(deployment: Deployment) -> dict[str, object]:
    parallel = deployment.parallel
    return {
        "tensor_parallel_size": parallel.tensor,
        "pipeline_parallel_size": parallel.pipeline,
        "data_parallel_size": parallel.data,
        "enable_expert_parallel": parallel.expert,
    }


def _sizes_in_words(deployment: Deployment) -> str:
    parallel = deployment.parallel
    return f"tensor {parallel.tensor}, pipeline {parallel.pipeline}, data {parallel.data}"


def _ledger_document(ledger: Ledger) -> dict[str, object] | None:
    if ledger.device_bytes is None:
        return None
    return {
        "device_bytes": ledger.device_bytes,
        "parts": [
            {
                "name": part.name,
                "bytes": part.num_bytes,
                "min": part.bounds.low,
                "max": part.bounds.high,
                "provenance": part.source,
            }
            for part in ledger.parts
        ],
        "terms": [
            {"name": t.name, "min": t.low, "max": t.high, "provenance": f"modelled: {t.source}"}
            for t in ledger.heavy.claims.terms
        ],
    }


def _workload_document(answer: WorkloadAnswer) -> dict[str, object]:
    holds, short = answer.holds, answer.short_bytes
    return {
        "context": answer.context,
        "concurrency": answer.concurrency,
        "fits": answer.fits,
        "holds": holds.low if holds.exact else _bounds(holds.low, holds.high),
        "limit": answer.limit,
        "replicas": answer.replicas,
        "devices": answer.devices,
        "request_bytes": answer.request_bytes,
        "short_bytes": short.high if short.exact else _bounds(short.low, short.high),
    }
