"""Does a workload fit: so many requests of so many tokens at once, and if not, what is short.

Holds arithmetic on a Ledger with vLLM 0.32's rules. Speed is not judged here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ullage.errors import BadUsage
from ullage.planning.ledger import Case, Ledger, Range, deficit_bytes, num_ranks
from ullage.planning.vllm import Allocation, allocate


@dataclass(frozen=True, slots=True)
class WorkloadAnswer:
    """What one deployment can do for `concurrency` requests of `context` tokens, prompt and answer.

    `holds` is how many run at once, over all data-parallel replicas of the deployment; `limit` is
    what stops one more. `replicas` of the whole deployment are needed for all of them and take
    `devices` (None when not even one request fits). `short_bytes` is what the KV cache of one rank
    lacks for all of them at once. Ranges run from the heaviest to the lightest case; `fits` is
    None in between, or where the engine's rules do not cover the model.
    """

    context: int
    concurrency: int | None
    holds: Range
    limit: str
    fits: bool | None
    replicas: int | None
    devices: int | None
    request_bytes: int
    short_bytes: Range


def answer_workload(ledger: Ledger, context: int | None, concurrency: int | None) -> WorkloadAnswer:
    """Judge the workload as served with --max-model-len at its context.

    Without a context the deployment's own max_model_len is meant; without a concurrency only what
    fits is said. Raises BadUsage when the model or --max-model-len does not go that far, or nothing
    sizes the KV cache.
    """
    deployment = ledger.deployment
    length = ledger.decided.max_model_len
    if context is not None:
        length = context
        _check_context(ledger, context)
    cases = (ledger.heavy, ledger.light)
    allocations = [_at_length(case, ledger, length) for case in cases]
    copies = deployment.parallel.data
    holds = sorted(
        copies * (0 if _refused(case, allocation, ledger) else _running(allocation))
        for case, allocation in zip(cases, allocations, strict=True)
    )
    heavy = allocations[0]
    wanted = None if concurrency is None else -(-concurrency // copies)
    short = sorted(
        _short(case, allocation, wanted or 1)
        for case, allocation in zip(cases, allocations, strict=True)
    )
    replicas = None
    if concurrency is not None and holds[0]:
        replicas = -(-concurrency // holds[0])
    ranks = num_ranks(deployment.parallel)
    needed = concurrency or 1
    fits = True if holds[0] >= needed else (False if holds[1] < needed else None)
    if fits and heavy.basis == "unsupported":
        fits = None  # what the engine's rules do not cover may need more than was counted
    return WorkloadAnswer(
        context=length,
        concurrency=concurrency,
        holds=Range(holds[0], holds[1]),
        limit=_limit(heavy),
        fits=fits,
        replicas=replicas,
        devices=None if replicas is None else replicas * ranks,
        request_bytes=heavy.request_bytes,
        short_bytes=Range(short[0], short[1]),
    )


def _check_context(ledger: Ledger, context: int) -> None:
    """Raise BadUsage for a request that the engine would turn away whatever its memory."""
    asked = ledger.deployment.max_model_len or 0
    most, whose = ledger.decided.longest_model_len, "the model's own maximum"
    if 0 < asked <= most:
        most, whose = asked, "--max-model-len"
    unlimited = ledger.heavy.spec.max_positions <= 0 and asked <= 0
    if context > most and not unlimited:
        raise BadUsage(
            f"{context:,} tokens are beyond {whose}",
            field="--context",
            expected=f"at most {most:,}",
        )


def _at_length(case: Case, ledger: Ledger, length: int) -> Allocation:
    if case.kv_budget_bytes is None:
        raise BadUsage(
            "nothing says how large the KV cache is",
            field="--context",
            expected="--gpu NAME[:N] or --kv-cache-memory-bytes beside it",
        )
    deployment = replace(ledger.deployment, max_model_len=length)
    hardware = None if ledger.gpus is None else ledger.gpus.hardware
    return allocate(case.spec, deployment, max(0, case.kv_budget_bytes), hardware=hardware)


def _refused(case: Case, allocation: Allocation, ledger: Ledger) -> bool:
    """Whether the engine would not start at that length."""
    hardware = None if ledger.gpus is None else ledger.gpus.hardware
    short = deficit_bytes(
        case.weights.total,
        case.claims,
        case.kv_budget_bytes or 0,
        allocation,
        ledger.deployment,
        hardware,
    )
    return bool(short or allocation.refusals)


def _running(allocation: Allocation) -> int:
    """Requests of that length that one replica runs at once."""
    if allocation.max_concurrency is None:
        return allocation.max_num_seqs
    # One block is never handed out, which can cost the last request.
    usable = allocation.num_blocks - 1
    blocks = allocation.request_bytes // allocation.bytes_per_block
    return min(allocation.max_num_seqs, usable // blocks)


def _limit(allocation: Allocation) -> str:
    if allocation.refusals:
        return allocation.refusals[0]
    if _running(allocation) >= allocation.max_num_seqs:
        return f"max_num_seqs {allocation.max_num_seqs:,}"
    return "KV cache"


def _short(case: Case, allocation: Allocation, wanted: int) -> int:
    """KV bytes that one rank lacks for `wanted` requests at once."""
    needed = wanted * allocation.request_bytes + allocation.bytes_per_block
    return max(0, needed - (case.kv_budget_bytes or 0))
