"""Variants of the embedded engine as written on a command line: NAME=key:value,key:value.

Pure parsing. Values are read as JSON where they are JSON, else as text.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A name, and fields of EngineOptions that differ from its defaults."""

    name: str
    options: dict[str, Any]


def parse_variant(text: str) -> Variant:
    """`int8=quantization:int8,block_size:32`, or `float32=` for the defaults."""
    name, separator, fields = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=key:value,key:value")
    options = {}
    for field in filter(None, fields.split(",")):
        key, separator, value = field.partition(":")
        if not separator:
            raise argparse.ArgumentTypeError(f"{text}: {field} is not key:value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return Variant(name, options)
