"""Where one rank's memory goes: weights, KV and state, activations, engine and graphs, free.

Holds `build_ledger`. Each part comes from `costs/`, the KV cache from `vllm.py`; how the engine
divides the device among them is here (vLLM 0.32, v1/worker/gpu_worker.py). Printing is the CLI's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ullage.anatomy.spec import Anatomy, ModelSpec
from ullage.costs.activations import Term, Workspace, workspace
from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import Gpus, HardwareSpec
from ullage.costs.weights import WeightBytes, weight_bytes
from ullage.errors import BadUsage
from ullage.planning.parallel_sizes import accepted_tensor_sizes, refused_sizes
from ullage.planning.vllm import Allocation, allocate
from ullage.planning.vllm_decisions import Decisions, decide

DEFAULT_UTILIZATION = 0.92
"""gpu_memory_utilization where nobody sets it (vLLM 0.32, config/cache.py)."""

ENGINES = (("vllm", "0.32"),)
"""Engines and versions whose rules are reproduced; a patch release shares them."""

KV_FIGURES = (
    "kv_cache_bytes",
    "num_blocks",
    "kv_cache_tokens",
    "max_concurrency",
    "max_model_len_that_fits",
)
"""The figures that need to know how many bytes the KV cache gets."""

PartName = Literal["weights", "kv_and_state", "activations", "engine_and_graphs", "free"]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes, or another count, that are known to lie from `low` to `high`."""

    low: int
    high: int

    @property
    def exact(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the device in the plan, with the range that it may take and its source.

    `num_bytes` of all parts sum to the device's memory. `free` is negative where memory is short.
    """

    name: PartName
    num_bytes: int
    bounds: Range
    source: str


@dataclass(frozen=True, slots=True)
class Claims:
    """What a case takes besides weights and KV, in bytes; `terms` explain it with their ranges.

    `engine` counts against gpu_memory_utilization (runtime, graphs), `context` does not.
    """

    activations: int
    engine: int
    context: int
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One end of what is not known: everything at its heaviest, or everything at its lightest.

    `kv_budget_bytes` is what the engine would hand to the KV cache, negative when the rest already
    takes more; `deficit_bytes` what is missing to start and to serve one longest request. These
    and `allocation` are None when neither a device nor a size of the KV cache was named.
    """

    spec: ModelSpec
    weights: WeightBytes
    claims: Claims
    kv_budget_bytes: int | None
    deficit_bytes: int | None
    allocation: Allocation | None


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory of the heaviest rank of a deployment.

    The plan (`parts`, `heavy`) takes every unknown at its heaviest; `light` is the other end.
    `fits` is None when it cannot be told: nothing says what the device holds, or the answer lies
    between the two ends. `deficit` is 0…0 when it fits. `refusals` say why the engine would not
    start, memory included. `not_evaluable` pairs a figure's JSON key with what is missing.
    """

    deployment: Deployment
    gpus: Gpus | None
    decided: Decisions
    heavy: Case
    light: Case
    parts: tuple[Part, ...]
    fits: bool | None
    deficit: Range | None
    utilization: float | None
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    not_evaluable: tuple[tuple[str, str], ...] = ()

    @property
    def device_bytes(self) -> int | None:
        """What the parts add up to."""
        return None if self.gpus is None else self.gpus.hardware.memory_bytes


def num_ranks(parallel: Parallel) -> int:
    """How many devices the parallel sizes take, one for each rank."""
    return parallel.tensor * parallel.pipeline * parallel.context * parallel.data


def check_sizes(spec: ModelSpec, deployment: Deployment, gpus: Gpus | None) -> None:
    """Raise BadUsage for parallel sizes that the engine refuses or the devices do not cover."""
    parallel = deployment.parallel
    refused = refused_sizes(spec, parallel)
    if refused:
        accepted = accepted_tensor_sizes(spec, parallel)
        field = "--tensor-parallel-size"
        expected = f"one of {', '.join(map(str, accepted))}" if accepted else None
        if parallel.tensor in accepted or not accepted:
            field = "parallel sizes"
        raise BadUsage("; ".join(refused), field=field, expected=expected)
    needed = num_ranks(parallel)
    if gpus is not None and gpus.counted and needed > gpus.count:
        raise BadUsage(
            f"{needed:,} ranks need as many devices, and --gpu names {gpus.count:,}",
            field="--gpu",
            expected=f"{gpus.hardware.name}:{needed}, or smaller parallel sizes",
        )


def build_ledger(anatomy: Anatomy, deployment: Deployment, gpus: Gpus | None = None) -> Ledger:
    """The ledger of one rank. Raises BadUsage for sizes and formats that the engine refuses.

    vLLM 0.32 on a GPU gives the KV cache gpu_memory_utilization × total − (weights + runtime +
    peak activations + graphs), or exactly kv_cache_memory_bytes when that is set.
    """
    hardware = None if gpus is None else gpus.hardware
    _check_engine(deployment)
    _check_platform(deployment, hardware)
    check_sizes(anatomy.high, deployment, gpus)
    decided = decide(anatomy.high, deployment, hardware=hardware)
    heavy = _case(anatomy.high, deployment, hardware, heaviest=True)
    known = heavy.weights if anatomy.low is anatomy.high else None
    light = _case(anatomy.low, deployment, hardware, heaviest=False, weights=known)
    verdicts = {_fits(heavy, hardware), _fits(light, hardware)}
    deficit = None
    if heavy.deficit_bytes is not None and light.deficit_bytes is not None:
        deficit = Range(light.deficit_bytes, heavy.deficit_bytes)
    allocation = heavy.allocation
    return Ledger(
        deployment=deployment,
        gpus=gpus,
        decided=decided,
        heavy=heavy,
        light=light,
        parts=() if hardware is None else _parts(heavy, light, hardware),
        fits=verdicts.pop() if len(verdicts) == 1 else None,
        deficit=deficit,
        utilization=_utilization(deployment, hardware),
        refusals=decided.refusals if allocation is None else allocation.refusals,
        warnings=(
            *_unused(deployment, gpus),
            *(decided.warnings if allocation is None else allocation.warnings),
        ),
        not_evaluable=tuple(_missing(deployment, hardware, allocation).items()),
    )


def _unused(deployment: Deployment, gpus: Gpus | None) -> list[str]:
    """What was asked for and has no effect."""
    unused = []
    needed = num_ranks(deployment.parallel)
    if gpus is not None and gpus.counted and needed < gpus.count:
        unused.append(f"{gpus.count - needed:,} of {gpus.count:,} devices are not used")
    if deployment.kv_cache_memory_bytes is not None and deployment.gpu_memory_utilization:
        unused.append("--gpu-memory-utilization has no effect beside --kv-cache-memory-bytes")
    if gpus is None and deployment.gpu_memory_utilization:
        unused.append("--gpu-memory-utilization has no effect without --gpu")
    return unused


def _check_engine(deployment: Deployment) -> None:
    """Another engine, or another version, divides its memory differently: no figure is lent."""
    version = ".".join(deployment.engine_version.split(".")[:2])
    if (deployment.engine, version) not in ENGINES:
        known = ", ".join(f"{engine} {number}" for engine, number in ENGINES)
        raise BadUsage(
            f"the memory rules of {deployment.engine[:40]} {deployment.engine_version[:20]} are "
            "not known",
            field="--engine",
            expected=known,
        )


def _check_platform(deployment: Deployment, hardware: HardwareSpec | None) -> None:
    if hardware is None:
        return
    on_cpu = hardware.platform == "cpu"
    if on_cpu != (deployment.platform == "cpu"):
        raise BadUsage(
            f"{hardware.name} is not a {deployment.platform} device",
            field="--platform",
            expected="cpu" if on_cpu else "cuda",
        )


def _utilization(deployment: Deployment, hardware: HardwareSpec | None) -> float | None:
    if hardware is None or deployment.kv_cache_memory_bytes is not None:
        return None
    return deployment.gpu_memory_utilization or DEFAULT_UTILIZATION


def _case(
    spec: ModelSpec,
    deployment: Deployment,
    hardware: HardwareSpec | None,
    *,
    heaviest: bool,
    weights: WeightBytes | None = None,
) -> Case:
    decided = decide(spec, deployment, hardware=hardware)
    if weights is None:
        weights = weight_bytes(spec, deployment.parallel, dtype=decided.dtype)
    needs = workspace(
        spec,
        deployment.parallel,
        hardware,
        max_num_batched_tokens=decided.max_num_batched_tokens,
        max_num_seqs=decided.max_num_seqs,
        element_bytes=4 if decided.dtype == "float32" else 2,
        on_cpu=deployment.platform == "cpu",
    )
    claims = _claims(needs, heaviest=heaviest)
    budget = _kv_budget(weights.total, claims, deployment, hardware)
    if budget is None:
        return Case(spec, weights, claims, None, None, None)
    allocation = allocate(spec, deployment, max(0, budget), hardware=hardware)
    deficit = deficit_bytes(weights.total, claims, budget, allocation, deployment, hardware)
    return Case(spec, weights, claims, budget, deficit, allocation)


def _claims(needs: Workspace, *, heaviest: bool) -> Claims:
    engine = sum(term.high if heaviest else term.low for term in needs.engine)
    activations, context = needs.activations, needs.context
    return Claims(
        activations=activations.high if heaviest else activations.low,
        engine=engine,
        context=context.high if heaviest else context.low,
        terms=(activations, *needs.engine, context),
    )


def _requested_bytes(deployment: Deployment, hardware: HardwareSpec) -> int:
    """What gpu_memory_utilization asks for: rounded up, as vLLM does (v1/worker/utils.py)."""
    utilization = deployment.gpu_memory_utilization or DEFAULT_UTILIZATION
    return math.ceil(hardware.memory_bytes * utilization)


def _kv_budget(
    weights: int, claims: Claims, deployment: Deployment, hardware: HardwareSpec | None
) -> int | None:
    """Bytes for the KV cache; negative when the rest already takes more; None when unknowable.

    On a GPU the context is gone before the engine measures, so it lies outside of the budget; a
    CPU worker counts its whole process (v1/worker/cpu_worker.py).
    """
    if deployment.kv_cache_memory_bytes is not None:
        return deployment.kv_cache_memory_bytes
    if hardware is None:
        return None
    inside = claims.activations + claims.engine
    if deployment.platform == "cpu":
        inside += claims.context
    return _requested_bytes(deployment, hardware) - weights - inside


def deficit_bytes(
    weights: int,
    claims: Claims,
    budget: int,
    allocation: Allocation,
    deployment: Deployment,
    hardware: HardwareSpec | None,
) -> int:
    """Bytes that are missing for the engine to start and serve one request of max_model_len.

    One block is never handed out (vLLM's null block), so a request needs one more than its own.
    """
    needed = allocation.request_bytes + allocation.bytes_per_block
    deficit = max(0, needed - budget)
    if hardware is None:
        return deficit
    resident = weights + claims.activations + claims.engine + claims.context
    if deployment.kv_cache_memory_bytes is not None:
        taken = max(needed, allocation.kv_cache_bytes)
        return max(deficit, resident + taken - hardware.memory_bytes)
    if deployment.platform != "cpu":
        # vLLM does not start when less than the requested share is free (v1/worker/utils.py).
        free_at_start = hardware.memory_bytes - claims.context
        deficit = max(deficit, _requested_bytes(deployment, hardware) - free_at_start)
    return deficit


def _fits(case: Case, hardware: HardwareSpec | None) -> bool | None:
    allocation = case.allocation
    if case.deficit_bytes is None or allocation is None:
        return None
    if case.deficit_bytes or allocation.refusals:
        return False
    # What the engine's rules do not cover may need more than was counted.
    return None if hardware is None or allocation.basis == "unsupported" else True


def _missing(
    deployment: Deployment, hardware: HardwareSpec | None, allocation: Allocation | None
) -> dict[str, str]:
    """What cannot be evaluated, by JSON key, and what would make it so."""
    if hardware is not None:
        if allocation is not None and allocation.basis == "unsupported":
            return {"fits": "; ".join(allocation.warnings) or "no rule of the engine covers it"}
        return {}
    missing = {"fits": "no device is named: give --gpu NAME[:N]"}
    missing["ledger"] = missing["fits"]
    if deployment.kv_cache_memory_bytes is None:
        reason = "no device and no size of the KV cache: give --gpu or --kv-cache-memory-bytes"
        missing |= dict.fromkeys(KV_FIGURES, reason)
        missing["fits"] = reason
    return missing


def _parts(heavy: Case, light: Case, hardware: HardwareSpec) -> tuple[Part, ...]:
    rows = [_amounts(case, hardware) for case in (heavy, light)]
    sources: dict[PartName, str] = {
        "weights": "config: every tensor of the heaviest rank as served",
        "kv_and_state": _basis(heavy),
        "activations": f"modelled: {heavy.claims.terms[0].source}",
        "engine_and_graphs": "modelled: "
        + "; ".join(f"{term.name}: {term.source}" for term in heavy.claims.terms[1:]),
        "free": f"device: the rest of {hardware.memory_bytes:,}; {hardware.source('memory_bytes')}",
    }
    return tuple(
        Part(
            name,
            rows[0][name],
            Range(min(row[name] for row in rows), max(row[name] for row in rows)),
            source,
        )
        for name, source in sources.items()
    )


def _basis(case: Case) -> str:
    basis = "modelled" if case.allocation is None else case.allocation.basis
    if basis.startswith("vllm"):
        return f"engine: {basis}"
    return "modelled: vLLM 0.32's rules for a GPU, not confirmed on one"


def _amounts(case: Case, hardware: HardwareSpec) -> dict[PartName, int]:
    """Bytes of each part at one end; they sum to the device's memory by construction."""
    amounts: dict[PartName, int] = {
        "weights": case.weights.total,
        "kv_and_state": 0 if case.allocation is None else case.allocation.kv_cache_bytes,
        "activations": case.claims.activations,
        "engine_and_graphs": case.claims.engine + case.claims.context,
    }
    amounts["free"] = hardware.memory_bytes - sum(amounts.values())
    return amounts
