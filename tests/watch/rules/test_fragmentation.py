"""How full pages are, and which block suits, against every request counted one by one."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.watch.rules.cases import seen_as
from ullage.watch.rules.fragmentation import GOOD, SIZES, better_size, use_of_pages

LENGTHS = st.lists(st.integers(1, 6000), min_size=1, max_size=40)


def true_use(lengths: list[int], grown: int, size: int) -> float:
    whole = [length + grown for length in lengths]
    return sum(whole) / sum(size * math.ceil(length / size) for length in whole)


@given(LENGTHS, st.integers(0, 500), st.sampled_from((1, *SIZES, 8192)))
def test_the_range_holds_the_truth(lengths: list[int], grown: int, size: int):
    prompts = seen_as("request_prompt_tokens", *((float(v), 1.0) for v in lengths))
    use = use_of_pages(size, prompts, float(grown))
    truth = true_use(lengths, grown, size)
    assert use.low - 1e-9 <= truth <= use.high + 1e-9
    assert 0 < use.low <= use.high <= 1


@given(LENGTHS, st.integers(0, 500))
def test_the_better_size_is_good_or_the_smallest(lengths: list[int], grown: int):
    prompts = seen_as("request_prompt_tokens", *((float(v), 1.0) for v in lengths))
    size = better_size(prompts, float(grown))
    assert size in SIZES
    assert size == SIZES[0] or true_use(lengths, grown, size) >= GOOD
