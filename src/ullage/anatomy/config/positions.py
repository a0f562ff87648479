"""Positions: RoPE per kind of layer (old flat keys and new `rope_parameters`), learned tables.

Reads what the configuration says about positions; which layers rotate at all is `mixers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.config.keys import Section
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import PositionKind, Positions, Rope

DEFAULT_THETA = 10_000.0
MAX_FACTOR = 1e6
# Names of the same scaling (transformers renamed them over time).
_SCALING_NAMES = {"su": "longrope", "mrope": "default", "none": "default"}
_STRUCTURAL = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "mrope_section",
    "mrope_interleaved",
    "partial_rotary_factor",
}
# Newer configs key rope_parameters by kind of layer: which word stands for which kind.
_KIND_KEYS = {
    "full": ("full_attention", "main", "global", "hybrid"),
    "sliding": ("sliding_attention", "local", "main", "hybrid_sliding"),
    "chunked": ("chunked_attention",),
    "compressed": ("compress",),
}
_THETA_KEYS = {
    "sliding": ("rope_local_base_freq", "local_rope_theta", "rope_theta"),
    "full": ("global_rope_theta", "rope_theta"),
    "compressed": ("compress_rope_theta", "rope_theta"),
}


def rope_section(section: Section, kind: str) -> tuple[Section | None, bool]:
    """The object with the scaling of one kind of layer, and whether it was meant for that kind.

    The file's rope_parameters, else its rope_scaling, else what the class sets up.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if section.has(name):
            found = section.section(name)
            if found is not None:
                return _of_kind(found, kind)
    section.ignore("rope_parameters", "rope_scaling")
    default = section.defaults.get("rope_parameters")
    if not isinstance(default, Mapping):
        return None, False
    made = Section({}, section.reading, f"{section.path}rope_parameters.", default, section.label)
    return _of_kind(made, kind)


def _of_kind(found: Section, kind: str) -> tuple[Section | None, bool]:
    values = found.values or found.defaults
    nested = [key for key, value in values.items() if isinstance(value, Mapping)]
    if not nested:
        return found, False
    for word in _KIND_KEYS.get(kind, ()):
        if word in nested:
            found.ignore(*nested)
            return found.section(word), True
    return None, True


def _default_theta(section: Section, kind: str) -> float:
    """The class's theta for one kind of layer."""
    default = section.defaults.get("rope_parameters")
    if isinstance(default, Mapping):
        made = Section({}, section.reading, "", default, section.label)
        inner, _ = _of_kind(made, kind)
        values = {} if inner is None else {**inner.defaults, **inner.values}
        theta = values.get("rope_theta")
        if isinstance(theta, int | float):
            return float(theta)
    default = section.defaults.get("default_theta", DEFAULT_THETA)
    return float(default) if isinstance(default, int | float) else DEFAULT_THETA


def _by_kind(section: Section) -> bool:
    """Whether the class rotates its sliding layers apart (Gemma-3, ModernBERT)."""
    default = section.defaults.get("rope_parameters")
    return isinstance(default, Mapping) and isinstance(default.get("sliding_attention"), Mapping)


def _theta(section: Section, scaling: Section | None, kind: str) -> float:
    keys = _THETA_KEYS.get(kind, ("rope_theta",))
    if kind == "sliding" and _by_kind(section):
        keys = keys[:-1]  # there, rope_theta is the full layers' only
    stated = section.has("rope_parameters") or section.has("rope_scaling")
    if stated and scaling is not None and scaling.has("rope_theta"):
        return scaling.number("rope_theta", minimum=1e-6, maximum=1e15)
    for key in keys:
        if section.has(key):
            return section.number(key, minimum=1e-6, maximum=1e15)
    if scaling is not None and scaling.has("rope_theta"):
        return scaling.number("rope_theta", minimum=1e-6, maximum=1e15)
    for key in keys:
        if section.defaults.get(key) is not None:
            return section.number(key, minimum=1e-6, maximum=1e15)
    theta = _default_theta(section, kind)
    if section.has("rope_ratio"):  # ChatGLM stretches the base instead of naming it
        theta *= section.number("rope_ratio", minimum=1e-6)
    section.reading.source(section.field("rope_theta"), theta, f"default: {section.label}")
    return theta


def _rotary_dim(section: Section, scaling: Section | None, head_dim: int) -> int:
    if section.knows("rotary_dim") and section.optional_integer("rotary_dim", minimum=0):
        dim = section.integer("rotary_dim", minimum=0)
        section.ignore("partial_rotary_factor")
    else:
        fraction: float | None = None
        if scaling is not None:
            fraction = scaling.optional_number("partial_rotary_factor", maximum=1.0)
        if fraction is not None:
            section.ignore("partial_rotary_factor")
        else:
            fraction = section.optional_number("partial_rotary_factor", maximum=1.0)
        if fraction is None:
            default = section.defaults.get("default_partial_rotary_factor", 1.0)
            fraction = float(default) if isinstance(default, int | float) else 1.0
        dim = int(head_dim * fraction)
    if dim > head_dim:
        raise section.error("rotary_dim", dim, f"at most head_dim, {head_dim}")
    return dim


def read_rope(
    section: Section,
    head_dim: int,
    kind: str,
    *,
    interleaved: bool = False,
    whole: bool = False,
) -> Rope:
    """RoPE of the layers of one `kind`. `whole`: all of head_dim turns (MLA's rotary part)."""
    scaling, own = rope_section(section, kind)
    theta = _theta(section, scaling, kind)
    rotary_dim = head_dim if whole else _rotary_dim(section, scaling, head_dim)
    if whole:
        section.ignore("partial_rotary_factor")
        if scaling is not None:
            scaling.ignore("partial_rotary_factor")
    section.ignore("original_max_position_embeddings")  # a length, not a size
    if scaling is None or (kind == "sliding" and not own and section.knows("rope_local_base_freq")):
        # Gemma-3: rope_scaling belongs to the global layers only.
        return Rope(theta, rotary_dim, interleaved=interleaved)
    name = scaling.optional_text("rope_type") or scaling.optional_text("type") or "default"
    scaling.ignore("type", "rope_type", "rope_theta")
    parameters: list[tuple[str, float | str | bool | tuple[float, ...]]] = []
    for key, value in sorted((scaling.values or scaling.defaults).items()):
        if key in _STRUCTURAL:
            continue
        scaling.ignore(key)
        if isinstance(value, bool | str):
            parameters.append((key, value))
        elif isinstance(value, int | float):
            parameters.append((key, scaling.number(key, minimum=-1e300)))
        elif isinstance(value, list):
            if len(value) > 4096 or any(
                isinstance(v, bool) or not isinstance(v, int | float) or not abs(v) < 1e300
                for v in value
            ):
                raise scaling.error(key, value, "a list of numbers")
            parameters.append((key, tuple(float(v) for v in value)))
        elif value is not None:
            raise scaling.error(key, value, "a number, a list of numbers or a word")
    original = scaling.optional_integer("original_max_position_embeddings")
    if original is None and name != "default":
        original = section.optional_integer("original_max_position_embeddings")
    sections = scaling.integers("mrope_section") or ()
    return Rope(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=_SCALING_NAMES.get(name, name),
        factor=_factor(scaling),
        original_max_positions=original,
        sections=sections[:8],
        interleaved=interleaved
        or (scaling.has("mrope_interleaved") and scaling.boolean("mrope_interleaved")),
        parameters=tuple(parameters),
    )


def _factor(scaling: Section) -> float:
    """How far a scaling stretches: 1 where none is given, never 0 or beyond any real length."""
    factor = scaling.optional_number("factor", minimum=-1e300)
    if factor is None:
        return 1.0
    if not 0 < factor <= MAX_FACTOR:
        raise scaling.error("factor", factor, f"a number above 0, at most {MAX_FACTOR:,.0f}")
    return factor


def uses_alibi(section: Section, family: Family) -> bool:
    """Whether slopes stand in for a rotation in a family that otherwise rotates.

    Falcon says so. Baichuan does not: its 7B (hidden_size 4096) rotates, its 13B has slopes, which
    is also how vLLM 0.32 (baichuan.py) tells them apart.
    """
    if family.name == "falcon":
        return section.boolean("alibi", False, why="default: false")
    if family.name == "baichuan":
        return section.integer("hidden_size") != _BAICHUAN_ROTATES
    return False


def _padding_id(section: Section, family: Family) -> int | None:
    """The padding token's id where positions begin behind it; 1 where the file names none.

    1 is the default of RobertaConfig and of its kin in transformers 5.24.
    """
    if not isinstance(family.padding_id, str):
        return family.padding_id
    found = section.values.get(family.padding_id, 1)
    return found if type(found) is int and found >= 0 else None


_BAICHUAN_ROTATES = 4096
_POSITION_WORDS: dict[str, PositionKind] = {"alibi": "alibi", "rotary": "rope", "rope": "rope"}


def read_disentangled(section: Section, hidden_size: int) -> list[tuple[str, int]]:
    """DeBERTa's sizes: rows of relative positions, whether they have a norm, keys of their own and
    a convolution beside the first layer (each hidden_size or, when absent, 0)."""
    relative = section.boolean("relative_attention", False, why="default: false")
    furthest = section.optional_integer("max_relative_positions", minimum=-1) or -1
    buckets = section.optional_integer("position_buckets", minimum=-1, maximum=1 << 24) or -1
    rows = furthest if furthest > 0 else section.integer("max_position_embeddings")
    rows = buckets if buckets > 0 else rows
    normed = "layer_norm" in section.text("norm_rel_ebd", "none", why="default: none")
    shared = section.boolean("share_att_key", False, why="default: false")
    kinds = section.find("pos_att_type")
    words = kinds if isinstance(kinds, str | list | tuple) else ""
    kernel = section.optional_integer("conv_kernel_size", minimum=0, maximum=1 << 10) or 0
    section.ignore("pooler_hidden_act", "pooler_hidden_size", "legacy", "conv_act")
    own = relative and not shared
    return [
        ("relative_rows", 2 * rows if relative else 0),
        ("relative_norm", hidden_size if relative and normed else 0),
        ("relative_keys", hidden_size if own and "c2p" in words else 0),
        ("relative_queries", hidden_size if own and "p2c" in words else 0),
        ("conv_kernel", kernel),
        ("conv_width", hidden_size if kernel else 0),
    ]


def read_positions(section: Section, family: Family, max_positions: int) -> Positions:
    """How the stack knows positions; a learned table has max_positions + the family's offset.

    Raises MalformedConfig for a learned table of which nothing says how many rows it has.
    """
    positions = _positions(section, family, max_positions)
    if positions.kind == "learned" and max_positions <= 0:
        raise section.reading.error(
            "missing",
            field=section.field("max_position_embeddings"),
            expected="the rows of the table of positions",
        )
    return positions


def _positions(section: Section, family: Family, max_positions: int) -> Positions:
    if family.positions != "rope" or family.nope == "all":
        section.ignore("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    if family.kind == "encoder" and family.positions == "learned":
        word = section.optional_text("position_embedding_type")
        if word in _POSITION_WORDS:  # Jina, and others that bring their own code
            section.ignore("rotary_emb_base")
            return Positions(_POSITION_WORDS[word])
    if family.positions == "disentangled":  # DeBERTa: a table only beside the relative ones
        if section.boolean("position_biased_input", True, why="default: true"):
            return Positions("learned", max_positions)
        return Positions("relative")
    if uses_alibi(section, family):
        section.ignore("rope_theta", "rope_scaling", "rope_parameters")
        return Positions("alibi")
    if family.name == "mpt" and not section.boolean("alibi", True, why="default: true"):
        return Positions("learned", max_positions)
    if family.positions == "learned":
        rows = max_positions + family.position_offset
        return Positions("learned", rows, _padding_id(section, family))
    return Positions(family.positions)
