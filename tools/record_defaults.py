"""Record what transformers' config classes assume when a key is absent.

Writes src/ullage/anatomy/config/defaults.jsonl: one line per model type, with the class, its
defaults that can matter to structure, and the model types of its nested configurations.
Run it with an interpreter that has transformers: python tools/record_defaults.py
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ullage.anatomy.config.spellings import IRRELEVANT, IRRELEVANT_ENDINGS

OUT = Path(__file__).parent.parent / "src/ullage/anatomy/config/defaults.jsonl"
SKIP = IRRELEVANT | {"dtype", "is_encoder_decoder", "add_cross_attention", "rope_parameters"}
# Granite's factors scale activations only, but the spec carries them.
SKIP_ENDINGS = tuple(e for e in IRRELEVANT_ENDINGS if "multiplier" not in e)


def plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(plain(v) for v in value)
    if isinstance(value, dict):
        return len(value) <= 16 and all(plain(v) for v in value.values())
    return value is None or isinstance(value, str | int | bool)


def rope_defaults(made: object) -> dict[str, object]:
    """What a class sets up for RoPE when the file says nothing, where that is not plain RoPE."""
    rope = getattr(made, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope or not plain(rope):
        return {}
    if any(isinstance(value, dict) for value in rope.values()):
        return {"rope_parameters": rope}
    if rope.get("rope_type", "default") != "default":
        return {"rope_parameters": rope}
    fraction = rope.get("partial_rotary_factor", 1.0)
    return {} if fraction == 1.0 else {"default_partial_rotary_factor": fraction}


def record(model_type: str) -> dict[str, object] | None:
    try:
        cls = CONFIG_MAPPING[model_type]
    except Exception as error:  # a class whose optional dependency is absent
        print(f"{model_type}: {error}", file=sys.stderr)
        return None
    defaults: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        value = field.default
        if value is dataclasses.MISSING:
            if field.default_factory is dataclasses.MISSING:
                continue
            value = field.default_factory()
        if field.name in SKIP or field.name.endswith(SKIP_ENDINGS):
            continue
        if plain(value):
            defaults[field.name] = value
    for name in ("default_theta", "default_partial_rotary_factor"):
        value = getattr(cls, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    try:
        made = cls()
    except Exception as error:
        print(f"{model_type}: not default-constructible: {error}", file=sys.stderr)
        made = None
    defaults.update(rope_defaults(made))
    nested: dict[str, str] = {}
    for name in cls.sub_configs:
        sub = getattr(made, name, None) if made is not None else None
        kind = getattr(sub, "model_type", None)
        if isinstance(kind, str) and kind:
            nested[name] = kind
        defaults.pop(name, None)
    row: dict[str, object] = {"model_type": model_type, "class": cls.__name__}
    if nested:
        row["nested"] = nested
    row["defaults"] = defaults
    return row


def main() -> None:
    warnings.simplefilter("ignore")
    rows = [row for name in sorted(CONFIG_MAPPING) if (row := record(name))]
    head = {"transformers": transformers.__version__}
    lines = [json.dumps(r, separators=(",", ":"), allow_nan=False) for r in [head, *rows]]
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
