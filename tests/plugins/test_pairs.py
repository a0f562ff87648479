"""benchmarks/plugin: the bounds of a ratio, against tables of Student's t and against drawing."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "plugin"))

from plugin_pairs import adjusted_ratio, ratio_of, ratio_of_groups, t_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (29, 2.045), (100, 1.984)],
)
def test_the_quantile_is_that_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=6e-4)


def test_the_bounds_hold_the_truth_as_often_as_they_say() -> None:
    draw = random.Random(3)  # noqa: S311
    held = 0
    for _ in range(150):
        pairs = []
        for _ in range(12):
            base = draw.uniform(1, 2)
            pairs.append((base, base * 1.02 * draw.lognormvariate(0, 0.02)))
        found = ratio_of(pairs)
        held += found.low <= 1.02 <= found.high
    assert 133 <= held <= 150


def test_pairs_of_one_group_that_are_alike_do_not_narrow_the_bounds_of_groups() -> None:
    draw = random.Random(5)  # noqa: S311
    held_by_group = held_by_pair = 0
    for _ in range(150):
        groups = []
        for _ in range(8):
            luck = draw.lognormvariate(0, 0.02)
            groups.append([(1.0, 1.02 * luck * draw.lognormvariate(0, 0.002)) for _ in range(6)])
        by_group = ratio_of_groups(groups)
        by_pair = ratio_of([pair for group in groups for pair in group])
        assert by_group.mean == pytest.approx(by_pair.mean)
        held_by_group += by_group.low <= 1.02 <= by_group.high
        held_by_pair += by_pair.low <= 1.02 <= by_pair.high
    assert 133 <= held_by_group <= 150
    assert held_by_pair < 110


def test_a_control_takes_away_what_it_shares_and_the_bounds_still_hold_the_truth() -> None:
    draw = random.Random(7)  # noqa: S311
    held, narrower = 0, 0
    for _ in range(150):
        pairs, controls = [], []
        for _ in range(20):
            disturbed = [draw.lognormvariate(0, 0.05) for _ in range(2)]
            noise = [draw.lognormvariate(0, 0.01) for _ in range(4)]
            pairs.append((disturbed[0] * noise[0], 1.02 * disturbed[1] * noise[1]))
            controls.append((disturbed[0] * noise[2], disturbed[1] * noise[3]))
        found, plain = adjusted_ratio(pairs, controls), ratio_of(pairs)
        held += found.low <= 1.02 <= found.high
        narrower += found.high - found.low < (plain.high - plain.low) / 2
    assert 133 <= held <= 150
    assert narrower > 140


def test_one_has_no_spread() -> None:
    with pytest.raises(ValueError, match="1 ratios"):
        ratio_of([(1.0, 1.0)])
    with pytest.raises(ValueError, match="1 ratios"):
        ratio_of_groups([[(1.0, 1.0), (1.0, 1.1)]])
    with pytest.raises(ValueError, match="2 ratios"):
        adjusted_ratio([(1.0, 1.1)] * 2, [(1.0, 1.1)] * 2)
    with pytest.raises(ValueError, match="never moves"):
        adjusted_ratio([(1.0, 1.1)] * 5, [(1.0, 1.0)] * 5)
