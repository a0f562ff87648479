"""Rules about positions: RoPE's base against the length, its precision, the length served.

Holds the judgement; the angles come from `frequencies.py`, the configuration's keys are judged in
`rope_keys.py`. No fixed range of theta is wrong: each is judged against the model's own length.
"""

from __future__ import annotations

from ullage.anatomy.spec import Attention, CompressedAttention, Mixer, Rope
from ullage.audit import vllm
from ullage.audit.frequencies import TURN, angles_per_token
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject, span
from ullage.findings.finding import Evidence, Severity

LEAST_TURNING = 1 / 3
"""Below this share of turning pairs, theta was made for another length (models: 0.56 and more)."""
MOST_ANGLE_ERROR_RAD = 0.1
TABLE_ERRORS = {
    "float32": 2.0**-25,
    "float": 2.0**-25,
    "float16": 2.0**-12,
    "half": 2.0**-12,
    "bfloat16": 2.0**-9,
}
"""Half the spacing of each dtype just below 1."""
NO_ROPE = "layers with rotary embeddings"
THETA_KEYS = ("rope_theta", "rope_parameters")


def _seen(mixer: Mixer, length: int) -> int:
    """How far apart a query and a key of this mixer can be: its window, or the whole length."""
    bound = None
    if isinstance(mixer, Attention):
        bound = mixer.window or mixer.chunk
    elif isinstance(mixer, CompressedAttention) and not mixer.ratio:
        bound = mixer.window
    return min(bound, length) if bound else length


def _angles(rope: Rope, mixer: Mixer, length: int) -> tuple[float, ...] | None:
    head_dim = mixer.head_dim if isinstance(mixer, Attention) else 0
    return angles_per_token(rope, head_dim=head_dim, length=length)


def _unknown_kind(rope: Rope) -> NotEvaluable:
    return NotEvaluable((f"the frequencies of RoPE scaling '{rope.scaling}' as configured",))


NO_LENGTH = NotEvaluable(("max_position_embeddings or --max-model-len",))


def _some_pair_is_slow(subject: Subject) -> Verdict:
    length = subject.served_length
    facts: list[Evidence] = []
    for rope, mixer, layers in subject.ropes():
        if length is None:
            return NO_LENGTH
        angles = _angles(rope, mixer, length)
        if angles is None:
            return _unknown_kind(rope)
        far = _seen(mixer, length)
        slowest = min(angles)
        wavelength = TURN / slowest if slowest else float("inf")
        facts += [
            subject.fact("rope_theta", rope.theta, *THETA_KEYS),
            Evidence("longest wavelength", round(wavelength), "tokens", "calculated")
            if slowest
            else Evidence("pairs that never turn", angles.count(0.0), "", "calculated"),
            Evidence("farthest key", far, "tokens", subject.length_source()),
        ]
        if wavelength < far:
            written = subject.where(*THETA_KEYS).startswith(("config", "flag"))
            note = "" if written else " (a default: the configuration gives none)"
            return Fired(
                f"With theta {rope.theta:g}{note} the slowest rotary pair of {span(layers)} comes "
                f"round every {wavelength:,.0f} tokens, sooner than the {far:,} tokens that these "
                "layers look back: no pair tells near from far over the whole length.",
                f"Restore the theta or rope_scaling that the model was trained with, or pass "
                f"--max-model-len {int(wavelength)} at most.",
                tuple(facts),
            )
    return Clear(tuple(facts) or (subject.fact(NO_ROPE, 0),))


def _pairs_turn(subject: Subject) -> Verdict:
    length = subject.spec.max_positions
    facts: list[Evidence] = []
    for rope, mixer, layers in subject.ropes():
        if not length:
            return NO_LENGTH
        if _seen(mixer, length) < length:
            continue  # a window's layers often share the theta of the layers that see everything
        angles = _angles(rope, mixer, length)
        if angles is None:
            return _unknown_kind(rope)
        moving = [angle for angle in angles if angle]
        turning = sum(1 for angle in moving if angle * length >= TURN)
        facts += [
            subject.fact("rope_theta", rope.theta, *THETA_KEYS),
            Evidence("pairs that turn at least once", turning, f"of {len(moving)}", "calculated"),
            subject.fact("max_position_embeddings", length, unit="tokens"),
        ]
        if turning < LEAST_TURNING * len(moving):
            return Fired(
                f"With theta {rope.theta:g} only {turning} of {len(moving)} rotary pairs of "
                f"{span(layers)} make a full turn within {length:,} positions: such a base belongs "
                "to a far longer context.",
                "Compare rope_theta and max_position_embeddings with the model's original "
                "config.json; one of them was probably copied from another model.",
                tuple(facts),
            )
    return Clear(tuple(facts) or (subject.fact("full-length layers with rotary embeddings", 0),))


def _angle_error(angle: float, last: int) -> float:
    """Half the spacing of float32 at the largest angle that is not a whole number, in radians.

    A whole number of radians per token is exact below 2^24, so the first pair costs nothing.
    """
    largest = angle * last
    if largest <= 0 or (angle == 1.0 and last < 1 << 24):
        return 0.0
    exponent = 0
    while largest >= 2.0:
        largest /= 2.0
        exponent += 1
    return float(2.0 ** (exponent - 24))


def table_error(dtype: str) -> float | None:
    """The most that rounding a finished cosine or sine to `dtype` moves it, at any position."""
    return TABLE_ERRORS.get(dtype)


def _angle_precision(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    length = subject.served_length
    dtype = subject.deployment.dtype or subject.spec.dtype
    facts: list[Evidence] = []
    for rope, mixer, layers in subject.ropes():
        if length is None:
            return NO_LENGTH
        angles = _angles(rope, mixer, length)
        if angles is None:
            return _unknown_kind(rope)
        error = max(_angle_error(angle, length - 1) for angle in angles)
        facts += [
            Evidence("last position", length - 1, "", subject.length_source()),
            Evidence("largest angle error", error, "rad", "calculated: float32 rounding"),
            Evidence(f"error of a table in {dtype}", table_error(dtype), "", "calculated"),
            Evidence(
                "dtype of the angles",
                "float32",
                "",
                "vllm 0.32: model_executor/layers/rotary_embedding/base.py",
            ),
        ]
        if error > MOST_ANGLE_ERROR_RAD:
            fastest = max((angle for angle in angles if angle != 1.0), default=0.0)
            return Fired(
                f"At position {length - 1:,} the float32 angles from which vLLM 0.32 makes its "
                f"cos/sin table for {span(layers)} are rounded by up to {error:.2g} rad, beside "
                f"the {fastest:.2g} rad that the fastest inexact pair turns per token: there it "
                "hardly tells neighbours apart.",
                f"Pass --max-model-len {_exact_length(angles)} or less, where the error stays "
                f"below {MOST_ANGLE_ERROR_RAD} rad, and test long prompts beyond that.",
                tuple(facts),
            )
    return Clear(tuple(facts) or (subject.fact(NO_ROPE, 0),))


def _exact_length(angles: tuple[float, ...]) -> int:
    length = 1 << 24
    while max(_angle_error(angle, length - 1) for angle in angles) > MOST_ANGLE_ERROR_RAD:
        length //= 2
    return length


def _served_length(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    wanted = subject.deployment.max_model_len
    limit = float(subject.spec.max_positions)
    if not limit:
        return _without_limit(subject)
    if not any(word in subject.spec.model_type for word in vllm.FAMILIES_WITH_SCALED_LIMIT):
        for rope, _, _ in subject.ropes():
            if rope.scaling not in vllm.ROPE_KINDS_WITH_SCALED_LIMIT and rope.factor != 1.0:
                limit *= rope.factor
                break
    limit_fact = subject.fact(
        "longest request", int(limit), "max_position_embeddings", unit="tokens"
    )
    asked = wanted if wanted is not None and wanted > 0 else None
    facts = (limit_fact, subject.flag("--max-model-len", asked, "tokens"))
    if asked is not None and asked > limit:
        return Fired(
            f"--max-model-len {asked:,} is above the {int(limit):,} positions that the model has; "
            "vLLM 0.32 refuses to start, and beyond its positions a model answers nonsense.",
            f"Pass --max-model-len {int(limit)} or less; for longer requests add the scaling that "
            "the model's authors tested.",
            facts,
        )
    return Clear(facts)


def _without_limit(subject: Subject) -> Verdict:
    """Nothing names a longest length: no fault where nothing encodes positions (states alone)."""
    kind = subject.spec.positions.kind
    if kind != "none" and (kind != "rope" or any(subject.ropes())):
        return NotEvaluable(("max_position_embeddings",))
    asked = subject.deployment.max_model_len
    return Clear(
        (
            Evidence("positions that bound a request", 0, "", "spec: no layer encodes positions"),
            subject.flag("--max-model-len", asked, "tokens"),
        )
    )


RULES = (
    Rule(
        id="A021",
        title="Slowest rotary pair against the length",
        severity=Severity.warning,
        category="positions",
        why="A rotary pair comes round after its wavelength. When every pair does so within the "
        "distance that a layer looks back, positions repeat. The base that avoids this grows with "
        "the length, so no fixed range of rope_theta is right.",
        fix="Restore the trained rope_theta and scaling, or serve a shorter length.",
        source="RoPE (arXiv 2104.09864); base against length (arXiv 2405.14591); formulas of "
        "transformers 5.24 modeling_rope_utils.py",
        example="rope_theta 10000 with max_position_embeddings 131072 and no rope_scaling",
        check=_some_pair_is_slow,
    ),
    Rule(
        id="A022",
        title="Share of rotary pairs that turn",
        severity=Severity.info,
        category="positions",
        why="Pairs that make no full turn within the trained length carry little about positions. "
        "Published models let 56% to 78% of them turn; far fewer is the mark of a base that was "
        "copied from a model of a longer context.",
        fix="Compare rope_theta and max_position_embeddings with the original config.json.",
        source="counted over published configurations; formulas of transformers 5.24",
        example="rope_theta 1e15 with max_position_embeddings 8192",
        check=_pairs_turn,
    ),
    Rule(
        id="A027",
        title="Angle precision at the last position",
        severity=Severity.warning,
        category="positions",
        why="Engines compute position × frequency in float32 and round the finished cosine and "
        "sine to the model's dtype. That last rounding costs the same at every position; the "
        "product's error grows with the position and passes 0.1 rad above 2 million.",
        fix="Serve a length at which the angle error stays small.",
        source="vllm 0.32: model_executor/layers/rotary_embedding/base.py; IEEE 754 binary32",
        example="max_position_embeddings 10485760 (Llama-4-Scout)",
        check=_angle_precision,
    ),
    Rule(
        id="A028",
        title="--max-model-len against the model's positions",
        severity=Severity.error,
        category="positions",
        why="The engine refuses a length beyond the model's positions, and a model that is forced "
        "past them answers nonsense (or reads outside a learned table).",
        fix="Lower --max-model-len, or configure a scaling that the authors tested.",
        source="vllm 0.32: config/model.py, _get_and_verify_max_len",
        example="--max-model-len 200000 with max_position_embeddings 131072",
        check=_served_length,
    ),
)
