"""The plugin's one pass over paged keys, held to the probe's own that is held to float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ullage_vllm import entropy
from ullage_vllm.entropy import COLUMNS, Keys, Place, Rule

from ullage.engine.rule import AttentionRule
from ullage.probes.attention.entropy import attention_rows

HEADS, KV_HEADS, DIM = 6, 2, 16
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "soft cap": {"soft_cap": 3.0},
    "slopes": {"slopes": tuple(2.0 ** -(at + 1) for at in range(HEADS))},
    "sinks": {"sinks": [0.5, -2.0, 9.0, 0.0, 30.0, -30.0]},
    "all of them": {
        "window": 300,
        "soft_cap": 20.0,
        "slopes": tuple(2.0 ** -(at + 1) for at in range(HEADS)),
        "sinks": [0.5, -2.0, 9.0, 0.0, 3.0, -30.0],
    },
}


def drawn(length: int, sharp: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    q_SHD = torch.randn(length, HEADS, DIM, generator=draw) * sharp
    k_SKD, v_SKD = (torch.randn(length, KV_HEADS, DIM, generator=draw) for _ in range(2))
    return q_SHD, k_SKD, v_SKD


def both(
    rule: dict[str, Any], length: int, rows: list[int], sharp: float = 1.0
) -> tuple[entropy.Rows, Any]:
    q_SHD, k_SKD, v_SKD = drawn(length, sharp)
    sinks, slopes, here = rule.get("sinks"), rule.get("slopes"), rule_of(rule)
    found = entropy.read(
        q_SHD[rows],
        rows,
        Keys(lambda start, stop: k_SKD[start:stop].permute(1, 2, 0)),
        here,
        lambda start, stop: v_SKD[start:stop].transpose(0, 1),
    )
    there = AttentionRule(0.25, here.window, here.soft_cap, slopes or ())
    expected = attention_rows(
        q_SHD[rows].double(),
        k_SKD.double(),
        torch.tensor(rows),
        there,
        sinks_H=None if sinks is None else torch.tensor(sinks).double(),
        values_SKD=v_SKD.double(),
    )
    return found, expected


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rows", [[0], [1], [700], [4999], [0, 1, 17, 300, 2047, 2048, 4999]])
def test_every_rule_gives_the_probes_numbers(name: str, rows: list[int]) -> None:
    """One row goes without masks; 5,000 keys are three tiles."""
    found, expected = both(RULES[name], 5000, rows)
    told = dict(zip(COLUMNS, found.columns_RHC.unbind(-1), strict=True))
    for ours, theirs in (
        ("entropy_nats", "entropy_nats"),
        ("sink_mass", "first_mass"),
        ("band_mass", "band_mass"),
        ("band_entropy_nats", "band_entropy_nats"),
        ("max_score", "max_score"),
    ):
        torch.testing.assert_close(told[ours], getattr(expected, theirs), atol=1e-4, rtol=1e-5)
    if "sinks" in RULES[name]:
        torch.testing.assert_close(
            told["entropy_with_sink_nats"], expected.entropy_with_sink_nats, atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            told["learned_sink_mass"], expected.learned_sink_mass, atol=1e-5, rtol=0
        )
    else:
        assert told["entropy_with_sink_nats"].isnan().all()
    torch.testing.assert_close(found.output_RHD, expected.output_RHD.float(), atol=1e-4, rtol=1e-4)


def rule_of(told: dict[str, Any]) -> Rule:
    slopes, sinks = told.get("slopes"), told.get("sinks")
    return Rule(
        scale=0.25,
        window=told.get("window"),
        soft_cap=told.get("soft_cap"),
        slopes_H=None if slopes is None else torch.tensor(slopes),
        sinks_H=None if sinks is None else torch.tensor(sinks),
    )


@pytest.mark.parametrize("position", [0, 1, 39, 700, 4999])
@pytest.mark.parametrize("most_scores", [1, 10_000, 1 << 20])
def test_a_row_of_many_layers_together_is_that_of_each(
    position: int, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of different rules, so that each sees other keys; held a few or all at a time."""
    monkeypatch.setattr(entropy, "MOST_SCORES", most_scores)
    places, expected = [], []
    for number, told in enumerate([*RULES.values(), *RULES.values()]):
        q_SHD, k_SKD, _ = drawn(5000 + number)
        keys = Keys(
            lambda start, stop, k_SKD=k_SKD: k_SKD[start:stop].permute(1, 2, 0), 100 + number
        )
        places.append(Place(q_SHD[position], keys, rule_of(told)))
        expected.append(entropy.read(q_SHD[[position]], [position], keys, rule_of(told)))
    found = entropy.one_row(places, position)
    whole = torch.cat([one.columns_RHC[0] for one in expected])
    torch.testing.assert_close(found, whole, atol=2e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("rows", [[2999], [2, 2048, 2999]])
def test_scores_of_thousands_lose_no_digit_that_counts(rows: list[int]) -> None:
    found, expected = both({}, 3000, rows, sharp=3000.0)
    torch.testing.assert_close(found.columns_RHC[..., 0], expected.entropy_nats, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [[60], [10, 60]])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_score_that_is_no_number_makes_its_head_no_number(rows: list[int], broken: float) -> None:
    q_SHD, k_SKD, _ = drawn(64)
    k_SKD[5, 1] = broken
    found = entropy.read(
        q_SHD[rows], rows, Keys(lambda a, b: k_SKD[a:b].permute(1, 2, 0)), Rule(scale=0.25)
    )
    assert not found.columns_RHC[:, HEADS // 2 :, 0].isfinite().any()
    assert found.columns_RHC[:, : HEADS // 2, 0].isfinite().all()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("position", [0, 30, 4999])
def test_weights_have_the_entropy_that_is_told(name: str, position: int) -> None:
    q_SHD, k_SKD, _ = drawn(5000)
    rule = RULES[name]
    slopes = rule.get("slopes")
    here = Rule(
        0.25, rule.get("window"), rule.get("soft_cap"),
        None if slopes is None else torch.tensor(slopes),
    )  # fmt: skip

    keys = Keys(lambda start, stop: k_SKD[start:stop].permute(1, 2, 0))
    told = entropy.weights(q_SHD[position], position, keys, here, head=4)
    assert len(told) == position + 1 - here.low(position)
    assert math.isclose(sum(told), 1.0, abs_tol=1e-9)
    rows = entropy.read(q_SHD[[position]], [position], keys, here)
    expected = -sum(one * math.log(one) for one in told if one)
    assert abs(expected - float(rows.columns_RHC[0, 4, 0])) < 1e-4
