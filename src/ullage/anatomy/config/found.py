"""Where the language model lies inside a configuration, and of which family it is: `find_text`.

Walks down nested sections; what they say is read by the other modules of this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ullage.anatomy.config.defaults import ClassDefaults, class_defaults
from ullage.anatomy.config.keys import Reading, Section, show
from ullage.anatomy.config.spellings import TEXT_KEYS
from ullage.anatomy.families.family import Family
from ullage.anatomy.families.table import family_of


@dataclass(slots=True)
class Found:
    """The language model's section inside a configuration, and the sections around it."""

    text: Section
    around: list[Section]
    model_type: str
    architecture: str
    family: Family


def architecture_of(config: Mapping[str, object], reading: Reading) -> str:
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


def find_text(config: Mapping[str, object], reading: Reading) -> Found:
    """Walk down to the language model, remembering the sections passed."""
    values, path = config, ""
    model_type = _model_type(values, reading, path)
    architecture = architecture_of(config, reading)
    around: list[Section] = []
    for _ in range(4):
        known = class_defaults(model_type)
        nested = dict(known.nested) if known else {}
        decoder_key = family_of(model_type, "").decoder_key
        keys = TEXT_KEYS if decoder_key is None else (*TEXT_KEYS, decoder_key)
        key = next((k for k in keys if isinstance(values.get(k), Mapping)), None)
        if key is None:
            key = next((k for k in keys if k in nested and k not in values), None)
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
        inner_architecture = architecture_of(values, reading)
        model_type = inner_type
        architecture = architecture or inner_architecture
        if inner_architecture and family_of(model_type, "").name == "generic":
            architecture = inner_architecture
    family = family_of(model_type, architecture)
    known = (
        class_defaults(model_type)
        or class_defaults(family.base or "")
        or class_defaults(family.name)
    )
    if known is not None and "text_config" in known.nested:
        known = class_defaults(known.nested["text_config"]) or known
    text = _section(values, reading, path, known)
    if family.extra:
        text.defaults = {**family.extra, **text.defaults}
    text.ignore("model_type", "architectures")
    return Found(text, around, model_type or "unknown", architecture, family)
