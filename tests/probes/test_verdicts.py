"""Alarms said as findings: of which layers, in which words."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.probes.baseline.judging import Alarm
from ullage.probes.baseline.relations import Cell
from ullage.probes.baseline.verdicts import of_alarms


def test_a_kind_in_many_layers_is_one_finding() -> None:
    alarms = [Alarm(Cell("mixer_norm", layer), 90.0, 1, 1) for layer in range(7)]
    found = [
        one for one in of_alarms(alarms, 1, lambda _: False, {}) if one.finding.state == "fired"
    ]
    assert [(one.kind, one.layers) for one in found] == [("norm", tuple(range(7)))]


def _alarm(part: str, layer: int | None, head: int | None = None, **more: Any) -> Alarm:
    return Alarm(Cell(part, layer, head), more.pop("z", 90.0), 1, 4, **more)


@pytest.mark.parametrize(
    ("alarms", "cause"),
    [
        ([_alarm("q", 7, 4, factor=4.0)],
         "Q of head 4 in layer 7 does not give what the baseline's weights give: it is 4 times as "
         "large."),
        ([_alarm("k", 2, head, factor=0.0) for head in range(3)],
         "K of heads 0, 1, 2 in layer 2 does not give what the baseline's weights give: nothing "
         "comes of it."),
        ([_alarm("k", 2, 0, factor=0.0), _alarm("k", 2, 1, z=95.0, factor=3.0)],
         "K of heads 0, 1 in layer 2 does not give what the baseline's weights give, furthest k of "
         "head 1: it is 3 times as large."),
        ([_alarm("v", layer, head) for layer in range(6) for head in range(2)],
         "V in 6 layers (0, 1, 2, 3, 4, 5) does not give what the baseline's weights give."),
        ([_alarm("gate", 1), _alarm("down", 1)],
         "Gate, down in layer 1 do not give what the baseline's weights give."),
        ([_alarm("mlp_norm", 3, channel=9, made=2.0, said=1.0)],
         "Mlp_norm in layer 3 does not give what the baseline's weights give, furthest in channel "
         "9: it is 2 times as large."),
        ([_alarm("mixer_norm", at, channel=9, made=3.0, said=1.0, z=90.0 + at) for at in range(5)],
         "Mixer_norm in 5 layers (0, 1, 2, 3, 4) does not give what the baseline's weights give, "
         "furthest mixer_norm in layer 4 in channel 9: it is 3 times as large."),
        ([_alarm("lm_head", None)], "Lm_head does not give what the baseline's weights give."),
        ([_alarm("activation", 1)],
         "Activation in layer 1 does not give what the baseline's activation function gives."),
        ([_alarm("attention", 1, 0)],
         "Attention of head 0 in layer 1 does not give what another kernel gives over the same "
         "cache."),
        ([_alarm("rope", at) for at in range(2)],
         "Rope in 2 layers (0, 1) does not give what the baseline's angles give."),
    ],
)  # fmt: skip
def test_a_cause_speaks_of_all_that_stand_and_of_what_each_is_held_to(
    alarms: list[Alarm], cause: str
) -> None:
    found = of_alarms(alarms, 4, lambda _: False, {})
    assert [one.finding.cause for one in found if one.finding.state == "fired"] == [cause]
