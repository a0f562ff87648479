"""The fastest round counts, and everybody gets his turns."""

from __future__ import annotations

import time

from ullage.lab.timing import race


def test_the_fastest_round_counts_whatever_the_others_were():
    calls = []

    def uneven():
        calls.append(None)
        time.sleep(0.05 if len(calls) % 2 else 0.002)

    found = race({"uneven": uneven, "slow": lambda: time.sleep(0.02)}, budget_s=0.2, least=4)
    assert 0.002 <= found["uneven"] < 0.02 <= found["slow"]


def test_variants_take_turns():
    order = []
    race(
        {name: lambda name=name: (order.append(name), time.sleep(0.002)) for name in "ab"},
        budget_s=0.0,
        least=3,
    )
    assert "".join(order[-6:]) == "ababab"
