"""A GGUF file tells the same model as the config.json that it was converted from.

Each case lays out the tensors of a tiny model under GGUF names (by the reference name map), writes
the metadata as llama.cpp's converter does, and expects the spec of the original configuration.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import GgufBuilder, Value, llama_gguf
from gguf_cases import CASES, gguf_tensors, written_metadata

from ullage.anatomy import load, read_config
from ullage.anatomy.compare import compare
from ullage.anatomy.gguf.config import config_from_gguf
from ullage.anatomy.gguf.header import read_gguf
from ullage.anatomy.gguf.rope import llama3_table
from ullage.anatomy.gguf.stored_types import weight_scheme
from ullage.anatomy.gguf.types import GGML_BLOCKS
from ullage.costs.weights import stored_bytes, weight_bytes
from ullage.errors import BadInput, MalformedCheckpoint, UnsupportedModel


@pytest.mark.parametrize("name", CASES)
def test_the_file_tells_the_model_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    case, architecture = CASES[name], name.partition(":")[0].partition(",")[0]
    original = read_config(case.config, file="config.json").spec
    file = tmp_path / "m.gguf"
    tensors = gguf_tensors(architecture, original)
    file.write_bytes(GgufBuilder().file(written_metadata(architecture, case), tensors))
    model = load(file)
    found = model.anatomy.spec
    assert not found.unknowns
    assert model.anatomy.low is model.anatomy.spec is model.anatomy.high
    assert found.layers == original.layers
    assert replace(found, layers=(), quantization=None) == replace(original, layers=())
    assert model.checkpoint is not None
    comparison = compare(found, model.checkpoint)
    assert comparison.agrees, comparison
    assert comparison.num_parameters == sum(t.num_elements for t in model.checkpoint.tensors)


# --- sources, scaling, quantisation --------------------------------------------------------------


def test_every_key_says_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf())
    found = config_from_gguf([read_gguf(file)])
    assert set(found.sources) == set(found.config)
    assert found.sources["num_hidden_layers"] == "header: llama.block_count"
    assert found.sources["vocab_size"] == "header: rows of token_embd.weight"
    assert found.sources["tie_word_embeddings"] == "header: no output.weight is stored"
    sources = {s.field: s.source for s in load(file).anatomy.sources}
    assert sources["hidden_size"] == "header: llama.embedding_length"


def factors(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_llama3_scaling_is_recognised_by_its_table(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    table = llama3_table(16, 500000.0, 8.0)
    file.write_bytes(
        llama_gguf(
            extra={"llama.rope.freq_base": ("float32", 500000.0)},
            extra_tensors={"rope_freqs.weight": ("F32", (8,))},
            data={"rope_freqs.weight": factors(table)},
        )
    )
    scaling = config_from_gguf([read_gguf(file)]).config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_llama3_s_table_is_the_one_that_transformers_divides_by() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    table = torch.tensor(llama3_table(128, 500000.0, 8.0), dtype=torch.float64)
    torch.testing.assert_close(plain / table, scaled.double(), rtol=1e-5, atol=0)


def test_a_table_that_no_rule_gives_is_not_guessed_at(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(
        llama_gguf(
            extra_tensors={"rope_freqs.weight": ("F32", (8,))},
            data={"rope_freqs.weight": factors([1, 1, 1, 2, 3, 5, 7, 11])},
        )
    )
    scaling = config_from_gguf([read_gguf(file)]).config["rope_scaling"]
    assert scaling == {"rope_type": "gguf_table"}


@pytest.mark.parametrize("ggml_type", sorted(GGML_BLOCKS))
def test_a_scheme_adds_up_to_the_block(ggml_type: str) -> None:
    elements, num_bytes = GGML_BLOCKS[ggml_type]
    scheme = weight_scheme(ggml_type)
    blocks = 1 if scheme.group < 0 else elements
    assert scheme.bits * blocks + scheme.scale_bits == num_bytes * 8
    assert 0 < scheme.bits <= 64


def mixed_types(
    tensors: dict[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """As llama.cpp stores a model: vectors in F32, matrices in several types, a few in F16."""
    wide = ["Q8_0", "Q4_1", "F16"]

    def kind(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) < 2 or shape[-1] % 32:
            return "F32"
        # Gate and up are one tensor to some families and two to GGUF; quantisers treat them alike.
        return wide[sum(name.replace("ffn_gate_exps", "ffn_up_exps").encode()) % 3]

    return {name: (kind(name, shape), shape) for name, (_, shape) in tensors.items()}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with config.json"])
@pytest.mark.parametrize("name", CASES)
def test_a_quantised_file_weighs_what_it_stores(tmp_path: Path, name: str, beside: bool) -> None:
    case, architecture = CASES[name], name.partition(":")[0].partition(",")[0]
    spec = read_config(case.config, file="config.json").spec
    tensors = mixed_types(gguf_tensors(architecture, spec))
    file = tmp_path / "m.gguf"
    file.write_bytes(GgufBuilder().file(written_metadata(architecture, case), tensors))
    if beside:  # what config.json says of dtype and quantisation is not how the file is stored
        quantised = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
        said = case.config | {"torch_dtype": "float32", "quantization_config": quantised}
        (tmp_path / "config.json").write_text(json.dumps(said))
    model = load(tmp_path if beside else file)
    assert model.checkpoint is not None
    found = model.anatomy
    assert found.spec.quantization is not None and found.spec.quantization.method == "gguf"
    assert found.low == found.high == found.spec and not found.spec.unknowns
    pooler = 2 * (64 * 64 + 64) if name == "bert" else 0  # its converter leaves it out
    assert stored_bytes(found.spec).with_mtp == model.checkpoint.num_bytes + pooler


def test_a_bias_is_stored_apart_from_its_matrix(tmp_path: Path) -> None:
    biases = {
        f"blk.{layer}.attn_{part}.bias": ("F32", (rows,))
        for layer in range(2)
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("output", 64))
    }
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf(extra_tensors=biases))
    model = load(file)
    assert model.checkpoint is not None
    assert stored_bytes(model.anatomy.spec).total == model.checkpoint.num_bytes


def config_beside(file: Path) -> None:
    """config.json of the same model beside a GGUF file, as its publisher wrote it."""
    said = dict(load(file).files.config or {}) | {"torch_dtype": "bfloat16"}
    (file.parent / "config.json").write_text(json.dumps(said))


def test_tensors_without_a_type_make_a_range(tmp_path: Path) -> None:
    """A part that is not there: from the narrowest to the widest type that there is."""
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(llama_gguf())
    config_beside(whole)
    whole_bytes = stored_bytes(load(whole).anatomy.spec).total
    whole.rename(tmp_path / "m-00001-of-00002.gguf")
    model = load(tmp_path)
    assert model.checkpoint is not None and len(model.checkpoint.missing_files) == 1
    assert stored_bytes(model.anatomy.spec).total == whole_bytes  # all of it lay in the first part

    (tmp_path / "m-00001-of-00002.gguf").write_bytes(llama_gguf(num_layers=1))
    found = load(tmp_path).anatomy
    (unknown,) = found.spec.unknowns
    assert "model.layers.1." in unknown.found and unknown.widens == ("weights",)
    low, high = stored_bytes(found.low).total, stored_bytes(found.high).total
    assert low < whole_bytes < high
    first = tmp_path / "first" / "m.gguf"
    first.parent.mkdir()
    first.write_bytes(llama_gguf(num_layers=1))
    second = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64
    assert high == stored_bytes(load(first).anatomy.spec).total + 8 * second  # F64


def test_names_that_are_not_known_make_a_range(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf())
    config_beside(file)
    file.write_bytes(llama_gguf(extra={"general.architecture": ("string", "nobody")}))
    found = load(tmp_path).anatomy
    assert found.spec.unknowns[0].widens == ("weights",)
    index = load(tmp_path).checkpoint
    assert index is not None
    assert stored_bytes(found.low).total < index.num_bytes < stored_bytes(found.high).total


def test_the_real_model_is_smollm2() -> None:
    from test_gguf import smollm2

    model = load(smollm2())
    spec = model.anatomy.spec
    assert (spec.model_type, spec.num_layers, spec.hidden_size) == ("llama", 30, 576)
    assert model.checkpoint is not None
    comparison = compare(spec, model.checkpoint)
    assert comparison.agrees
    assert comparison.num_parameters == 134_515_008  # SmolLM2-135M, tied
    assert stored_bytes(spec).total == model.checkpoint.num_bytes
    assert weight_bytes(spec).total == model.checkpoint.num_bytes


def test_transformers_reads_the_same_configuration() -> None:
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    from test_gguf import smollm2

    reference = module.load_gguf_checkpoint(str(smollm2()))["config"]
    ours = config_from_gguf([read_gguf(smollm2())]).config
    assert {key: ours[key] for key in reference if key != "_model_name_or_path"} == {
        key: value for key, value in reference.items() if key != "_model_name_or_path"
    }


# --- contradictions ------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Value], type[BadInput], str]] = {
    "another architecture": (
        {"general.architecture": ("string", "rwkv7")},
        UnsupportedModel,
        'architecture "rwkv7" is not known',
    ),
    "no architecture": ({"general.architecture": ("uint32", 3)}, MalformedCheckpoint, "a name"),
    "a billion layers": (
        {"llama.block_count": ("uint32", 10**9)},
        MalformedCheckpoint,
        "block_count: 1000000000; expected 2",
    ),
    "too few layers": ({"llama.block_count": ("uint32", 1)}, MalformedCheckpoint, "expected 2"),
    "another width": (
        {"llama.embedding_length": ("uint32", 32)},
        MalformedCheckpoint,
        "expected 64, the width of token_embd.weight",
    ),
    "a width in words": (
        {"llama.embedding_length": ("string", "64")},
        MalformedCheckpoint,
        "a number",
    ),
    "a fraction of a layer": (
        {"llama.block_count": ("float32", 1.5)},
        MalformedCheckpoint,
        "a whole number",
    ),
    "not a number": (
        {"llama.rope.freq_base": ("float32", float("nan"))},
        MalformedCheckpoint,
        "a number from 0",
    ),
    "layers that differ": (
        {"llama.attention.head_count_kv": ("[uint32]", [2, 4])},
        UnsupportedModel,
        "differ from layer to layer",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_contradict_the_tensors_are_named(tmp_path: Path, case: str) -> None:
    extra, error, fragment = WRONG[case]
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf(extra=extra))
    with pytest.raises(error) as caught:
        load(file)
    assert fragment in str(caught.value)
    assert str(file) in str(caught.value)


def test_layers_that_agree_are_one_value(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(llama_gguf(extra={"llama.attention.head_count_kv": ("[uint32]", [2, 2])}))
    assert config_from_gguf([read_gguf(file)]).config["num_key_value_heads"] == 2


def test_a_directory_of_several_models_needs_a_choice(tmp_path: Path) -> None:
    for name in ("m-Q4.gguf", "m-Q8.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(llama_gguf())
    with pytest.raises(MalformedCheckpoint, match="holds 2 GGUF models"):
        load(tmp_path)
    (tmp_path / "m-Q8.gguf").unlink()
    assert load(tmp_path).anatomy.spec.num_layers == 2


def test_a_model_without_all_its_parts_is_not_sized(tmp_path: Path) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    file.write_bytes(llama_gguf(extra={"split.no": ("uint16", 0), "split.count": ("uint16", 2)}))
    with pytest.raises(MalformedCheckpoint, match="1 parts of this model are not there"):
        load(file)
