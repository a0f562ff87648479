"""Rules about what the configuration says of RoPE: keys, kinds, stretch and shapes.

Holds consistency only; whether theta suits the length is `positions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ullage.anatomy.spec import Attention, CompressedAttention, LatentAttention, Mixer
from ullage.audit import vllm
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject, span
from ullage.findings.finding import Evidence, Severity

NO_ROPE = "layers with rotary embeddings"
THETA_KEYS = ("rope_theta", "rope_parameters")


def _keys_agree(subject: Subject) -> Verdict:
    text = subject.text
    objects = [
        (key, part)
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(part := text.get(key), Mapping)
    ]
    facts: list[Evidence] = []
    for name, part in _flattened(objects):
        old, new = part.get("type"), part.get("rope_type")
        if isinstance(new, str):
            facts.append(subject.fact(f"{name}.rope_type", new, name.split(".", 1)[0]))
        if isinstance(old, str) and isinstance(new, str) and not _same_kind(old, new):
            return Fired(
                f"{name} says rope_type {new!r} and, by the older key, type {old!r}; vLLM 0.32 "
                "refuses to start on this.",
                f"Remove type from {name} in config.json and keep rope_type as trained.",
                (*facts, subject.fact(f"{name}.type", old, name.split(".", 1)[0])),
                Severity.error,
            )
    for key in ("rope_theta", "partial_rotary_factor"):
        flat = text.get(key)
        if not isinstance(flat, int | float):
            continue
        facts.append(subject.fact(key, flat))
        for name, part in objects:
            nested = part.get(key)
            if isinstance(nested, int | float) and nested != flat:
                return Fired(
                    f"{key} is {flat:g} at the top and {nested:g} in {name}: engines that read the "
                    "newer key and tools that read the older one rotate by different angles.",
                    f"Keep the value that the model was trained with and remove {key} from the "
                    "other place in config.json.",
                    (*facts, subject.fact(f"{name}.{key}", nested, name)),
                )
    if len(objects) == 2 and not _same_scaling(objects[0][1], objects[1][1]):
        return Fired(
            "rope_parameters and rope_scaling are both present and differ; which one applies "
            "depends on the reader's version.",
            "Keep rope_parameters (the newer key) with the trained values and remove rope_scaling.",
            (*facts, subject.fact("rope_parameters and rope_scaling", "differ", "rope_scaling")),
        )
    return Clear(tuple(facts) or (subject.fact("rope keys that could disagree", 0),))


def _flattened(
    objects: list[tuple[str, Mapping[str, object]]],
) -> Iterator[tuple[str, Mapping[str, object]]]:
    for name, part in objects:
        yield name, part
        for key, inner in part.items():
            if isinstance(inner, Mapping):
                yield f"{name}.{key}", inner


def _same_kind(old: str, new: str) -> bool:
    return old == new or (old, new) in {("su", "longrope"), ("mrope", "default")}


def _same_scaling(new: Mapping[str, object], old: Mapping[str, object]) -> bool:
    shared = set(new) & set(old)
    return all(new[key] == old[key] for key in shared)


def _stretch(subject: Subject) -> Verdict:
    length = subject.spec.max_positions
    facts: list[Evidence] = []
    for rope, _, layers in subject.ropes():
        if rope.scaling not in ("yarn", "deepseek_yarn"):
            continue
        original = rope.original_max_positions
        keys = ("rope_scaling", "rope_parameters")
        if original is None:
            return Fired(
                f"YaRN stretches {span(layers)} by {rope.factor:g} from a length that is not "
                "given: engines then take max_position_embeddings, which already is the stretched "
                "one.",
                "Add original_max_position_embeddings, the length before stretching, to the rope "
                "settings in config.json.",
                (subject.fact("factor", rope.factor, *keys),),
            )
        if not length:
            return NotEvaluable(("max_position_embeddings",))
        reach = round(original * rope.factor)
        facts += [
            subject.fact("factor", rope.factor, *keys),
            subject.fact("original_max_position_embeddings", original, *keys, unit="tokens"),
            subject.fact("max_position_embeddings", length, unit="tokens"),
        ]
        if reach < length:
            return Fired(
                f"YaRN reaches {original:,} × {rope.factor:g} = {reach:,} positions, fewer than "
                f"max_position_embeddings {length:,}: the last {length - reach:,} are beyond what "
                "the rotation was stretched for.",
                f"Pass --max-model-len {reach}, or correct factor in config.json to "
                f"{length / original:g} if the model was trained so.",
                tuple(facts),
            )
        if reach > length:
            return Fired(
                f"YaRN reaches {original:,} × {rope.factor:g} = {reach:,} positions, but "
                f"max_position_embeddings is {length:,}; vLLM 0.32 takes that as the limit and "
                "does not multiply it by factor, so short requests pay for a stretch that nothing "
                "uses.",
                f"Set max_position_embeddings to {reach} in config.json to serve the stretched "
                "length, or remove the scaling to serve the original one.",
                tuple(facts),
            )
    return Clear(tuple(facts) or (subject.fact("layers with YaRN", 0, "rope_scaling"),))


def _kind_is_known(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    facts: list[Evidence] = []
    for rope, _, layers in subject.ropes():
        facts.append(subject.fact("rope_type", rope.scaling, "rope_parameters", "rope_scaling"))
        if rope.scaling not in vllm.ROPE_KINDS:
            return Fired(
                f"The RoPE scaling of {span(layers)} is {rope.scaling!r}, which vLLM 0.32 does not "
                "know: it stops while building the model.",
                "Correct rope_type in config.json (default, linear, dynamic, yarn, llama3, longrope"
                " and proportional are the usual ones), or use an engine that knows this one.",
                tuple(facts),
            )
    return Clear(tuple(facts) or (subject.fact(NO_ROPE, 0),))


def _rotary_shape(subject: Subject) -> Verdict:
    facts: list[Evidence] = []
    for rope, mixer, layers in subject.ropes():
        width = _rotary_width(mixer)
        facts += [
            subject.fact(
                "rotary dimensions", rope.rotary_dim, "partial_rotary_factor", *THETA_KEYS
            ),
            subject.fact("head dimensions", width, "qk_rope_head_dim", "head_dim", "hidden_size"),
        ]
        problem = ""
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= width:
            problem = (
                f"{rope.rotary_dim} of {width} dimensions of each head turn in {span(layers)}; "
                "rotation works on pairs, so this must be even and between 2 and the head's size."
            )
        elif rope.sections:
            facts.append(subject.fact("mrope_section sum", sum(rope.sections), *THETA_KEYS[1:]))
            if sum(rope.sections) * 2 != rope.rotary_dim:
                problem = (
                    f"mrope_section {list(rope.sections)} sums to {sum(rope.sections)}, but "
                    f"{rope.rotary_dim} rotary dimensions of {span(layers)} hold "
                    f"{rope.rotary_dim // 2} pairs."
                )
        if problem:
            return Fired(
                problem,
                "Correct head_dim, partial_rotary_factor or mrope_section in config.json from the "
                "model's original.",
                tuple(facts),
            )
    return Clear(tuple(facts) or (subject.fact(NO_ROPE, 0),))


def _rotary_width(mixer: Mixer) -> int:
    if isinstance(mixer, Attention):
        return mixer.head_dim
    if isinstance(mixer, LatentAttention):
        return mixer.qk_rope_head_dim
    return mixer.rope_head_dim if isinstance(mixer, CompressedAttention) else 0


RULES = (
    Rule(
        id="A023",
        title="Old and new RoPE keys",
        severity=Severity.warning,
        category="positions",
        why="rope_theta and rope_scaling moved into rope_parameters, and type became rope_type. "
        "Where both spellings stand and differ, the angles depend on who reads the file.",
        fix="Keep one place for each value, preferably rope_parameters.",
        source="transformers 5.24 modeling_rope_utils.py; vllm 0.32 transformers_utils/config.py, "
        "patch_legacy_rope_type",
        example='rope_theta 500000 beside rope_parameters {"rope_theta": 10000}',
        check=_keys_agree,
    ),
    Rule(
        id="A024",
        title="YaRN's factor against the model's length",
        severity=Severity.warning,
        category="positions",
        why="YaRN stretches original_max_position_embeddings by factor. vLLM 0.32 takes "
        "max_position_embeddings as the stretched length and does not multiply it again, so the "
        "three numbers must agree.",
        fix="Make max_position_embeddings equal original_max_position_embeddings × factor.",
        source="YaRN (arXiv 2309.00071); vllm 0.32: config/model.py, _get_and_verify_max_len",
        example="factor 4, original_max_position_embeddings 32768, max_position_embeddings 32768",
        check=_stretch,
    ),
    Rule(
        id="A025",
        title="RoPE scaling known to the engine",
        severity=Severity.error,
        category="positions",
        why="An engine that does not know a scaling either stops or, worse, ignores it.",
        fix="Correct rope_type, or use an engine that knows it.",
        source="vllm 0.32: model_executor/layers/rotary_embedding/__init__.py",
        example='rope_scaling {"rope_type": "llama4", "factor": 8}',
        check=_kind_is_known,
    ),
    Rule(
        id="A026",
        title="Rotary dimensions per head",
        severity=Severity.error,
        category="positions",
        why="Rotation turns pairs of dimensions; multi-section RoPE deals the pairs out to time, "
        "height and width, and the sections must use all of them.",
        fix="Correct head_dim, partial_rotary_factor or mrope_section.",
        source="RoPE (arXiv 2104.09864); vllm 0.32: rotary_embedding/{base,mrope}.py",
        example="mrope_section [24, 20, 16] with 128 rotary dimensions (60 pairs, not 64)",
        check=_rotary_shape,
    ),
)
