"""A configuration → `Anatomy`: finds the text model in it, its family, and composes the parts.

Composition only; the parts are read by `layer_kinds`, `mixers`, `feed_forward`, `positions` and
`towers`. Nothing is opened here: that is `open.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ullage.anatomy.defaults import ClassDefaults, class_defaults
from ullage.anatomy.families import family_of
from ullage.anatomy.family import Family
from ullage.anatomy.feed_forward import read_dense, read_experts, sparse_layers
from ullage.anatomy.keys import Mode, Reading, Section, show
from ullage.anatomy.layer_kinds import Kind, read_kinds, read_single, rope_layers
from ullage.anatomy.mixers import (
    FINE_RATIO,
    MAX_WIDTH,
    fact,
    read_compressed,
    read_mixer,
)
from ullage.anatomy.positions import read_positions
from ullage.anatomy.quantization import doubt_of, read_quantization
from ullage.anatomy.spec import (
    Anatomy,
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
    Mixer,
    ModelSpec,
    NoFeedForward,
    Norm,
    Quantization,
    Tower,
)
from ullage.errors import MalformedConfig

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
    kinds = read_kinds(text, family)
    sparse = sparse_layers(text, family, len(kinds))
    layers, dense, experts = _layers(text, family, kinds, sparse)
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
        mtp_layers=_mtp(text, family, layers, dense, experts),
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


def _layers(
    text: Section, family: Family, kinds: list[Kind], sparse: list[bool]
) -> tuple[tuple[LayerSpec, ...], Dense | None, Experts | None]:
    """All layers; equal parts are one object, so that a deep model stays small."""
    experts = read_experts(text, family)
    needs_dense = any(
        kind == "dense" or (kind is None and (experts is None or not s))
        for (_, kind), s in zip(kinds, sparse, strict=True)
    )
    dense = read_dense(text, family) if needs_dense else None
    if not needs_dense:
        text.ignore(family.dense_width, "intermediate_size")
    mixers = _mixers(text, family, [kind for kind, _ in kinds])
    hash_layers = text.optional_integer("num_hash_layers", minimum=0) or 0
    hashed = replace(experts, hash_routed=True, score_correction_bias=False) if experts else None
    parallel = None
    if text.knows("enable_moe_block") and text.boolean("enable_moe_block", False):
        parallel = read_dense(text, family)  # Gemma-4: a dense MLP beside the experts
    elif text.knows("enable_moe_block"):
        experts = None
        dense = read_dense(text, family)
    layers = []
    for i, (_, kind) in enumerate(kinds):
        part: FeedForward = NoFeedForward()
        if kind == "moe" or (kind is None and experts is not None and sparse[i]):
            if experts is None:
                raise text.error("num_experts", None, "the number of experts")
            part = hashed if i < hash_layers and hashed is not None else experts
        elif kind != "none" and dense is not None:
            part = dense
        layers.append(
            LayerSpec(
                i,
                mixers[i],
                part,
                parallel_dense=parallel if isinstance(part, Experts) else None,
            )
        )
    return tuple(layers), dense, experts


def _mixers(text: Section, family: Family, kinds: list[str]) -> list[Mixer]:
    n = len(kinds)
    if family.mixer == "compressed":
        return _compressed_mixers(text, family, n)
    made = {kind: read_mixer(text, family, kind) for kind in dict.fromkeys(kinds)}
    mixers: list[Mixer] = [made[kind] for kind in kinds]
    if family.nope in ("full", "keys"):
        rotates = (
            rope_layers(text, n) if family.nope == "keys" else [kind != "full" for kind in kinds]
        )
        still = {k: replace(m, rope=None) for k, m in made.items() if isinstance(m, Attention)}
        mixers = [
            m if rotates[i] or kinds[i] not in still else still[kinds[i]]
            for i, m in enumerate(mixers)
        ]
    mixers = _shared_indexers(text, mixers)
    return _shared_kv(text, kinds, mixers)


def _compressed_mixers(text: Section, family: Family, n: int) -> list[Mixer]:
    """DeepSeek-V4: compress_ratios lists a ratio per layer, MTP layers at the end."""
    ratios = text.integers("compress_ratios", maximum=1 << 20)
    if ratios is None:
        raise text.error("compress_ratios", None, f"a list of {n} ratios")
    if len(ratios) < n:
        raise text.error("compress_ratios", list(ratios), f"a list of {n} ratios or more")
    made = {r: read_compressed(text, family, r) for r in dict.fromkeys(ratios)}
    return [made[r] for r in ratios[:n]]


def _shared_indexers(text: Section, mixers: list[Mixer]) -> list[Mixer]:
    """GLM-5.2: indexer_types says which layers reuse an earlier layer's choice of keys."""
    types = text.texts("indexer_types", length=len(mixers))
    text.ignore(
        "index_share_for_mtp_iteration",
        "index_skip_topk_offset",
        "index_topk_freq",
        "index_topk_pattern",
    )
    if types is None:
        return mixers
    shared: dict[int, Mixer] = {}
    out: list[Mixer] = []
    for i, (word, mixer) in enumerate(zip(types, mixers, strict=True)):
        if word not in ("full", "shared"):
            raise text.error(f"indexer_types[{i}]", word, "full or shared")
        if word == "shared" and isinstance(mixer, LatentAttention) and mixer.indexer is not None:
            if id(mixer) not in shared:
                shared[id(mixer)] = replace(mixer, indexer=replace(mixer.indexer, shared=True))
            mixer = shared[id(mixer)]
        out.append(mixer)
    return out


def _shared_kv(text: Section, kinds: list[str], mixers: list[Mixer]) -> list[Mixer]:
    """Gemma-3n and -4: the last num_kv_shared_layers read the KV of the last layer of their kind."""
    count = text.optional_integer("num_kv_shared_layers", minimum=0) or 0
    n = len(mixers)
    if count == 0:
        return mixers
    if count >= n:
        raise text.error("num_kv_shared_layers", count, f"fewer than the {n} layers")
    first = n - count
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    out = list(mixers)
    for i in range(first, n):
        mixer = mixers[i]
        if kinds[i] not in last or not isinstance(mixer, Attention):
            raise text.error("num_kv_shared_layers", count, "a layer of each kind to read from")
        out[i] = replace(mixer, kv_shared_from=last[kinds[i]])
    return out


def _mtp(
    text: Section,
    family: Family,
    layers: tuple[LayerSpec, ...],
    dense: Dense | None,
    experts: Experts | None,
) -> tuple[LayerSpec, ...]:
    """Multi-token-prediction layers: one full layer each unless the configuration lists kinds."""
    count = text.optional_integer("num_nextn_predict_layers", minimum=0, maximum=64) or 0
    each = text.optional_integer("mtp_transformer_layers", minimum=0, maximum=64)
    if text.has("use_mtp") and not text.boolean("use_mtp"):
        count = 0
    text.ignore("mtp_use_dedicated_embeddings")
    listed = read_single(text, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    if count == 0:
        return ()
    if listed is not None:
        if count * len(listed) > 256:
            raise text.error("num_nextn_predict_layers", count, "fewer layers")
        pair = []
        for mixer_kind, ffn in listed * count:
            part: FeedForward = NoFeedForward()
            if ffn == "moe" and experts is not None:
                part = experts
            elif ffn == "dense" and dense is not None:
                part = dense
            pair.append((read_mixer(text, family, mixer_kind), part))
        return tuple(LayerSpec(i, m, f) for i, (m, f) in enumerate(pair))
    model = next(
        (x for x in reversed(layers) if isinstance(x.mixer, Attention | LatentAttention)),
        layers[-1],
    )
    mixer: Mixer = model.mixer
    if family.mixer == "compressed":
        ratios = text.integers("compress_ratios") or ()
        mixer = read_compressed(
            text, family, ratios[-1] if len(ratios) > len(layers) else FINE_RATIO
        )
    return tuple(
        LayerSpec(i, mixer, layers[-1].feed_forward, parallel_dense=model.parallel_dense)
        for i in range(count * (each or 1))
    )


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


__all__ = ["MalformedConfig", "read_config"]
