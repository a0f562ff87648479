"""Whether two fingerprints are of one model: bytes first, then values, settings, answers.

Holds the comparison and its verdict, as data; no torch. Every tolerance stands here with its
source; what the fingerprints lack decides nothing and is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ullage.probes.sameness.distances import answers_apart, cut_alike, weights_apart
from ullage.probes.sameness.marks import Fingerprint, Noise, StoredMark, ValueMark

Verdict = Literal[
    "same_weights",
    "same_values",
    "same_model_other_precision",
    "same_answers",
    "same_weights_other_answers",
    "not_the_same_model",
    "not_decided",
]
"""same_weights: every tensor's checksum is equal. same_values: the same numbers, stored otherwise.
same_answers: only answers could be compared. The last three are failures; with equal weights it is
a machine or an engine that computes otherwise."""

FLOAT_ROUNDING = {"F64": 0.0, "F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-9}
"""The most that storing a number in this type changes it, relative to itself (half a step)."""
SMALL_FLOATS = {"F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3}
_LAYER = re.compile(r"\.([0-9]+)\.")
_BLOCK_BITS = re.compile(r"(?:I?Q|MXFP|NVFP)([2-8])")
BLOCK_REACH = 3.3
"""A block of 32 numbers in b bits has steps of 2·max/2^b, and rounding by a step is off by step/√12
in the rms. No block is smaller than its largest number, so it is off by at most √(32/3)/2^b of its
size; normal numbers by 1.21/2^b. Held against gguf's own quantisation, outliers included, in
tests/probes/test_sameness.py; types that only llama.cpp writes (Q2_K … Q6_K, IQ…) are taken to be
no worse than plain blocks of as many bits."""
SKETCH_SPREAD = 1.35
"""A sketch tells a difference's norm to a quarter (one σ of its square); three σ upwards."""
ROUNDED = 1e-6
"""Below it values are equal: a sketch is kept to nine digits of sums as large as the norm."""
SAME_NATS = 1e-3
"""Mean |Δ logprob| of one model in float32 by two implementations stays below it (measured: the
embedded engine's paths and transformers, tests/probes/test_sameness.py)."""
ROUNDINGS = 2.0
"""Two answers that both were rounded are apart by at most the sum of what each is off by."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which A and B differ. `part` is stored, values, settings, rope, tokenizer or
    answers; `layer` and `kind` locate a weight. `size` is ‖a − b‖/‖a‖ of a weight, nats of answers;
    `allowed` what rounding explains of it."""

    part: str
    what: str
    layer: int | None = None
    kind: str | None = None
    size: float | None = None
    allowed: float | None = None


@dataclass(frozen=True, slots=True)
class AnswersApart:
    """Mean and largest |Δ logprob| over `tokens`, and the rung that explains it: equal, float32,
    a measured precision, or None. `rungs` are (precision, the most it explains); `limits_known`:
    they reach the precision of both sides, or all that could be measured."""

    mean_nats: float
    max_nats: float
    tokens: int
    explained_by: str | None
    rungs: tuple[tuple[str, float], ...]
    limits_known: bool


@dataclass(frozen=True, slots=True)
class Sameness:
    """The verdict in one word and one sentence, with everything that differs, the first first."""

    verdict: Verdict
    sentence: str
    differences: tuple[Difference, ...]
    answers: AnswersApart | None
    not_compared: tuple[tuple[str, str], ...]

    @property
    def same(self) -> bool:
        return self.verdict in _SAME


_SAME = ("same_weights", "same_values", "same_model_other_precision", "same_answers")
_Found = tuple[Verdict, str, tuple[Difference, ...]]


def compare(a: Fingerprint, b: Fingerprint, reference: Fingerprint | None = None) -> Sameness:
    """What A and B have in common. `reference` lends its measured noise where neither has any."""
    noise = max((f.noise for f in (a, b, reference) if f is not None), key=len)
    apart = _answers(a, b, noise)
    verdict, sentence, differences = _verdict(a, b, apart)
    if verdict == "not_the_same_model" and apart is not None and apart.explained_by is None:
        differences = (*(d for d in differences if d.part != "answers"), _of_answers(apart))
    return Sameness(verdict, sentence, differences, apart, tuple(_not_compared(a, b)))


# --- the verdict ---------------------------------------------------------------------------------


def _verdict(a: Fingerprint, b: Fingerprint, apart: AnswersApart | None) -> _Found:
    """Bytes decide where both are there; else values; else answers. Settings always count."""
    stored, values, changed = tuple(_stored(a, b)), tuple(_values(a, b)), _changed_bytes(a, b)
    others = (*_settings(a, b), *_rope(a, b), *_tokenizer(a, b))
    both_stored = bool(a.stored and b.stored)
    if both_stored and not stored and not others:
        told = f"all {len(a.stored)} tensors are equal byte for byte"
        return _with_answers("same_weights", told, apart)
    if a.values and b.values:
        beyond = tuple(d for d in values if d.size is None or d.size > (d.allowed or 0.0))
        if beyond or changed or others:
            # Bytes that changed without rounding are located by the values that moved.
            return _not_the_same(values if changed else beyond, changed + others)
        if values:
            return _rounded(a, b, values)
        told = f"all {len(a.values)} weights hold the same numbers, stored as {_types(a)} and "
        return _with_answers("same_values", told + _types(b), apart)
    if both_stored and _type_set(a) == _type_set(b):
        return _not_the_same(stored, others)
    return _not_the_same((), others, seen=False) if others else _by_answers(apart)


def _rounded(a: Fingerprint, b: Fingerprint, values: tuple[Difference, ...]) -> _Found:
    worst = max(values, key=lambda d: (d.size or 0.0) / (d.allowed or 1.0))
    told = (
        f"rounding to {_types(a)} and {_types(b)} explains all differences: {worst.what} differs "
        f"by {worst.size:.2g} of its size, {worst.allowed:.2g} would be explained"
    )
    return "same_model_other_precision", told, ()


def _with_answers(verdict: Verdict, told: str, apart: AnswersApart | None) -> _Found:
    """Equal weights must give equal answers, up to the order in which float32 is added up."""
    if apart is None or apart.explained_by in ("equal", "float32"):
        return verdict, told, ()
    return (
        "same_weights_other_answers",
        f"{told}, but log-probabilities differ by {apart.mean_nats:.2g} nats in the mean: one "
        "machine or engine computes otherwise",
        (_of_answers(apart),),
    )


def _not_the_same(
    weights: tuple[Difference, ...], others: tuple[Difference, ...], *, seen: bool = True
) -> _Found:
    every = weights + others
    weights = weights or tuple(one for one in others if one.part == "stored")
    if weights:
        first = weights[0]
        size = "" if first.size is None else f" by {first.size:.2g} of its size"
        place = "" if None in (first.layer, first.kind) else f" (layer {first.layer}, {first.kind})"
        number = "one weight differs" if len(weights) == 1 else f"{len(weights)} weights differ"
        sentence = f"{number}, first {first.what}{place}{size}"
    else:
        told = "the weights do not differ" if seen else "weights were not seen"
        sentence = f"{told}, but {others[0].part} differs: {others[0].what}"
    return "not_the_same_model", sentence, every


def _by_answers(apart: AnswersApart | None) -> _Found:
    if apart is None:
        return "not_decided", "nothing that both fingerprints hold can be compared", ()
    told = f"the log-probabilities of {apart.tokens} tokens differ by {apart.mean_nats:.2g} nats"
    if apart.explained_by in ("equal", "float32"):
        return "same_answers", f"{told}, as one model's do; weights were not seen", ()
    if apart.explained_by is not None:
        return (
            "same_model_other_precision",
            f"{told}, which {apart.explained_by} explains; weights were not seen",
            (),
        )
    if not apart.limits_known:
        return (
            "not_decided",
            f"{told}; what precision alone does to this model is not known without the model: "
            "give it as --reference",
            (_of_answers(apart),),
        )
    name, most = apart.rungs[-1]
    told = f"{told}, of which {name} explains {most:.2g}"
    return "not_the_same_model", told, (_of_answers(apart),)


def _of_answers(apart: AnswersApart) -> Difference:
    allowed = max(limit for _, limit in apart.rungs)
    what = f"mean |Δ logprob| over {apart.tokens} tokens, the largest {apart.max_nats:.2g}"
    return Difference("answers", what, size=apart.mean_nats, allowed=allowed)


# --- bytes ---------------------------------------------------------------------------------------


def _stored(a: Fingerprint, b: Fingerprint) -> Iterator[Difference]:
    """Everything in which the stored tensors differ, in A's order."""
    if not a.stored or not b.stored:
        return
    theirs = {mark.name: mark for mark in b.stored}
    for mark in a.stored:
        match = theirs.pop(mark.name, None)
        if match is None:
            yield _of_stored(mark.name, "is missing in B")
        elif match != mark:
            yield _of_stored(mark.name, _stored_words(mark, match))
    for name in theirs:
        yield _of_stored(name, "is missing in A")


def _stored_words(mark: StoredMark, match: StoredMark) -> str:
    if mark.shape != match.shape:
        return f"is {list(mark.shape)} in A, {list(match.shape)} in B"
    if mark.dtype != match.dtype:
        return f"is {mark.dtype} in A, {match.dtype} in B"
    return "holds other bytes"


def _of_stored(name: str, what: str) -> Difference:
    layer = _LAYER.search(name)
    return Difference("stored", f"{name} {what}", None if layer is None else int(layer[1]))


def _changed_bytes(a: Fingerprint, b: Fingerprint) -> tuple[Difference, ...]:
    """Tensors of one name, type and shape with other bytes: no rounding explains these."""
    theirs = {mark.name: mark for mark in b.stored}
    return tuple(
        _of_stored(mark.name, "holds other bytes")
        for mark in a.stored
        if (match := theirs.get(mark.name)) is not None
        and (match.dtype, match.shape) == (mark.dtype, mark.shape)
        and match.sum64 != mark.sum64
    )


# --- values --------------------------------------------------------------------------------------


def _values(a: Fingerprint, b: Fingerprint) -> Iterator[Difference]:
    """Weights that are not equal, in the order of the layers; with what rounding explains."""
    if not a.values or not b.values:
        return
    theirs = {mark.name: mark for mark in b.values}
    for mark in a.values:
        match = theirs.pop(mark.name, None)
        if match is None or match.shape != mark.shape:
            yield Difference("values", _unlike(mark, match), mark.layer, mark.kind, None, None)
            continue
        size = weights_apart(mark, match)
        if size > ROUNDED:
            allowed = _allowed(a, b, mark)
            yield Difference("values", mark.name, mark.layer, mark.kind, size, allowed)
    for mark in theirs.values():
        yield Difference("values", f"{mark.name} is missing in A", mark.layer, mark.kind)


def _unlike(mark: ValueMark, match: ValueMark | None) -> str:
    if match is None:
        return f"{mark.name} is missing in B"
    return f"{mark.name} is {list(mark.shape)} in A, {list(match.shape)} in B"


def _allowed(a: Fingerprint, b: Fingerprint, mark: ValueMark) -> float:
    """What rounding from one storage to the other explains, by the roughest type of both.

    Norms and biases are not packed by any scheme: theirs is that of bfloat16 at the most.
    """
    types = _type_set(a) | _type_set(b)
    if len(types) < 2 and types <= FLOAT_ROUNDING.keys():
        return 0.0  # floats of one type: nothing was rounded between them
    if len(mark.shape) < 2:
        return FLOAT_ROUNDING["BF16"] * SKETCH_SPREAD
    return max(rounding(one) for one in types) * SKETCH_SPREAD


def rounding(dtype: str) -> float:
    """‖rounded − w‖/‖w‖ that storing in this type explains; of an unknown type, as by one bit."""
    if dtype in FLOAT_ROUNDING:
        return FLOAT_ROUNDING[dtype]
    if dtype in SMALL_FLOATS:
        return SMALL_FLOATS[dtype]
    bits = _BLOCK_BITS.match(dtype)
    return BLOCK_REACH / float(1 << (1 if bits is None else int(bits[1])))


def _type_set(fingerprint: Fingerprint) -> set[str]:
    return {mark.dtype for mark in fingerprint.stored}


def _types(fingerprint: Fingerprint) -> str:
    return "/".join(sorted(_type_set(fingerprint))) or "an unknown type"


# --- settings ------------------------------------------------------------------------------------


def _settings(a: Fingerprint, b: Fingerprint) -> Iterator[Difference]:
    theirs = dict(b.settings)
    if not a.settings or not theirs:
        return
    ours = dict(a.settings)
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key) != theirs.get(key):
            yield Difference("settings", f"{key} is {ours.get(key)} in A, {theirs.get(key)} in B")


def _rope(a: Fingerprint, b: Fingerprint) -> Iterator[Difference]:
    if None not in (a.rope, b.rope) and a.rope != b.rope:
        yield Difference("rope", f"angles {a.rope} in A, {b.rope} in B", kind="rope")


def _tokenizer(a: Fingerprint, b: Fingerprint) -> Iterator[Difference]:
    """What they make of the prompts decides where that is known: two files may say the same."""
    theirs = {mark.prompt: mark for mark in b.answers}
    pairs = [(mark, theirs[mark.prompt]) for mark in a.answers if mark.prompt in theirs]
    for mark, match in pairs:
        if not cut_alike(mark, match):
            counts = f"{mark.num_tokens} tokens in A, {match.num_tokens} in B"
            yield Difference("tokenizer", f"{mark.prompt[:24]!r}… is {counts}")
            return
    if not pairs and None not in (a.tokenizer, b.tokenizer) and a.tokenizer != b.tokenizer:
        yield Difference("tokenizer", "tokenizer.json differs")


# --- answers -------------------------------------------------------------------------------------


def _answers(a: Fingerprint, b: Fingerprint, noise: tuple[Noise, ...]) -> AnswersApart | None:
    found = answers_apart(a.answers, b.answers)
    if found is None:
        return None
    mean, largest, tokens = found
    rungs = (("float32", SAME_NATS), *((n.precision, ROUNDINGS * n.mean_nats) for n in noise))
    known = [name for name, _ in rungs]
    both = [side.precision for side in (a, b)]
    told = [known.index(one) for one in both if one in known]
    if len(told) == len(both):
        rungs = rungs[: 1 + max(told)]  # nothing rougher than the rougher of the two explains
    explained = next((name for name, most in rungs if mean <= most), None)
    limits_known = bool(noise) or len(told) == len(both)
    return AnswersApart(
        mean, largest, tokens, explained if largest else "equal", rungs, limits_known
    )


def _not_compared(a: Fingerprint, b: Fingerprint) -> Iterator[tuple[str, str]]:
    for letter, one in (("A", a), ("B", b)):
        for part, reason in one.absent:
            yield f"{letter}: {part}", reason
