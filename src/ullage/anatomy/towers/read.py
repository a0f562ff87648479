"""Vision and audio towers in front of the text model: which ones, and how many parameters.

A tower keeps no cache between tokens, so only counts matter. Formulas are `sizes.py`; a tower
of an unknown type gets a range, and is named as Unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ullage.anatomy.config.defaults import class_defaults
from ullage.anatomy.config.keys import Section
from ullage.anatomy.config.spellings import TEXT_KEYS
from ullage.anatomy.spec import Tower
from ullage.anatomy.towers.codecs import CODECS
from ullage.anatomy.towers.encoders import (
    APART,
    OMNI_WHOLE,
    REMOTE_ENCODERS,
    REMOTE_PROJECTORS,
    phi4_towers,
)
from ullage.anatomy.towers.older import OLDER_ENCODERS, OLDER_PROJECTORS, OLDER_VITS
from ullage.anatomy.towers.readers import READER_ENCODERS, READER_PROJECTORS, READER_WHOLE
from ullage.anatomy.towers.recent import RECENT_ENCODERS, RECENT_PROJECTORS, RECENT_WHOLE
from ullage.anatomy.towers.sizes import (
    ENCODERS,
    MAX_WIDTH,
    PROJECTORS,
    VIT_NAMES,
    VITS,
    WHOLE,
    TowerSize,
    vit_size,
)
from ullage.errors import UnsupportedModel

_WHOLE = {**WHOLE, **OMNI_WHOLE, **RECENT_WHOLE, **READER_WHOLE, **CODECS}
_ENCODERS = {
    **ENCODERS,
    **REMOTE_ENCODERS,
    **RECENT_ENCODERS,
    **READER_ENCODERS,
    **OLDER_ENCODERS,
}
_PROJECTORS = {
    **PROJECTORS,
    **REMOTE_PROJECTORS,
    **RECENT_PROJECTORS,
    **READER_PROJECTORS,
    **OLDER_PROJECTORS,
}
_VITS = {**VITS, **OLDER_VITS}

_DEPTHS = (
    "num_hidden_layers",
    "depth",
    "layers",
    "encoder_layers",
    "num_layers",
    "num_blocks",
    "resampler_depth",
)
_NOT_TOWERS = frozenset(
    (
        *TEXT_KEYS,
        "quantization_config",
        "compression_config",
        "generation_config",
        "sparse_attention_config",
        "linear_attn_config",
        "attn_config",
        "ffn_config",
        "per_layer_config",
        "dual_chunk_attention_config",
        *APART,
    )
)
_HEARD = (
    "audio",
    "speech",
    "acoustic",
    "sound",
    "voice",
    "codec",
    "semantic",
    "diffusion",
    "parakeet",
)


def read_towers(
    around: list[Section], text: Section, text_hidden: int, apart: tuple[str, ...] = ()
) -> tuple[Tower, ...]:
    """Every tower that the configuration names, or that its class has by default.

    `apart` lists the family's nested configurations of models that this one does not hold.

    Raises:
        UnsupportedModel: a tower is named, but nothing about its size can be read.
    """
    towers = _phi4(text, text_hidden)
    for section in around or [text]:
        model_type = section.values.get("model_type")
        root_type = model_type if isinstance(model_type, str) else ""
        known = class_defaults(root_type)
        nested: Mapping[str, str] = known.nested if known else {}
        keys = [k for k, v in section.values.items() if _may_be_tower(k, v)]
        if section is not text:
            keys += [k for k in nested if k not in section.values]
        for key in APART:
            if section.values.get(key) is not None:
                section.ignore(key)
                section.reading.source(section.field(key), "left out", "a model of its own")
        for key in keys:
            if key in _NOT_TOWERS or key in apart:
                continue
            value = section.values.get(key, {})
            if not isinstance(value, Mapping):
                raise section.error(key, value, "an object")
            section.ignore(key)
            towers.append(_tower(section, key, value, root_type, nested.get(key, ""), text_hidden))
    return tuple(towers)


def _phi4(text: Section, text_hidden: int) -> list[Tower]:
    """Phi-4-multimodal, whose towers are fixed by its code."""
    embeddings = text.section("embd_layer")
    if embeddings is None:
        return []
    for key in ("vision_lora", "speech_lora"):
        if text.has(key):
            text.ignore(key)
            text.reading.source(text.field(key), "left out", "an adapter, loaded apart")
    return [
        Tower(
            "audio" if modality == "audio" else "vision",
            "phi4mm",
            size.num_layers,
            size.hidden_size,
            size.num_heads,
            size.intermediate,
            size.parameters,
        )
        for modality, size in phi4_towers(embeddings, text_hidden)
    ]


_TOWER_KEYS = ("vision_config", "audio_config")
_TOWER_SIGNS = frozenset(("model_type", "hidden_size", "d_model", "embed_dim", "width", *_DEPTHS))


def _may_be_tower(key: str, value: object) -> bool:
    """An object named like a part; any other than the usual ones must look like one too."""
    if value is None or key.startswith("_") or not key.endswith("_config"):
        return False
    if key in _TOWER_KEYS:
        return True
    if isinstance(value, Mapping) and value.get("model_type") == "mlp_projector":
        return False  # DeepSeek-VL2's, which its tower's formula counts
    return isinstance(value, Mapping) and not _TOWER_SIGNS.isdisjoint(value)


def _tower(
    root: Section,
    key: str,
    values: Mapping[str, object],
    root_type: str,
    default_type: str,
    text_hidden: int,
) -> Tower:
    stated = values.get("model_type")
    named = stated if isinstance(stated, str) and stated else default_type
    heard = any(word in key or word in named for word in _HEARD)
    modality: Literal["vision", "audio"] = "audio" if heard else "vision"
    candidates = (
        f"{root_type} {named}",
        named,
        VIT_NAMES.get(named, ""),
        default_type,
        f"{named}_{modality}",
    )
    tower_type = next((c for c in candidates if c in _WHOLE or c in _VITS or c in _ENCODERS), named)
    known = class_defaults(tower_type)
    section = Section(
        values,
        root.reading,
        f"{root.path}{key}.",
        known.defaults if known else None,
        known.label if known else "",
    )
    size, parameters = _understood(root, section, tower_type, root_type, text_hidden)
    if size is None:
        size = _visible(section)
    if parameters is None:
        parameters = _bracket(root, key, tower_type, size, text_hidden)
    return Tower(
        modality=modality,
        model_type=tower_type or "unknown",
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        num_heads=size.num_heads,
        intermediate=size.intermediate,
        parameters=parameters,
    )


def _understood(
    root: Section, section: Section, tower_type: str, root_type: str, text_hidden: int
) -> tuple[TowerSize | None, int | None]:
    """The sizes of a tower of a known type, and its parameters where its projector is known too."""
    if tower_type in _WHOLE:
        whole = _WHOLE[tower_type](section, text_hidden)
        return whole, None if whole is None else whole.parameters
    if tower_type in _VITS:
        size = vit_size(section, _VITS[tower_type])
    elif tower_type in _ENCODERS:
        size = _ENCODERS[tower_type](section, text_hidden)
    else:
        return None, None
    projector = _PROJECTORS.get(root_type)
    if projector is None:
        return size, None
    root.ignore("projector_hidden_act")
    return size, size.parameters + projector(root, size.hidden_size, text_hidden)


def _bracket(root: Section, key: str, tower_type: str, size: TowerSize, text_hidden: int) -> int:
    """Parameters of a tower that is not understood: from its plain layers to half as much again
    and a wide projector."""
    if not size.num_layers or not size.hidden_size:
        raise UnsupportedModel(
            f"a tower of type {tower_type or 'unknown'} whose size is not said",
            file=root.reading.file,
            field=root.field(key),
            expected="a tower with layers and a width",
        )
    hidden = size.hidden_size
    width = size.intermediate or 4 * hidden
    plain = size.num_layers * (4 * hidden * hidden + 2 * hidden * width)
    low = max(plain, size.parameters)
    high = max(plain * 3 // 2, size.parameters) + 32 * hidden * text_hidden + (1 << 25)
    return root.reading.decide(
        root.field(key),
        f"a tower of type {tower_type or 'unknown'}",
        likely=low + 4 * hidden * text_hidden,
        low=low,
        high=high,
        widens=("weights",),
    )


def _visible(section: Section) -> TowerSize:
    """What can be read of a tower that is not understood; 0 stands for what cannot."""

    def integer(*names: str) -> int:
        for name in names:
            value = section.values.get(name, section.defaults.get(name))
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_WIDTH:
                return value
        return 0

    return TowerSize(
        integer(*_DEPTHS),
        integer("hidden_size", "embed_dim", "width", "d_model", "hidden_dim", "dim"),
        integer("num_attention_heads", "num_heads", "heads", "encoder_attention_heads"),
        integer("intermediate_size", "mlp_dim", "encoder_ffn_dim"),
        0,
    )
