"""Which script a text is written in, counted letter by letter: no text is kept.

Holds the table of scripts and the counting. Languages that share a script are not told apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

SCRIPTS = (
    *("latin", "greek", "cyrillic", "hebrew", "arabic", "indic", "thai", "hangul", "cjk", "other"),
)
LATIN, CJK = SCRIPTS.index("latin"), SCRIPTS.index("cjk")

# First code point of each run of Unicode blocks (Blocks.txt 16.0) → script. Kana count as cjk:
# Japanese writes both in one sentence. Blocks of scripts that are not named are "other".
_RUNS: tuple[tuple[int, str], ...] = (
    (0x0000, "latin"),
    (0x0370, "greek"),
    (0x0400, "cyrillic"),
    (0x0530, "other"),
    (0x0590, "hebrew"),
    (0x0600, "arabic"),
    (0x0700, "other"),
    (0x0750, "arabic"),
    (0x0780, "other"),
    (0x0860, "arabic"),
    (0x0900, "indic"),
    (0x0E00, "thai"),
    (0x0E80, "other"),
    (0x1100, "hangul"),
    (0x1200, "other"),
    (0x1C80, "cyrillic"),
    (0x1C90, "other"),
    (0x1D00, "latin"),
    (0x1F00, "greek"),
    (0x2000, "latin"),
    (0x2C80, "other"),
    (0x2DE0, "cyrillic"),
    (0x2E00, "other"),
    (0x2E80, "cjk"),
    (0x3130, "hangul"),
    (0x3190, "cjk"),
    (0xA000, "other"),
    (0xA640, "cyrillic"),
    (0xA6A0, "other"),
    (0xA720, "latin"),
    (0xA800, "other"),
    (0xA8E0, "indic"),
    (0xA900, "other"),
    (0xA960, "hangul"),
    (0xA980, "other"),
    (0xAB30, "latin"),
    (0xAB70, "other"),
    (0xAC00, "hangul"),
    (0xD800, "other"),
    (0xF900, "cjk"),
    (0xFB00, "latin"),
    (0xFB07, "other"),
    (0xFB1D, "hebrew"),
    (0xFB50, "arabic"),
    (0xFE00, "other"),
    (0xFE70, "arabic"),
    (0xFF00, "latin"),
    (0xFF66, "cjk"),
    (0xFFA0, "hangul"),
    (0xFFE0, "other"),
    (0x1AFF0, "cjk"),
    (0x1B170, "other"),
    (0x1E030, "cyrillic"),
    (0x1E090, "other"),
    (0x1EE00, "arabic"),
    (0x1EF00, "other"),
    (0x20000, "cjk"),
    (0x32000, "other"),
)
_STARTS = tuple(start for start, _ in _RUNS)
_GROUPS = tuple(SCRIPTS.index(name) for _, name in _RUNS)

CJK_LETTERS = 3
"""An ideograph says what about so many letters of an alphabet say."""
LEAST_LETTERS = 16
"""Fewer letters have no script worth a word: an acronym, a number with its unit."""
NOTED = 0.2
"""Latin stands in every text (code, names, a template's roles): another script with this share of
the letters is what the text is written in."""
PRESENT, MIXED = 0.05, 0.1
"""The share from which a script of the prompt may be answered in; and from which three scripts in
one answer are a mixture."""


def count_letters(text: str, counts: list[int]) -> None:
    """Add the letters of `text` to `counts`, one count per script of SCRIPTS."""
    if text.isascii():
        counts[LATIN] += sum(map(str.isalpha, text))
        return
    for character in text:
        if character.isalpha():
            group = _GROUPS[bisect_right(_STARTS, ord(character)) - 1]
            counts[group] += CJK_LETTERS if group == CJK else 1


def main_script(counts: Sequence[int]) -> int | None:
    """What a text with these letters is written in; None of too few letters."""
    total = sum(counts)
    if total < LEAST_LETTERS:
        return None
    count, foreign = max((count, -at) for at, count in enumerate(counts) if at != LATIN)
    return -foreign if count >= NOTED * total else LATIN


def switched(prompt: Sequence[int], answer: Sequence[int]) -> bool | None:
    """Whether an answer is in a script that its prompt did not ask for; None where that is open.

    Asked for is what the prompt is written in, and any script but Latin that is present in it: a
    sentence to translate.
    """
    asked, given = main_script(prompt), main_script(answer)
    if asked is None or given is None:
        return None
    if given in (asked, LATIN):
        return given != asked
    return prompt[given] < PRESENT * sum(prompt)


def mixed(answer: Sequence[int]) -> bool:
    """Whether three scripts or more share an answer."""
    total = sum(answer)
    return total >= 2 * LEAST_LETTERS and sum(n >= MIXED * total for n in answer) >= 3
