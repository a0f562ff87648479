"""The document of a reading of sizes, and the file to compare with later.

Holds JSON both ways. In the file each log-rms is a whole number of thousandths of a nat.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ullage.anatomy.open import begins_with, read_json_object
from ullage.errors import BadUsage
from ullage.findings.written import write_whole
from ullage.probes.drift.drift import (
    HIGHEST,
    LIMITS,
    LOWEST,
    PLACES,
    DriftReading,
    Largest,
    Spot,
    SpotReading,
    spots,
)

FORMAT = "ullage-drift-1"
MAX_BYTES = 1 << 30
_PER_NAT = 1000
_EXPECTED = "a file of ullage probe drift --save"
_PLAIN = ("model", "by", "dtype", "num_layers")


def to_document(reading: DriftReading) -> dict[str, Any]:
    """Without the channels' sizes by prompt, which only the file has."""
    return {
        "format": FORMAT,
        **{name: getattr(reading, name) for name in _PLAIN},
        "widths": dict(reading.widths),
        "heads": list(reading.heads),
        "tokens": list(reading.tokens),
        "prompts": list(reading.prompts),
        "spots": [asdict(one) for one in reading.spots],
    }


def write(reading: DriftReading, file: Path) -> None:
    """Saves it whole or not at all. Raises BadUsage when it cannot be written."""
    whole = np.round(reading.log_rms_PC * _PER_NAT).astype("<i2")
    document = to_document(reading)
    document["log_rms"] = base64.b64encode(whole.tobytes()).decode()
    write_whole(file, json.dumps(document, allow_nan=False) + "\n", field="--save")


def is_saved(path: Path) -> bool:
    """Whether a file begins as a saved reading does."""
    return begins_with(path, FORMAT)


def read(path: Path) -> DriftReading:
    """A saved one. Raises BadInput for what is no such file."""
    document = read_json_object(path, MAX_BYTES)
    try:
        return _reading(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadUsage(what[:120], file=path, expected=_EXPECTED) from None


def _reading(held: Mapping[str, Any]) -> DriftReading:
    if held["format"] != FORMAT:
        raise ValueError(f"format {held['format']!r}, not {FORMAT}")
    layers = int(held["num_layers"])
    widths = {place: int(held["widths"][place]) for place in PLACES}
    heads, kv_heads, size = (int(number) for number in held["heads"])
    tokens = tuple(int(number) for number in held["tokens"])
    prompts = tuple(str(mark) for mark in held["prompts"])
    if len(prompts) != len(tokens):
        raise ValueError(f"{len(prompts)} prompts of {len(tokens)}")
    if min(layers, *widths.values(), heads, kv_heads, size, len(tokens)) < 1:
        raise ValueError("a size of 0")
    if held["dtype"] not in LIMITS:
        raise ValueError(f"dtype {held['dtype']!r}")
    # Counted, not listed: a lie about the layers must not cost memory.
    width = layers * sum(widths.values()) + widths["x"] + widths["normed"]
    raw = base64.b64decode(held["log_rms"], validate=True)
    if len(raw) != 2 * width * len(tokens):
        raise ValueError(f"{len(raw)} bytes of log_rms for {len(tokens)} × {width} channels")
    table = np.frombuffer(raw, "<i2").reshape(len(tokens), width).astype(np.float32)
    table /= np.float32(_PER_NAT)
    if table.min() < LOWEST or table.max() > HIGHEST:
        raise ValueError(f"log_rms outside of {LOWEST:g} to {HIGHEST:g}")
    found = tuple(_spot(one) for one in held["spots"])
    if [one.spot for one in found] != list(spots(layers)):
        raise ValueError("spots that do not follow from num_layers")
    return DriftReading(
        str(held["model"]), str(held["by"]), held["dtype"], layers, widths,
        (heads, kv_heads, size), tokens, prompts, found, table,
    )  # fmt: skip


def _spot(held: Mapping[str, Any]) -> SpotReading:
    at, spot = held["largest"], held["spot"]
    made = SpotReading(
        spot=Spot(str(spot["place"]), int(spot["layer"])),
        rms=float(held["rms"]),
        mean=float(held["mean"]),
        largest=Largest(
            float(at["value"]), int(at["prompt"]), int(at["position"]), int(at["channel"])
        ),
        near={str(name): float(share) for name, share in held["near"].items()},
        dead=tuple(int(channel) for channel in held["dead"]),
        massive=tuple((int(channel), float(times)) for channel, times in held["massive"]),
        not_finite=int(held["not_finite"]),
    )
    if not all(map(math.isfinite, (made.rms, made.mean, made.largest.value))):
        raise ValueError("a number that is not finite")
    return made
