"""The rule about fused projections: matrices that hold several, and what re-sharding them needs.

Holds the verdict; that the engine can cut the parts is `parallelism.py`'s and `feed_forward.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.anatomy.spec import Dense
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

MATRICES = {"qkv": "query, key and value", "gate_up": "gate and up"}


def _parts(subject: Subject, role: str) -> Iterator[tuple[str, int]]:
    """(name, units that a rank must get whole) of each part of a fused matrix."""
    if role == "gate_up":
        for part, _ in subject.feed_forwards:
            if isinstance(part, Dense) and part.gated:
                yield "gate and up columns", part.intermediate
    else:
        for attention, _ in subject.attentions():
            yield "query heads", attention.num_heads
            yield "KV heads", attention.num_kv_heads


def _fused(subject: Subject) -> Verdict:
    ranks = subject.tensor_parallel
    if ranks == 1:
        return Clear((subject.parallel_fact(),))  # nothing is cut
    from ullage.anatomy.tensors.expected import expected_tensors  # costs start-up

    found: dict[str, str] = {}
    unnamed = False
    for tensor in expected_tensors(subject.spec):
        if tensor.role in MATRICES and tensor.stack in ("decoder", "encoder"):
            found.setdefault(tensor.role, tensor.name)
            unnamed = unnamed or not tensor.named
    facts: tuple[Evidence, ...] = (
        subject.parallel_fact(),
        Evidence("fused projections", ", ".join(found) or None, "", "names of the family"),
    )
    if not found:
        return Clear(facts)
    if unnamed:
        return NotEvaluable(("the names under which this family stores its projections",))
    uneven: list[tuple[str, str, int]] = []
    for role in found:
        for what, number in dict.fromkeys(_parts(subject, role)):
            facts = (*facts, Evidence(what, number, "", "spec"))
            if number % ranks:
                uneven.append((role, what, number))
    if not uneven:
        return Clear(facts)
    role, what, number = uneven[0]
    copied = role == "qkv" and all(
        kind == "KV heads" and ranks % count == 0 for _, kind, count in uneven
    )
    return Fired(
        f"{found[role]} holds {MATRICES[role]} in one matrix, and its {number:,} {what} do not "
        f"divide over {ranks} ranks: rows cut into {ranks} equal pieces would mix the parts"
        + (
            "; vLLM cuts them part by part and copies KV heads, a file cut beforehand must too."
            if copied
            else ", and no cut part by part exists either."
        ),
        f"Re-shard by splitting the matrix into its parts first and repeating each KV head "
        f"{ranks // number if copied else 1} times, or choose a --tensor-parallel-size that "
        f"divides {number:,}."
        if copied
        else f"Choose a --tensor-parallel-size that divides {number:,}.",
        facts,
        Severity.info if copied else None,
    )


RULES = (
    Rule(
        id="A071",
        title="Fused projections under tensor parallelism",
        severity=Severity.warning,
        category="parallelism",
        why="Some checkpoints store query, key and value (or gate and up) as one matrix. Tensor "
        "parallelism must split it into its parts before it cuts each; equal pieces of the whole "
        "give every rank rows of another part.",
        fix="Split into parts, cut each, and repeat KV heads where there are fewer than ranks.",
        source="names of the family; vllm 0.32: model_executor/layers/linear.py, "
        "QKVParallelLinear and MergedColumnParallelLinear",
        example="a fused qkv_proj of 40 query and 10 KV heads over 4 ranks",
        check=_fused,
    ),
)
