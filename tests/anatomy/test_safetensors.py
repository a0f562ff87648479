"""A safetensors header is believed only as far as the file bears it out."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
from checkpoint_files import header_of, safetensors_bytes, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.anatomy.files.safetensors import DTYPE_BITS, MAX_HEADER_BYTES, read_safetensors
from ullage.errors import MalformedCheckpoint

GOOD = {"a": ("F32", (2, 3)), "b": ("BF16", (4,)), "empty": ("F16", (0, 7)), "one": ("I64", ())}
quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def entry(dtype: str, shape: list[object], begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_in_the_order_of_their_data_with_absolute_offsets(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "m.safetensors", GOOD)
    data_start = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    tensors, metadata = read_safetensors(file)
    assert [(t.name, t.dtype, t.shape) for t in tensors] == [
        ("a", "F32", (2, 3)),
        ("b", "BF16", (4,)),
        ("empty", "F16", (0, 7)),
        ("one", "I64", ()),
    ]
    assert [(t.start - data_start, t.end - data_start) for t in tensors] == [
        (0, 24),
        (24, 32),
        (32, 32),
        (32, 40),
    ]
    assert metadata == ()
    assert {t.file for t in tensors} == {str(file)}


def test_metadata_may_hold_braces_quotes_and_any_unicode(tmp_path: Path) -> None:
    pairs = {"json": '{"a": [1, "}"]}', "é": "\u2028\N{SNOWMAN}", "": "\\"}
    file = tmp_path / "m.safetensors"
    file.write_bytes(safetensors_bytes({"__metadata__": pairs, **header_of(GOOD)[0]}, 40))
    assert dict(read_safetensors(file)[1]) == pairs


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_has_the_size_that_the_reference_gives_it(tmp_path: Path, dtype: str) -> None:
    num_bytes = DTYPE_BITS[dtype]  # eight elements
    raw = safetensors_bytes({"t": entry(dtype, [8], 0, num_bytes)}, num_bytes)
    (tmp_path / "m.safetensors").write_bytes(raw)
    (tensor,), _ = read_safetensors(tmp_path / "m.safetensors")
    assert tensor.num_bytes == num_bytes
    ((_, reference),) = safetensors.deserialize(raw)
    assert len(reference["data"]) == num_bytes


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda n: n != "__metadata__")
models = st.dictionaries(names, st.tuples(st.sampled_from(["F32", "BF16", "U8", "I64"]), shapes))


@quick
@given(
    tensors=models,
    indent=st.sampled_from([None, 1]),
    separators=st.booleans(),
    pad=st.integers(0, 9),
)
def test_any_valid_file_reads_as_the_reference_reads_it(
    tmp_path: Path,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    indent: int | None,
    separators: bool,
    pad: int,
) -> None:
    header, data_bytes = header_of(tensors)
    text = json.dumps(
        header, indent=indent, separators=(",", ":") if separators else None, ensure_ascii=pad < 5
    )
    raw = safetensors_bytes(text.encode() + b" " * pad, data_bytes)
    file = tmp_path / "m.safetensors"
    file.write_bytes(raw)
    ours = {t.name: (t.dtype, t.shape, t.num_bytes) for t in read_safetensors(file)[0]}
    reference = {
        name: (view["dtype"], tuple(view["shape"]), len(view["data"]))
        for name, view in safetensors.deserialize(raw)
    }
    assert ours == reference


def _lie(name: str, value: object) -> dict[str, object]:
    header, _ = header_of(GOOD)
    header[name] = value
    return header


LIES = {
    "empty file": (b"", "at least 8 bytes"),
    "seven bytes": (b"1234567", "at least 8 bytes"),
    "truncated header": (safetensors_bytes(*header_of(GOOD))[:60], "that is complete"),
    "header of 2^63": (safetensors_bytes({}, 0, length=2**63), f"at most {MAX_HEADER_BYTES}"),
    "header beyond the file": (safetensors_bytes({}, 0, length=99), "that is complete"),
    "bad UTF-8": (safetensors_bytes(b'{"\xff":1}', 0), "not UTF-8"),
    "not JSON": (safetensors_bytes(b"{'a': 1}", 0), "not valid"),
    "a JSON list": (safetensors_bytes(b"[]", 0), "not valid"),
    "leading space": (safetensors_bytes(b" {}", 0), "not valid"),
    "text after it": (safetensors_bytes(b"{} {}", 0), "after the closing brace"),
    "unclosed": (safetensors_bytes(b'{"a":', 0), "not valid"),
    "lone surrogate": (safetensors_bytes(b'{"\\ud800":1}', 0), "surrogate"),
    "tensor twice": (
        safetensors_bytes(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            2,
        ),
        'tensor "a" is given twice',
    ),
    "metadata twice": (
        safetensors_bytes(b'{"__metadata__":{},"__metadata__":{}}', 0),
        "given twice",
    ),
    "metadata key twice": (
        safetensors_bytes(b'{"__metadata__":{"k":"1","k":"2"}}', 0),
        "given twice",
    ),
    "metadata not strings": (safetensors_bytes(b'{"__metadata__":{"k":1}}', 0), "not valid"),
    "field twice": (
        safetensors_bytes(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        'key "dtype" is given twice',
    ),
    "unknown dtype": (safetensors_bytes({"a": entry("F7", [1], 0, 1)}, 1), "'F7'; expected one of"),
    "dtype a list": (safetensors_bytes({"a": entry(["U8"], [1], 0, 1)}, 1), "dtype"),  # type: ignore[arg-type]
    "no dtype": (safetensors_bytes({"a": {"shape": [1], "data_offsets": [0, 1]}}, 1), "nothing"),
    "entry not an object": (safetensors_bytes({"a": 3}, 0), "an object is missing"),
    "negative size": (safetensors_bytes({"a": entry("U8", [-1], 0, 1)}, 1), "non-negative"),
    "boolean size": (safetensors_bytes({"a": entry("U8", [True], 0, 1)}, 1), "non-negative"),
    "float size": (safetensors_bytes({"a": entry("U8", [1.0], 0, 1)}, 1), "non-negative"),
    "size beyond 64 bits": (safetensors_bytes({"a": entry("U8", [0, 2**70], 0, 0)}, 0), "shape"),
    "product beyond 64 bits": (
        safetensors_bytes({"a": entry("U8", [2**40, 2**40], 0, 1)}, 1),
        "whole bytes",
    ),
    "three offsets": (
        safetensors_bytes(
            _lie("a", {"dtype": "F32", "shape": [6], "data_offsets": [0, 1, 24]}), 40
        ),
        "two byte offsets",
    ),
    "offsets backwards": (safetensors_bytes({"a": entry("U8", [1], 1, 0)}, 1), "begin ≤ end"),
    "too few bytes": (safetensors_bytes(_lie("a", entry("F32", [6], 0, 20)), 40), "whole bytes"),
    "half a byte": (safetensors_bytes({"a": entry("F4", [3], 0, 1)}, 1), "whole bytes"),
    "overlap": (safetensors_bytes(_lie("b", entry("BF16", [4], 20, 28)), 40), "overlaps"),
    "hole": (
        safetensors_bytes({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, 3),
        "leaves a hole",
    ),
    "data missing": (safetensors_bytes(header_of(GOOD)[0], 39), "truncated"),
    "data left over": (safetensors_bytes(header_of(GOOD)[0], 41), "longer than its tensors"),
    "nested deeply": (safetensors_bytes(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", 0), "object"),
}


@pytest.mark.parametrize("case", LIES)
def test_each_lie_gets_one_sentence_that_names_it(tmp_path: Path, case: str) -> None:
    raw, fragment = LIES[case]
    file = tmp_path / "m.safetensors"
    file.write_bytes(raw)
    with pytest.raises(MalformedCheckpoint) as caught:
        read_safetensors(file)
    sentence = str(caught.value)
    assert fragment in sentence
    assert sentence.startswith(str(file))
    assert len(sentence) < 1000
    assert "\n" not in sentence
    assert caught.value.exit_code == 2


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.safetensors")
    for place in (tmp_path, tmp_path / "pipe.safetensors", tmp_path / "none", Path("a\0b")):
        with pytest.raises(MalformedCheckpoint):
            read_safetensors(place)


@settings(quick, max_examples=400)
@given(
    position=st.integers(0, 400),
    replacement=st.binary(min_size=0, max_size=6),
    cut=st.integers(0, 6),
    kept=st.integers(0, 400),
)
def test_a_mutated_file_is_refused_or_accepted_by_the_reference_too(
    tmp_path: Path, position: int, replacement: bytes, cut: int, kept: int
) -> None:
    raw = safetensors_bytes({"__metadata__": {"format": "pt"}, **header_of(GOOD)[0]}, 40)
    mutated = raw[:position] + replacement + raw[position + cut :]
    mutated = mutated[: len(mutated) - kept] if kept < 40 else mutated
    file = tmp_path / "m.safetensors"
    file.write_bytes(mutated)
    try:
        tensors, _ = read_safetensors(file)
    except MalformedCheckpoint as error:
        assert str(error)
        return
    reference = safetensors.deserialize(mutated)
    assert {t.name for t in tensors} == {name for name, _ in reference}
    assert all(t.start <= t.end <= len(mutated) for t in tensors)
