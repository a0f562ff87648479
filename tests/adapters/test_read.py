"""Whole adapters: which files are taken, and what each writer's tensors become."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters import writers
from tests.adapters.peft_adapters import CASES, make_adapter, make_model
from ullage.anatomy.adapters.adapter import Adapter, Matrix
from ullage.anatomy.adapters.read import read_adapter
from ullage.errors import BadUsage, MalformedCheckpoint, UllageError

Q = "model.layers.0.self_attn.q_proj"


def shapes(adapter: Adapter) -> dict[str, tuple[object, ...]]:
    return {
        m.module: (m.rank, m.in_features, m.out_features, m.num_experts)
        for m in adapter.modules
        if m.a is not None
    }


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.method == "LoraConfig"]
)
def test_every_module_that_peft_adapted_is_found_under_its_path(name: str, tmp_path: Path) -> None:
    """The oracle is the model's own tree: paths of LoRA layers and sides of what they wrap."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    case = CASES[name]
    meant: dict[str, tuple[object, ...]] = {}
    for path, layer in make_model(name).base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            path, experts = path.replace(".base_layer", ""), None
            if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
                path, experts = f"{path}.{layer.parameter_name}", layer.num_experts
            sides = (layer.in_features, layer.out_features)
            meant[path] = (layer.r[case.adapter_name], *sides, experts)
    if name == "one model short":
        meant = {path.removeprefix("model."): sides for path, sides in meant.items()}
    adapter = read_adapter(make_adapter(name, tmp_path))
    assert shapes(adapter) == meant
    assert adapter.from_pickle is case.pickle
    assert not any(module.fault or module.transposed for module in adapter.modules)
    assert adapter.num_bytes == sum(t.num_bytes for t in adapter.tensors) > 0


def test_what_is_saved_beside_the_pair_is_told_apart(tmp_path: Path) -> None:
    def saved(name: str) -> dict[str, set[str]]:
        adapter = read_adapter(make_adapter(name, tmp_path))
        return {
            m.module: {str(t.key.matrix) for t in m.tensors}
            for m in adapter.modules
            if m.saved or m.magnitude or m.bias_b
        }

    assert saved("modules_to_save") == {"lm_head": {"saved"}}
    assert saved("classifier") == {"score": {"saved"}}
    assert saved("trainable tokens") == {"model.embed_tokens": {"tokens"}}
    assert saved("lm_head") == {"lm_head": {"A", "B", "base"}}
    assert saved("embedding") == {"model.embed_tokens": {"embedding_A", "embedding_B", "base"}}
    assert saved("bias all")[Q] == {"A", "B", "saved"}
    assert saved("dora")[Q] == {"A", "B", "magnitude"}
    assert saved("lora bias")[Q] == {"A", "B", "bias_B"}


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.method != "LoraConfig"]
)
def test_another_method_is_named_and_has_no_scale(name: str, tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter(name, tmp_path))
    kind = CASES[name].method.removesuffix("Config").upper()
    assert adapter.config.peft_type.replace("_", "") in (kind, "PTUNING")
    assert all(module.scale is None for module in adapter.modules)
    assert not any(t.key.matrix is Matrix.SAVED for t in adapter.tensors)


def test_a_pickle_tells_the_same_as_safetensors(tmp_path: Path) -> None:
    folder = make_adapter("plain", tmp_path)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    meant = {t.key.text: (t.dtype, t.shape, t.num_bytes) for t in read_adapter(folder).tensors}
    file.unlink()
    half = {key: value.to(torch.bfloat16) for key, value in tensors.items()}
    forms: dict[str, Callable[[Path], None]] = {
        "plain": lambda to: torch.save(tensors, to),
        "before torch 1.6": lambda to: torch.save(
            tensors, to, _use_new_zipfile_serialization=False
        ),
        "parameters": lambda to: torch.save(
            {key: torch.nn.Parameter(value) for key, value in tensors.items()}, to
        ),
        "below a key": lambda to: torch.save({"module": tensors, "step": 3}, to),
        "of a module": lambda to: torch.save({"state_dict": {**tensors, "_extra": None}}, to),
    }
    for form, write in forms.items():
        write(folder / "adapter_model.bin")
        adapter = read_adapter(folder)
        assert adapter.from_pickle, form
        found = {t.key.text: (t.dtype, t.shape, t.num_bytes) for t in adapter.tensors}
        assert found == meant, form
    torch.save(half, folder / "adapter_model.bin")
    assert {t.dtype for t in read_adapter(folder).tensors} == {"BF16"}


WRITERS = {
    "unsloth": writers.unsloth,
    "ms-swift": writers.ms_swift,
    "llama-factory": writers.llama_factory,
    "peft": writers.axolotl_sharded,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_programs_that_write_pefts_layout(writer: str, tmp_path: Path) -> None:
    adapter = read_adapter(WRITERS[writer](tmp_path))
    assert adapter.config.writer == writer
    assert shapes(adapter) == {
        f"model.layers.{layer}.{place}": (4, inner, out, None)
        for layer, (place, (out, inner)) in itertools.product(range(2), writers.PLACES.items())
    }
    assert {m.scale for m in adapter.modules} == {2.0}


def test_mlx_stores_its_matrices_the_other_way_round(tmp_path: Path) -> None:
    adapter = read_adapter(writers.mlx(tmp_path, kind="dora", experts=8))
    assert (adapter.config.writer, adapter.config.variants) == ("mlx", ("dora",))
    found = shapes(adapter)
    assert found[Q] == (4, 64, 64, None)
    assert found["model.layers.1.mlp.down_proj"] == (4, 128, 64, None)
    assert found["model.layers.1.mlp.switch_mlp.up_proj"] == (4, 64, 32, 8)
    assert all(m.transposed and m.scale == 20.0 for m in adapter.modules)
    assert sum(m.magnitude is not None for m in adapter.modules) == 6
    assert adapter.unused_files == ("0000100_adapters.safetensors",)


def test_the_older_layout_of_mlx_vlm(tmp_path: Path) -> None:
    adapter = read_adapter(writers.mlx_vlm_legacy(tmp_path))
    assert shapes(adapter)["language_model.model.layers.0.mlp.down_proj"] == (4, 128, 64, None)
    assert {m.scale for m in adapter.modules} == {0.1}


def test_torchtune_writes_both_its_own_names_and_pefts(tmp_path: Path) -> None:
    adapter = read_adapter(writers.torchtune(tmp_path / "both"))
    assert (adapter.config.writer, adapter.from_pickle) == ("torchtune", False)
    assert adapter.unused_files == ("adapter_model.pt",)
    own = read_adapter(writers.torchtune_own(tmp_path / "own", dora=True))
    assert (own.config.writer, own.from_pickle, own.config.variants) == (
        "torchtune",
        True,
        ("dora",),
    )
    assert shapes(own)["layers.0.mlp.w2"] == (4, 128, 64, None)
    assert not any(module.transposed for module in own.modules)
    assert all(module.magnitude is not None for module in own.modules)


def test_megatrons_adapters_stand_for_its_fused_modules(tmp_path: Path) -> None:
    adapter = read_adapter(writers.megatron(tmp_path))
    assert adapter.config.writer == "megatron"
    assert shapes(adapter)["decoder.layers.1.self_attention.linear_qkv"] == (4, 64, 128, None)


def test_safetensors_win_over_pickles_and_the_rest_is_listed(tmp_path: Path) -> None:
    folder = writers.peft(tmp_path)
    for name in ("adapter_model.bin", "other.safetensors"):
        (folder / name).write_bytes(b"not read")
    adapter = read_adapter(folder)
    assert [Path(file).name for file in adapter.files] == ["adapter_model.safetensors"]
    assert adapter.unused_files == ("adapter_model.bin", "other.safetensors")


def test_a_file_may_be_given_instead_of_its_directory(tmp_path: Path) -> None:
    folder = writers.peft(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "mine.safetensors")
    with pytest.raises(BadUsage, match=r"mine\.safetensors"):
        read_adapter(folder)
    assert len(read_adapter(folder / "mine.safetensors").modules) == 6
    whole = writers.peft(tmp_path / "whole")
    assert len(read_adapter(whole / "adapter_config.json").modules) == 6


def test_shards_are_read_with_and_without_an_index_and_missing_ones_are_named(
    tmp_path: Path,
) -> None:
    folder = writers.axolotl_sharded(tmp_path)
    assert len(read_adapter(folder).modules) == 6
    index = folder / "adapter_model.safetensors.index.json"
    moved = index.rename(tmp_path / "index.txt")
    assert len(read_adapter(folder).modules) == 6
    (folder / "adapter_model-00002-of-00002.safetensors").unlink()
    for with_index in (False, True):
        if with_index:
            moved.rename(index)
        adapter = read_adapter(folder)
        assert [Path(file).name for file in adapter.missing_files] == [
            "adapter_model-00002-of-00002.safetensors"
        ]


def test_two_tensors_for_one_place_make_two_modules(tmp_path: Path) -> None:
    folder = writers.peft(tmp_path)
    tensors = {**writers.peft_tensors(), **writers.peft_tensors(prefix="")}
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [m.module for m in read_adapter(folder).modules]
    assert sorted(modules) == sorted(2 * sorted(set(modules)))


def test_two_adapters_in_one_file_are_kept_apart(tmp_path: Path) -> None:
    folder = writers.peft(tmp_path)
    tensors = {
        **writers.peft_tensors(tail=".one.weight"),
        **writers.peft_tensors(tail=".two.weight"),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = read_adapter(folder).modules
    assert {m.adapter_name for m in modules} == {"one", "two"}
    assert all(m.a is not None and m.b is not None for m in modules)


def test_a_pair_that_does_not_fit_together_says_so(tmp_path: Path) -> None:
    folder = writers.peft(tmp_path)
    tensors = writers.peft_tensors()
    names = sorted(tensors)
    tensors[names[0]] = torch.zeros(0)  # what ZeRO-3 leaves of a parameter it did not gather
    tensors[names[2]] = torch.zeros(8, 64)  # another rank than its B
    del tensors[names[4]]
    save_file(tensors, folder / "adapter_model.safetensors")
    faults = [module.fault for module in read_adapter(folder).modules if module.fault]
    assert sorted(faults) == [
        "A [8, 64] and B [64, 4] do not have one rank in common",
        "A has the shape [0], so it holds no matrix",
        "has no A",
    ]


def _write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ((), "no adapter_config.json"),
        (("config.json", "model.safetensors"), "holds a whole model"),
        (("mine/adapter_config.json",), "folders have one: mine"),
        (("adapter_model.safetensors",), "no adapter_config.json beside adapter_model.safetensors"),
        (("__0_0.distcp", ".metadata"), "distributed checkpoint"),
        (("lora.nemo",), r"a \.nemo archive"),
        (("adapter_config.json",), "without weights"),
        (("adapter_config.json", "lora.safetensors"), r"there is lora\.safetensors"),
    ],
)
def test_a_directory_that_is_no_adapter_is_one_sentence(
    names: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    _write(tmp_path, *names)
    with pytest.raises(BadUsage, match=what) as caught:
        read_adapter(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "a\0b", Path("/dev/null")):
        with pytest.raises(UllageError):
            read_adapter(path)


def test_an_adapter_of_a_download_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    writers.peft(snapshot)
    for file in list(snapshot.iterdir()):
        shutil.move(file, blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    assert len(read_adapter(snapshot).modules) == 6
    # Older downloads into a directory of one's own are links into the cache as well.
    local = tmp_path / "local"
    local.mkdir()
    for file in blobs.iterdir():
        (local / file.name).symlink_to(file)
    assert len(read_adapter(local).modules) == 6


def test_an_adapter_of_a_405b_model_is_read_from_its_header_alone(tmp_path: Path) -> None:
    """126 layers, 7 modules, rank 64: 5 GB of tensors that are never touched."""
    sizes = {"q": (16384, 16384), "k": (16384, 1024), "v": (16384, 1024), "o": (16384, 16384)}
    places = {f"self_attn.{letter}_proj": size for letter, size in sizes.items()}
    places |= {"mlp.gate_proj": (16384, 53248), "mlp.up_proj": (16384, 53248)}
    places["mlp.down_proj"] = (53248, 16384)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for layer, (place, (inner, out)) in itertools.product(range(126), places.items()):
        for letter, shape in (("A", [64, inner]), ("B", [out, 64])):
            begin, end = end, end + 2 * shape[0] * shape[1]
            name = f"base_model.model.model.layers.{layer}.{place}.lora_{letter}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    writers.peft(tmp_path, r=64, lora_alpha=128)
    with (tmp_path / "adapter_model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + end)
    read_adapter(tmp_path)
    times = []
    for _ in range(3):
        begin_s = time.process_time()
        adapter = read_adapter(tmp_path)
        times.append(time.process_time() - begin_s)
    assert min(times) < 0.3
    assert len(adapter.modules) == 882
    assert adapter.num_bytes == end > 10**9
    assert {(m.rank, m.scale) for m in adapter.modules} == {(64, 2.0)}


def test_reading_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    writers.torchtune_own(tmp_path)
    code = (
        "import sys; from pathlib import Path;"
        "from ullage.anatomy.adapters.read import read_adapter;"
        "read_adapter(Path(sys.argv[1]));"
        "print(sorted({'torch', 'numpy', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_reading_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    folder = writers.axolotl_sharded(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    read_adapter(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_no_tensor_at_all_is_refused(tmp_path: Path) -> None:
    folder = writers.peft(tmp_path)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(MalformedCheckpoint, match="holds no tensor"):
        read_adapter(folder)
