"""Rules about norms, copied layers and quantisation scales, judged on what `--deep` read.

Single numbers and rows are `weights.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.audit.weights import FP16_MAX, NOT_ASKED, SOURCE, content, looked_at
from ullage.deep.names import is_scale
from ullage.findings.finding import Evidence, Severity

if TYPE_CHECKING:
    from ullage.deep.readings import DeepScan, TensorReading, VectorReading

HALF = 0.5
_NORM_WORDS = ("norm", "ln_", "ln0", "ln1", "ln2")


def norm_weights(scan: DeepScan) -> list[tuple[TensorReading, VectorReading]]:
    """The weights of norms: vectors of floats whose name says so."""
    return [
        (t, t.vector)
        for t in scan.tensors
        if t.vector is not None
        and t.name.endswith("weight")
        and any(word in t.name.lower() for word in _NORM_WORDS)
    ]


def norm_offset(subject: Subject) -> int:
    """What is added to a stored norm weight before it multiplies: 1 where norms are x·(1 + w)."""
    # GGUF conversion adds the one that Gemma's norms leave out.
    checkpoint = subject.model.checkpoint
    is_gguf = checkpoint is not None and checkpoint.format == "gguf"
    return int(subject.spec.norm.unit_offset and not is_gguf)


def _norm_weights(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    offset = norm_offset(subject)
    norms = norm_weights(scan)
    served = subject.deployment.dtype or subject.spec.dtype
    facts = [Evidence("norm weights", len(norms), "", SOURCE)]
    if norms:
        facts += [
            Evidence("least weight", min(v.least for _, v in norms), "", SOURCE),
            Evidence("greatest weight", max(v.greatest for _, v in norms), "", SOURCE),
            Evidence("negative weights", sum(v.negative for _, v in norms), "", SOURCE),
            Evidence("offset added to them", offset, "", subject.where("model_type")),
        ]
    dead = [t for t, v in norms if v.least + offset == 0 and v.greatest + offset == 0]
    if dead:
        return Fired(
            f"All of {dead[0].name} multiplies by zero"
            f"{f' (and {len(dead) - 1} more norms)' if len(dead) > 1 else ''}: what follows sees "
            "nothing of the input.",
            "Take the checkpoint again; if it is the same there, the conversion left the norm out.",
            (*looked_at(scan), *facts),
            Severity.error,
        )
    holes = [t for t, v in norms if not offset and v.zero > HALF * t.shape[0]]
    if holes:
        return Fired(
            f"More than half of {holes[0].name} is zero"
            f"{f' (and of {len(holes) - 1} more norms)' if len(holes) > 1 else ''}: those channels "
            "are lost to the layer.",
            "Compare with the checkpoint that this one was made from; expect it only of a pruned "
            "model.",
            (*looked_at(scan), *facts),
        )
    # A normalised vector of n numbers has no element above √n.
    wide = [
        (t, max(abs(v.least + offset), abs(v.greatest + offset)) * t.shape[0] ** HALF)
        for t, v in norms
    ]
    wide = [(t, reach) for t, reach in wide if reach > FP16_MAX]
    if wide and served in ("float16", "half"):
        tensor, reach = max(wide, key=lambda pair: pair[1])
        return Fired(
            f"The outputs of {tensor.name} can reach {reach:.6g}, beyond float16's 65,504.",
            "Pass --dtype bfloat16.",
            (*looked_at(scan), *facts, subject.flag("--dtype", subject.deployment.dtype)),
        )
    return content(subject, facts)


def _copied_layers(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    groups = scan.same_across_layers
    facts = (
        *looked_at(scan),
        Evidence("groups of equal tensors", len(groups), "", SOURCE),
    )
    if not groups:
        return Clear(facts)
    first = groups[0]
    in_all = f" ({len(groups)} such groups in all)" if len(groups) > 1 else ""
    return Fired(
        f"{first[0]} and {first[1]} hold the same bytes{in_all}: "
        "a layer was copied over another, or the model was made by stacking layers.",
        "Compare with the source checkpoint; a stacked model that was not trained further spends "
        "memory and time on copies.",
        facts,
    )


def _scales(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    if subject.spec.quantization is not None:
        stored = [t for t in scan.tensors if t.reading == "floats" and is_scale(t.name)]
    else:  # without quantisation a `scale` is a weight like any other
        stored = [t for t in scan.tensors if t.dtype == "F8_E8M0"]
    blocks = [(t, t.blocks) for t in scan.tensors if t.blocks is not None]
    facts = (
        Evidence("tensors of scales", len(stored), "", SOURCE),
        Evidence("scales inside packed blocks", sum(b.count for _, b in blocks), "", SOURCE),
    )
    broken = [t for t in stored if t.num_nan or t.num_inf]
    broken += [t for t, b in blocks if b.not_finite]
    if broken:
        return Fired(
            f"{broken[0].name} ({broken[0].dtype}) has scales that are NaN or Inf"
            f"{f' (and {len(broken) - 1} more tensors)' if len(broken) > 1 else ''}: every weight "
            "under them is NaN.",
            "Take the file again and compare its sha256; if it is the same, quantise again.",
            (*looked_at(scan), *facts),
            Severity.error,
        )
    zero = [(t, t.num_zero) for t in stored if t.num_zero]
    zero += [(t, b.zero_but_packed) for t, b in blocks if b.zero_but_packed]
    if zero:
        tensor, number = zero[0]
        return Fired(
            f"{number:,} scales of {tensor.name} ({tensor.dtype}) are zero over weights that are "
            f"not{f' (and {len(zero) - 1} more tensors)' if len(zero) > 1 else ''}: those weights "
            "are gone.",
            "Quantise again with calibration that reaches every expert and channel.",
            (*looked_at(scan), *facts),
        )
    if subject.spec.quantization is None and not stored and not blocks:
        return Clear((*looked_at(scan), Evidence("quantised", False, "", "config and headers")))
    verdict = content(subject, facts)
    packed = [
        t for t in scan.tensors if t.dtype in ("U8", "I8", "I32") and not stored and not blocks
    ]
    if packed and isinstance(verdict, Clear):
        return NotEvaluable(("scales of the packed weights (no tensor is named as their scale)",))
    return verdict


RULES = (
    Rule(
        id="A157",
        title="Norm weights",
        severity=Severity.warning,
        category="weights",
        why="A norm's weight multiplies the whole stream. Zeros cut channels off; a weight w over "
        "n channels can give w·√n, which float16 must hold.",
        fix="Take the checkpoint again, or serve in bfloat16.",
        source="RMSNorm: |x/rms(x)| ≤ √n; transformers Gemma: x·(1 + weight)",
        example="--deep on an input_layernorm.weight of zeros in a Llama",
        check=_norm_weights,
    ),
    Rule(
        id="A158",
        title="Layers that are copies of each other",
        severity=Severity.warning,
        category="weights",
        why="No two trained layers hold the same bytes. Equal ones come from a conversion that "
        "wrote one layer twice, or from stacking layers of a smaller model.",
        fix="Compare with the source checkpoint.",
        source="tensors with equal 64-bit sums, compared byte by byte; constants left out",
        example="--deep on a file in which layers 0 and 1 have the same q_proj",
        check=_copied_layers,
    ),
    Rule(
        id="A159",
        title="Quantisation scales",
        severity=Severity.warning,
        category="weights",
        why="A scale multiplies every weight of its group, channel or tensor: NaN or Inf there "
        "spoils all of them, zero deletes them.",
        fix="Quantise again, with calibration that reaches every expert.",
        source="OCP MX: E8M0; ggml block structures; compressed-tensors, ModelOpt and AWQ names",
        example="--deep on a GGUF in which a Q8_0 block has the scale 0x7E00",
        check=_scales,
    ),
)
