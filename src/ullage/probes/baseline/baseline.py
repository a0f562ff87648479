"""What a healthy model is like inside: its sketch, how far rounding alone goes, what is usual.

Holds the baseline and its file (safetensors: arrays, and one JSON document beside them). Taking one
is `learning`; judging by it `judging`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ullage.errors import BadInput, BadUsage
from ullage.findings.written import write_whole
from ullage.probes.baseline.relations import Cell, cells
from ullage.probes.baseline.sketch import AdapterSketch, Form, Sketch, Turning
from ullage.probes.baseline.sound import require_sound

SCHEMA = "ullage.probe-baseline/1"
EXPECTED = "a file that `ullage probe baseline` made"
MAX_BYTES = 4 << 30
PATHS = ("torch", "compiled")
"""Who runs a step; their rounding differs in bfloat16."""
_DOCUMENT = "ullage"

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Precision:
    """How the model was run. Readings of another precision are not judged by this baseline."""

    dtype: str
    quantization: str
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Usual:
    """Of each of `usual.figures`, over the means of the prompts: float64 [figures].

    `spread` is their standard deviation, or the least that one is taken to be. A figure that was
    never read has NaN in both.
    """

    mean: Doubles
    spread: Doubles


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """`noise` float64 [len(PATHS), cells]: residuals of a healthy model in units of their size."""

    model: str
    by: str
    settings: str
    precision: Precision
    max_model_len: int
    rounding: float
    rows: int
    prompts: int
    sketch: Sketch
    noise: Doubles
    usual: Usual

    @property
    def cells(self) -> tuple[Cell, ...]:
        return cells(self.sketch.form)


def save(baseline: Baseline, path: str) -> None:
    """Write the file, whole or not at all. Raises BadUsage where it cannot be written."""
    from safetensors.numpy import save as to_bytes

    sketch = baseline.sketch
    arrays: dict[str, NDArray[Any]] = {"noise": baseline.noise}
    arrays |= {f"usual.{name}": getattr(baseline.usual, name) for name in ("mean", "spread")}
    arrays |= {f"sketch.{name}": getattr(sketch, name) for name in _arrays_of(Sketch)}
    for number, turning in enumerate(sketch.turnings):
        arrays[f"turning.{number}"] = turning.frequencies
    for number, adapter in enumerate(sketch.adapters.values()):
        for name in _arrays_of(AdapterSketch):
            arrays[f"adapter.{number}.{name}"] = getattr(adapter, name)
    document = {
        "schema": SCHEMA,
        **{name: getattr(baseline, name) for name in _PLAIN},
        "precision": asdict(baseline.precision),
        "form": asdict(sketch.form),
        "head_bias": sketch.head_bias,
        "turnings": [
            {"factor": one.factor, "interleaved": one.interleaved} for one in sketch.turnings
        ],
        "adapters": list(sketch.adapters),
    }
    ordered = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole(path, to_bytes(ordered, {_DOCUMENT: json.dumps(document)}), field="--save")


_PLAIN = ("model", "by", "settings", "max_model_len", "rounding", "rows", "prompts")


def _arrays_of(kind: type) -> list[str]:
    """Fields that are arrays: all that are not told in the document."""
    told = ("form", "head_bias", "turnings", "adapters")
    return [field.name for field in fields(kind) if field.name not in told]


def read(path: str) -> Baseline:
    """The baseline in the file. Raises BadInput for one that is none, or does not fit itself."""
    from safetensors import SafetensorError, safe_open

    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise BadInput(f"more than {MAX_BYTES:,} bytes", file=path, expected=EXPECTED)
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        reason = error.strerror or "not a usable path"
        raise BadInput(f"cannot be read ({reason})", file=path, expected=EXPECTED) from error
    except (SafetensorError, TypeError, ValueError) as error:
        raise BadInput("not a safetensors file", file=path, expected=EXPECTED) from error
    try:
        document = json.loads(metadata.get(_DOCUMENT, "null"))
    except (ValueError, RecursionError) as error:
        raise BadInput("no JSON document in it", file=path, expected=EXPECTED) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BadInput(f"no schema {SCHEMA!r}", file=path, field="schema", expected=EXPECTED)
    try:
        found = _baseline(document, arrays)
        require_sound(found, len(PATHS))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadInput(f"does not fit itself ({error})", file=path, expected=EXPECTED) from error
    return found


def _baseline(document: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Baseline:
    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in document["form"].items()
    }
    form = Form(**told)
    turnings = tuple(
        Turning(arrays[f"turning.{number}"], float(one["factor"]), bool(one["interleaved"]))
        for number, one in enumerate(document["turnings"])
    )
    adapters = {
        str(name): AdapterSketch(
            **{part: arrays[f"adapter.{number}.{part}"] for part in _arrays_of(AdapterSketch)}
        )
        for number, name in enumerate(document["adapters"])
    }
    sketch = Sketch(
        form=form,
        head_bias=float(document["head_bias"]),
        turnings=turnings,
        adapters=adapters,
        **{name: arrays[f"sketch.{name}"] for name in _arrays_of(Sketch)},
    )
    return Baseline(
        precision=Precision(**document["precision"]),
        sketch=sketch,
        noise=arrays["noise"],
        usual=Usual(arrays["usual.mean"], arrays["usual.spread"]),
        **{name: document[name] for name in _PLAIN},
    )


def precision_of(options: Any) -> Precision:
    """Of an engine's options."""
    return Precision(
        "float32" if options.dtype == "auto" else options.dtype,
        options.quantization,
        options.kv_cache_dtype,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a spec what `require_for` compares, before there are weights."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    gated: bool


def require_for(baseline: Baseline, form: Form | Sizes, precision: Precision, file: str) -> None:
    """Raise BadUsage unless a model of that form, so run, can be judged by the baseline.

    Weights, angles and scales may differ: whether they do is what is judged.
    """
    for name in (field.name for field in fields(Sizes)):
        own, other = getattr(baseline.sketch.form, name), getattr(form, name)
        if own != other:
            raise BadUsage(f"{name} {own}", file=file, expected=f"the model's {other}")
    if baseline.precision != precision:
        raise BadUsage(
            f"taken in {_told(baseline.precision)}",
            file=file,
            expected=f"one of the precision that is run, {_told(precision)}",
        )


def _told(precision: Precision) -> str:
    return (
        f"--dtype {precision.dtype} --quantization {precision.quantization} "
        f"--kv-cache-dtype {precision.kv_cache_dtype}"
    )
