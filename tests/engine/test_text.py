"""Text of an answer as it streams: whole characters, stop strings, nothing said twice."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tests.engine.families import write_byte_tokenizer
from ullage.engine.text.tokenizer import TemplateError, TextStream, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory)
    return Tokenizer(FastTokenizer.from_file(str(directory / "tokenizer.json")), frozenset({2}))


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    said = []
    for token in ids:
        said.append(stream.push(token))
        if stream.stopped:
            break
    return [*said, stream.close()]


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=40), stops=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3)
)
def test_a_stream_says_what_comes_before_the_first_stop(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    said = "".join(pieces(tokenizer.stream(stops), tokenizer.encode(text)))
    ends = [text.find(stop) for stop in stops if stop in text]
    assert said == text[: min(ends, default=len(text))] or _earlier_stop(text, stops, said)


def _earlier_stop(text: str, stops: list[str], said: str) -> bool:
    """Of stops that overlap, the one that is complete first ends the text."""
    first = min(text.find(stop) + len(stop) for stop in stops if stop in text)
    return any(text.startswith(said + stop) and len(said + stop) == first for stop in stops)


@settings(max_examples=50, deadline=None)
@given(text=st.text("ab", min_size=1, max_size=30))
def test_what_is_said_is_never_taken_back(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream(["abba", "bb"])
    said = ""
    for token in tokenizer.encode(text):
        said += stream.push(token)
        assert not any(stop in said for stop in ("abba", "bb"))
        if stream.stopped:
            break


def test_characters_of_several_tokens_come_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é🙂")
    assert len(ids) == 6
    assert pieces(tokenizer.stream([]), ids) == ["", "é", "", "", "", "🙂", ""]


def test_half_a_character_at_the_end_is_shown_as_broken(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé")[:-1]
    assert pieces(tokenizer.stream([]), ids) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_possible_stop_is_held_back_and_released(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer.stream(["END"]), tokenizer.encode("aENb")) == ["a", "", "", "ENb", ""]


def test_templates_see_messages_and_may_refuse(tokenizer: Tokenizer) -> None:
    from dataclasses import replace

    template = (
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    chatty = replace(tokenizer, chat_template=template)
    assert chatty.apply_chat_template([{"role": "user", "content": "hi"}]) == "[user]hi[a]"
    with pytest.raises(TemplateError, match="no bad"):
        chatty.apply_chat_template([{"role": "bad", "content": "hi"}])
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% for",
    ],
)
def test_templates_cannot_leave_the_sandbox(tokenizer: Tokenizer, template: str) -> None:
    from dataclasses import replace

    with pytest.raises(TemplateError):
        replace(tokenizer, chat_template=template).apply_chat_template(
            [{"role": "user", "content": "hi"}]
        )


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path, family_dir) -> None:
    import shutil

    from ullage.engine.engine import Engine
    from ullage.errors import MalformedCheckpoint

    copy = shutil.copytree(family_dir("llama"), tmp_path / "model")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(MalformedCheckpoint, match=r"tokenizer\.json: missing"):
        Engine.load(copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(MalformedCheckpoint, match="not a tokenizer"):
        Engine.load(copy)


def test_encoding_a_long_text_leaves_others_their_turn(tokenizer: Tokenizer) -> None:
    """A server encodes in one thread while others hand out tokens and answer probes."""
    turns = 0
    done = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    before = turns
    ids = tokenizer.encode("hello " * 50_000)
    during = turns - before
    done.set()
    other.join()
    assert len(ids) >= 50_000
    assert during >= 5


def _wordpiece() -> FastTokenizer:
    """One token a letter; words of more than 100 letters become one [UNK], spaces nothing."""
    letters = "abcdefgh"
    vocab = {"[UNK]": 0, **{c: 1 + at for at, c in enumerate(letters)}}
    vocab |= {f"##{c}": 20 + at for at, c in enumerate(letters)}
    fast = FastTokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    fast.normalizer = normalizers.BertNormalizer()
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return fast


def _bytes() -> FastTokenizer:
    """One token a byte, and a special one that takes all spaces before it (as RoBERTa's mask)."""
    vocab = {c: at for at, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return fast


_KINDS = {"wordpiece": _wordpiece, "bytes": _bytes}
# What tokenizers shrink: runs of spaces, words too long for any token, accents, special tokens.
_PARTS = st.sampled_from(["a", "abc ", " ", "\n", "é", "e\u0301", "<mask>", "中", "a" * 150, "."])
_RUNS = st.lists(st.tuples(_PARTS, st.sampled_from([1, 2, 30, 9000])), max_size=4)


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=25, deadline=None)
@given(runs=_RUNS, limit=st.sampled_from([1, 8, 40]), keep_end=st.booleans())
def test_a_part_never_says_of_a_text_that_fits_that_it_is_too_long(
    kind: str, runs: list[tuple[str, int]], limit: int, keep_end: bool
) -> None:
    tokenizer = Tokenizer(_KINDS[kind](), frozenset())
    text = "".join(part * times for part, times in runs)
    ids = tokenizer.encode(text)
    part = tokenizer.far_more(text, limit, keep_end=keep_end)
    if part is not None:
        assert len(ids) > limit
        # And cut to the limit the part gives what the whole would.
        if keep_end:
            assert part.ids[-limit:] == ids[-limit:]
        else:
            assert part.ids[:limit] == ids[:limit]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("keep_end", [False, True])
def test_megabytes_are_known_to_be_too_long_from_a_small_part(kind: str, keep_end: bool) -> None:
    tokenizer = Tokenizer(_KINDS[kind](), frozenset())
    part = tokenizer.far_more("abc " * (1 << 20), 100, keep_end=keep_end)
    assert part is not None
    assert len(part) < 10_000
