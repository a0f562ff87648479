"""The running judgement: what explains a residual, what is unusual, and how it is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.probes.planting import PROMPTS
from ullage.engine.options import EngineOptions
from ullage.probes.baseline import usual
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.judging import Judge, z_of
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.relations import KINDS, Cell, Residuals
from ullage.probes.baseline.rules import RULES
from ullage.probes.baseline.usual import Requests
from ullage.probes.baseline.verdicts import verdicts


@pytest.fixture(scope="module")
def baseline(family_dir: Callable[[str], Path]) -> Baseline:
    options = EngineOptions(enforce_eager=True)
    return learn(family_dir("llama"), PROMPTS, options, new_tokens=24)


def healthy(baseline: Baseline, random: np.random.Generator) -> Residuals:
    """As rounding leaves them: normal, of the baseline's own noise."""
    count = len(baseline.cells)
    said = random.standard_normal(count) + 3.0
    off = random.standard_normal(count) * np.nan_to_num(baseline.noise[0], nan=0.0)
    return Residuals(
        residual=np.abs(off), size=np.ones(count), floor=np.zeros(count), made=said + off,
        said=said, adapted=np.zeros(count), channels=np.full(count, -1),
    )  # fmt: skip


def at(baseline: Baseline, part: str, layer: int | None, head: int | None = None) -> int:
    return baseline.cells.index(Cell(part, layer, head))


def changed(residuals: Residuals, number: int, made: float) -> None:
    residuals.made[number] = made
    residuals.residual[number] = abs(made - residuals.said[number])


def see(judge: Judge, residuals: Residuals, figures: Any = None, request: str = "a") -> bool:
    if figures is None:
        figures = judge.baseline.usual.mean
    return judge.see(residuals, figures, request, compiled=False)


def fired(judge: Judge) -> dict[str, Any]:
    return {one.finding.id: one for one in verdicts(judge) if one.finding.state == "fired"}


def test_normal_residuals_of_the_known_size_raise_nothing(baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(1)
    for _ in range(2_000):
        assert not see(judge, healthy(baseline, random))
    assert not judge.alarms() and not fired(judge)


def test_what_was_healthy_before_does_not_hide_a_factor(baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(12)
    number = at(baseline, "q", 1, 2)
    for _ in range(200):
        see(judge, healthy(baseline, random))
    for _ in range(3):
        residuals = healthy(baseline, random)
        changed(residuals, number, 4.0 * residuals.said[number])
        see(judge, residuals)
    (alarm,) = judge.alarms()
    assert alarm.factor == pytest.approx(4.0, abs=1e-6)


def test_of_one_row_nothing_is_explained(baseline: Baseline) -> None:
    """One residual is some multiple of whatever stands beside it, an adapter's part included."""
    judge, random = Judge(baseline), np.random.default_rng(13)
    residuals = healthy(baseline, random)
    number = at(baseline, "q", 1, 2)
    residuals.adapted[number] = 0.7
    changed(residuals, number, 1.3 * residuals.said[number])
    see(judge, residuals)
    (alarm,) = judge.alarms()
    assert alarm.factor is None and alarm.adapter_share is None
    assert fired(judge)["P001"].kind == "q"


@pytest.mark.parametrize("factor", [4.0, 0.0, 0.5, -1.0])
def test_an_output_times_a_factor_is_said_so(factor: float, baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(2)
    number = at(baseline, "v", 2, 1)
    for _ in range(4):
        residuals = healthy(baseline, random)
        changed(residuals, number, factor * residuals.said[number])
        see(judge, residuals)
    (one,) = fired(judge).values()
    assert (one.kind, one.layer, one.heads) == ("v", 2, (1,))
    (alarm,) = judge.alarms()
    assert alarm.factor == pytest.approx(factor, abs=1e-6)
    said = "nothing comes of it" if factor == 0 else f"{factor:.3g} times as large"
    assert said in one.finding.cause


@pytest.mark.parametrize(
    ("factor", "said"),
    [(1.0003, "0.03% too large"), (0.98, "2.00% too small"), (1.1, "1.1 times as large")],
)
def test_a_factor_near_one_is_said_in_percent(factor: float, said: str, baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(2)
    number = at(baseline, "q", 0, 0)
    for _ in range(4):
        residuals = healthy(baseline, random)
        changed(residuals, number, factor * residuals.said[number])
        see(judge, residuals)
    assert said in fired(judge)["P001"].finding.cause


def test_what_no_factor_explains_is_not_called_one(baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(3)
    number = at(baseline, "o", 1)
    for sign in (1, -1, -1, 1, -1, 1):
        residuals = healthy(baseline, random)
        changed(residuals, number, residuals.said[number] + sign * 0.4)
        see(judge, residuals)
    (alarm,) = judge.alarms()
    assert alarm.factor is None and fired(judge)["P001"].kind == "o"


@pytest.mark.parametrize("seed", range(20))
def test_what_a_factor_explains_but_for_more_than_rounding_is_not_called_one(
    seed: int, baseline: Baseline
) -> None:
    """Rows of one text are alike: a single wrong weight then adds nearly the same to each."""
    judge, random = Judge(baseline), np.random.default_rng(seed)
    number = at(baseline, "up", 1)
    for _ in range(4):
        residuals = healthy(baseline, random)
        said = residuals.said[number]
        changed(residuals, number, said * (0.9 + 0.003 * random.standard_normal()))
        see(judge, residuals)
        (alarm,) = judge.alarms()
        assert alarm.factor is None
    assert "times as large" not in fired(judge)["P001"].finding.cause


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_an_adapter_in_part_is_an_adapters(share: float, baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(4)
    number = at(baseline, "down", 1)
    for _ in range(4):
        residuals = healthy(baseline, random)
        added = float(random.standard_normal())
        residuals.adapted[number] = added
        changed(residuals, number, residuals.said[number] + (share - 1) * added)
        see(judge, residuals)
    (one,) = fired(judge).values()
    assert (one.finding.id, one.kind, one.layers) == ("P006", "lora", (1,))


def test_gate_and_up_exchanged_are_said_so(baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(5)
    gate, up = at(baseline, "gate", 1), at(baseline, "up", 1)
    for _ in range(3):
        residuals = healthy(baseline, random)
        a, b = residuals.said[gate], residuals.said[up]
        changed(residuals, gate, b)
        changed(residuals, up, a)
        see(judge, residuals)
    (one,) = fired(judge).values()
    assert one.finding.cause.startswith("Gate and up have changed places in layer 1")


def test_gate_and_up_that_are_wrong_otherwise_are_never_said_to_be_exchanged(
    baseline: Baseline,
) -> None:
    """Of some rows each gives by chance about what the other should, of many layers in many."""
    random = np.random.default_rng(15)
    gate, up = at(baseline, "gate", 1), at(baseline, "up", 1)
    for off in (0.001, 0.05, 0.3, 1.0):
        for _ in range(50):
            judge = Judge(baseline)
            for row in range(12):
                residuals = healthy(baseline, random)
                if row % 3 == 0:
                    residuals.said[up] = residuals.said[gate] + 0.01 * random.standard_normal()
                for number in (gate, up):
                    by = off * random.standard_normal()
                    changed(residuals, number, residuals.said[number] + by)
                see(judge, residuals)
                assert not judge.exchanged(1), (off, row)


@pytest.mark.parametrize("part", KINDS)
def test_each_part_fires_the_rule_of_its_kind_in_its_layer(part: str, baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(6)
    number = next(n for n, cell in enumerate(baseline.cells) if cell.part == part)
    if np.isnan(baseline.noise[0, number]):
        pytest.skip("this model has no such part")
    residuals = healthy(baseline, random)
    changed(residuals, number, residuals.said[number] + 1.0)
    assert see(judge, residuals)
    (one,) = fired(judge).values()
    rule = next(rule for rule in RULES if rule.id == one.finding.id)
    assert one.kind == KINDS[part] and one.kind in rule.kinds
    assert one.layer == baseline.cells[number].layer


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_begins_where_a_row_meets_it_first(
    value: float, baseline: Baseline
) -> None:
    judge, random = Judge(baseline), np.random.default_rng(7)
    residuals = healthy(baseline, random)
    for part, layer in (("down", 1), ("mixer_norm", 2), ("q", 2), ("lm_head", None)):
        for number, cell in enumerate(baseline.cells):
            if (cell.part, cell.layer) == (part, layer):
                changed(residuals, number, value)
    with np.errstate(invalid="ignore"):
        see(judge, residuals)
    (one,) = [one for one in fired(judge).values() if one.finding.id == "P007"]
    assert (one.kind, one.layers) == ("mlp", (1,))


def test_what_was_never_read_is_not_judged(baseline: Baseline) -> None:
    residuals = healthy(baseline, np.random.default_rng(8))
    residuals.size[:] = np.nan
    assert np.isnan(z_of(residuals, baseline.noise[0])).all()
    judge = Judge(baseline)
    for rule in verdicts(judge):
        assert rule.finding.state == "not_evaluable"


def test_a_residual_within_the_rounding_of_the_stream_is_none(baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(9)
    number = at(baseline, "o", 0)
    for _ in range(200):
        residuals = healthy(baseline, random)
        residuals.floor[number] = 10.0
        changed(residuals, number, residuals.said[number] + 10.0 * random.standard_normal())
        see(judge, residuals)
    assert not judge.alarms()


# --- figures: what depends on texts ---


def test_a_request_counts_once_at_its_first_rows(baseline: Baseline) -> None:
    requests = Requests()
    values = np.arange(3.0)
    due = [count for count in range(1, 1_100) if requests.add("a", values + count) is not None]
    assert due == [4, 64, 1_024]


def test_means_are_of_the_rows_that_are_known(baseline: Baseline) -> None:
    requests = Requests()
    for number in (1.0, np.nan, 3.0):
        assert requests.add("a", np.array([number, np.nan])) is None
    mean = requests.add("a", np.array([np.inf, np.nan]))
    assert mean is not None and mean[0] == 2.0 and np.isnan(mean[1])


def test_only_so_many_requests_are_remembered() -> None:
    requests = Requests()
    for number in range(10 * Requests.MOST):
        requests.add(str(number), np.zeros(2))
    assert len(requests._open) == Requests.MOST


def test_entropies_far_from_every_prompt_are_a_warning_in_their_layers(
    baseline: Baseline,
) -> None:
    judge, random = Judge(baseline), np.random.default_rng(10)
    number = next(
        n for n, figure in enumerate(judge.figures) if (figure.name, figure.layer) == ("entropy", 1)
    )
    for request in range(8):
        figures = baseline.usual.mean.copy()
        figures[number] += 12 * usual.MARGIN * baseline.usual.spread[number]
        for _ in range(Requests.FIRST):
            see(judge, healthy(baseline, random), figures, str(request))
    (one,) = fired(judge).values()
    assert (one.finding.id, one.layers) == ("P008", (1,))
    assert one.finding.severity.name == "warning"


def figures_of_requests(
    baseline: Baseline, far: Callable[[usual.Figure, float, float], float], requests: int = 12
) -> dict[str, Any]:
    """What fires when each figure of every request is `far(figure, mean, spread)`."""
    judge, random = Judge(baseline), np.random.default_rng(14)
    known = zip(judge.figures, baseline.usual.mean, baseline.usual.spread, strict=True)
    figures = np.array([far(*one) for one in known])
    for request in range(requests):
        for _ in range(Requests.FIRST):
            see(judge, healthy(baseline, random), figures, str(request))
    return fired(judge)


def test_a_head_that_rests_on_one_key_in_every_request_fires_p008(baseline: Baseline) -> None:
    def far(figure: usual.Figure, mean: float, spread: float) -> float:
        here = (figure.name, figure.layer, figure.head) == ("entropy", 1, 2)
        return 0.05 if here else mean

    number = Judge(baseline).figures.index(usual.Figure("entropy", 1, 2))
    assert baseline.usual.mean[number] > 0.75
    found = figures_of_requests(baseline, far)
    assert set(found) == {"P008"}
    assert (found["P008"].layers, found["P008"].heads) == ((1,), (2,))


@pytest.mark.parametrize(("times", "rules"), [(100, {"P009"}), (2, set())])
def test_a_residual_stream_a_hundred_times_as_large_fires_p009_twice_does_not(
    times: float, rules: set[str], baseline: Baseline
) -> None:
    def far(figure: usual.Figure, mean: float, spread: float) -> float:
        return mean + np.log(times) * figure.name.startswith("residual_")

    assert set(figures_of_requests(baseline, far)) == rules


def test_every_figure_three_spreads_off_in_every_request_fires_nothing(baseline: Baseline) -> None:
    assert not figures_of_requests(
        baseline, lambda figure, mean, spread: mean + 3 * spread, requests=200
    )


def test_behind_a_fault_of_the_models_own_what_texts_do_says_nothing(
    baseline: Baseline,
) -> None:
    judge, random = Judge(baseline), np.random.default_rng(11)
    number = at(baseline, "k", 0, 0)
    for request in range(8):
        for _ in range(Requests.FIRST):
            residuals = healthy(baseline, random)
            changed(residuals, number, 0.0)
            see(judge, residuals, baseline.usual.mean + 50.0, str(request))
    assert set(fired(judge)) == {"P001"}
    states = {one.finding.id: one.finding.state for one in verdicts(judge)}
    assert states["P008"] == states["P009"] == "not_evaluable"


def test_every_rule_says_why_and_what_to_do() -> None:
    assert [rule.id for rule in RULES] == [f"P{n:03d}" for n in range(1, 10)]
    kinds = [kind for rule in RULES for kind in rule.kinds]
    assert set(KINDS.values()) <= set(kinds) and len(kinds) == len(set(kinds))
    for rule in RULES:
        assert rule.why.endswith(".") and rule.fix.endswith(".") and rule.example


@pytest.mark.parametrize(("layers", "findings"), [((1,), 1), ((0, 2), 2)])
def test_a_kind_in_few_layers_is_a_finding_of_each(
    layers: tuple[int, ...], findings: int, baseline: Baseline
) -> None:
    judge, random = Judge(baseline), np.random.default_rng(12)
    residuals = healthy(baseline, random)
    for layer in layers:
        changed(residuals, at(baseline, "mlp_norm", layer), 50.0)
    see(judge, residuals)
    found = [one for one in verdicts(judge) if one.finding.state == "fired"]
    assert [one.layer for one in found] == list(layers) and len(found) == findings


# --- what was not looked at is not clear ---


def states(judge: Judge) -> dict[str, str]:
    return {one.finding.id: one.finding.state for one in verdicts(judge)}


def test_rows_that_ran_as_no_row_of_the_baseline_did_clear_nothing(baseline: Baseline) -> None:
    """Taken without compiled steps, asked about compiled ones."""
    judge, random = Judge(baseline), np.random.default_rng(21)
    assert np.isnan(baseline.noise[1]).all()
    for _ in range(8):
        judge.see(healthy(baseline, random), baseline.usual.mean, "a", compiled=True)
    found = states(judge)
    assert {found[f"P00{number}"] for number in range(1, 8)} == {"not_evaluable"}
    assert found["P008"] == found["P009"] == "clear"


def test_texts_are_not_judged_before_a_request_has_some_rows(baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(22)
    for number in range(3 * Requests.FIRST):
        see(judge, healthy(baseline, random), request=str(number % Requests.FIRST))
        told = verdicts(judge)[7:]
        read = number // Requests.FIRST + 1
        expected = "clear" if read >= Requests.FIRST else "not_evaluable"
        assert {one.finding.state for one in told} == {expected}, number
        assert all("rows were read" in one.finding.missing[0] for one in told)
    for _ in range(Requests.FIRST):
        see(judge, healthy(baseline, random), request="long")
    assert states(judge)["P008"] == states(judge)["P009"] == "clear"


def test_an_adapter_is_clear_once_a_row_of_it_was_read(baseline: Baseline) -> None:
    known = replace(baseline, sketch=replace(baseline.sketch, adapters={"tuned": Any}))
    judge, random = Judge(known), np.random.default_rng(23)
    see(judge, healthy(known, random))
    assert states(judge)["P006"] == "not_evaluable"
    of_it = healthy(known, random)
    of_it.adapted[:] = 0.1
    see(judge, of_it)
    assert states(judge)["P006"] == "clear"


def test_what_there_is_nothing_of_is_clear_once_the_rest_was_judged(baseline: Baseline) -> None:
    """A server without adapters lacks nothing: that P006 cannot be evaluated would cry for help."""
    form = replace(baseline.sketch.form, rope_of=(None,) * baseline.sketch.form.layers)
    still = replace(baseline, sketch=replace(baseline.sketch, form=form))
    judge, random = Judge(still), np.random.default_rng(26)
    assert states(judge)["P006"] == states(judge)["P003"] == "not_evaluable"
    unread = healthy(still, random)
    unread.size[:] = np.nan
    see(judge, unread)
    assert states(judge)["P006"] == states(judge)["P003"] == "not_evaluable"
    see(judge, healthy(still, random))
    found = {one.finding.id: one.finding for one in verdicts(judge)}
    for rule, why in (("P006", "no adapter in the baseline"), ("P003", "no layer of this model")):
        assert found[rule].state == "clear"
        (told,) = (e.value for e in found[rule].evidence if e.name == "nothing to judge")
        assert str(told).startswith(why)


def test_rows_of_an_adapter_that_the_baseline_does_not_know_leave_adapters_unjudged(
    baseline: Baseline,
) -> None:
    known = replace(baseline, sketch=replace(baseline.sketch, adapters={"tuned": Any}))
    for of, random in ((baseline, np.random.default_rng(27)), (known, np.random.default_rng(28))):
        judge = Judge(of)
        see(judge, healthy(of, random))
        found = {one.finding.id: one.finding for one in verdicts(judge, strange_rows=3)}
        assert found["P006"].state == "not_evaluable"
        assert "--lora" in found["P006"].missing[0]
        (count,) = (e.value for e in found["P001"].evidence if "does not know" in e.name)
        assert count == 3
    of_it = healthy(known, random)
    of_it.adapted[:] = 0.1
    see(judge, of_it)
    found = {one.finding.id: one.finding for one in verdicts(judge, strange_rows=3)}
    assert found["P006"].state == "clear"
    assert [e.value for e in found["P006"].evidence if "does not know" in e.name] == [3]


def test_what_was_not_judged_is_named_beside_what_was(baseline: Baseline) -> None:
    """Rows of an adapter that the baseline does not know: its products are left out."""
    judge, random = Judge(baseline), np.random.default_rng(24)
    residuals = healthy(baseline, random)
    for number, cell in enumerate(baseline.cells):
        if cell.kind in ("q", "v"):
            residuals.size[number] = np.nan
    see(judge, residuals)
    (products,) = (one.finding for one in verdicts(judge) if one.finding.id == "P001")
    assert products.state == "clear"
    left_out = [e.value for e in products.evidence if e.name == "not judged"]
    assert [str(one).split(":")[0] for one in left_out] == ["q", "v"]


def test_behind_numbers_that_are_not_finite_nothing_is_clear(baseline: Baseline) -> None:
    judge, random = Judge(baseline), np.random.default_rng(25)
    residuals = healthy(baseline, random)
    residuals.residual[at(baseline, "o", 1) :] = np.nan
    see(judge, residuals)
    found = states(judge)
    assert found.pop("P007") == "fired"
    assert set(found.values()) == {"not_evaluable"}
