"""What a machine computed, operator by operator, in a file to hold against another machine's.

Holds the values and their JSON document, both ways; no torch. Taking one is `trace`,
comparing two is `bundle_compare`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ullage.anatomy.open import read_json_object
from ullage.errors import BadUsage
from ullage.findings.written import write_whole

FORMAT = "ullage-numerics-1"
MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorMark:
    """One tensor: `digest` of its bytes, how many are NaN and Inf, and of the finite ones ‖x‖, sum,
    largest magnitude, a sketch (`marks`) and the first values."""

    digest: str
    dtype: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    norm: float
    total: float
    largest: float
    sketch: tuple[float, ...]
    first: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OperatorMark:
    """One operator that ran: in which module, on and to which tensors (by `digest`)."""

    name: str
    path: str
    kind: str
    layer: int | None
    backward: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """One run. `parameters` are checksums as they lie in memory, in the dtype that ran."""

    source: str
    dtype: str
    token_ids: tuple[int, ...]
    backward: bool
    environment: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    operators: tuple[OperatorMark, ...]
    tensors: Mapping[str, TensorMark]


def write(bundle: Bundle, file: Path) -> None:
    """Saves it whole or not at all. Raises BadUsage when it cannot be written."""
    document = {
        "format": FORMAT,
        **{name: getattr(bundle, name) for name in ("source", "dtype", "token_ids", "backward")},
        "environment": dict(bundle.environment),
        "parameters": dict(bundle.parameters),
        "operators": [asdict(one) for one in bundle.operators],
        "tensors": [asdict(one) for one in bundle.tensors.values()],
    }
    write_whole(file, json.dumps(document, allow_nan=False) + "\n", field="--save")


def read(path: Path) -> Bundle:
    """A saved one. Raises BadInput for what is not a bundle of this form."""
    document = read_json_object(path, MAX_BYTES)
    try:
        return _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadUsage(
            what[:120], file=path, expected="a file of ullage probe numerics --save"
        ) from None


def _from_document(document: Mapping[str, Any]) -> Bundle:
    if document["format"] != FORMAT:
        raise ValueError(f"format {str(document['format'])[:40]!r}, not {FORMAT}")
    tensors = {one.digest: one for one in map(_tensor, document["tensors"])}
    bundle = Bundle(
        source=str(document["source"]),
        dtype=str(document["dtype"]),
        token_ids=tuple(int(one) for one in document["token_ids"]),
        backward=bool(document["backward"]),
        environment=tuple((str(k), str(v)) for k, v in document["environment"].items()),
        parameters=tuple((str(k), str(v)) for k, v in document["parameters"].items()),
        operators=tuple(map(_operator, document["operators"])),
        tensors=tensors,
    )
    named = {mark for one in bundle.operators for mark in (*one.inputs, *one.outputs)}
    if lacking := sorted(named - tensors.keys()):
        raise ValueError(f"an operator names tensor {lacking[0][:40]!r}, which is not there")
    return bundle


def _tensor(held: Mapping[str, Any]) -> TensorMark:
    return TensorMark(
        str(held["digest"]),
        str(held["dtype"]),
        tuple(int(one) for one in held["shape"]),
        int(held["num_nan"]),
        int(held["num_inf"]),
        _finite(held["norm"]),
        _finite(held["total"]),
        _finite(held["largest"]),
        tuple(map(_finite, held["sketch"])),
        tuple(map(_finite, held["first"])),
    )


def _operator(held: Mapping[str, Any]) -> OperatorMark:
    return OperatorMark(
        str(held["name"]),
        str(held["path"]),
        str(held["kind"]),
        None if held["layer"] is None else int(held["layer"]),
        bool(held["backward"]),
        tuple(str(one) for one in held["inputs"]),
        tuple(str(one) for one in held["outputs"]),
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number
