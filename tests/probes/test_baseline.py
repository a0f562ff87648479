"""A baseline's file: what is read is what was saved, and what is none is one sentence."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.engine.adapters import write_adapter
from tests.probes.planting import PROMPTS
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.errors import BadInput, BadUsage
from ullage.probes.baseline.baseline import Baseline, precision_of, read, require_for, save
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.sketch import Sketch


@pytest.fixture(scope="module")
def baseline(
    family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Baseline:
    model = family_dir("llama")
    adapter = write_adapter(model, tmp_path_factory.mktemp("adapter"))
    return learn(model, PROMPTS, EngineOptions(), {"tuned": str(adapter)}, new_tokens=24)


@pytest.fixture(scope="module")
def saved(baseline: Baseline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "b"
    save(baseline, str(file))
    return file


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)
    if hasattr(a, "__dataclass_fields__"):
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_what_is_read_is_what_was_saved(baseline: Baseline, saved: Path) -> None:
    assert equal(read(str(saved)), baseline)


def document_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header, and its data."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def told(change: Callable[[dict[str, Any]], None], saved: Path) -> bytes:
    """The file, its own document changed."""
    header, data = document_of(saved)
    document = json.loads(header["__metadata__"]["ullage"])
    change(document)
    header["__metadata__"]["ullage"] = json.dumps(document)
    return with_header(header, data)


def _wrong(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(more)


def _form(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["form"].update(more)


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"hello, this is no baseline",
    "pickle": lambda _: pickle.dumps({"noise": [1, 2, 3]}),
    "truncated": lambda saved: saved.read_bytes()[:-100],
    "half a header": lambda saved: saved.read_bytes()[:500],
    "a header of exabytes": lambda saved: struct.pack("<Q", 2**62) + saved.read_bytes()[8:],
    "no document": lambda saved: with_header(
        {k: v for k, v in document_of(saved)[0].items() if k != "__metadata__"},
        document_of(saved)[1],
    ),
    "another schema": lambda saved: told(_wrong(schema="other/1"), saved),
    "a document that is a list": lambda saved: with_header(
        {**document_of(saved)[0], "__metadata__": {"ullage": "[]"}}, document_of(saved)[1]
    ),
    "no JSON": lambda saved: with_header(
        {**document_of(saved)[0], "__metadata__": {"ullage": "{" * 9000}}, document_of(saved)[1]
    ),
    "a missing array": lambda saved: with_header(
        {("renamed" if k == "noise" else k): v for k, v in document_of(saved)[0].items()},
        document_of(saved)[1],
    ),
    "more layers than arrays": lambda saved: told(_form(layers=9), saved),
    "a huge form": lambda saved: told(_form(layers=2**40, heads=2**40), saved),
    "a negative form": lambda saved: told(_form(layers=-1), saved),
    "a form of text": lambda saved: told(_form(layers="three"), saved),
    "a fraction of a layer": lambda saved: told(_form(layers=3.0), saved),
    "an unknown activation": lambda saved: told(_form(activation="os.system"), saved),
    "an unknown field": lambda saved: told(_form(extra=1), saved),
    "scales of text": lambda saved: told(_form(scales=["a", "b", "c"]), saved),
    "too few scales": lambda saved: told(_form(scales=[1.0]), saved),
    "a turning that is not there": lambda saved: told(_form(rope_of=[7, 7, 7]), saved),
    "turnings of text": lambda saved: told(_wrong(turnings="x"), saved),
    "an adapter that is not there": lambda saved: told(_wrong(adapters=["a", "b"]), saved),
    "a precision of numbers": lambda saved: told(_wrong(precision=3), saved),
    "a rounding of text": lambda saved: told(_wrong(rounding="x"), saved),
    "a rounding that is NaN": lambda saved: told(_wrong(rounding=float("nan")), saved),
    "a length of text": lambda saved: told(_wrong(max_model_len="x"), saved),
    "a negative noise": lambda saved: _array(saved, "noise", -1.0),
    "an infinite noise": lambda saved: _array(saved, "noise", np.inf),
    "NaN in a sketch": lambda saved: _array(saved, "sketch.o_LI", np.nan),
    "Inf in an embedding": lambda saved: _array(saved, "sketch.embedding_V", np.inf),
    "NaN in a turning": lambda saved: _array(saved, "turning.0", np.nan),
}


def _array(saved: Path, name: str, value: float) -> bytes:
    """One number of an array changed."""
    header, data = document_of(saved)
    first, last = header[name]["data_offsets"]
    kind = {"F32": np.float32, "F64": np.float64}[header[name]["dtype"]]
    array = np.frombuffer(data[first:last], kind).copy()
    array[0] = value
    return with_header(header, data[:first] + array.tobytes() + data[last:])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_none_is_one_sentence(name: str, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "hostile"
    file.write_bytes(HOSTILE[name](saved))
    with pytest.raises(BadInput, match="hostile") as refused:
        read(str(file))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.floats(0, 1), value=st.integers(0, 255))
def test_any_byte_changed_is_read_or_refused(
    at: float, value: int, saved: Path, tmp_path: Path
) -> None:
    """Never another exception."""
    data = bytearray(saved.read_bytes())
    header = 8 + struct.unpack("<Q", data[:8])[0]
    data[int(at * (header - 1))] = value
    file = tmp_path / "b"
    file.write_bytes(bytes(data))
    try:
        read(str(file))
    except BadInput as refused:
        assert "\n" not in str(refused)


def test_arrays_of_another_type_are_refused(baseline: Baseline, tmp_path: Path) -> None:
    sketch = replace(baseline.sketch, o_LI=baseline.sketch.o_LI.astype(np.float16))
    save(replace(baseline, sketch=sketch), str(tmp_path / "b"))
    with pytest.raises(BadInput, match="float16"):
        read(str(tmp_path / "b"))


@pytest.mark.parametrize(
    "name", [f.name for f in fields(Sketch) if f.name.endswith(("_LI", "_LE", "_L", "_E", "_LH"))]
)
def test_arrays_of_another_shape_are_refused(name: str, baseline: Baseline, tmp_path: Path) -> None:
    array = getattr(baseline.sketch, name)
    sketch = replace(baseline.sketch, **{name: np.concatenate([array, array])})
    save(replace(baseline, sketch=sketch), str(tmp_path / "b"))
    with pytest.raises(BadInput, match="does not fit itself"):
        read(str(tmp_path / "b"))


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    for place in (str(tmp_path), str(tmp_path / "nothing"), "a\0b"):
        with pytest.raises(BadInput) as refused:
            read(place)
        assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_written_leaves_what_was_there(
    baseline: Baseline, tmp_path: Path
) -> None:
    with pytest.raises(BadUsage, match="--save"):
        save(baseline, str(tmp_path / "no" / "such" / "folder"))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"layers": 4}, "layers"), ({"heads": 8}, "heads"), ({"vocab": 5}, "vocab"),
        ({"gated": False}, "gated"),
    ],
)  # fmt: skip
def test_another_shape_is_refused(
    changed: dict[str, Any], sentence: str, baseline: Baseline
) -> None:
    form = replace(baseline.sketch.form, **changed)
    with pytest.raises(BadUsage, match=sentence):
        require_for(baseline, form, baseline.precision, "b")


def test_another_precision_is_refused_and_other_scales_are_judged(baseline: Baseline) -> None:
    form = baseline.sketch.form
    with pytest.raises(BadUsage, match="int8"):
        require_for(baseline, form, precision_of(EngineOptions(quantization="int8")), "b")
    other = replace(form, scales=(1.0, 1.0, 1.0), norm_eps=1.0, windows=(5, 5, 5))
    require_for(baseline, other, baseline.precision, "b")


def test_too_few_tokens_are_no_baseline(family_dir: Callable[[str], Path]) -> None:
    with pytest.raises(BadUsage, match="prompts"):
        learn(family_dir("llama"), ["one"], EngineOptions(enforce_eager=True), new_tokens=4)


def test_an_empty_prompt_is_refused(family_dir: Callable[[str], Path]) -> None:
    with pytest.raises(BadUsage, match="empty"):
        learn(family_dir("llama"), [""], EngineOptions(enforce_eager=True), new_tokens=80)


@pytest.mark.parametrize("eager", [False, True])
def test_a_token_without_an_embedding_is_no_share_of_anything(
    eager: bool, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of padding all numbers are 0: nothing is told to stderr, and no cell's noise is without end,
    which would never fire."""
    model, options = tmp_path / "model", EngineOptions(enforce_eager=eager)
    shutil.copytree(family_dir("llama"), model)
    weights = load_file(model / "model.safetensors")
    ends = [text.encode()[-1] for text in PROMPTS]
    before = learn(family_dir("llama"), PROMPTS, options, new_tokens=24)
    engine = Engine.load(model, options)
    assert engine.tokenizer is not None
    weights["model.embed_tokens.weight"][[engine.tokenizer.encode(chr(n))[-1] for n in ends]] = 0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    found = learn(model, PROMPTS, options, new_tokens=24)
    assert not np.isinf(found.noise).any()
    assert np.array_equal(np.isnan(found.noise), np.isnan(before.noise))
