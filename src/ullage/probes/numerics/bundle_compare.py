"""The first operator that two machines compute otherwise, from their bundles alone.

Holds the comparison and its bounds, as data; no torch. What a bundle has is `bundle`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from ullage.errors import BadUsage
from ullage.probes.numerics.bundle import Bundle, OperatorMark, TensorMark

Verdict = Literal["same_bits", "rounding_only", "differs"]

HALF_STEPS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance between neighbouring numbers, relative to them, of each dtype (IEEE 754;
bfloat16 has 8 bits of significand)."""
ORDER = 32.0
"""In half steps of the type that sums are kept in: what another order may do to an operator's
output. √k half steps for k terms with rounding of random sign; k ≤ 1,024 between two roundings in
the blocked sums of BLAS libraries."""
ROUNDINGS = 4.0
"""In half steps of bfloat16 and float16, whose sums are kept in float32: outputs are rounded once
on either side, and a fused attention rounds its weights too."""
AMPLIFIED = 8.0
"""Inputs that are apart already may come out this much further apart: a softmax or a difference of
near equals does that. What is at fault does it from inputs that agree."""

NEVER_EQUAL = 1e9
"""The distance of tensors of other shapes, or of which one has NaN or Inf where the other has none:
more than any bound; JSON has no Inf."""


@dataclass(frozen=True, slots=True)
class OperatorApart:
    """An operator of both whose outputs are further apart than its inputs explain."""

    index: int
    operator: OperatorMark
    inputs_apart: float
    outputs_apart: float
    allowed: float
    what: str


@dataclass(frozen=True, slots=True)
class Compared:
    """`first` at fault; `first_bits` is the first operator whose bits differ from equal inputs.

    `unmatched` names operators that only one side ran, `environment` what the machines differ in.
    """

    verdict: Verdict
    compared: int
    other_bits: int
    first: OperatorApart | None
    first_bits: OperatorApart | None
    unmatched: tuple[str, ...]
    environment: tuple[tuple[str, str, str], ...]


def compare(a: Bundle, b: Bundle) -> Compared:
    """Raises BadUsage where the two did not run the same model, prompt and dtype."""
    _require_comparable(a, b)
    pairs, unmatched = _matched(a.operators, b.operators)
    every = [_apart(index, one, other, a, b) for index, one, other in pairs]
    differing = [one for one in every if one is not None]
    first = next((one for one in differing if one.outputs_apart > one.allowed), None)
    first_bits = next((one for one in differing if one.inputs_apart == 0), None)
    verdict: Verdict = "differs" if first else "rounding_only" if differing else "same_bits"
    there = dict(b.environment)
    environment = tuple(
        (name, value, there.get(name, "absent"))
        for name, value in a.environment
        if there.get(name) != value
    )
    return Compared(verdict, len(pairs), len(differing), first, first_bits, unmatched, environment)


def _require_comparable(a: Bundle, b: Bundle) -> None:
    both = f"{a.source} and {b.source}"
    for field in ("dtype", "backward", "token_ids"):
        one, other = getattr(a, field), getattr(b, field)
        if one != other:
            found = "other tokens" if field == "token_ids" else f"{one} and {other}"
            raise BadUsage(found, file=both, field=field, expected="two runs of one prompt")
    theirs = dict(b.parameters)
    for name, mark in a.parameters:
        if name not in theirs:
            raise BadUsage(f"{name} is in one only", file=both, expected="one model")
        if theirs[name] != mark:
            raise BadUsage(
                f"{name} holds other bytes",
                file=both,
                expected="one model (ullage probe compare tells how far two are apart)",
            )
    if len(theirs) != len(a.parameters):
        lacking = sorted(theirs.keys() - dict(a.parameters).keys())
        raise BadUsage(f"{lacking[0]} is in one only", file=both, expected="one model")


def _matched(
    a: Sequence[OperatorMark], b: Sequence[OperatorMark]
) -> tuple[list[tuple[int, OperatorMark, OperatorMark]], tuple[str, ...]]:
    """Operators of both in order; devices may run others for the same module."""
    ours, theirs = ([(one.path, one.backward, one.name) for one in side] for side in (a, b))
    if ours == theirs:
        zipped = zip(a, b, strict=True)
        return [(index, one, other) for index, (one, other) in enumerate(zipped)], ()
    pairs, unmatched = [], []
    for tag, i, i_end, j, j_end in SequenceMatcher(
        None, ours, theirs, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            pairs += [(i + n, a[i + n], b[j + n]) for n in range(i_end - i)]
        else:
            unmatched += [f"A: {one.name} in {one.path}" for one in a[i:i_end]]
            unmatched += [f"B: {one.name} in {one.path}" for one in b[j:j_end]]
    return pairs, tuple(unmatched)


def _apart(
    index: int, one: OperatorMark, other: OperatorMark, a: Bundle, b: Bundle
) -> OperatorApart | None:
    """None: equal bits."""
    if one.outputs == other.outputs:
        return None
    inputs = list(_gaps(one.inputs, other.inputs, a, b))
    outputs = list(_gaps(one.outputs, other.outputs, a, b))
    entered = max((gap for gap, _ in inputs), default=0.0)
    left, what = max(outputs, default=(0.0, ""))
    marks = [a.tensors[mark] for mark in (*one.inputs, *one.outputs)]
    rounding = max((_rounding(mark.dtype) for mark in marks), default=0.0)
    allowed = max(rounding, AMPLIFIED * entered)
    return OperatorApart(index, one, entered, left, allowed, what)


def _rounding(dtype: str) -> float:
    half_step = HALF_STEPS.get(dtype, 0.0)
    return half_step * (ROUNDINGS if dtype in ("bfloat16", "float16") else ORDER)


def _gaps(
    one: Sequence[str], other: Sequence[str], a: Bundle, b: Bundle
) -> Iterator[tuple[float, str]]:
    if len(one) != len(other):
        yield NEVER_EQUAL, f"{len(one)} tensors, {len(other)} there"
        return
    for x, y in zip(one, other, strict=True):
        yield _gap(a.tensors[x], b.tensors[y])


def _gap(x: TensorMark, y: TensorMark) -> tuple[float, str]:
    """‖x − y‖/‖x‖ as the sketches tell it (to a quarter), and in words."""
    if x.digest == y.digest:
        return 0.0, "equal bits"
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return NEVER_EQUAL, f"{x.dtype} {list(x.shape)} in A, {y.dtype} {list(y.shape)} in B"
    if (x.num_nan, x.num_inf) != (y.num_nan, y.num_inf):
        return NEVER_EQUAL, (
            f"{x.num_nan} NaN and {x.num_inf} Inf in A, {y.num_nan} and {y.num_inf} in B"
        )
    squares = sum((p - q) ** 2 for p, q in zip(x.sketch, y.sketch, strict=True))
    largest = max(x.norm, y.norm)
    gap = math.sqrt(squares) / largest if largest else 0.0
    return gap, f"{gap:.3g} apart"
