"""What a fingerprint of a model holds: marks of stored tensors, of values, of settings, of answers.

Holds the values and their JSON document, both ways; no torch and no numpy. Taking one is
`fingerprints`, comparing two is `sameness`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ullage.anatomy.open import begins_with, read_json_object
from ullage.errors import BadUsage
from ullage.findings.written import write_whole

FORMAT = "ullage-fingerprint-1"
MAX_BYTES = 256 << 20
NUM_BUCKETS = 32
"""How many sums a sketch has."""


@dataclass(frozen=True, slots=True)
class StoredMark:
    """One tensor as it lies in the files; `sum64` (hexadecimal) is the checksum of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sum64: str


@dataclass(frozen=True, slots=True)
class ValueMark:
    """One weight as the embedded engine holds it in float32, whatever file it came from.

    `kind` is q, k, v, o, mlp, norm or embedding. `norm` is ‖w‖. `sketch` are sums over the elements
    with random signs, in buckets: two sketches are as far apart as the two weights, give or take a
    quarter (see `values`).
    """

    name: str
    layer: int | None
    kind: str
    shape: tuple[int, ...]
    norm: float
    sketch: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AnswerMark:
    """A fixed prompt: its tokens as ids (None: a server shows texts), the log-probability of each
    but the first, given those before it, and how many tokens there are."""

    prompt: str
    num_tokens: int
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Noise:
    """How far a precision moves this model's answers: |Δ logprob| against float32, measured."""

    precision: str
    mean_nats: float
    max_nats: float


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is known of one model. A part that is missing has its reason in `absent`.

    `source` says where it is from; `by` what computed the answers, `precision` in which (float32,
    bfloat16, int8; None: not told). `settings` are what a configuration decides beside the weights,
    as flat texts.
    """

    source: str
    by: str
    precision: str | None
    stored: tuple[StoredMark, ...]
    values: tuple[ValueMark, ...]
    answers: tuple[AnswerMark, ...]
    noise: tuple[Noise, ...]
    settings: tuple[tuple[str, str], ...]
    rope: str | None
    tokenizer: str | None
    absent: tuple[tuple[str, str], ...]


def to_document(fingerprint: Fingerprint) -> dict[str, Any]:
    """The JSON document, which `from_document` reads again."""
    return {
        "format": FORMAT,
        **asdict(fingerprint),
        "settings": dict(fingerprint.settings),
        "absent": dict(fingerprint.absent),
    }


def write(fingerprint: Fingerprint, file: Path) -> None:
    """Saves it whole or not at all. Raises BadUsage when it cannot be written."""
    write_whole(file, json.dumps(to_document(fingerprint), allow_nan=False) + "\n", field="--save")


def is_saved(path: Path) -> bool:
    """Whether a file begins as a saved fingerprint does."""
    return begins_with(path, FORMAT)


def read(path: Path) -> Fingerprint:
    """A saved one. Raises BadInput for what is not a fingerprint of this form."""
    document = read_json_object(path, MAX_BYTES)
    try:
        return from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadUsage(
            what[:120], file=path, expected="a file of ullage probe fingerprint"
        ) from None


def from_document(document: Mapping[str, Any]) -> Fingerprint:
    """Reads `to_document`'s form; raises KeyError, TypeError or ValueError for any other."""
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r}, not {FORMAT}")
    return Fingerprint(
        source=str(document["source"]),
        by=str(document["by"]),
        precision=_text(document["precision"]),
        stored=tuple(
            StoredMark(str(m["name"]), str(m["dtype"]), _shape(m["shape"]), str(m["sum64"]))
            for m in document["stored"]
        ),
        values=tuple(
            ValueMark(
                str(m["name"]), None if m["layer"] is None else int(m["layer"]), str(m["kind"]),
                _shape(m["shape"]), float(m["norm"]), _sketch(m["sketch"]),
            )
            for m in document["values"]
        ),
        answers=tuple(_answer(m) for m in document["answers"]),
        noise=tuple(
            Noise(str(m["precision"]), float(m["mean_nats"]), float(m["max_nats"]))
            for m in document["noise"]
        ),
        settings=tuple((str(k), str(v)) for k, v in document["settings"].items()),
        rope=_text(document["rope"]),
        tokenizer=_text(document["tokenizer"]),
        absent=tuple((str(k), str(v)) for k, v in document["absent"].items()),
    )  # fmt: skip


def _answer(held: Any) -> AnswerMark:
    ids = None if held["token_ids"] is None else _shape(held["token_ids"])
    made = AnswerMark(str(held["prompt"]), int(held["num_tokens"]), ids, _floats(held["logprobs"]))
    if len(made.logprobs) != made.num_tokens - 1 or (ids and len(ids) != made.num_tokens):
        raise ValueError(f"{len(made.logprobs)} logprobs of {made.num_tokens} tokens")
    return made


def _sketch(value: Any) -> tuple[float, ...]:
    made = _floats(value)
    if len(made) not in (0, NUM_BUCKETS):
        raise ValueError(f"a sketch of {len(made)} numbers")
    return made


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in value)


def _floats(value: Any) -> tuple[float, ...]:
    made = tuple(float(number) for number in value)
    if not all(map(math.isfinite, made)):
        raise ValueError("a number that is not finite")
    return made
