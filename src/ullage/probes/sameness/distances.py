"""How far apart two marks are: of a weight by its sketch, of answers by their log-probabilities.

Holds arithmetic on `marks` only, without torch or numpy. What a distance means is `sameness`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ullage.probes.sameness.marks import AnswerMark, Noise, ValueMark

NOT_FINITE = 1e9
"""The distance to a weight that holds NaN or Inf; JSON has no Inf."""


def weights_apart(one: ValueMark, other: ValueMark) -> float:
    """‖a − b‖ / ‖a‖ as the sketches tell it: right to a quarter for most differences.

    The sum of a difference's elements with random signs has an expected square of its own; 32
    buckets of such sums have a relative spread of √(2/32). A change of one element is told exactly.
    """
    if not one.sketch or not other.sketch:
        return 0.0 if one.sketch == other.sketch else NOT_FINITE
    squares = sum((x - y) ** 2 for x, y in zip(one.sketch, other.sketch, strict=True))
    largest = max(one.norm, other.norm)
    return math.sqrt(squares) / largest if largest else 0.0


def answers_apart(
    one: Sequence[AnswerMark], other: Sequence[AnswerMark]
) -> tuple[float, float, int] | None:
    """Mean and largest |Δ logprob| over all tokens of prompts that both have, and how many tokens.

    None: no prompt is cut into the same tokens on both sides, so nothing can be compared.
    """
    theirs = {mark.prompt: mark for mark in other}
    gaps = [
        abs(x - y)
        for mark in one
        if (match := theirs.get(mark.prompt)) is not None and cut_alike(mark, match)
        for x, y in zip(mark.logprobs, match.logprobs, strict=True)
    ]
    return (sum(gaps) / len(gaps), max(gaps), len(gaps)) if gaps else None


def cut_alike(one: AnswerMark, other: AnswerMark) -> bool:
    """Whether both cut the prompt into the same tokens, as far as both tell."""
    if one.num_tokens != other.num_tokens:
        return False
    return None in (one.token_ids, other.token_ids) or one.token_ids == other.token_ids


def noise_of(
    precision: str, exact: Sequence[AnswerMark], rounded: Sequence[AnswerMark]
) -> Noise | None:
    """How far `rounded` is from `exact`."""
    found = answers_apart(exact, rounded)
    return None if found is None else Noise(precision, round(found[0], 7), round(found[1], 7))
