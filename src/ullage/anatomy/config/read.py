"""A configuration → `Anatomy`: finds the text model in it, its family, and composes the parts.

Composition only; the stacks are read by `body.py` and its neighbours, what stands in front by
`towers/`. Nothing is opened here: that is `open.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.config.body import read_body
from ullage.anatomy.config.found import Found, find_text
from ullage.anatomy.config.heads import has_lm_head, judges_of
from ullage.anatomy.config.keys import MAX_WIDTH, Mode, Reading, Section, show
from ullage.anatomy.config.mixers import fact, maybe_size
from ullage.anatomy.config.numerics import read_numerics
from ullage.anatomy.config.positions import read_disentangled
from ullage.anatomy.families.family import Family
from ullage.anatomy.families.table import UNSUPPORTED
from ullage.anatomy.quantization.read import doubt_of, read_quantization
from ullage.anatomy.spec import Anatomy, ModelSpec, Norm, Quantization
from ullage.anatomy.towers.read import read_towers
from ullage.errors import UnsupportedModel

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


def _read(
    config: Mapping[str, object],
    file: str,
    mode: Mode,
    side_file: Mapping[str, object] | None,
) -> tuple[ModelSpec, Reading, tuple[str, ...]]:
    reading = Reading(file, mode)
    found = find_text(config, reading)
    text, family = found.text, found.family
    _check_row(found, file)
    for name in family.flatten:
        text.flatten(name)
    text.ignore(*family.ignored, *family.apart)
    hidden_size = text.integer("hidden_size", maximum=MAX_WIDTH)
    embedding = text.optional_integer("embedding_size", maximum=MAX_WIDTH)
    body = read_body(found, hidden_size)
    judges, num_labels = judges_of(found)
    spec = ModelSpec(
        model_type=found.model_type,
        architecture=found.architecture,
        family=family.name,
        kind=body.kind,
        hidden_size=hidden_size,
        vocab_size=text.integer("vocab_size", maximum=MAX_VOCAB),
        max_positions=body.max_positions,
        layers=body.layers,
        norm=_norm(text, family),
        positions=body.positions,
        tie_embeddings=_tied(found),
        dtype=_dtype(found),
        embedding_size=None if embedding == hidden_size else embedding,
        encoder_layers=body.encoder,
        encoder_hidden_size=body.encoder_hidden_size,
        encoder_positions=body.encoder_positions,
        mtp_layers=body.mtp,
        token_types=_token_types(text, family),
        final_norm=_final_norm(text, family),
        embedding_norm=_embedding_norm(text, family),
        embedding_scale=_embedding_scale(text, family, hidden_size),
        lm_head=has_lm_head(found),
        judges=judges,
        num_labels=num_labels,
        lm_head_bias=fact(
            text, family.lm_head_bias, "lm_head_bias", likely=False, widens="weights"
        ),
        logit_soft_cap=text.optional_number("final_logit_softcapping"),
        residual_streams=text.integer("hc_mult", 1, why="default: one stream", maximum=64),
        per_layer_input=_per_layer_input(text),
        family_sizes=(
            *_family_sizes(text, family, hidden_size),
            *_outer_sizes(found),
            *body.sizes,
        ),
        towers=read_towers(found.around, text, hidden_size, family.apart),
        quantization=_quantization(config, found, side_file, file),
        unknowns=tuple(reading.unknowns.values()),
        numerics=read_numerics(text, family.name),
    )
    if family.name == "generic":
        _refuse(text)
    for section in found.around:  # a copy of the language model's own number
        if section.values.get("vocab_size") == spec.vocab_size:
            section.ignore("vocab_size")
    unread = [key for section in (*found.around, text) for key in section.unread()]
    return spec, reading, tuple(unread)


def _embedding_norm(text: Section, family: Family) -> bool:
    condition = family.embedding_norm_if
    return family.embedding_norm or (condition is not None and bool(maybe_size(text, condition)))


def _check_row(found: Found, file: str) -> None:
    """Raise for types without a row, and where a row holds for other values or classes only."""
    text, family = found.text, found.family
    if found.model_type in UNSUPPORTED and family.name == "generic":
        raise UnsupportedModel(
            f"{show(found.model_type)} has {UNSUPPORTED[found.model_type]}",
            file=file,
            field=text.field("model_type"),
            expected="a kind of model that can be priced",
        )
    for key, wanted in family.requires.items():
        value = text.values.get(key, text.defaults.get(key, wanted))
        if value not in (None, wanted):
            raise UnsupportedModel(
                f"{show(value)} in the family {family.name}",
                file=text.reading.file,
                field=text.field(key),
                expected=show(wanted),
            )
        text.ignore(key)
    if family.unpriced is not None:
        text.reading.unknown(
            text.field(family.unpriced), "layers whose work per token is not priced", "flops"
        )
    if family.classes and found.architecture and found.architecture not in family.classes:
        raise UnsupportedModel(
            f"{show(found.architecture)} has parts that are not understood",
            file=text.reading.file,
            field="architectures",
            expected=" or ".join(family.classes),
        )


# Words in keys that speak of a cache, a state or parts of their own: an unknown family that leaves
# one of them unread cannot be priced, since nothing bounds what it keeps per token or stores.
_HINTS = (
    "ssm",
    "mamba",
    "conv",
    "linear_",
    "state",
    "recurren",
    "lora_rank",
    "compress",
    "codebook",
    "shared_expert",
    "retention",
    "memory",
)
# Keys of encoders and encoder-decoders: without a row in the table nothing says how they are built.
_NOT_DECODERS = (
    "encoder_layers",
    "type_vocab_size",
    "encoder_attention_heads",
    "num_decoder_layers",
)


def _refuse(text: Section) -> None:
    """Raise for an unknown family with a key that makes a plain decoder a wrong reading."""
    values = text.values
    if values.get("is_encoder_decoder") is True:
        raise UnsupportedModel(
            "an encoder-decoder of an unknown kind", file=text.reading.file, field="model_type"
        )
    for key in text.unread():
        name = key.rpartition(".")[2]
        if not values.get(name):
            continue
        if name in _NOT_DECODERS:
            raise UnsupportedModel(
                "an encoder of an unknown kind", file=text.reading.file, field=key
            )
        if any(hint in name.lower() for hint in _HINTS):
            raise UnsupportedModel(
                f"{show(values[name])} in a configuration of an unknown kind",
                file=text.reading.file,
                field=key,
                expected="a kind of model whose parts are understood",
            )


def _family_sizes(text: Section, family: Family, hidden_size: int) -> tuple[tuple[str, int], ...]:
    sizes = [(k, text.integer(k, maximum=MAX_WIDTH)) for k in family.sizes]
    sizes += [(k, maybe_size(text, k)) for k in family.maybe_sizes]
    if family.vision_width is not None:
        vision = text.section("vision_config")
        sizes += [("width", text.integer("intermediate_size", maximum=MAX_WIDTH))]
        sizes += [("vision_width", vision.integer(family.vision_width) if vision else hidden_size)]
    if family.positions == "disentangled":
        sizes += read_disentangled(text, hidden_size)
    return tuple(sizes)


def _outer_sizes(found: Found) -> tuple[tuple[str, int], ...]:
    """Sizes that lie around the language model's section, 0 where a wrapper has no such key."""
    sizes = []
    for key in found.family.outer_sizes:
        holders = [section for section in found.around if section.knows(key)]
        sizes.append((key, maybe_size(holders[0], key) if holders else 0))
    return tuple(sizes)


def _token_types(text: Section, family: Family) -> int:
    if not family.token_types:
        return 0
    return text.integer("type_vocab_size", 2, why="default: 2", minimum=0, maximum=1 << 16)


def _final_norm(text: Section, family: Family) -> bool:
    """OPT-350m normalises after each part instead of at the end."""
    if text.knows("do_layer_norm_before"):
        return text.boolean("do_layer_norm_before", True, why="default: true")
    if family.pre_if is not None:
        return text.boolean(family.pre_if, False, why="default: false")
    return family.final_norm


def _embedding_scale(text: Section, family: Family, hidden_size: int) -> float:
    if family.embedding_scale == "sqrt":
        return float(hidden_size**0.5)
    if family.embedding_scale == "mup":  # AFMoE
        return float(hidden_size**0.5) if text.boolean("mup_enabled", False) else 1.0
    if family.embedding_scale == "key":  # Granite, MiniCPM
        for key in ("embedding_multiplier", "scale_emb"):
            if text.has(key):
                return text.number(key, minimum=-1e9, maximum=1e9)
    return 1.0


def _per_layer_input(text: Section) -> tuple[int, int] | None:
    """Gemma-3n and -4: a second embedding table, one slice of it per layer."""
    width = text.optional_integer("hidden_size_per_layer_input", minimum=0, maximum=MAX_WIDTH)
    if not width:
        text.ignore("vocab_size_per_layer_input")
        return None
    return text.integer("vocab_size_per_layer_input", maximum=MAX_VOCAB), width


def _norm(text: Section, family: Family) -> Norm:
    place = family.place
    if text.knows("do_layer_norm_before") and not text.boolean("do_layer_norm_before", True):
        place = "post"  # OPT-350m
    if family.pre_if is not None and text.boolean(family.pre_if, False):
        place = "pre"
    if family.sandwich_if is not None and text.boolean(family.sandwich_if, False):
        place = "sandwich"
    if family.parallel_if is not None and text.boolean(family.parallel_if, False):
        place = "parallel"
    return Norm(
        kind=family.norm,
        eps=text.number("norm_eps", 1e-6, why="default: 1e-6", maximum=1.0),
        place=place,
        bias=fact(text, family.norm_bias, "norm_bias", likely=False, widens="weights"),
        unit_offset=fact(text, family.unit_offset, "unit_offset", likely=False, widens="flops"),
        affine=family.affine and _norm_has_weights(text),
        beside=place == "parallel" and _norms_beside(text),
    )


def _norms_beside(text: Section) -> bool:
    """Falcon's num_ln_in_parallel_attn; two by default in the new decoder (40B, not 11B)."""
    if not text.knows("new_decoder_architecture"):
        return False
    stated = text.optional_integer("num_ln_in_parallel_attn", maximum=2)
    new = text.boolean("new_decoder_architecture", False, why="default: false")
    return stated == 2 or (stated is None and new)


def _norm_has_weights(text: Section) -> bool:
    return text.boolean("layer_norm_elementwise_affine", True, why="default: true")


def _tied(found: Found) -> bool:
    """tie_word_embeddings; the outermost value wins, as in transformers."""
    for section in (*found.around, found.text):
        if section.has("tie_word_embeddings"):
            value = section.boolean("tie_word_embeddings")
            for other in (*found.around, found.text):
                other.ignore("tie_word_embeddings")
            return value
    if found.family.name == "generic" and not found.text.knows("tie_word_embeddings"):
        # Code outside the library inherits its default, which was true and is now false.
        return found.text.reading.decide(
            "tie_word_embeddings",
            "absent",
            likely=False,
            low=True,
            high=False,
            widens=("weights",),
        )
    return found.text.boolean("tie_word_embeddings", False, why="default: false")


def _dtype(found: Found) -> str:
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


def _quantization(
    config: Mapping[str, object],
    found: Found,
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
