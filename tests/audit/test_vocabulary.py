"""The scan of tokenizer.json finds the ids that a JSON parser finds, whatever the tokens hold."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.audit.vocabulary import Vocabulary, _number_beyond, read_vocabulary

TOKENS = st.text(st.sampled_from('ab"\\:{}[],1 9\n') | st.characters(codec="utf-8"), max_size=8)
VOCABULARIES = st.dictionaries(TOKENS, st.integers(0, 10**9), max_size=30)
ADDED = st.lists(st.tuples(st.integers(0, 10**9), TOKENS), max_size=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"


@settings(deadline=None)
@given(VOCABULARIES, ADDED, st.booleans(), st.sampled_from([None, 2]), TOKENS)
def test_ids_are_those_of_the_parser(place, vocab, added, ascii_only, indent, extra):
    document = {
        "note": extra,
        "added_tokens": [{"id": number, "content": text} for number, text in added],
        "model": {"type": "BPE", "unk_token": extra, "vocab": vocab, "merges": [extra]},
    }
    place.write_text(json.dumps(document, ensure_ascii=ascii_only, indent=indent), "utf-8")
    largest = max(vocab.values(), default=None)
    assert read_vocabulary(place) == Vocabulary(
        largest, max((number for number, _ in added), default=None)
    )


# What a text must not be taken for: a number behind a colon, with quotes and backslashes before it.
SHAMS = st.lists(
    st.sampled_from(
        ['"', "\\", ":", " ", "\n", "999999", "12", "}", "{", ",", '": 9999', "\\u0022:88"]
    ),
    max_size=6,
).map("".join)


@settings(deadline=None)
@given(
    texts=st.lists(SHAMS, unique=True, min_size=1, max_size=12),
    ids=st.lists(
        st.sampled_from([0, 8, 9, 10, 11, 99, 100, 9998, 9999, 10000, 88888]),
        min_size=12,
        max_size=12,
    ),
    in_order=st.booleans(),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_numbers_inside_tokens_are_no_ids(place, texts, ids, in_order, ascii_only, indent):
    ids = sorted(ids) if in_order else ids
    vocab = dict(zip(texts, ids, strict=False))
    model = {"model": {"vocab": vocab, "merges": texts}}
    place.write_text(json.dumps(model, ensure_ascii=ascii_only, indent=indent), "utf-8")
    assert read_vocabulary(place) == Vocabulary(max(vocab.values()), None)


@settings(deadline=None)
@given(st.integers(0, 10**12 - 2), st.integers(0, 10**12 - 1))
def test_a_number_beyond_another_is_seen(limit, number):
    found = _number_beyond(limit).search(b'"a": %d' % number)
    assert (found is not None) == (number > limit)


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.floats(-1e3, 0, allow_nan=False)), max_size=20))
def test_a_list_of_pieces_counts_places(place, pieces):
    place.write_text(json.dumps({"model": {"type": "Unigram", "vocab": pieces}}))
    last = len(pieces) - 1 if pieces else None
    assert read_vocabulary(place) == Vocabulary(last, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"model": {"vocab": {"a": 1, "b": "2"}}}',
        '{"model": {"vocab": {"a": 1',
        '{"model": {"vocab": {"a": 1 "b": 2}}}',
        '{"model": {"vocab": {"a": 1e3}}}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {"vocab": {"a": 1234567890123}}}',
        '{"model": {"vocab": {"a": 1]}}',
        '{"model": {"vocab": [["a", 1], "b"]}}',
        '{"added_tokens": [7], "model": {"vocab": {}}}',
        '{"added_tokens": [{"id": "7"}], "model": {"vocab": {}}}',
        '{"added_tokens": ' + "[" * 100_000 + ', "model": {"vocab": {}}}',
        '{"model": {"vocab": {' + '"a' * 100_000,
    ],
)
def test_what_cannot_be_read_is_named(place, text):
    place.write_text(text)
    found = read_vocabulary(place)
    assert isinstance(found, str) and "tokenizer.json" in found


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "regular file" in str(read_vocabulary(tmp_path / "tokenizer.json"))
