"""Rules about the numbers in the tensors: NaN, zeros, copies of rows, ranges of narrower dtypes.

They judge what `--deep` read (`ullage.deep.readings`); layers against each other, norms and scales
are `weights_layers.py`. Without `--deep` every one of them is not evaluable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject, unit_count
from ullage.deep.names import is_scale
from ullage.findings.finding import Evidence, Severity

if TYPE_CHECKING:
    from ullage.deep.readings import DeepScan, TensorReading

SOURCE = "--deep: every tensor's bytes"
NOT_ASKED = NotEvaluable(("the tensors' values (--deep reads them)",))
FP16_MAX = 65_504.0
FP8_MAX = 448.0
VOCABULARY_NAMES = ("embed", "wte", "lm_head", "output.weight", "token_embd", "shared.weight")
UNUSED_SHARE = 0.01
INT8_LEVELS = 127
LEAST_LEVELS = 8


def unread_types(scan: DeepScan) -> NotEvaluable | None:
    """Not evaluable for want of types that are not understood, None when all are."""
    types: dict[str, int] = {}
    for tensor in scan.tensors:
        if tensor.reading == "bytes" and tensor.num_bytes:
            types[tensor.dtype] = types.get(tensor.dtype, 0) + 1
    if not types:
        return None
    return NotEvaluable(
        tuple(f"values of {unit_count(n, f'{t} tensor')} (not read here)" for t, n in types.items())
    )


def content(subject: Subject, facts: Iterable[Evidence]) -> Verdict:
    """Clear on `facts`, unless some tensors' types are not understood."""
    assert subject.deep is not None
    return unread_types(subject.deep) or Clear((*looked_at(subject.deep), *facts))


def looked_at(scan: DeepScan) -> tuple[Evidence, ...]:
    """How much was read."""
    return (
        Evidence("tensors read", len(scan.tensors), "", SOURCE),
        Evidence("bytes read", scan.num_bytes, "bytes", SOURCE),
    )


def is_matrix(tensor: TensorReading) -> bool:
    return (
        len(tensor.shape) >= 2
        and tensor.reading in ("floats", "blocks")
        and not is_scale(tensor.name)
    )


def _in_vocabulary(tensor: TensorReading) -> bool:
    name = tensor.name
    if name == "output.weight":
        return True
    return any(part in name for part in VOCABULARY_NAMES if part != "output.weight")


def _and_more(tensors: list[TensorReading]) -> str:
    return f" (and {unit_count(len(tensors) - 1, 'more tensor')})" if len(tensors) > 1 else ""


def _not_finite(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    bad = [
        t for t in scan.tensors if not is_scale(t.name) and ((t.num_nan or 0) or (t.num_inf or 0))
    ]
    num_nan = sum(t.num_nan or 0 for t in bad)
    num_inf = sum(t.num_inf or 0 for t in bad)
    facts = (
        Evidence("NaN", num_nan, "elements", SOURCE),
        Evidence("Inf", num_inf, "elements", SOURCE),
    )
    if not bad:
        return content(subject, facts)
    first = bad[0]
    what = " and ".join(
        f"{number:,} {name}"
        for number, name in ((first.num_nan or 0, "NaN"), (first.num_inf or 0, "Inf"))
        if number
    )
    return Fired(
        f"{first.name} holds {what}, the first at element {first.first_bad:,}{_and_more(bad)}: "
        "every token that meets it comes out as NaN.",
        f"Take {first.file} from its source again and compare its sha256; if it is the same, the "
        "checkpoint was saved after training had diverged or was cast beyond its range.",
        (*looked_at(scan), *facts, Evidence("tensors with NaN or Inf", len(bad), "", SOURCE)),
    )


def _zeros(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    matrices = [t for t in scan.tensors if is_matrix(t)]
    empty = [t for t in matrices if t.all_zero]
    with_rows = [
        t
        for t in matrices
        if t.rows is not None and t.rows.zero and not t.all_zero and not _in_vocabulary(t)
    ]
    unused = sum(t.rows.zero for t in matrices if t.rows and not t.all_zero and _in_vocabulary(t))
    facts = (
        Evidence("matrices of zeros", len(empty), "", SOURCE),
        Evidence("matrices with some rows of zeros", len(with_rows), "", SOURCE),
        Evidence("vocabulary rows of zeros", unused, "rows", SOURCE),
    )
    if empty:
        return Fired(
            f"{empty[0].name} holds nothing but zeros{_and_more(empty)}: what flows through it is "
            "gone, and no engine says so.",
            "Take the file from its source again; if it is the same there, the conversion wrote a "
            "placeholder for a tensor that it did not find.",
            (*looked_at(scan), *facts),
        )
    if with_rows:
        first = with_rows[0]
        assert first.rows is not None
        return Fired(
            f"{first.rows.zero:,} of {first.rows.count:,} rows of {first.name} are zero"
            f"{_and_more(with_rows)}: these outputs are dead and cost memory and time.",
            "Expect it of a pruned model; else compare with the checkpoint that this one was made "
            "from.",
            (*looked_at(scan), *facts),
            Severity.info,
        )
    return content(subject, facts)


def _copies(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    compared = [t for t in scan.tensors if is_matrix(t) and t.rows is not None]
    vocabulary = [t for t in compared if _in_vocabulary(t)]
    layers = [t for t in compared if not _in_vocabulary(t) and t.rows and t.rows.duplicates]
    many = [t for t in vocabulary if t.rows and t.rows.duplicates > UNUSED_SHARE * t.rows.count]
    facts = (
        Evidence("matrices compared row by row", len(compared), "", SOURCE),
        Evidence(
            "vocabulary rows equal to an earlier one",
            sum(t.rows.duplicates for t in vocabulary if t.rows),
            "rows",
            SOURCE,
        ),
        Evidence(
            "other rows equal to an earlier one",
            sum(t.rows.duplicates for t in layers if t.rows),
            "rows",
            SOURCE,
        ),
    )
    for found, meaning, remedy in (
        (
            layers,
            "trained rows do not repeat, so these were copied or overwritten.",
            "Compare with the checkpoint that this one was made from; expect it only where heads "
            "or experts were copied on purpose.",
        ),
        (
            many,
            "the tokens behind them cannot be told apart; unused tokens may share a row, but "
            "seldom so many.",
            "Nothing to do when the vocabulary was enlarged and not trained further; else compare "
            "with the tokenizer's length.",
        ),
    ):
        if found:
            rows = found[0].rows
            assert rows is not None
            return Fired(
                f"{rows.duplicates:,} of {rows.count:,} rows of {found[0].name} equal an earlier "
                f"row{_and_more(found)}: {meaning}",
                remedy,
                (*looked_at(scan), *facts),
            )
    return content(subject, facts)


def _channels(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    limit = INT8_LEVELS / LEAST_LEVELS
    read = [t for t in scan.tensors if is_matrix(t) and t.channels is not None]
    ratios = {
        t.name: t.channels.largest / t.channels.median
        for t in read
        if t.channels is not None and t.channels.median > 0
    }
    if not read and any(t.blocks is not None for t in scan.tensors):
        return NotEvaluable(("channels of weights in packed blocks",))
    facts = [Evidence("matrices with channels", len(read), "", SOURCE)]
    if ratios:
        worst = max(ratios, key=lambda name: ratios[name])
        facts.append(Evidence("largest channel ÷ median channel", ratios[worst], "", SOURCE))
    above = [t for t in read if ratios.get(t.name, 0) > limit]
    if not above:
        return content(subject, facts)
    first = max(above, key=lambda t: ratios[t.name])
    assert first.channels is not None
    return Fired(
        f"Channel {first.channels.channel:,} of {first.name} reaches {first.channels.largest:.4g}, "
        f"{ratios[first.name]:.3g} times the median channel's {first.channels.median:.4g}"
        f"{_and_more(above)}: with one int8 scale for the tensor the median channel keeps "
        f"{INT8_LEVELS / ratios[first.name]:.1f} of {INT8_LEVELS} levels.",
        "Quantise this model per channel or per group, never with one scale per tensor.",
        (*looked_at(scan), *facts),
    )


def _beyond(
    limit: float, dtypes: tuple[str, ...], name: str
) -> Callable[[DeepScan], tuple[list[TensorReading], tuple[str, ...], tuple[Evidence, ...]]]:
    """Tensors of `dtypes` with values above `limit`, packed ones that may have some, and facts."""

    def find(
        scan: DeepScan,
    ) -> tuple[list[TensorReading], tuple[str, ...], tuple[Evidence, ...]]:
        floats = [
            t
            for t in scan.tensors
            if t.dtype in dtypes and t.largest is not None and not is_scale(t.name)
        ]
        above = [t for t in floats if t.largest is not None and t.largest > limit]
        above.sort(key=lambda t: -(t.largest or 0.0))
        open_ones = tuple(
            f"the exact values of {t.name} ({t.dtype})"
            for t in scan.tensors
            if t.blocks is not None and t.blocks.bound > limit
        )[:3]
        largest = max((t.largest or 0.0 for t in floats), default=None)
        return (
            above,
            open_ones,
            (
                Evidence("largest magnitude", largest, "", SOURCE),
                Evidence(f"largest number of {name}", limit, "", "format"),
            ),
        )

    return find


_beyond_fp16 = _beyond(FP16_MAX, ("BF16", "F32", "F64"), "float16")
_beyond_fp8 = _beyond(FP8_MAX, ("BF16", "F16", "F32", "F64"), "float8_e4m3fn")


def _fp16_range(subject: Subject) -> Verdict:
    if subject.deep is None:
        return NOT_ASKED
    above, open_ones, facts = _beyond_fp16(subject.deep)
    dtype = subject.deployment.dtype or subject.spec.dtype
    served = dtype in ("float16", "half")
    if not above:
        return NotEvaluable(open_ones) if open_ones else content(subject, facts)
    return Fired(
        f"{above[0].name} reaches {above[0].largest:.6g}, beyond float16's 65,504"
        f"{_and_more(above)}: "
        + (
            "served in float16 it becomes Inf, and the answers NaN."
            if served
            else "the model must not be cast to float16."
        ),
        "Pass --dtype bfloat16, and do not convert the checkpoint to float16.",
        (*looked_at(subject.deep), *facts, subject.flag("--dtype", subject.deployment.dtype)),
        Severity.error if served else None,
    )


def _fp8_range(subject: Subject) -> Verdict:
    if subject.deep is None:
        return NOT_ASKED
    above, open_ones, facts = _beyond_fp8(subject.deep)
    if not above:
        return NotEvaluable(open_ones) if open_ones else content(subject, facts)
    return Fired(
        f"{above[0].name} reaches {above[0].largest:.6g}, beyond the 448 of float8_e4m3fn"
        f"{_and_more(above)}: a cast without a scale saturates or gives NaN.",
        "Quantise to fp8 with scales (--quantization fp8 computes them); never cast the weights "
        "alone.",
        (*looked_at(subject.deep), *facts),
    )


RULES = (
    Rule(
        id="A151",
        title="NaN and Inf in the weights",
        severity=Severity.error,
        category="weights",
        why="One NaN or Inf in a weight spreads to every token that passes it. Files are damaged "
        "by interrupted copies, and checkpoints are saved after training diverged.",
        fix="Take the file again and compare its sha256; else use an earlier checkpoint.",
        source="IEEE 754; OCP 8-bit floating point; read from the bytes",
        example="--deep on model.safetensors with 0x7FC0 in a BF16 tensor",
        check=_not_finite,
    ),
    Rule(
        id="A152",
        title="Tensors and rows of zeros",
        severity=Severity.warning,
        category="weights",
        why="A matrix of zeros passes nothing on: a placeholder of a conversion, or a hole where a "
        "download was interrupted. Rows of zeros are dead outputs.",
        fix="Take the file again, or convert again and look at what the converter did not find.",
        source="read from the bytes",
        example="--deep on a file whose up_proj is 4 MB of zero bytes",
        check=_zeros,
    ),
    Rule(
        id="A153",
        title="Rows that repeat inside a matrix",
        severity=Severity.info,
        category="weights",
        why="Trained rows never repeat bit by bit. Copies speak of a faulty merge or cut; in "
        "embeddings the rows of unused tokens may be equal, up to 1% is not reported.",
        fix="Compare with the checkpoint that this one was made from.",
        source="rows with equal 64-bit sums, compared byte by byte",
        example="--deep on a file in which row 7 of o_proj is a copy of row 6",
        check=_copies,
    ),
    Rule(
        id="A154",
        title="Outlier channels against one scale per tensor",
        severity=Severity.info,
        category="weights",
        why="One scale per tensor is set by its largest value. Where one channel is 16 times the "
        "median one, int8 leaves the others fewer than 8 of 127 levels.",
        fix="Quantise per channel or per group.",
        source="symmetric int8: 127 levels; largest magnitude of each input channel",
        example="--deep on a down_proj with one column a hundred times the others",
        check=_channels,
    ),
    Rule(
        id="A155",
        title="Weights against float16's range",
        severity=Severity.info,
        category="weights",
        why="float16 ends at 65,504 where bfloat16 and float32 go on to 3.4e38: a larger weight "
        "becomes Inf when the engine casts it.",
        fix="Serve in bfloat16.",
        source="IEEE 754 binary16; vllm 0.32 casts weights to --dtype on load",
        example="--deep --dtype float16 on a BF16 tensor that holds 70,000",
        check=_fp16_range,
    ),
    Rule(
        id="A156",
        title="Weights against fp8's range",
        severity=Severity.info,
        category="weights",
        why="float8_e4m3fn ends at 448. Quantisers scale before they cast; a plain cast of larger "
        "weights saturates or gives NaN.",
        fix="Quantise with scales.",
        source="OCP 8-bit floating point specification: E4M3",
        example="--deep on a norm weight of 500",
        check=_fp8_range,
    ),
)
