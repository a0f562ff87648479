"""Rules about stored tensors against those that the configuration predicts.

Holds the verdicts on `anatomy/compare.py`'s comparison, which the subject carries; files as such
are `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ullage.audit.checkpoint import NO_HEADERS
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject, unit_count
from ullage.findings.finding import Evidence, Severity

if TYPE_CHECKING:
    from ullage.anatomy.compare import Comparison, Difference


def _lacking(subject: Subject) -> NotEvaluable | None:
    comparison = subject.comparison
    if comparison is None:
        return NO_HEADERS
    if not comparison.comparable:
        return NotEvaluable((comparison.reason or "a comparison of the headers",))
    return None


def _number(differences: Sequence[Difference]) -> int:
    return sum(difference.count for difference in differences)


def _facts(comparison: Comparison, name: str, number: int) -> tuple[Evidence, ...]:
    source = "headers against the configuration"
    return (
        Evidence("tensors as predicted", comparison.matched, "", source),
        Evidence(name, number, "", source),
    )


def _missing(subject: Subject) -> Verdict:
    lacking, comparison = _lacking(subject), subject.comparison
    if lacking is not None or comparison is None:
        return lacking or NO_HEADERS
    number = _number(comparison.missing)
    facts = _facts(comparison, "tensors missing", number)
    if not number:
        return Clear(facts)
    first = comparison.missing[0]
    return Fired(
        f"{unit_count(number, 'tensor')} that this configuration needs "
        f"{'is' if number == 1 else 'are'} not stored, the first is {first.name} "
        f"{first.expected}: engines stop, or start with noise in its place.",
        "Take the complete checkpoint, or the config.json that was written with it.",
        facts,
    )


def _unexpected(subject: Subject) -> Verdict:
    lacking, comparison = _lacking(subject), subject.comparison
    if lacking is not None or comparison is None:
        return lacking or NO_HEADERS
    number = _number(comparison.unexpected)
    facts = _facts(comparison, "tensors that nothing explains", number)
    if not number:
        return Clear(facts)
    first = comparison.unexpected[0]
    return Fired(
        f"{unit_count(number, 'tensor')} of the checkpoint "
        f"{'has' if number == 1 else 'have'} no place in this configuration, the first is "
        f"{first.name} ({first.found}): they are dropped, or the load fails.",
        "Check that config.json belongs to these weights (number of layers, biases, adapters that "
        "were not merged).",
        facts,
    )


def _shapes(subject: Subject) -> Verdict:
    lacking, comparison = _lacking(subject), subject.comparison
    if lacking is not None or comparison is None:
        return lacking or NO_HEADERS
    number = _number(comparison.wrong_shape)
    facts = _facts(comparison, "tensors of another shape", number)
    if not number:
        return Clear(facts)
    first = comparison.wrong_shape[0]
    return Fired(
        f"{unit_count(number, 'tensor')} {'has' if number == 1 else 'have'} another shape than "
        f"the configuration says, the first is {first.name}: {first.found} stored, "
        f"{first.expected} expected.",
        "Correct the sizes in config.json (head_dim, heads, widths, vocab_size) from the stored "
        "shapes, or take the config.json that was written with these weights.",
        facts,
    )


def _dtypes(subject: Subject) -> Verdict:
    lacking, comparison = _lacking(subject), subject.comparison
    if lacking is not None or comparison is None:
        return lacking or NO_HEADERS
    number = _number(comparison.wrong_dtype)
    facts = _facts(comparison, "tensors stored in another format", number)
    if not number:
        return Clear(facts)
    first = comparison.wrong_dtype[0]
    return Fired(
        f"{unit_count(number, 'tensor')} {'is' if number == 1 else 'are'} stored in another format "
        f"than the configuration says, the first is {first.name}: {first.found} stored, "
        f"{first.expected} expected.",
        "Make the quantisation's list of excluded modules match what is stored.",
        facts,
    )


def _mtp(subject: Subject) -> Verdict:
    lacking, comparison = _lacking(subject), subject.comparison
    layers = len(subject.spec.mtp_layers)
    if not layers:
        return Clear((Evidence("multi-token-prediction layers", 0, "", "config"),))
    if lacking is not None or comparison is None:
        return lacking or NO_HEADERS
    facts = (
        Evidence("multi-token-prediction layers", layers, "", "config"),
        Evidence("stored", comparison.mtp_stored, "", "headers"),
    )
    if comparison.mtp_stored:
        return Clear(facts)
    return Fired(
        f"The configuration names {unit_count(layers, 'multi-token-prediction layer')}, and the "
        "checkpoint stores none: speculative decoding with them cannot start.",
        "Leave --speculative-config off for this checkpoint, or take one that has these layers.",
        facts,
    )


RULES = (
    Rule(
        id="A131",
        title="Tensors that the configuration needs",
        severity=Severity.error,
        category="checkpoint",
        why="Weights that are not stored are refused, or filled with noise without a word.",
        fix="Take the complete checkpoint.",
        source="names and shapes of the family, against the headers",
        example="num_hidden_layers 33 over a checkpoint of 32 layers",
        check=_missing,
    ),
    Rule(
        id="A132",
        title="Tensors that the configuration does not explain",
        severity=Severity.warning,
        category="checkpoint",
        why="Weights without a place are dropped: a layer too few, a bias that is off, an adapter "
        "that was never merged.",
        fix="Check that configuration and weights belong together.",
        source="names and shapes of the family, against the headers",
        example="num_hidden_layers 31 over a checkpoint of 32 layers",
        check=_unexpected,
    ),
    Rule(
        id="A133",
        title="Shapes against the configuration",
        severity=Severity.error,
        category="checkpoint",
        why="The sizes in config.json only say what was meant. The headers say what is.",
        fix="Correct config.json from the stored shapes.",
        source="names and shapes of the family, against the headers",
        example="intermediate_size 11008 over matrices of 14336 rows",
        check=_shapes,
    ),
    Rule(
        id="A134",
        title="Storage formats against the quantisation",
        severity=Severity.error,
        category="checkpoint",
        why="A module that is stored plain but listed as quantised (or the reverse) fails to load.",
        fix="Make the list of excluded modules match what is stored.",
        source="dtypes of the headers, against quantization_config",
        example="one F8_E4M3 projection in a bfloat16 model",
        check=_dtypes,
    ),
    Rule(
        id="A135",
        title="Multi-token-prediction layers",
        severity=Severity.info,
        category="checkpoint",
        why="Many exports drop these layers but keep their count in config.json.",
        fix="Do not plan on speculative decoding with them.",
        source="names of the family, against the headers",
        example="num_nextn_predict_layers 1 without the tensors of that layer",
        check=_mtp,
    ),
)
