"""Which files of a directory are the model, and what is missing, misplaced or stored twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoint_files import GgufBuilder, llama_gguf, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.anatomy.files.index import read_checkpoint, read_gguf_parts
from ullage.anatomy.files.weight_map import read_weight_map
from ullage.errors import BadInput, MalformedCheckpoint

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
quick = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def shard(folder: Path, name: str, *tensors: str) -> Path:
    return write_safetensors(folder / name, dict.fromkeys(tensors, ("F32", (2,))))


def write_index(folder: Path, places: dict[str, str], total: object = 24) -> Path:
    file = folder / INDEX
    file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return file


def sharded(folder: Path) -> Path:
    shard(folder, ONE, "a", "b")
    shard(folder, TWO, "c")
    write_index(folder, {"a": ONE, "b": ONE, "c": TWO})
    return folder


def test_a_sharded_checkpoint_is_one_list(tmp_path: Path) -> None:
    index = read_checkpoint(sharded(tmp_path))
    assert index is not None
    assert [t.name for t in index.tensors] == ["a", "b", "c"]
    assert index.files == (str(tmp_path / ONE), str(tmp_path / TWO))
    assert (index.num_bytes, index.declared_bytes, index.num_elements) == (24, 24, 6)
    assert index.is_complete
    assert index == read_checkpoint(tmp_path / INDEX)


def test_a_missing_shard_is_data(tmp_path: Path) -> None:
    (sharded(tmp_path) / TWO).unlink()
    index = read_checkpoint(tmp_path)
    assert index is not None
    assert index.missing_files == (str(tmp_path / TWO),)
    assert index.absent_tensors == (("c", str(tmp_path / TWO)),)
    assert [t.name for t in index.tensors] == ["a", "b"]
    assert index.has_headers
    assert not index.is_complete


def test_an_index_file_alone_proves_no_bytes(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": ONE})
    index = read_checkpoint(tmp_path)
    assert index is not None
    assert not index.has_headers
    assert not index.is_complete
    assert index.missing_files == (str(tmp_path / ONE),)


def test_misplaced_unlisted_and_double_tensors_are_told_apart(tmp_path: Path) -> None:
    shard(tmp_path, ONE, "a", "twice", "stray")
    shard(tmp_path, TWO, "twice", "b")
    write_index(tmp_path, {"a": ONE, "b": ONE, "twice": TWO})
    index = read_checkpoint(tmp_path)
    assert index is not None
    assert index.absent_tensors == (("b", str(tmp_path / ONE)),)
    assert index.unlisted_tensors == (
        ("b", str(tmp_path / TWO)),
        ("stray", str(tmp_path / ONE)),
        ("twice", str(tmp_path / ONE)),
    )
    assert index.duplicate_tensors == (("twice", str(tmp_path / ONE)),)
    kept = next(t for t in index.tensors if t.name == "twice")
    assert kept.file == str(tmp_path / TWO), "the index file decides which copy counts"


def test_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    shard(tmp_path, "part-a.safetensors", "a", "x")
    shard(tmp_path, "part-b.safetensors", "b", "x")
    index = read_checkpoint(tmp_path)
    assert index is not None
    assert [t.name for t in index.tensors] == ["a", "x", "b"]
    assert index.duplicate_tensors == (("x", str(tmp_path / "part-b.safetensors")),)


def test_another_layout_beside_it_is_unused(tmp_path: Path) -> None:
    shard(sharded(tmp_path), "consolidated.safetensors", "layers.0.wq")
    (tmp_path / "model-Q4.gguf").write_bytes(llama_gguf(1))
    shard(tmp_path, "adapter_model.safetensors", "lora_A")
    index = read_checkpoint(tmp_path)
    assert index is not None
    assert index.unused_files == ("consolidated.safetensors", "model-Q4.gguf")


def test_mistral_s_layout_counts_when_nothing_else_is_there(tmp_path: Path) -> None:
    shard(tmp_path, "consolidated.safetensors", "layers.0.wq")
    index = read_checkpoint(tmp_path)
    assert index is not None
    assert [t.name for t in index.tensors] == ["layers.0.wq"]


def test_model_safetensors_wins_over_strangers(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", "a")
    shard(tmp_path, "other.safetensors", "b")
    index = read_checkpoint(tmp_path)
    assert index is not None
    assert [t.name for t in index.tensors] == ["a"]
    assert index.unused_files == ("other.safetensors",)


def test_a_directory_without_weights_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shard(tmp_path, "adapter_model.safetensors", "lora_A")
    assert read_checkpoint(tmp_path) is None


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    shard(blobs, "1f2e", "a")
    (snapshot / "model.safetensors").symlink_to("../blobs/1f2e")
    index = read_checkpoint(snapshot)
    assert index is not None
    assert [t.name for t in index.tensors] == ["a"]


# --- GGUF ----------------------------------------------------------------------------------------


def split_parts(folder: Path, count: int = 3) -> list[Path]:
    builder = GgufBuilder()
    files = []
    for number in range(count):
        file = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        metadata = {
            "split.no": ("uint16", number),
            "split.count": ("uint16", count),
            "split.tensors.count": ("int32", count),
            **({"general.architecture": ("string", "llama")} if number == 0 else {}),
        }
        file.write_bytes(builder.file(metadata, {f"t{number}": ("F32", (8,))}))
        files.append(file)
    return files


def test_the_parts_of_a_split_gguf_are_one_model(tmp_path: Path) -> None:
    files = split_parts(tmp_path)
    for place in (tmp_path, files[0], files[2]):
        index = read_checkpoint(place)
        assert index is not None
        assert index.format == "gguf"
        assert [t.name for t in index.tensors] == ["t0", "t1", "t2"]
        assert dict(index.metadata)["general.architecture"] == "llama"
        assert index.is_complete


def test_a_missing_part_is_data(tmp_path: Path) -> None:
    files = split_parts(tmp_path)
    files[1].unlink()
    headers, missing = read_gguf_parts(files[0])
    assert (len(headers), missing) == (2, (str(files[1]),))


def test_a_part_under_another_part_s_name_is_refused(tmp_path: Path) -> None:
    files = split_parts(tmp_path)
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(MalformedCheckpoint, match="calls itself part 2 of 3"):
        read_checkpoint(tmp_path)


def test_parts_that_hold_too_few_tensors_are_refused(tmp_path: Path) -> None:
    files = split_parts(tmp_path)
    empty = {"split.no": ("uint16", 2), "split.count": ("uint16", 3)}
    files[2].write_bytes(GgufBuilder().file(empty, {}))
    with pytest.raises(MalformedCheckpoint, match="2 tensors in all parts; expected 3"):
        read_checkpoint(tmp_path)


def test_several_gguf_models_need_a_choice(tmp_path: Path) -> None:
    for name in ("m-Q4.gguf", "m-Q8.gguf", "mmproj-f16.gguf"):
        (tmp_path / name).write_bytes(llama_gguf(1))
    with pytest.raises(MalformedCheckpoint, match=r"2 GGUF models \(m-Q4.gguf, m-Q8.gguf\)"):
        read_checkpoint(tmp_path)
    (tmp_path / "m-Q8.gguf").unlink()
    assert read_checkpoint(tmp_path) is not None


def test_a_gguf_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "ggml-model").write_bytes(llama_gguf(1))
    index = read_checkpoint(tmp_path / "ggml-model")
    assert index is not None
    assert index.format == "gguf"


# --- names that would leave the directory --------------------------------------------------------

ESCAPES = [
    "../secret.safetensors",
    "/etc/passwd.safetensors",
    "sub/../../x.safetensors",
    "sub/x.safetensors",
    "..\\x.safetensors",
    "C:\\x.safetensors",
    "..",
    ".",
    "",
    "a\0.safetensors",
    "x" * 300 + ".safetensors",
    "config.json",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_leaves_the_directory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shard(tmp_path, "secret.safetensors", "a")
    write_index(folder, {"a": name})
    opened: list[Path] = []
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **kw: (opened.append(self), real(self, *args, **kw))[1]
    )
    with pytest.raises(MalformedCheckpoint, match=r"is not a (plain name|\.safetensors file)"):
        read_checkpoint(folder)
    assert opened == [folder / INDEX]


LIES = {
    "not JSON": ("{", "not valid"),
    "a list": ("[]", "not valid"),
    "no map": ('{"metadata": {}}', "no weight_map"),
    "map twice": ('{"weight_map": {}, "weight_map": {}}', "given twice"),
    "tensor twice": ('{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "given twice"),
    "a number": ('{"weight_map": {"a": 1}}', "quoted string"),
    "a map that is a list": ('{"weight_map": []}', "an object is missing"),
    "text after it": ('{"weight_map": {}} x', "after the closing brace"),
    "not UTF-8": ("\udcff", "not UTF-8"),
}


@pytest.mark.parametrize("case", LIES)
def test_each_lie_gets_one_sentence_that_names_it(tmp_path: Path, case: str) -> None:
    text, fragment = LIES[case]
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(MalformedCheckpoint) as caught:
        read_checkpoint(tmp_path)
    assert fragment in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / INDEX))


@pytest.mark.parametrize("total", [None, "24", -1, 1.5, True, float("nan"), float("inf"), [24]])
def test_a_total_that_is_no_number_of_bytes_is_no_total(tmp_path: Path, total: object) -> None:
    assert read_weight_map(write_index(tmp_path, {}, total)) == ({}, None)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(ESCAPES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@quick
@given(
    document=st.dictionaries(
        st.sampled_from(["weight_map", "metadata", "x"]),
        json_values | st.dictionaries(st.text(max_size=8), st.sampled_from([ONE, TWO])),
    )
)
def test_any_json_gives_an_index_or_one_sentence(tmp_path: Path, document: object) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(document))
    try:
        index = read_checkpoint(tmp_path)
    except BadInput as error:
        assert len(str(error)) < 1000
        return
    assert index is not None
    assert {os.path.dirname(file) for file in index.files} <= {str(tmp_path)}  # noqa: PTH120
