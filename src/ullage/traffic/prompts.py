"""Prompts of real tokens in exact lengths, the same for the same seed.

Holds how a passage of ours becomes prompts. Lengths and times come from `trace.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeVar

T = TypeVar("T")

# Runs of this many tokens keep the text's own statistics while no two prompts share a long prefix,
# which a prefix cache would otherwise turn into prefill that never happens.
SHORTEST_RUN, LONGEST_RUN = 12, 40
FIRST_RUN = 3


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where prompts are cut from: token ids of the passage, or its words where ids are not taken.

    `tokens_per_word` says how many of the server's tokens a word was seen to make.
    """

    ids: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    tokens_per_word: float = 1.0

    @property
    def description(self) -> str:
        if self.ids:
            return "token ids of a passage that ships with ullage, cut and shuffled (exact lengths)"
        return "words of a passage that ships with ullage (lengths approximate, by the word)"


def passage() -> str:
    """The text that prompts are cut from; written for this purpose."""
    return (files("ullage.traffic") / "data" / "passage.txt").read_text(encoding="utf-8")


def random_ids(vocab_size: int, *, seed: int, count: int = 512) -> tuple[int, ...]:
    """Ids drawn evenly over a vocabulary, for a server that cannot tokenize.

    The first 8 ids are left out: that is where tokenizers keep their control tokens.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    low = 8 if vocab_size > 16 else 0
    return tuple(draw.randrange(low, vocab_size) for _ in range(count))


def make_prompt(source: PromptSource, num_tokens: int, *, seed: int) -> tuple[int, ...] | str:
    """A prompt of `num_tokens` tokens (ids: exactly; words: about). Same arguments, same prompt."""
    assert num_tokens > 0, "a prompt has at least one token"
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    if source.ids:
        return tuple(_runs(source.ids, num_tokens, draw))
    num_words = max(1, round(num_tokens / source.tokens_per_word))
    return " ".join(_runs(source.words, num_words, draw))


def _runs(items: tuple[T, ...], count: int, draw: random.Random) -> list[T]:
    """`count` items in runs from random places. The first run is short, so that openings differ."""
    out: list[T] = []
    length = FIRST_RUN
    while len(out) < count:
        at = draw.randrange(len(items))
        out.extend(items[at : at + length])
        length = draw.randint(SHORTEST_RUN, LONGEST_RUN)
    return out[:count]
