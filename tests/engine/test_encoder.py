"""Encoders against transformers: hidden states alone and in ragged batches, for every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.encoders import ENCODERS, hidden_states, require_minilm, write_encoder
from ullage.anatomy import load
from ullage.engine.encoder.bias import bucket, window_bias
from ullage.engine.encoder.encoder import Encoder, max_tokens
from ullage.engine.encoder.support import require_encoder
from ullage.engine.encoder.weights import EncoderWeights
from ullage.engine.linear import LINEARS
from ullage.errors import MalformedCheckpoint, UnsupportedModel

EncoderDir = Callable[[str], Path]


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> EncoderDir:
    @cache
    def directory(name: str) -> Path:
        return write_encoder(name, tmp_path_factory.mktemp(name))

    return directory


def _load(directory: Path, quantization: str = "none") -> Encoder:
    model = load(directory)
    return Encoder(model.anatomy.spec, EncoderWeights(model), LINEARS[quantization])


def _texts(seed: int, longest: int) -> list[list[int]]:
    """Texts of unlike and of equal lengths, out of order, the longest and the shortest too."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [7, longest, 1, 7, 19, 7, 2, 19]
    return [torch.randint(6, 320, (length,), generator=draw).tolist() for length in lengths]


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_equal_those_of_transformers(name: str, encoder_dir: EncoderDir) -> None:
    directory = encoder_dir(name)
    encoder, theirs = _load(directory), hidden_states(directory)
    texts = _texts(1, max_tokens(encoder.spec))
    assert max_tokens(encoder.spec) in (130, 128, 124)
    for text, found in zip(texts, encoder.forward(texts), strict=True):
        torch.testing.assert_close(found, theirs(text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
def test_a_text_is_the_same_alone_and_in_company(name: str, encoder_dir: EncoderDir) -> None:
    encoder = _load(encoder_dir(name))
    texts = _texts(2, 60)
    for text, together in zip(texts, encoder.forward(texts), strict=True):
        (alone,) = encoder.forward([text])
        # Many rows may be multiplied by other loops than few: each is within 4e-5 of float64.
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["roberta", "roberta-other-padding"])
def test_padding_within_a_text_is_counted_as_transformers_counts_it(
    name: str, encoder_dir: EncoderDir
) -> None:
    directory = encoder_dir(name)
    padding = load(directory).anatomy.spec.positions.padding_id
    assert padding is not None
    text = [7, 8, padding, 9, padding, padding, 10]
    (ours,) = _load(directory).forward([text])
    torch.testing.assert_close(ours, hidden_states(directory)(text), rtol=1e-4, atol=1e-4)


def test_the_real_minilm_gives_transformers_hidden_states() -> None:
    from tokenizers import Tokenizer

    directory = require_minilm()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    texts = [
        tokenizer.encode(text).ids
        for text in (
            "How full is the cask?",
            "Ullage is the free space left in a vessel of wine, of oil or of grain.",
            "Schmetterlinge fliegen über die Wiese.",
            "how full is the cask?",
        )
    ]
    encoder, theirs = _load(directory), hidden_states(directory)
    found = encoder.forward(texts)
    for text, states in zip(texts, found, strict=True):
        torch.testing.assert_close(states, theirs(text), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0], found[3])  # it is an uncased model
    assert encoder.weights_bytes is not None
    # The pooler (149k numbers) is not run, one token type is, ids are not weights.
    stored = sum(
        t.num_bytes
        for t in load(directory).checkpoint.tensors
        if "pooler" not in t.name  # type: ignore[union-attr]
    )
    assert encoder.weights_bytes == stored - 384 * 4 - 512 * 8


def test_int8_errs_little_on_real_weights() -> None:
    directory = require_minilm()
    text = [101, 2129, 2440, 2003, 1996, 25222, 2243, 1029, 102]
    (exact,) = _load(directory).forward([text])
    encoder = _load(directory, "int8")
    (rough,) = encoder.forward([text])
    likeness = torch.cosine_similarity(exact.mean(0), rough.mean(0), dim=0)
    assert 0.99 < likeness < 1.0
    assert encoder.weights_bytes is None or encoder.weights_bytes < 65e6  # 90 MB in float32


def test_weights_are_found_without_the_root_and_under_old_names(
    tmp_path: Path, encoder_dir: EncoderDir
) -> None:
    """A BertForMaskedLM has the root `bert.`, a BertModel has not; Google's files say gamma."""
    from safetensors.torch import load_file, save_file

    directory = encoder_dir("bert")
    held = load_file(directory / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in held.items()
    }
    assert old.keys() != held.keys()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    save_file(old, tmp_path / "model.safetensors")
    text = [[5, 6, 7]]
    assert torch.equal(_load(tmp_path).forward(text)[0], _load(directory).forward(text)[0])


def test_a_missing_and_a_misshapen_tensor_are_named(
    tmp_path: Path, encoder_dir: EncoderDir
) -> None:
    from safetensors.torch import load_file, save_file

    directory = encoder_dir("bert")
    held = load_file(directory / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    name = "encoder.layer.1.output.dense.weight"
    save_file({k: v for k, v in held.items() if k != name}, tmp_path / "model.safetensors")
    with pytest.raises(MalformedCheckpoint, match=name):
        _load(tmp_path)
    save_file({**held, name: held[name].T.contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(MalformedCheckpoint, match=name):
        _load(tmp_path)


def test_what_is_not_run_exactly_is_refused_by_field(encoder_dir: EncoderDir) -> None:
    spec = load(encoder_dir("bert")).anatomy.spec
    require_encoder(spec)
    mixer = spec.layers[0].mixer
    refused = {
        "kind": replace(spec, kind="decoder"),
        "family": replace(spec, family="longformer"),
        "norm.place": replace(spec, norm=replace(spec.norm, place="sandwich")),
        "positions.kind": replace(spec, positions=replace(spec.positions, kind="alibi")),
        "judges": replace(spec, judges="sequence"),
        "mixer.causal": replace(
            spec,
            layers=(replace(spec.layers[0], mixer=replace(mixer, causal=True)),),  # type: ignore[type-var]
        ),
    }
    for field, other in refused.items():
        with pytest.raises(UnsupportedModel, match=field):
            require_encoder(other)


def test_buckets_of_every_distance_equal_those_of_transformers() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = torch.arange(-700, 701)
    theirs = MPNetEncoder.relative_position_bucket(distances)
    assert torch.equal(bucket(distances), theirs)


@pytest.mark.parametrize("length", [1, 4, 5, 9])
def test_a_window_shows_as_many_tokens_on_either_side(length: int) -> None:
    found = window_bias(3, length)
    if found is None:  # then nothing is hidden
        found = torch.zeros(length, length)
    for query in range(length):
        for key in range(length):
            seen = abs(query - key) <= 3
            assert found[query, key].item() == (0.0 if seen else float("-inf"))
