"""What a replica says of itself, over time: changes are told once, in words that can be read."""

from __future__ import annotations

import pytest

from ullage.telemetry.snapshot import Identity
from ullage.watch.changes import Known


def changed(before: Identity, after: Identity) -> list[tuple[str, str, str]]:
    known = Known()
    known.take(before, 1.0)
    known.take(after, 2.0)
    return [(change.what, change.before, change.after) for change in known.changes]


@pytest.mark.parametrize(
    "before, after, told",
    [
        ("7.083333333333333", "1.0833333333333333", ("7.08333", "1.08333")),
        ("0.9", "0.92", ("0.9", "0.92")),
        ("2097152", "327680", ("2097152", "327680")),
        ("auto", "fp8", ("auto", "fp8")),
        ("1.2.3456789", "1.2.3456790", ("1.2.3456789", "1.2.3456790")),
    ],
)
def test_a_long_fraction_is_told_to_six_digits_and_nothing_else_is_touched(
    before: str, after: str, told: tuple[str, str]
) -> None:
    found = changed(Identity(settings={"flag": before}), Identity(settings={"flag": after}))
    assert found == [("flag", *told)]


def test_a_version_that_looks_like_a_number_stays_as_it_is() -> None:
    before, after = Identity(version="2026.1130001"), Identity(version="2026.1130002")
    assert changed(before, after) == [("version", "2026.1130001", "2026.1130002")]


def test_what_it_stops_saying_is_no_change() -> None:
    assert changed(Identity(settings={"flag": "1"}), Identity()) == []
