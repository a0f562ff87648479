"""Embeddings: pooling as sentence-transformers' files say, against written-out arithmetic."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.encoders import hidden_states, require_minilm, write_encoder, write_pooling
from ullage.engine.encoder.embedder import Embedder, TextRefused
from ullage.engine.encoder.pooling import Pooling, read_pooling
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage, MalformedCheckpoint, UllageError, UnsupportedModel

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder("bert", tmp_path_factory.mktemp("bert"))


def _mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _unit(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in vector))
    return [x / length for x in vector]


def test_the_real_minilm_gives_the_mean_of_its_states_at_length_one() -> None:
    directory = require_minilm()
    embedder, theirs = Embedder.load(directory), hidden_states(directory)
    assert (embedder.max_model_len, embedder.num_dimensions) == (256, 384)
    texts = [
        "How full is the barrel?",
        "The barrel is nearly full.",
        "Der Zug nach Wien fährt heute nicht.",
    ]
    ids = [embedder.tokens(text) for text in texts]
    assert all(text[0] == 101 and text[-1] == 102 for text in ids)  # [CLS] … [SEP]
    found = embedder.embed(ids)
    for text, embedding in zip(ids, found, strict=True):
        expected = _unit(_mean(theirs(list(text)).tolist()))
        assert embedding.tolist() == pytest.approx(expected, abs=1e-5)
    # What it was trained for: the two about barrels lie near each other.
    assert found[0] @ found[1] > found[0] @ found[2] + 0.3


def test_the_real_minilm_gives_what_vllm_recorded() -> None:
    recorded = json.loads((FIXTURES / "vllm-0.32-minilm.json").read_text(encoding="utf-8"))
    embedder = Embedder.load(require_minilm())
    for text, expected in recorded["embeddings"].items():
        (found,) = embedder.embed([embedder.tokens(text)]).tolist()
        assert found == pytest.approx(expected, abs=1e-6)


def test_texts_that_differ_in_length_do_not_touch_each_other() -> None:
    """Alone, together, in another order, beside long ones: the same embedding."""
    embedder = Embedder.load(require_minilm())
    text = "the free space above the wine in a cask that is not quite full"
    ids = [embedder.tokens(text[:length]) for length in (3, 62, 14, 14, 40)]
    together = embedder.embed(ids)
    for order in ([4, 3, 2, 1, 0], [2], [0, 1]):
        found = embedder.embed([ids[index] for index in order])
        torch.testing.assert_close(found, together[order], rtol=1e-5, atol=1e-6)


STATES = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_cls_token": True}, [1.0, -2.0]),
        ({"pooling_mode_lasttoken": True}, [-5.0, 6.0]),
        ({"pooling_mode_max_tokens": True}, [3.0, 6.0]),
        ({"pooling_mode_mean_tokens": True}, [-1 / 3, 8 / 3]),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, [-1 / 3**0.5, 8 / 3**0.5]),
        ({"pooling_mode_weightedmean_tokens": True}, [-8 / 6, 24 / 6]),
        ({"pooling_mode": "cls", "embedding_dimension": 2}, [1.0, -2.0]),
        ({"pooling_mode": ["max", "cls"]}, [3.0, 6.0, 1.0, -2.0]),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            [1.0, -2.0, -1 / 3, 8 / 3],
        ),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_every_pooling_of_sentence_transformers(
    config: dict[str, Any], expected: list[float], normalize: bool, tmp_path: Path
) -> None:
    write_pooling(tmp_path, config, normalize)
    found = read_pooling(tmp_path)(STATES)
    assert found.tolist() == pytest.approx(_unit(expected) if normalize else expected, rel=1e-6)


def test_the_flag_of_vllm_comes_before_the_files(tmp_path: Path) -> None:
    write_pooling(tmp_path, {"pooling_mode_mean_tokens": True}, normalize=False)
    assert read_pooling(tmp_path, {"pooling_type": "CLS"}) == Pooling(("cls",), True)
    told = {"pooling_type": "last", "use_activation": False}
    assert read_pooling(tmp_path, told) == Pooling(("lasttoken",), False)
    for wrong in ({"pooling_type": "STEP"}, {}, {"pooling_type": "CLS", "dimensions": 3}):
        with pytest.raises(BadUsage, match="pooler-config"):
            read_pooling(tmp_path, wrong)


def test_lengths_and_case_come_from_the_side_file(bert: Path, tmp_path: Path) -> None:
    for file in bert.rglob("*.*"):
        if file.is_file():
            (tmp_path / file.relative_to(bert)).parent.mkdir(exist_ok=True)
            (tmp_path / file.relative_to(bert)).write_bytes(file.read_bytes())
    side = tmp_path / "sentence_bert_config.json"
    side.write_text(json.dumps({"max_seq_length": 50, "do_lower_case": True}))
    embedder = Embedder.load(tmp_path)
    assert embedder.max_model_len == 50
    assert embedder.tokens("W7 w8") == (2, 11, 12, 3)
    assert Embedder.load(bert).tokens("W7 w8") == (2, 1, 12, 3)
    assert Embedder.load(bert).max_model_len == 130
    side.write_text(json.dumps({"max_seq_length": None, "do_lower_case": False}))
    assert Embedder.load(tmp_path).max_model_len == 130
    side.write_text(json.dumps({"max_seq_length": "many"}))
    with pytest.raises(MalformedCheckpoint, match="sentence_bert_config"):
        Embedder.load(tmp_path)


def _modules(*kinds: str, path: object = "1_Pooling") -> str:
    return json.dumps([{"idx": 0, "type": kind, "path": path} for kind in kinds])


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ({}, UnsupportedModel, "modules.json"),
        ({"modules.json": "{}"}, MalformedCheckpoint, "modules.json"),
        ({"modules.json": "[1"}, UllageError, "not JSON"),
        ({"modules.json": "[" * 99_999}, UllageError, "nested too deeply"),
        ({"modules.json": "[NaN]"}, UllageError, "NaN"),
        ({"modules.json": "[1]"}, UnsupportedModel, "None"),
        ({"modules.json": _modules("a.Transformer")}, MalformedCheckpoint, "no pooling"),
        ({"modules.json": _modules("a.Pooling")}, UllageError, "1_Pooling"),
        ({"modules.json": _modules("a.Pooling", "a.Dense")}, UnsupportedModel, "Dense"),
        ({"modules.json": _modules("a.Pooling", path="../x")}, MalformedCheckpoint, "path"),
        ({"modules.json": _modules("a.Pooling", path="/etc")}, MalformedCheckpoint, "path"),
        ({"modules.json": _modules("a.Pooling", path=None)}, MalformedCheckpoint, "path"),
    ],
)
def test_what_the_files_do_not_say_is_not_guessed(
    files: dict[str, str], error: type[UllageError], match: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=match):
        if "Dense" in files.get("modules.json", ""):
            (tmp_path / "1_Pooling").mkdir()
            (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
        read_pooling(tmp_path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    write_pooling(tmp_path, {"pooling_mode": "mean"}, normalize=True)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    os.mkfifo(tmp_path / "1_Pooling" / "config.json")
    with pytest.raises(UllageError, match="1_Pooling"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    "config", [{}, {"pooling_mode": "attention"}, {"pooling_mode": "mean", "window": 3}, [1]]
)
def test_a_pooling_that_is_not_known_is_refused(config: Any, tmp_path: Path) -> None:
    write_pooling(tmp_path, config, normalize=True)
    with pytest.raises((UnsupportedModel, MalformedCheckpoint), match="1_Pooling"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (lambda: EngineOptions(block_size=32), "--block-size"),
        (lambda: EngineOptions(enable_lora=True), "--enable-lora"),
        (lambda: EngineOptions(kv_cache_memory_bytes=1 << 20), "--kv-cache-memory-bytes"),
        (lambda: EngineOptions(max_model_len=131), "--max-model-len"),
        (lambda: EngineOptions(max_num_batched_tokens=129), "--max-num-batched-tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_flag(
    options: Callable[[], EngineOptions], flag: str, bert: Path
) -> None:
    with pytest.raises(BadUsage, match=flag):
        Embedder.load(bert, options())


def test_a_batch_holds_the_longest_text_where_nothing_else_was_asked(tmp_path: Path) -> None:
    directory = write_encoder("modernbert", tmp_path, max_position_embeddings=600)
    embedder = Embedder.load(directory)
    assert (embedder.max_model_len, embedder.max_num_batched_tokens) == (600, 600)
    shorter = Embedder.load(directory, EngineOptions(max_model_len=100))
    assert (shorter.max_model_len, shorter.max_num_batched_tokens) == (100, 512)
    assert embedder.embed([list(range(4, 304)) * 2]).shape == (1, 64)


def test_texts_that_cannot_be_embedded_are_refused_whole(bert: Path) -> None:
    embedder = Embedder.load(bert, EngineOptions(max_model_len=20))
    embedder.require_fits([319] * 20)
    for ids, match in (
        ([], "no tokens"),
        ([5] * 21, "21 tokens"),
        ([320], "vocabulary"),
        ([-1], "vocabulary"),
    ):
        with pytest.raises(TextRefused, match=match):
            embedder.require_fits(ids)


@pytest.mark.parametrize(
    "keys",
    [
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"add_cross_attention": True},
    ],
)
def test_keys_that_make_another_model_of_it_are_refused(
    keys: dict[str, object], bert: Path, tmp_path: Path
) -> None:
    (key,) = keys
    with pytest.raises(UnsupportedModel, match=key):
        _nested(bert, tmp_path, **keys)


def test_a_decoder_is_not_taken_for_an_encoder(family_dir: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModel, match="kind"):
        Embedder.load(family_dir("llama"))


@pytest.mark.parametrize(
    ("limit", "keep_end", "expected"),
    [
        (None, False, (2, 5, 6, 7, 8, 3)),
        (6, False, (2, 5, 6, 7, 8, 3)),
        (5, False, (2, 5, 6, 7, 3)),
        (5, True, (2, 6, 7, 8, 3)),
        (2, False, (2, 3)),
    ],
)
def test_a_cut_keeps_the_tokens_around_a_text(
    limit: int | None, keep_end: bool, expected: tuple[int, ...], bert: Path
) -> None:
    embedder = Embedder.load(bert)
    text = "w1 w2 w3 w4"
    assert embedder.tokens(text, limit=limit, keep_end=keep_end) == expected
    bare = embedder.tokens(text, limit=3, keep_end=keep_end, add_special=False)
    assert bare == ((6, 7, 8) if keep_end else (5, 6, 7))
    given = embedder.tokens([9, 8, 7, 6], limit=3, keep_end=keep_end)
    assert given == ((8, 7, 6) if keep_end else (9, 8, 7))
    assert embedder.tokens([9, 8], limit=3, keep_end=keep_end) == (9, 8)


def test_a_limit_without_room_is_refused(bert: Path) -> None:
    with pytest.raises(TextRefused, match="truncate_prompt_tokens"):
        Embedder.load(bert).tokens("w1", limit=1)


def _nested(bert: Path, directory: Path, **keys: object) -> Embedder:
    for file in bert.rglob("*.*"):
        if file.is_file():
            (directory / file.relative_to(bert)).parent.mkdir(exist_ok=True, parents=True)
            (directory / file.relative_to(bert)).write_bytes(file.read_bytes())
    config = json.loads((bert / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **keys}))
    return Embedder.load(directory)


def test_only_models_made_for_it_are_shortened(bert: Path, tmp_path: Path) -> None:
    plain = Embedder.load(bert)
    assert plain.dimensions(None) == plain.dimensions(64) == 64
    with pytest.raises(TextRefused, match="dimensions"):
        plain.dimensions(32)
    listed = _nested(bert, tmp_path / "listed", matryoshka_dimensions=[16, 32])
    assert [listed.dimensions(size) for size in (16, 32, 64)] == [16, 32, 64]
    with pytest.raises(TextRefused, match="16 or 32"):
        listed.dimensions(17)
    free = _nested(bert, tmp_path / "free", is_matryoshka=True)
    assert free.dimensions(17) == 17
    with pytest.raises(TextRefused, match="up to 64"):
        free.dimensions(65)
    vectors = free.embed([[5, 6], [7]])
    for vector, whole in zip(free.shortened(vectors, 16).tolist(), vectors.tolist(), strict=True):
        assert vector == pytest.approx(_unit(whole[:16]), abs=1e-6)
