"""What DCGM tells for ever, or only because a device comes to rest, is no news."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.watch.rules.cases import NOW_S, World
from ullage.findings.finding import Finding
from ullage.telemetry.snapshot import Gpu
from ullage.watch.rule import judge
from ullage.watch.rules.gpus import FATAL_XIDS, RULES


def finding(rule_id: str, *gpus: Gpu, started_s: float | None = NOW_S - 4000) -> Finding:
    world = World(gpus=gpus)
    world.who = replace(world.who, started_s=started_s)
    (rule,) = (rule for rule in RULES if rule.id == rule_id)
    return judge(rule, world.subject()).finding


@pytest.mark.parametrize("code", FATAL_XIDS)
def test_a_fatal_xid_that_came_while_watching_fires(code: int) -> None:
    found = finding("W019", Gpu("0", xid_errors=float(code), xid_s=NOW_S - 60))
    assert found.state == "fired"
    assert f"Xid {code}, {FATAL_XIDS[code]}." in found.cause


@pytest.mark.parametrize("code", FATAL_XIDS)
def test_of_one_that_was_there_before_nothing_is_claimed(code: int) -> None:
    found = finding("W019", Gpu("0", xid_errors=float(code)))
    assert found.state == "not_evaluable"
    assert f"Xid {code}" in found.missing[0] and "when watching began" in found.missing[0]


def test_an_old_xid_of_one_device_hides_no_new_one_of_another() -> None:
    found = finding("W019", Gpu("0", xid_errors=48.0), Gpu("1", xid_errors=79.0, xid_s=NOW_S))
    assert found.state == "fired"
    assert "GPU 1: Xid 79" in found.cause and "GPU 0" not in found.cause


def test_an_engine_that_began_after_the_error_runs_on_what_was_mended() -> None:
    gpu = Gpu("0", xid_errors=94.0, xid_s=NOW_S - 60)
    assert finding("W019", gpu, started_s=NOW_S - 30).state == "clear"
    assert finding("W019", gpu, started_s=None).state == "fired"


def test_a_slowdown_without_a_cause_is_one_only_at_work() -> None:
    """The driver says hw_slowdown of a change of clocks, too."""
    resting = Gpu("0", throttled_because=("hw_slowdown",), busy_ratio=0.0)
    assert finding("W018", resting).state == "clear"
    assert finding("W018", replace(resting, busy_ratio=None)).state == "clear"
    assert finding("W018", replace(resting, busy_ratio=0.9)).state == "fired"
    hot = replace(resting, throttled_because=("hw_slowdown", "hw_thermal_slowdown"))
    assert finding("W018", hot).state == "fired"


def test_no_reason_is_an_answer_and_no_word_of_reasons_is_none() -> None:
    assert finding("W018", Gpu("0", throttled_because=())).state == "clear"
    assert finding("W018", Gpu("0")).state == "not_evaluable"
