"""A configuration → `Anatomy`: finds the text model in it, its family, and composes the parts.

Composition only; the parts are read by `layer_kinds`, `mixers`, `feed_forward`, `positions` and
`towers`. Nothing is opened here: that is `open.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ullage.anatomy.defaults import ClassDefaults, class_defaults
from ullage.anatomy.families import family_of
from ullage.anatomy.family import Family
from ullage.anatomy.keys import Mode, Reading, Section, show
from ullage.anatomy.layers import read_layers, read_mtp
from ullage.anatomy.mixers import MAX_WIDTH, fact
from ullage.anatomy.positions import read_positions
from ullage.anatomy.quantization import doubt_of, read_quantization
from ullage.anatomy.spec import Anatomy, ModelSpec, Norm, Quantization, Tower

# Where configurations of several modalities keep their language model.
TEXT_KEYS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
    "text_model_config",
)
DTYPES = {
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
}
DTYPE_NAMES = {"half": "float16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MAX_VOCAB = 1 << 28


def read_config(
    config: Mapping[str, object],
    *,
    file: str,
    quant_side_file: Mapping[str, object] | None = None,
) -> Anatomy:
    """The anatomy that a configuration describes.

    Args:
        config: the parsed JSON object.
        file: its name, for messages.
        quant_side_file: what hf_quant_config.json beside it holds, if there is one.

    Raises:
        MalformedConfig: a field is missing, of the wrong type, or contradicts another.
        UnsupportedModel: a part is known to be there but cannot be described.
    """
    spec, reading, unread = _read(config, file, "likely", quant_side_file)
    sources = tuple(reading.sources.values())
    if not reading.unknowns:
        return Anatomy(spec, spec, spec, sources, unread)
    low, _, _ = _read(config, file, "low", quant_side_file)
    high, _, _ = _read(config, file, "high", quant_side_file)
    return Anatomy(spec, low, high, sources, unread)


@dataclass(slots=True)
class _Found:
    """The language model's section inside a configuration, and the sections around it."""

    text: Section
    around: list[Section]
    model_type: str
    architecture: str
    family: Family


def _architecture(config: Mapping[str, object], reading: Reading) -> str:
    value = config.get("architectures")
    if value is None or value == []:
        return ""
    if not isinstance(value, list | tuple) or not isinstance(value[0], str):
        raise reading.error(
            f"found {show(value)}", field="architectures", expected="a list of class names"
        )
    return value[0][:200]


def _section(
    values: Mapping[str, object], reading: Reading, path: str, known: ClassDefaults | None
) -> Section:
    if known is None:
        return Section(values, reading, path)
    return Section(values, reading, path, known.defaults, known.label)


def _model_type(values: Mapping[str, object], reading: Reading, path: str) -> str:
    value = values.get("model_type")
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 200:
        raise reading.error(
            f"found {show(value)}", field=path + "model_type", expected="a short string"
        )
    return value


def _find_text(config: Mapping[str, object], reading: Reading) -> _Found:
    """Walk down to the language model, remembering the sections passed."""
    values, path = config, ""
    model_type = _model_type(values, reading, path)
    architecture = _architecture(config, reading)
    around: list[Section] = []
    for _ in range(4):
        known = class_defaults(model_type)
        nested = dict(known.nested) if known else {}
        key = next((k for k in TEXT_KEYS if isinstance(values.get(k), Mapping)), None)
        if key is None:
            key = next((k for k in TEXT_KEYS if k in nested and k not in values), None)
            if key is None or "hidden_size" in values:
                break
        section = _section(values, reading, path, known)
        section.ignore("model_type", key)
        around.append(section)
        inner = values.get(key)
        values = inner if isinstance(inner, Mapping) else {}
        path += key + "."
        inner_type = _model_type(values, reading, path)
        if not inner_type or (not class_defaults(inner_type) and inner_type == model_type):
            inner_type = inner_type or nested.get(key, model_type)
        inner_architecture = _architecture(values, reading)
        model_type = inner_type
        architecture = architecture or inner_architecture
        if inner_architecture and family_of(model_type, "").name == "generic":
            architecture = inner_architecture
    family = family_of(model_type, architecture)
    known = class_defaults(model_type) or class_defaults(family.base or family.name)
    text = _section(values, reading, path, known)
    if family.extra:
        text.defaults = {**family.extra, **text.defaults}
    text.ignore("model_type", "architectures")
    return _Found(text, around, model_type or "unknown", architecture, family)


def _read(
    config: Mapping[str, object],
    file: str,
    mode: Mode,
    side_file: Mapping[str, object] | None,
) -> tuple[ModelSpec, Reading, tuple[str, ...]]:
    reading = Reading(file, mode)
    found = _find_text(config, reading)
    text, family = found.text, found.family
    if family.name == "generic":
        reading.unknown("model_type", f"{show(found.model_type)} is not a known family", "weights")
    hidden_size = text.integer("hidden_size", maximum=MAX_WIDTH)
    max_positions = text.integer("max_position_embeddings", 2048, why="default: 2048")
    layers, dense, experts = read_layers(text, family)
    spec = ModelSpec(
        model_type=found.model_type,
        architecture=found.architecture,
        family=family.name,
        kind=family.kind,
        hidden_size=hidden_size,
        vocab_size=text.integer("vocab_size", maximum=MAX_VOCAB),
        max_positions=max_positions,
        layers=layers,
        norm=_norm(text, family),
        positions=read_positions(text, family, max_positions),
        tie_embeddings=_tied(found),
        dtype=_dtype(found),
        mtp_layers=read_mtp(text, family, layers, dense, experts),
        final_norm=family.final_norm,
        embedding_norm=family.embedding_norm,
        embedding_scale=hidden_size**0.5 if family.embedding_scale == "sqrt" else 1.0,
        lm_head_bias=fact(
            text, family.lm_head_bias, "lm_head_bias", likely=False, widens="weights"
        ),
        logit_soft_cap=text.optional_number("final_logit_softcapping"),
        residual_streams=text.integer("hc_mult", 1, why="default: one stream", maximum=64),
        towers=_towers(found),
        quantization=_quantization(config, found, side_file, file),
        unknowns=tuple(reading.unknowns.values()),
    )
    unread = [key for section in (*found.around, text) for key in section.unread()]
    return spec, reading, tuple(unread)


def _norm(text: Section, family: Family) -> Norm:
    return Norm(
        kind=family.norm,
        eps=text.number("norm_eps", 1e-6, why="default: 1e-6", maximum=1.0),
        place=family.place,
        bias=fact(text, family.norm_bias, "norm_bias", likely=False, widens="weights"),
        unit_offset=fact(text, family.unit_offset, "unit_offset", likely=False, widens="flops"),
        affine=family.affine,
    )


def _tied(found: _Found) -> bool:
    """tie_word_embeddings: the outermost file value wins (transformers ties by the outer config)."""
    for section in (*found.around, found.text):
        if section.has("tie_word_embeddings"):
            value = section.boolean("tie_word_embeddings")
            for other in (*found.around, found.text):
                other.ignore("tie_word_embeddings")
            return value
    return found.text.boolean("tie_word_embeddings", False, why="default: false")


def _dtype(found: _Found) -> str:
    for section in (found.text, *reversed(found.around)):
        if section.has("dtype"):
            name = section.text("dtype").removeprefix("torch.")
            name = DTYPE_NAMES.get(name, name)
            if name not in DTYPES:
                raise section.error("dtype", name, "one of " + ", ".join(sorted(DTYPES)))
            for other in (*found.around, found.text):
                other.ignore("dtype", "torch_dtype")
            return name
    reading = found.text.reading
    if found.family.dtype is not None:
        reading.source("dtype", found.family.dtype, f"default: the family {found.family.name}")
        return found.family.dtype
    return reading.decide(
        "dtype",
        "absent",
        likely="bfloat16",
        low="bfloat16",
        high="float32",
        widens=("weights", "kv", "state"),
    )


def _towers(found: _Found) -> tuple[Tower, ...]:
    return ()


def _quantization(
    config: Mapping[str, object],
    found: _Found,
    side_file: Mapping[str, object] | None,
    file: str,
) -> Quantization | None:
    for section in (*found.around, found.text):
        section.ignore("quantization_config", "compression_config", "expert_dtype")
    quantization = read_quantization(config, side_file, file=file)
    doubt = doubt_of(quantization, config, side_file, file=file)
    if doubt is None:
        return quantization
    return found.text.reading.decide(
        doubt.field,
        doubt.found,
        likely=doubt.likely,
        low=doubt.low,
        high=doubt.high,
        widens=("weights",),
    )
