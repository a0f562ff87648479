"""Answers against a server's own past: healthy traffic raises nothing, each sickness its rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.probes.quality_answers import KINDS, healthy, reading
from ullage.findings import Severity
from ullage.findings.finding import Finding
from ullage.probes.quality.answer import AnswerReading, Cycle
from ullage.probes.quality.rules import RULES, findings_on
from ullage.probes.quality.traits import TRAITS, past_of
from ullage.probes.quality.watch import (
    HELD_ANSWERS,
    PAST_ANSWERS,
    RECENT_ANSWERS,
    QualityWatch,
)

Draw = Callable[[random.Random], AnswerReading]


def watched(readings: Iterable[AnswerReading]) -> QualityWatch:
    watch = QualityWatch()
    for one in readings:
        watch.take(one)
    return watch


def usual(num: int = 1_200, seed: int = 1) -> QualityWatch:
    draw = random.Random(seed)  # noqa: S311
    return watched(healthy(draw) for _ in range(num))


def findings(watch: QualityWatch) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings_on(watch.report())}


def states(watch: QualityWatch) -> dict[str, str]:
    return {rule_id: finding.state for rule_id, finding in findings(watch).items()}


# --- healthy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_mixed_traffic_in_bursts_of_a_kind_raises_nothing(seed: int) -> None:
    """Runs of up to 60 answers of code, tables, Chinese, French, long prompts, one word."""
    draw = random.Random(seed)  # noqa: S311
    watch = QualityWatch()
    while watch.num_judged < 5_000:
        kind = draw.choice(list(KINDS))
        for _ in range(draw.choice((1, 5, 20, 60))):
            watch.take(healthy(draw, kind))
            assert not watch.fired
    assert set(states(watch).values()) == {"clear"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_of_one_kind_that_joins_raises_nothing(kind: str) -> None:
    """It makes a quarter of all answers from now on."""
    draw = random.Random(5)  # noqa: S311
    others = [name for name in KINDS if name != kind]
    watch = watched(healthy(draw, draw.choice(others)) for _ in range(1_000))
    for _ in range(1_000):
        watch.take(healthy(draw, kind if draw.random() < 0.25 else draw.choice(others)))
        assert not watch.fired


def test_a_client_that_lowers_max_tokens_is_not_a_model_that_runs_on() -> None:
    watch = usual()
    draw = random.Random(6)  # noqa: S311
    for _ in range(400):
        watch.take(reading(16, at_limit=True, confidence=draw.uniform(0.4, 0.8)))
    assert "running_on" not in watch.fired


def test_a_client_of_yes_and_no_that_makes_a_quarter_is_no_collapse_of_lengths() -> None:
    draw = random.Random(10)  # noqa: S311
    watch = watched(lengths(draw) for _ in range(1_200))
    assert watch.report().past_rates["short"].bound is not None
    for _ in range(600):
        brief = reading(2, confidence=None, switched=None)
        watch.take(brief if draw.random() < 0.25 else lengths(draw))
        assert not watch.fired


def test_answers_asked_at_a_known_temperature_are_held_against_their_like() -> None:
    """Greedy answers are surer; that says nothing of the model."""
    draw = random.Random(7)  # noqa: S311

    def asked(temperature: float) -> AnswerReading:
        low = 0.4 if temperature else 0.7
        return reading(confidence=draw.uniform(low, low + 0.2), temperature=temperature)

    watch = watched(asked(0.0 if draw.random() < 0.1 else 1.0) for _ in range(1_200))
    for _ in range(300):
        watch.take(asked(0.0))
        assert not watch.fired


def test_another_temperature_is_said_to_be_the_cause_and_is_no_warning() -> None:
    watch = usual()
    for _ in range(150):
        watch.take(reading(200, confidence=0.09, repetition=0.0, temperature=2.0))
    finding = findings(watch)["Q004"]
    assert (finding.state, finding.severity) == ("fired", Severity.info)
    assert "→ 2.00" in finding.cause


# --- sick ----------------------------------------------------------------------------------------

SICK: dict[str, tuple[str, Draw]] = {
    "stuck on one token": (
        "Q001",
        lambda draw: reading(
            200, at_limit=True, cycle=Cycle(1, 200), repetition=0.98, confidence=0.6
        ),
    ),
    "loops": (
        "Q001",
        lambda draw: reading(200, at_limit=draw.random() < 0.5, cycle=Cycle(23, 150)),
    ),
    "says the same in other words": ("Q001", lambda draw: reading(200, repetition=0.9)),
    "ends at once": ("Q002", lambda draw: reading(1, confidence=None, switched=None)),
    "never ends": ("Q003", lambda draw: reading(256, at_limit=True)),
    "unsure": ("Q004", lambda draw: reading(confidence=draw.uniform(0.02, 0.1))),
    "too sure": ("Q004", lambda draw: reading(confidence=draw.uniform(0.98, 1.0))),
    "another script": ("Q005", lambda draw: reading(switched=True)),
    "a mixture of scripts": ("Q005", lambda draw: reading(switched=None, mixed=True)),
}


def lengths(draw: random.Random) -> AnswerReading:
    """Healthy, without the answers of one word: nothing is too short where those are usual."""
    return healthy(draw, draw.choice(("chat", "code", "tables")))


@pytest.mark.parametrize("sickness", SICK)
def test_each_sickness_fires_its_rule_alone_within_a_hundred_answers(sickness: str) -> None:
    rule_id, sick = SICK[sickness]
    draw = random.Random(8)  # noqa: S311
    watch = watched(lengths(draw) for _ in range(1_200))
    assert not watch.fired
    num = 0
    while not watch.fired:
        watch.take(sick(draw))
        num += 1
        assert num <= 100
    fired = [one for one in findings(watch).values() if one.state == "fired"]
    assert [one.id for one in fired] == [rule_id]
    (finding,) = fired
    assert finding.cause.endswith(".") and finding.remedy.endswith(".")
    assert "None" not in finding.cause
    assert {"temperature mean, past", "temperature mean, recent"} <= {
        evidence.name for evidence in finding.evidence
    }
    assert finding.severity is (
        Severity.error if sickness == "stuck on one token" else Severity.warning
    )


def test_stuck_answers_need_no_past_to_be_an_error() -> None:
    watch = watched(
        reading(200, at_limit=True, cycle=Cycle(2, 200), repetition=0.98) for _ in range(60)
    )
    finding = findings(watch)["Q001"]
    assert (finding.state, finding.severity) == ("fired", Severity.error)
    assert "whatever was asked" in finding.cause


def test_where_short_answers_are_usual_none_is_too_short_and_it_says_so() -> None:
    watch = watched(reading(2, confidence=None, repetition=None) for _ in range(500))
    assert states(watch)["Q002"] == "not_evaluable"
    assert not watch.fired


def test_what_nearly_all_answers_do_is_not_looked_for_and_it_says_so() -> None:
    watch = watched(reading(switched=True) for _ in range(500))
    finding = findings(watch)["Q005"]
    assert finding.state == "not_evaluable"
    assert "100%" in finding.missing[0]


# --- the past ------------------------------------------------------------------------------------


def test_a_young_server_says_how_much_past_it_lacks() -> None:
    watch = usual(RECENT_ANSWERS + 40)
    for finding in findings(watch).values():
        assert finding.state == "not_evaluable"
        assert "of 50 answers that could" in " ".join(finding.missing)
    assert set(states(usual(400)).values()) == {"clear"}


def test_a_finding_ends_when_the_model_is_well_again() -> None:
    watch = usual()
    draw = random.Random(9)  # noqa: S311
    while not watch.fired:
        watch.take(reading(switched=True))
    for _ in range(100):
        watch.take(healthy(draw))
    assert not watch.fired
    assert watch.num_begun_anew == 0


def test_sick_answers_do_not_become_usual_while_it_fires_but_after_a_thousand_they_do() -> None:
    watch = usual()
    before = watch.report().past_rates["other_script"]
    for _ in range(RECENT_ANSWERS + HELD_ANSWERS // 2):
        watch.take(reading(switched=True))
    assert watch.fired
    assert watch.report().past_rates["other_script"].share == pytest.approx(before.share, abs=0.05)
    for _ in range(HELD_ANSWERS):
        watch.take(reading(switched=True))
    assert not watch.fired
    assert watch.report().begun_anew == 1


def test_what_is_kept_is_bounded() -> None:
    watch = usual(RECENT_ANSWERS + PAST_ANSWERS + 500)
    report = watch.report()
    assert report.judged == RECENT_ANSWERS + PAST_ANSWERS + 500
    assert report.recent == RECENT_ANSWERS
    assert report.past <= PAST_ANSWERS == len(watch._before)


def test_rates_are_of_answers_that_could_and_unknown_of_none() -> None:
    past = past_of([reading(num_tokens=5, switched=None) for _ in range(60)])
    assert past.rates["looping"].num == 0
    assert past.rates["looping"].share is None
    assert past.rates["other_script"].share is None
    assert past.rates["running_on"].num == 60
    assert past.rates["stuck"].bound is not None


def test_every_trait_belongs_to_one_rule_and_ids_are_in_order() -> None:
    ids = [rule.id for rule in RULES]
    assert ids == ["Q001", "Q002", "Q003", "Q004", "Q005"]
    used = [trait for rule in RULES for trait in rule.check.keywords["traits"]]  # type: ignore[attr-defined]
    assert sorted(trait.name for trait in used) == sorted(trait.name for trait in TRAITS)


def test_the_docs_name_every_rule_trait_and_dead_zone() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "probes.md").read_text(encoding="utf-8")
    section = page[page.index("## Answers: `ullage serve --probe-quality`") :]
    for rule in RULES:
        (row,) = (line for line in section.splitlines() if line.startswith(f"| [{rule.id}]"))
        for trait in rule.check.keywords["traits"]:  # type: ignore[attr-defined]
            if trait.most is None:
                assert f"{trait.dead_zone:.0%}".rstrip("%") in row.split("|")[-2]
    metrics = (docs / "serving.md").read_text(encoding="utf-8")
    assert not [trait.name for trait in TRAITS if f"`{trait.name}`" not in metrics]
