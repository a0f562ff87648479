"""W016 on a replica that flips between identities; which changes count is in `test_rules.py`."""

from __future__ import annotations

from tests.watch.rules.cases import NOW_S, World
from ullage.findings.finding import Finding
from ullage.watch.changes import MAX_CHANGES
from ullage.watch.rule import judge
from ullage.watch.rules.identity import MOST_TOLD, RULES
from ullage.watch.view import Change


def swapped(*changes: Change) -> Finding:
    (rule,) = RULES
    return judge(rule, World(changes=changes).subject()).finding


def flip(at: int) -> Change:
    before, after = ("0.31.0", "0.32.0") if at % 2 else ("0.32.0", "0.31.0")
    return Change(NOW_S - MAX_CHANGES + at, "version", before, after)


def test_a_replica_that_flips_is_told_in_a_few_sentences():
    num = 12
    told = swapped(*map(flip, range(num)))
    assert told.cause.count("It runs another version") == MOST_TOLD
    assert told.cause.endswith(f"And {num - MOST_TOLD} more such changes within 5 min.")


def test_no_more_is_counted_than_is_kept():
    told = swapped(*map(flip, range(MAX_CHANGES)))
    assert f"And at least {MAX_CHANGES - MOST_TOLD} more" in told.cause


def test_a_version_is_told_before_any_number_of_flags():
    flags = [Change(NOW_S - 10, f"flag{at}", "1", "2") for at in range(2 * MOST_TOLD)]
    told = swapped(Change(NOW_S - 60, "version", "0.31.0", "0.32.0"), *flags)
    assert told.cause.startswith("It runs another version: 0.31.0 → 0.32.0.")
    assert "flag0 is another" in told.cause
    assert len(told.evidence) == 2 + 2 * MOST_TOLD


def test_few_changes_are_all_told():
    told = swapped(*map(flip, range(MOST_TOLD)))
    assert told.cause.count("It runs another version") == MOST_TOLD
    assert "more" not in told.cause
