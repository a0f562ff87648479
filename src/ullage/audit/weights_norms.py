"""The rule that holds each norm's weight against the other layers' norms of the same role.

What a family's norms usually look like is written nowhere, and trained ones go far (SmolLM2's first
has 271 negative weights of 576). So a model is its own measure; zeros are A157's.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ullage.audit.rule import Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject, unit_count
from ullage.audit.weights import NOT_ASKED, SOURCE, content, looked_at
from ullage.audit.weights_layers import norm_offset, norm_weights
from ullage.findings.finding import Evidence, Severity

if TYPE_CHECKING:
    from ullage.deep.readings import TensorReading, VectorReading

LEAST_LAYERS = 3
"""Of two that differ nobody can say which is the usual one."""
UNUSUAL = 2.0**8
"""bfloat16 has 8 significant bits: of two summands this far apart the smaller one is lost."""


class _Norm(NamedTuple):
    """A norm's weight as it multiplies. `peak` is its largest magnitude."""

    tensor: TensorReading
    rms: float
    peak: float
    constant: float | None


class _Unlike(NamedTuple):
    norm: _Norm
    what: str
    value: float
    usual: float
    factor: float
    layers: int


def _norm(tensor: TensorReading, vector: VectorReading, offset: int) -> _Norm:
    square = vector.rms**2 + 2 * offset * vector.mean + offset**2
    least, greatest = vector.least + offset, vector.greatest + offset
    constant = least if vector.least == vector.greatest else None
    return _Norm(tensor, max(square, 0.0) ** 0.5, max(abs(least), abs(greatest)), constant)


def _role(name: str) -> str | None:
    """A tensor's name without its layer's number; None for what is not in a layer."""
    parts = name.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else ".".join([*parts[:number], "{n}", *parts[number + 1 :]])


def _unlike(norms: list[_Norm]) -> list[_Unlike]:
    """Those of one role that are beyond UNUSUAL of the role's median, the farthest first."""
    found = []
    for what, values in (
        ("root mean square", [norm.rms for norm in norms]),
        ("largest magnitude", [norm.peak for norm in norms]),
    ):
        usual = median(values)
        for norm, value in zip(norms, values, strict=True):
            if value and usual and not usual / UNUSUAL < value < usual * UNUSUAL:
                factor = max(value / usual, usual / value)
                found.append(_Unlike(norm, what, value, usual, factor, len(norms)))
    return sorted(found, key=lambda item: -item.factor)


def _norms_of_layers(subject: Subject) -> Verdict:
    scan = subject.deep
    if scan is None:
        return NOT_ASKED
    offset = norm_offset(subject)
    roles: dict[str, list[_Norm]] = {}
    alone = 0
    for tensor, vector in norm_weights(scan):
        role = _role(tensor.name)
        if role is None:
            alone += 1
        else:
            roles.setdefault(role, []).append(_norm(tensor, vector, offset))
    compared = [norms for norms in roles.values() if len(norms) >= LEAST_LAYERS]
    alone += sum(len(norms) for norms in roles.values() if len(norms) < LEAST_LAYERS)
    if not compared:
        return NotEvaluable((f"norm weights of one role in {LEAST_LAYERS} layers or more",))
    unlike = sorted((u for norms in compared for u in _unlike(norms)), key=lambda u: -u.factor)
    spread = max(
        (max(n.rms for n in norms) / least if (least := min(n.rms for n in norms)) else 0.0)
        for norms in compared
    )
    facts = (
        *looked_at(scan),
        Evidence("norms compared with other layers'", sum(map(len, compared)), "", SOURCE),
        Evidence("norms with too few others to compare", alone, "", SOURCE),
        Evidence("widest role: largest ÷ smallest root mean square", spread, "", SOURCE),
        Evidence("offset added to them", offset, "", subject.where("model_type")),
    )
    if unlike:
        return _fired_unlike(unlike, facts)
    fresh = [
        (norm, len(norms))
        for norms in compared
        for norm in norms
        if norm.constant and 2 * sum(other.constant is not None for other in norms) < len(norms)
    ]
    if fresh:
        norm, layers = fresh[0]
        return Fired(
            f"{norm.tensor.name} is {norm.constant:g} at each of its {norm.tensor.shape[0]:,} "
            f"elements{_more(len(fresh))}, where most of the {layers} layers' vary: it was not "
            "trained with them.",
            "Look in the log of the conversion for tensors that were not found and initialised "
            "anew; take the checkpoint again if there is none.",
            facts,
        )
    if all(norm.constant is not None for norms in compared for norm in norms):
        return Fired(
            f"All {sum(map(len, compared))} norm weights of the layers are constant, as before "
            "training.",
            "Nothing to do for a model with random weights; a trained one has lost its norms.",
            facts,
            Severity.info,
        )
    return content(subject, facts[len(looked_at(scan)) :])


def _fired_unlike(unlike: list[_Unlike], facts: tuple[Evidence, ...]) -> Fired:
    first = unlike[0]
    above = first.value > first.usual
    tensors = {item.norm.tensor.name for item in unlike}
    return Fired(
        f"{first.norm.tensor.name} has the {first.what} {first.value:.4g}, "
        f"{first.factor:,.4g} times {'above' if above else 'below'} the {first.usual:.4g} that is "
        f"usual in the {first.layers} layers (median){_more(len(tensors))}: its layer "
        f"{'drowns the others' if above else 'is lost among the others'}.",
        f"Compare {first.norm.tensor.file} with its source; one flipped bit, or a scale folded "
        "into the norm twice, does this.",
        facts,
    )


def _more(count: int) -> str:
    return f" (and {unit_count(count - 1, 'more norm')})" if count > 1 else ""


RULES = (
    Rule(
        id="A160",
        title="A layer's norm against the other layers'",
        severity=Severity.warning,
        category="weights",
        why="Layers add to one stream. A norm 256 times the usual lets its layer drown all others "
        "in bfloat16, one as far below is lost; a constant among trained ones is a placeholder.",
        fix="Compare with the source; look for tensors that a conversion did not find.",
        source="bfloat16: 8 significant bits; median over the layers of one role; transformers "
        "5.24 initialises missing norm weights with ones",
        example="--deep on a file in which layer 1's input_layernorm.weight is multiplied by 1,000",
        check=_norms_of_layers,
    ),
)
