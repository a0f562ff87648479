"""Perplexity and agreement against their definitions, written out in Python's own floats."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch

from ullage.engine.text.tokenizer import Tokenizer
from ullage.errors import UllageError
from ullage.lab import passages
from ullage.lab.scoring import score

DRAW = torch.Generator().manual_seed(1)
LOGITS = torch.randn(7, 5, generator=DRAW)
NEXT = torch.tensor([0, 4, 2, 2, 1, 3, 0])


def by_hand(logits, nexts):
    total = 0.0
    for row, token in zip(logits.tolist(), nexts.tolist(), strict=True):
        total -= row[token] - math.log(sum(math.exp(x) for x in row))
    return math.exp(total / len(nexts))


def test_perplexity_is_that_of_the_definition_however_it_is_cut():
    whole = score([(LOGITS, NEXT)])
    pieces = score([(LOGITS[:3], NEXT[:3]), (LOGITS[3:], NEXT[3:])])
    assert whole.perplexity == pytest.approx(by_hand(LOGITS, NEXT), rel=1e-6)
    assert pieces.perplexity == pytest.approx(whole.perplexity, rel=1e-9)


def test_change_is_the_ratio_of_perplexities():
    other = score([(LOGITS * 1.3, NEXT)])
    reference = score([(LOGITS, NEXT)])
    change, error = other.change(reference)
    assert change == pytest.approx(other.perplexity / reference.perplexity - 1, rel=1e-9)
    assert error > 0
    assert reference.change(reference) == (0.0, 0.0)


def test_agreement_counts_equal_first_choices():
    moved = LOGITS.clone()
    moved[2] = torch.tensor([9.0, 0, 0, 0, 0]) if LOGITS[2].argmax() != 0 else -moved[2]
    expected = sum(a == b for a, b in zip(moved.argmax(1), LOGITS.argmax(1), strict=True)) / 7
    found = score([(moved, NEXT)]).agreement(score([(LOGITS, NEXT)]))
    assert found == pytest.approx(expected) and found < 1


class Words:
    """A tokenizer that makes one id per character."""

    def encode(self, text, add_special=True):
        return [ord(c) for c in text]


def test_windows_are_the_same_every_time_and_do_not_overlap():
    tokenizer: Tokenizer = Words()  # type: ignore[assignment]
    text = passages.windows(tokenizer, 3, 50)
    assert text.ids == passages.windows(tokenizer, 3, 50).ids
    assert [len(window) for window in text.ids] == [50, 50, 50]
    assert text.num_scored == 3 * 49
    joined = "".join(chr(i) for window in text.ids for i in window)
    first = "\n\n".join(islice(passages.docstrings(), 5))
    assert len(first) > len(joined) and first.startswith(joined)


def test_too_little_text_is_said_and_never_repeated(monkeypatch):
    monkeypatch.setattr(passages, "MODULES", ("this",))
    with pytest.raises(UllageError, match="are needed"):
        passages.windows(Words(), 3, 50)  # type: ignore[arg-type]
