"""The flag by which a command replaces keys of the configuration, as a JSON object.

Holds the flag of each engine and its parsing: whole JSON, and vLLM's dotted keys. What an engine
makes of the keys is `overridden.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ullage.launch.launch import Launch
from ullage.launch.values import parse_integer

OVERRIDE_FLAGS = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the flag says: `values` by key, or `hidden`, the reason why that is not known."""

    flag: str
    values: Mapping[str, object]
    hidden: str = ""


def overrides_of(launch: Launch) -> Overrides | None:
    """The overrides that the command gives; None where it gives none.

    Dotted keys win over a whole object: vLLM puts them behind the command line as one more
    `--hf-overrides`, and argparse keeps the last (vllm 0.32: utils/argparse_utils.py).
    """
    flag = OVERRIDE_FLAGS[launch.engine]
    dotted = [given for given in launch.flags if given.name == f"{flag}."]
    whole = launch.given(flag)
    if whole is None and not dotted:
        return None
    opened = next((g.open for g in (*dotted, *((whole,) if whole else ())) if g.open), "")
    if opened:
        return Overrides(flag, {}, f"{opened} is not known")
    if dotted:
        made: dict[str, object] = {}
        for given in dotted:
            keys = given.spelling.split(".")[1:]
            if given.trouble or not given.values or not all(keys) or len(keys) > MAX_DEPTH:
                return Overrides(flag, {}, f"{given.spelling}: {given.trouble or 'no value'}")
            if keys[-1].endswith("+"):
                keys[-1] = keys[-1][:-1]
                _put(made, keys, [_value(part) for part in given.values[0].split(",")])
            else:
                _put(made, keys, _value(given.values[0]))
        return Overrides(flag, MappingProxyType(made))
    assert whole is not None
    return _whole(flag, whole.values, whole.trouble)


def _whole(flag: str, values: tuple[str, ...], trouble: str) -> Overrides:
    if trouble or not values:
        return Overrides(flag, {}, trouble or "no value")
    try:
        value = json.loads(values[0])
    except (ValueError, RecursionError):
        return Overrides(flag, {}, "it is no JSON")
    if not isinstance(value, dict) or _deeper(value, MAX_DEPTH):
        return Overrides(flag, {}, "it is no JSON object")
    return Overrides(flag, MappingProxyType(value))


def _deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(part, levels - 1) for part in inner)


def _put(made: dict[str, object], keys: list[str], value: object) -> None:
    """Set a nested key; lists that are given twice are joined, as vLLM joins them."""
    for key in keys[:-1]:
        inner = made.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = made[key] = {}
        made = inner
    known = made.get(keys[-1])
    if isinstance(known, list) and isinstance(value, list):
        value = [*known, *value]
    made[keys[-1]] = value


def _value(text: str) -> object:
    """JSON, else a number with a suffix (`128k`), else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return parse_integer(text)
    except (ValueError, OverflowError):
        return text
