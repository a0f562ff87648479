"""What transformers' config classes assume when a key is absent, one line of data per model type.

Looks one model type up without parsing the others. The data is recorded by
`tools/record_defaults.py`; families that transformers does not know
are rows of `families/table.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_FILE = Path(__file__).with_name("defaults.jsonl")


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """`label` names the class and the library's version; `nested` the sub-configs' model types."""

    label: str
    defaults: Mapping[str, object]
    nested: Mapping[str, str]


@lru_cache(maxsize=1)
def _lines() -> tuple[bytes, str]:
    data = _FILE.read_bytes()
    version = json.loads(data[: data.index(b"\n")])["transformers"]
    return data, str(version)


@lru_cache(maxsize=64)
def class_defaults(model_type: str) -> ClassDefaults | None:
    """The defaults of `model_type`'s config class, or None when transformers has no such class."""
    data, version = _lines()
    needle = b'\n{"model_type":' + json.dumps(model_type).encode() + b","
    start = data.find(needle)
    if start < 0:
        return None
    row = json.loads(data[start + 1 : data.index(b"\n", start + 1)])
    return ClassDefaults(
        f"{row['class']} (transformers {version})", row["defaults"], row.get("nested", {})
    )
