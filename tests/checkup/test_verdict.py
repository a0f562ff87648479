"""The verdict's sentences: what is agreed, what is exact, what was left out."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.checkup.figures import figure
from ullage.checkup.prediction_parts import gap
from ullage.checkup.verdict import _memory, gaps_sentence, state_of


def grown(measured: float, tolerance: float) -> dict[str, Any]:
    """A document of which the growth of the KV cache is known only."""
    return {
        "run": None,
        "kv_growth": {
            "bytes_per_token_predicted": figure(46_080, "bytes/token", "modelled"),
            "bytes_per_token_measured": figure(measured, "bytes/token", "measured"),
            "tolerance": tolerance,
            "bytes_seen": True,
        },
    }


@pytest.mark.parametrize(
    ("measured", "tolerance", "said"),
    [
        # Within what sampling resolves: agreement, with its width, and no word of exactness.
        (48_614, 0.077, "48,614 were measured, which agrees within ±7.7%"),
        (46_080, 0.077, "46,080 were measured, which agrees within ±7.7%"),
        # Finer than half a byte of a token: now it is exact.
        (46_080, 1e-5, "what was measured is exactly that"),
        # Outside of it.
        (51_000, 0.077, "by prediction but 51,000 as measured"),
    ],
)
def test_growth_agrees_within_what_was_resolved(
    measured: float, tolerance: float, said: str
) -> None:
    sentence = _memory(grown(measured, tolerance))
    assert said in sentence
    assert ("exactly" in sentence) == (tolerance < 1e-4)


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ([], ""),
        ([gap("37 audit rules", "", "rule", 37)], "37 rules could not be evaluated; they are "),
        (
            [gap("a", ""), gap("37 audit rules", "", "rule", 37), gap("b", "")],
            "37 rules and 2 measurements could not be evaluated; they are named ",
        ),
        (
            [gap("x", "", "ledger"), gap("9", "", "rule", 9), gap("1", "", "rule"), gap("k", "")],
            "10 rules, 1 measurement and 1 memory ledger could not be evaluated",
        ),
        ([gap("a", "")], "1 measurement could not be evaluated; it is named below with its reason"),
    ],
)
def test_every_thing_left_out_is_counted_by_what_it_is(
    gaps: list[dict[str, Any]], said: str
) -> None:
    sentence = gaps_sentence(gaps)
    assert sentence.startswith(said)
    assert bool(sentence) == bool(gaps)


@pytest.mark.parametrize(
    ("state", "assumed", "verdict"),
    [
        ("equal", [], "sound"),
        ("not_evaluable", [], "sound"),
        ("differs", [], "attention"),
        # What rests on a default that the server may not have is no charge against it.
        ("differs", ["--dtype"], "sound"),
    ],
)
def test_another_allocation_needs_attention(state: str, assumed: list[str], verdict: str) -> None:
    assert state_of({}, True, None, 0, None, {"state": state, "assumed": assumed}) == verdict
