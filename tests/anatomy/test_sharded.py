"""Large sharded checkpoints: every tensor is looked at, what is wrong is found, work grows evenly.

The checkpoints are made by benchmarks/audit, in DeepSeek-V3's layout and with holes for weights.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import header_of, safetensors_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.anatomy import load
from ullage.anatomy.checkpoint import CheckpointIndex
from ullage.anatomy.compare import Comparison, compare
from ullage.anatomy.files.index import read_checkpoint
from ullage.anatomy.files.safetensors import read_safetensors
from ullage.anatomy.files.weight_map import read_weight_map
from ullage.anatomy.stored import name_pattern, name_patterns
from ullage.errors import MalformedCheckpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "audit"))
from sharded import num_bytes, tensors, write_checkpoint, write_shard

INDEX = "model.safetensors.index.json"


def compared(folder: Path) -> Comparison:
    model = load(folder)
    assert model.checkpoint is not None
    return compare(model.anatomy.spec, model.checkpoint)


def checkpoint_of(folder: Path) -> CheckpointIndex:
    index = read_checkpoint(folder)
    assert index is not None
    return index


def test_60_000_tensors_in_128_shards_are_read_and_all_explained(tmp_path: Path) -> None:
    number = write_checkpoint(tmp_path, layers=41, files=128)
    assert number == 60_831
    model = load(tmp_path)
    index = model.checkpoint
    assert index is not None and index.is_complete and len(index.files) == 128
    assert len(index.tensors) == number and index.num_bytes == index.declared_bytes
    every = {t[0]: (t[1], t[2], num_bytes(t)) for t in tensors(41)}
    assert {t.name: (t.dtype, t.shape, t.num_bytes) for t in index.tensors} == every
    found = compare(model.anatomy.spec, index)
    assert found.agrees and found.mtp_stored
    scales = sum(name.endswith("_scale_inv") for name in every)
    assert found.matched + dict(found.explained)["quantisation"] == number
    assert dict(found.explained)["quantisation"] == scales


def test_the_real_model_has_as_many_tensors_as_its_publisher_lists() -> None:
    assert sum(1 for _ in tensors(61)) == 91_991  # deepseek-ai/DeepSeek-V3


EXPERT = "model.layers.3.mlp.experts.201.up_proj.weight"


def dropped(shard: list[tuple]) -> list[tuple]:
    return [t for t in shard if t[0] != EXPERT]


def added(shard: list[tuple]) -> list[tuple]:
    return [*shard, ("model.layers.3.mlp.experts.201.bias_of_nobody", "BF16", (7,))]


def widened(shard: list[tuple]) -> list[tuple]:
    return [(n, d, (2048, 7168 + 128) if n == EXPERT else s) for n, d, s in shard]


def unpacked(shard: list[tuple]) -> list[tuple]:
    return [(n, "BF16" if n == EXPERT else d, s) for n, d, s in shard]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (dropped, "missing"),
        (added, "unexpected"),
        (widened, "wrong_shape"),
        (unpacked, "wrong_shape"),
    ],
)
def test_one_wrong_expert_among_thousands_is_named(
    change: Callable[[list[tuple]], list[tuple]], kind: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, layers=5, files=8)
    index = json.loads((tmp_path / INDEX).read_text())
    name = index["weight_map"][EXPERT]
    shard = [t for t in tensors(5) if index["weight_map"][t[0]] == name]
    write_shard(tmp_path / name, change(shard))
    assert EXPERT not in dict(checkpoint_of(tmp_path).absent_tensors) or change is dropped
    if change is dropped:  # what an index promises in vain is rule A121's; here nothing promises it
        assert dict(checkpoint_of(tmp_path).absent_tensors) == {EXPERT: str(tmp_path / name)}
        del index["weight_map"][EXPERT]
        (tmp_path / INDEX).write_text(json.dumps(index))
    found = compared(tmp_path)
    assert found.comparable and not found.agrees
    (difference,) = getattr(found, kind)
    assert difference.name.replace("{e}", "201") in (EXPERT, added([])[0][0])
    assert [n for n, _ in checkpoint_of(tmp_path).unlisted_tensors] == (
        [added([])[0][0]] if change is added else []
    )


def test_absent_shards_and_tensors_stored_twice_are_listed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=5, files=8)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    shards = sorted(set(places.values()))
    (tmp_path / shards[3]).unlink()
    twice = [t for t in tensors(5) if places[t[0]] == shards[0]][-1]
    write_shard(
        tmp_path / shards[5], [t for t in tensors(5) if places[t[0]] == shards[5]] + [twice]
    )
    index = read_checkpoint(tmp_path)
    assert index is not None and not index.is_complete
    assert index.missing_files == (str(tmp_path / shards[3]),)
    gone = sorted(name for name, shard in places.items() if shard == shards[3])
    assert [name for name, _ in index.absent_tensors] == gone
    assert index.duplicate_tensors == ((twice[0], str(tmp_path / shards[5])),)
    assert len(index.tensors) == len(places) - len(gone)


def test_an_index_alone_lists_every_tensor_as_absent(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=5, files=8)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    index = read_checkpoint(tmp_path)
    assert index is not None and not index.has_headers and len(index.missing_files) == 8
    assert len(index.absent_tensors) == sum(1 for _ in tensors(5))


def _calls(work: Callable[[], object]) -> int:
    """How many functions are called, those in C included: the same number in every run."""
    number = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return number


def test_twice_the_experts_are_at_most_twice_the_work(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", layers=5, files=4, experts=128)
    write_checkpoint(tmp_path / "two", layers=5, files=4, experts=256)
    compared(tmp_path / "one")  # imports and tables
    one, two = (_calls(lambda n=n: compared(tmp_path / n)) for n in ("one", "two"))  # type: ignore[misc]
    assert two < 2 * one


# --- the shortcuts through usual members against the json module ----------------------------------

NAMES = st.lists(
    st.one_of(
        st.from_regex(r"[a-z.]{1,8}\.[0-9]{1,3}\.weight", fullmatch=True),
        st.text(min_size=1, max_size=5).filter(lambda t: t.isprintable() and t != "__metadata__"),
    ),
    unique=True,
    max_size=30,
)


def _in_style(made: object, style: int) -> str:
    if style == 0:
        return json.dumps(made, separators=(",", ":"))
    return json.dumps(made, indent=2 if style == 1 else None, ensure_ascii=style == 2)


@given(
    names=NAMES,
    kinds=st.lists(
        st.tuples(st.sampled_from(["BF16", "F32"]), st.lists(st.integers(0, 9), max_size=3))
    ),
    style=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_headers_of_any_layout_are_what_json_says(
    names: list[str],
    kinds: list[tuple[str, list[int]]],
    style: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    chosen = {n: kinds[i % len(kinds)] for i, n in enumerate(names)} if kinds else {}
    header, size = header_of(chosen)
    file = tmp_path_factory.mktemp("header") / "x.safetensors"
    file.write_bytes(safetensors_bytes(_in_style(header, style).encode(), size))
    read, _ = read_safetensors(file)
    assert {t.name: (t.dtype, list(t.shape)) for t in read} == {
        n: (d, s) for n, (d, s) in chosen.items()
    }


@given(names=NAMES, style=st.integers(0, 3), files=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_index_files_of_any_layout_are_what_json_says(
    names: list[str], style: int, files: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = {name: f"m-{i % files}.safetensors" for i, name in enumerate(names)}
    file = tmp_path_factory.mktemp("index") / INDEX
    file.write_text(_in_style({"weight_map": places, "metadata": {"total_size": 5}}, style))
    assert read_weight_map(file) == (places, 5)


def _members(number: int) -> dict[str, object]:
    header, _ = header_of({f"layers.{i}.w": ("BF16", (4,)) for i in range(number)})
    return header


@pytest.mark.parametrize("number", [1, 999, 1000, 1001, 2500])
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"layers.{n}.w"', '"layers.0.w"', 'the tensor "layers.0.w" is given twice'),
        ('"BF16"', '"BF17"', 'found "BF17"|BF17'),
        ("[4]", "[5]", "8 bytes for the shape"),
        ("[4]", "[04]", "layers.{n}.w"),
        ("[4]", "[4,]", "layers.{n}.w"),
    ],
)
def test_the_wrong_member_is_named_wherever_it_stands(
    number: int, old: str, new: str, sentence: str, tmp_path: Path
) -> None:
    end = 8 * (number + 1)
    last = {"last": {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}}
    text = json.dumps(_members(number + 1) | last, separators=(",", ":"))
    old, new, sentence = (t.replace("{n}", str(number)) for t in (old, new, sentence))
    at = text.index(f'"layers.{number}.w"')
    text = text[:at] + text[at:].replace(old, new, 1)
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(end))
    with pytest.raises(MalformedCheckpoint, match=sentence):
        read_safetensors(file)


@pytest.mark.parametrize("number", [1, 999, 1000, 1001, 2500])
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"t{n}"', '"t0"', '"t0" is given twice'),
        ('"a.safetensors"', '"../a.safetensors"', "not a plain name"),
        ('"a.safetensors"', '"a.bin"', "not a .safetensors file"),
        ('"a.safetensors"', "3", "a quoted string is missing"),
        ('"a.safetensors",', '"a.safetensors",\x0b', "a quoted string is missing"),
    ],
)
def test_the_wrong_place_is_named_wherever_it_stands(
    number: int, old: str, new: str, sentence: str, tmp_path: Path
) -> None:
    places = {f"t{i}": "a.safetensors" for i in range(number + 2)}
    text = json.dumps({"weight_map": places})
    at = text.index(f'"t{number}"')
    text = text[:at] + text[at:].replace(old.replace("{n}", str(number)), new, 1)
    file = tmp_path / INDEX
    file.write_text(text)
    with pytest.raises(MalformedCheckpoint, match=sentence):
        read_weight_map(file)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=10),
            st.lists(
                st.sampled_from([".experts.", "3", "17", ".", "a", "\n", ".experts.{e}."]),
                max_size=9,
            ).map("".join),
        ),
        max_size=20,
    )
)
def test_patterns_of_all_names_are_those_of_each(names: list[str]) -> None:
    assert name_patterns(names) == [name_pattern(name) for name in names]
