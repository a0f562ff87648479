"""One answer's reading: cycles against a brute-force search, repetition, scripts, nothing kept."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ullage.probes.quality.answer import (
    MAX_PERIOD,
    TAIL_TOKENS,
    Cycle,
    QualityOfAnswer,
    repetition_ratio,
    tail_cycle,
)
from ullage.probes.quality.quality import likeliest
from ullage.probes.quality.scripts import SCRIPTS, count_letters, main_script, mixed, switched


def letters(text: str) -> list[int]:
    counts = [0] * len(SCRIPTS)
    count_letters(text, counts)
    return counts


def answer(tokens: list[int], text: str = "", prompt: str = "", *, cut: bool = True):
    state = QualityOfAnswer(letters(prompt))
    for token in tokens:
        state.take(token, "")
    state.take(None, text)
    return state.reading(at_limit=cut, temperature=0.7)


def by_brute_force(tokens: list[int], max_period: int) -> Cycle | None:
    """Every suffix, every period: the longest suffix that repeats at least twice."""
    for start in range(len(tokens)):
        suffix = tokens[start:]
        for period in range(1, min(max_period, len(suffix) // 2) + 1):
            if suffix[period:] == suffix[:-period]:
                return Cycle(period, len(suffix))
    return None


few = st.lists(st.integers(0, 2), max_size=40)


@given(few, st.integers(1, 12))
def test_the_cycle_is_the_one_that_brute_force_finds(tokens: list[int], max_period: int) -> None:
    assert tail_cycle(tokens, max_period) == by_brute_force(tokens, max_period)


@given(few, st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(2, 9), st.data())
def test_a_planted_cycle_is_found_whatever_came_before(
    before: list[int], cycle: list[int], times: int, data: st.DataObject
) -> None:
    rest = cycle[: data.draw(st.integers(0, len(cycle) - 1))]
    tokens = [*before, *cycle * times, *rest]
    found = tail_cycle(tokens)
    assert found == by_brute_force(tokens, MAX_PERIOD)
    assert found is not None and found.num_tokens >= len(cycle) * times + len(rest)


def test_a_loop_is_a_tail_that_repeats_often_and_long() -> None:
    sentence = list(range(20, 30))
    assert answer([*range(5), *sentence * 4]).looping
    assert not answer([*range(5), *sentence * 3]).looping  # three like lines are a list
    assert not answer([*range(40), *[7] * 20]).looping  # a rule of dashes
    assert not answer([*sentence * 9, 1, 2, 3]).looping  # it got out again
    assert answer([*range(300), *range(64), *range(64), *range(64), *range(64)]).looping


def test_stuck_is_a_few_tokens_up_to_the_limit() -> None:
    assert answer([1, 2, 3] * 20).stuck
    assert not answer([1, 2, 3] * 20, cut=False).stuck  # it ended by itself
    assert not answer([1, 2, 3] * 19).stuck
    assert not answer(list(range(9)) * 25).stuck  # a table's row, or a sentence: only a loop
    assert answer(list(range(9)) * 25).looping


def test_repetition_is_the_share_of_what_had_come_before() -> None:
    assert repetition_ratio(list(range(31))) is None
    assert repetition_ratio(list(range(200))) == 0
    assert repetition_ratio([7] * 32) == pytest.approx(28 / 29)
    assert repetition_ratio([*range(40), *range(40)]) == pytest.approx(37 / 77)


@given(st.lists(st.integers(0, 5), min_size=32, max_size=120))
def test_repetition_equals_a_plain_count(tokens: list[int]) -> None:
    seen: list[list[int]] = []
    again = 0
    for at in range(len(tokens) - 3):
        gram = tokens[at : at + 4]
        again += gram in seen
        seen.append(gram)
    assert repetition_ratio(tokens) == pytest.approx(again / len(seen))


def test_a_running_answer_is_of_bounded_size_and_an_ended_one_is_numbers() -> None:
    draw = random.Random(1)  # noqa: S311
    state = QualityOfAnswer(letters("A prompt of many letters"))
    sizes = []
    for number in range(20_000):
        state.take(draw.randrange(50_000), "secret words ")
        if number in (TAIL_TOKENS, 19_999):
            sizes.append(len(pickle.dumps(state)))
    assert sizes[1] <= sizes[0] + 64  # sums take more digits
    assert b"secret" not in pickle.dumps(state)
    found = state.reading(at_limit=True, temperature=0.5)
    assert found.num_tokens == 20_000
    values = dataclasses.asdict(found)
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    assert set(texts.values()) <= set(SCRIPTS)
    assert not [name for name, value in values.items() if isinstance(value, list | tuple)]


def test_confidence_is_the_mean_of_the_looks_and_unknown_without_any() -> None:
    state = QualityOfAnswer(letters(""))
    state.take(1, "")
    assert state.reading(at_limit=False, temperature=1.0).confidence is None
    for probability in (0.5, 0.9):
        state.look(probability)
    found = state.reading(at_limit=False, temperature=1.0)
    assert (found.confidence, found.num_looks) == (pytest.approx(0.7), 2)


# What Unicode's names call the letters of each script.
NAMES = {
    "LATIN": "latin", "FULLWIDTH LATIN": "latin", "GREEK": "greek",
    "CYRILLIC": "cyrillic", "HEBREW": "hebrew", "ARABIC": "arabic", "DEVANAGARI": "indic",
    "BENGALI": "indic", "TAMIL": "indic", "TELUGU": "indic", "THAI": "thai", "HANGUL": "hangul",
    "HALFWIDTH HANGUL": "hangul", "CJK": "cjk", "HIRAGANA": "cjk", "KATAKANA": "cjk",
    "HALFWIDTH KATAKANA": "cjk", "BOPOMOFO": "cjk", "GEORGIAN": "other", "ARMENIAN": "other",
    "ETHIOPIC": "other", "LAO": "other", "KHMER": "other", "CHEROKEE": "other",
}  # fmt: skip


@pytest.mark.parametrize("prefix", sorted(NAMES))
def test_every_letter_counts_for_the_script_that_unicode_names(prefix: str) -> None:
    """But for letters in blocks of signs and of phonetics, which are few."""
    wrong, total = 0, 0
    for code in range(0x32000):
        character = chr(code)
        if character.isalpha() and unicodedata.name(character, "").startswith(f"{prefix} "):
            total += 1
            wrong += not letters(character)[SCRIPTS.index(NAMES[prefix])]
    assert total > 20
    assert wrong <= 0.05 * total


ENGLISH = "Why is the sky blue? Answer in two sentences. "
CHINESE = "天空为什么是蓝色的？请用两句话回答。"
RUSSIAN = "Почему небо голубое? Ответь двумя предложениями."


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (ENGLISH, ENGLISH, False),
        (ENGLISH, RUSSIAN, True),
        (ENGLISH, CHINESE * 2, True),
        (CHINESE, ENGLISH, True),
        (CHINESE, CHINESE, False),
        # A template's English around a short question changes nothing.
        (f"You are a helpful assistant.\nuser\n{CHINESE}\nassistant\n", CHINESE, False),
        # Nor does it hide that the question was Chinese: an ideograph says more than a letter.
        (f"You are a helpful assistant named Small.\nuser\n{CHINESE[:9]}", ENGLISH, True),
        # Text to translate may be answered in either script.
        (f"Translate into Russian, keep the names: {ENGLISH}, {RUSSIAN[:20]}", RUSSIAN, False),
        (CHINESE, f"使用以下代码来回答这个问题：`print('{ENGLISH[:20]}')` 这样就可以了。", False),
        (ENGLISH, "42", None),
        ("?", ENGLISH, None),
        ("Pourquoi le ciel est-il bleu ? Réponds en deux phrases.", ENGLISH, False),  # one script
        ("空はなぜ青いのですか。二文で答えてください。", CHINESE, False),  # one script here
    ],
)
def test_a_script_that_was_not_asked_for(prompt: str, text: str, expected: bool | None) -> None:
    assert switched(letters(prompt), letters(text)) is expected


def test_three_scripts_in_one_answer_are_a_mixture() -> None:
    assert mixed(letters(ENGLISH + RUSSIAN + CHINESE))
    assert not mixed(letters(ENGLISH + RUSSIAN))
    assert not mixed(letters(CHINESE * 3 + "ABC γ привет"))
    assert not mixed(letters("日本語のテキスト、カタカナとひらがなと漢字。" * 3))


@given(st.text(max_size=60))
def test_any_text_is_counted_letter_by_letter_whatever_its_pieces(text: str) -> None:
    whole, pieces = letters(text), [0] * len(SCRIPTS)
    for character in text:
        count_letters(character, pieces)
    assert whole == pieces
    assert main_script(whole) is None or sum(whole) > 0


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50))
def test_the_likeliest_tokens_probability_is_softmaxs_largest(logits: list[float]) -> None:
    expected = torch.tensor(logits, dtype=torch.float64).softmax(0).max().item()
    for dtype in (torch.float32, torch.float64):
        assert likeliest(torch.tensor(logits, dtype=dtype)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_none_and_warn_nobody(bad: float) -> None:
    assert math.isnan(likeliest(torch.tensor([0.0, bad, 1.0])))
