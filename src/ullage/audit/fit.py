"""Rules about memory: do the weights fit, one longest request, the requests that are asked for.

Holds the verdicts on the ledger of the heaviest rank; its figures are `planning/ledger.py`'s.
"""

from __future__ import annotations

from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

GIB = 2**30
MIB = 2**20


def _gib(num_bytes: float) -> str:
    """GiB with two digits, MiB below a hundredth of one: never a shortage of 0.00."""
    if 0 < num_bytes < GIB / 100:
        return f"{num_bytes / MIB:,.2f} MiB"
    return f"{num_bytes / GIB:,.2f} GiB"


def _no_ledger(subject: Subject) -> NotEvaluable:
    return NotEvaluable((subject.no_ledger or "--gpu NAME[:N]",))


def _weights(subject: Subject) -> Verdict:
    ledger, gpus = subject.ledger, subject.gpus
    if ledger is None or gpus is None:
        return _no_ledger(subject)
    device = gpus.hardware.memory_bytes
    least, most = ledger.light.weights.total, ledger.heavy.weights.total
    facts = (
        Evidence("weights of one rank", least, "bytes", "modelled from the spec"),
        Evidence("device memory", device, "bytes", gpus.hardware.source("memory_bytes")),
    )
    if least > device:
        needed = -(-least * subject.tensor_parallel // device)
        return Fired(
            f"The weights of one rank take {_gib(least)}, and one {gpus.hardware.name} holds "
            f"{_gib(device)}.",
            f"Cut the weights over more devices (--tensor-parallel-size above {needed} as a first "
            "guess, see `ullage size`), or take a quantised checkpoint.",
            facts,
        )
    if most > device:
        return NotEvaluable(
            tuple(dict.fromkeys(unknown.field for unknown in subject.spec.unknowns))
        )
    return Clear(facts)


def _one_request(subject: Subject) -> Verdict:
    ledger = subject.ledger
    if ledger is None:
        return _no_ledger(subject)
    case = ledger.heavy
    if case.allocation is None or ledger.deficit is None:
        return NotEvaluable(tuple(dict(ledger.not_evaluable).values()) or ("--gpu NAME[:N]",))
    allocation = case.allocation
    facts = (
        Evidence("longest request", allocation.max_model_len, "tokens", _decided(subject)),
        Evidence("KV of one such request", allocation.request_bytes, "bytes", allocation.basis),
        Evidence("KV cache", allocation.kv_cache_bytes, "bytes", "memory ledger"),
        Evidence("bytes short, at most", ledger.deficit.high, "bytes", "memory ledger"),
    )
    if ledger.deficit.high == 0:
        return Clear(facts)
    if ledger.deficit.low == 0:
        return NotEvaluable(
            (
                f"memory that only a measurement knows: between nothing and "
                f"{_gib(ledger.deficit.high)} is short",
            )
        )
    longest = allocation.max_model_len_that_fits
    way = (
        f"Pass --max-model-len {longest}, more devices, or a smaller --kv-cache-dtype."
        if longest > 0
        else "Cut the weights over more devices (--tensor-parallel-size), or take a quantised "
        "checkpoint: after the weights no KV is left."
    )
    low, high = (_gib(end) for end in (ledger.deficit.low, ledger.deficit.high))
    short = f"{high} is" if low == high else f"{low} to {high} are"
    return Fired(
        f"One request of {allocation.max_model_len:,} tokens does not fit: {short} short on the "
        "heaviest rank (one block of the KV cache is always kept back), and vLLM 0.32 refuses to "
        "start.",
        way,
        facts,
    )


def _decided(subject: Subject) -> str:
    if subject.deployment.max_model_len is not None:
        return "flag: --max-model-len"
    return subject.where("max_position_embeddings")


def _asked_for(subject: Subject) -> Verdict:
    ledger = subject.ledger
    if ledger is None:
        return _no_ledger(subject)
    allocation = ledger.heavy.allocation
    if allocation is None or allocation.max_concurrency is None:
        return NotEvaluable(tuple(dict(ledger.not_evaluable).values()) or ("a KV cache",))
    wanted = subject.deployment.max_num_seqs
    fitting, length = allocation.max_concurrency, allocation.max_model_len
    facts = (
        subject.flag("--max-num-seqs", wanted, "requests"),
        Evidence("longest requests that fit", round(fitting, 2), "requests", allocation.basis),
        Evidence("KV cache", allocation.kv_cache_tokens, "tokens", allocation.basis),
    )
    if wanted is None or wanted <= fitting:
        return Clear(facts)
    tokens = (allocation.kv_cache_tokens or 0) // wanted
    return Fired(
        f"--max-num-seqs {wanted:,} admits more than the KV cache holds: {fitting:.2f} requests of "
        f"{length:,} tokens, or {wanted:,} of {tokens:,}; longer ones push each other out and are "
        "computed again.",
        f"Pass --max-num-seqs {max(1, int(fitting))} if requests reach the limit, or leave it when "
        f"they stay below {tokens:,} tokens, and watch vllm:num_preemptions_total.",
        facts,
    )


RULES = (
    Rule(
        id="A141",
        title="Weights against the device",
        severity=Severity.error,
        category="fit",
        why="Weights larger than the device's memory cannot be loaded, whatever the other flags.",
        fix="Cut them over more devices, or take a quantised checkpoint.",
        source="sum of the tensors of the heaviest rank; driver-reported memory",
        example="Llama-3.1-405B in bfloat16 on H100-SXM:8",
        check=_weights,
    ),
    Rule(
        id="A142",
        title="One request of the longest length",
        severity=Severity.error,
        category="fit",
        why="vLLM starts only when its KV cache holds one request of --max-model-len.",
        fix="Lower --max-model-len, use more devices, or a smaller KV format.",
        source="vllm 0.32: v1/core/kv_cache_utils.py; memory ledger",
        example="--max-model-len 131072 for Llama-3.1-8B on an RTX-4090",
        check=_one_request,
    ),
    Rule(
        id="A143",
        title="Requests at a time against the KV cache",
        severity=Severity.info,
        category="fit",
        why="Admitting more requests than the cache holds at full length means preemption, whose "
        "work is done twice.",
        fix="Set --max-num-seqs from the lengths that really occur.",
        source="vllm 0.32: v1/core/sched/scheduler.py preempts by recomputation",
        example="--max-num-seqs 1024 on a card that holds three requests of full length",
        check=_asked_for,
    ),
)
