"""The findings on a server's answers, Q001 loops to Q005 script: traits that rose, in sentences.

Holds the rules, pure functions of a QualityReport. When a trait has risen is `watch`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ullage.findings.answer import Answer, Clear, Fired, NotEvaluable, finding_of
from ullage.findings.finding import Evidence, Finding, Severity
from ullage.probes.quality.traits import (
    HIGHEST_BOUND,
    LOOPS,
    NEEDED,
    REPEATS,
    RUNS_ON,
    SHORT,
    STRAYS,
    STUCK,
    SURE,
    UNSURE,
    Rate,
    Trait,
)
from ullage.probes.quality.watch import QualityReport

BY_TEMPERATURE = (LOOPS, REPEATS, UNSURE, SURE)
OTHER_TEMPERATURE = 0.25
SOURCE = "measured: this server's answers"
COMPARE = (
    "Read some answers. Where nobody changed what is asked (a client, a prompt, a template), hold "
    "the model against a healthy copy (`ullage probe compare`): weights, adapter, quantisation, "
    "rope scaling."
)
LOOPS_FIX = (
    f"{COMPARE} A temperature near 0 makes small models loop; repetition_penalty hides loops."
)
SHORT_FIX = (
    f"{COMPARE} An end comes too soon by a stop string, a stop token or a template that ends the "
    "answer's turn before it began."
)
RUNS_ON_FIX = (
    f"{COMPARE} A model does not end when its end token is not the one that the template makes it "
    "write, or when the template is another model's."
)
SCRIPT_FIX = f"{COMPARE} A client that has texts translated raises this too."


@dataclass(frozen=True, slots=True)
class Rule:
    """One way for answers to go wrong; fields as in `findings.answer.Described`."""

    id: str
    title: str
    severity: Severity
    category: str
    why: str
    fix: str
    source: str
    example: str
    check: Callable[[QualityReport], Answer]


def findings_on(report: QualityReport) -> tuple[Finding, ...]:
    """What every rule says."""
    return tuple(finding_of(rule, rule.check(report)) for rule in RULES)


def _check(
    report: QualityReport,
    traits: tuple[Trait, ...],
    remedy: str,
    severity: Callable[[frozenset[str]], Severity | None] = lambda _: None,
) -> Answer:
    """Fired where one of the traits did; clear only where all of them were looked for."""
    told = [trait for trait in traits if trait.name in report.fired]
    facts = tuple(fact for trait in traits for fact in _facts(report, trait))
    if told:
        said = [_sentence(report, trait) for trait in told]
        warmer = _warmer(report)
        grave = severity(report.fired)
        if warmer and all(trait in BY_TEMPERATURE for trait in told):
            said.append(warmer)
            grave = Severity.info
        return Fired(" ".join(said), remedy, (*facts, *_asked(report)), grave)
    missing = tuple(text for trait in traits if (text := _lacking(report, trait)))
    return NotEvaluable(missing) if missing else Clear((*facts, *_asked(report)))


def _sentence(report: QualityReport, trait: Trait) -> str:
    recent, past = report.recent_rates[trait.name], report.past_rates[trait.name]
    text = f"{_percent(recent)} of the last {recent.num} answers {trait.words}"
    if trait.most is not None:
        return f"{text}, whatever was asked: more than {trait.most:.0%} never should."
    return f"{text}; before it was {_percent(past)} of {past.num}."


def _percent(rate: Rate) -> str:
    return "none" if rate.share is None else f"{rate.share:.0%}"


def _warmer(report: QualityReport) -> str:
    """A sentence where answers are asked for at another temperature than before, else ""."""
    was, now = report.past_means.temperature, report.recent_means.temperature
    if was is None or now is None or abs(now - was) < OTHER_TEMPERATURE:
        return ""
    return (
        f"Requests ask for another temperature than before (mean {was:.2f} → {now:.2f}), which "
        "does this by itself."
    )


def _lacking(report: QualityReport, trait: Trait) -> str:
    """What a trait still lacks to be looked for, "" when nothing."""
    rate = report.past_rates[trait.name]
    if trait.most is not None:
        return "" if report.recent_rates[trait.name].num else "answers of 32 tokens or more"
    if rate.bound is None:
        return (
            f"a past to tell by whether more answers {trait.words} "
            f"({rate.num} of {NEEDED} answers that could)"
        )
    if rate.bound >= HIGHEST_BOUND:
        return f"a past in which fewer answers {trait.words} ({_percent(rate)} of {rate.num})"
    return ""


def _facts(report: QualityReport, trait: Trait) -> tuple[Evidence, ...]:
    recent, past = report.recent_rates[trait.name], report.past_rates[trait.name]
    return (
        *_share(f"{trait.name}, past", past),
        *_share(f"{trait.name}, recent", recent),
        *((_ratio(f"{trait.name}, at most", past.bound),) if past.bound is not None else ()),
        Evidence(f"{trait.name}, recent answers", recent.num, "answers", SOURCE),
    )


def _share(name: str, rate: Rate) -> tuple[Evidence, ...]:
    """A share of no answers is not known."""
    return () if rate.share is None else (_ratio(name, rate.share),)


def _ratio(name: str, value: float) -> Evidence:
    return Evidence(name, round(value, 4), "ratio", SOURCE)


def _asked(report: QualityReport) -> tuple[Evidence, ...]:
    """How the answers were asked for, before and now: what else may explain another rate."""
    return tuple(
        Evidence(f"temperature mean, {when}", round(means.temperature, 3), "", "requests")
        for when, means in (("past", report.past_means), ("recent", report.recent_means))
        if means.temperature is not None
    )


def _stuck_is_an_error(fired: frozenset[str]) -> Severity | None:
    return Severity.error if STUCK.name in fired else None


TEST = (
    "a sequential test against the server's own past, at most one false alarm in 10^8 answers "
    "(probes/quality/evidence.py); dead zones in probes/quality/traits.py"
)

RULES = (
    Rule(
        id="Q001",
        title="Answers that repeat themselves",
        severity=Severity.warning,
        category="answers",
        why="A model that loops holds its KV blocks up to the token limit and says nothing; every "
        "counter shows a success.",
        fix=LOOPS_FIX,
        source=TEST,
        example="7% of answers end in a loop for a day, then 80% of 40 answers",
        check=partial(
            _check, traits=(STUCK, LOOPS, REPEATS), remedy=LOOPS_FIX, severity=_stuck_is_an_error
        ),
    ),
    Rule(
        id="Q002",
        title="Answers that end after very few tokens",
        severity=Severity.warning,
        category="answers",
        why="An end token that comes too soon leaves answers empty, and the server looks faster.",
        fix=SHORT_FIX,
        source=TEST,
        example="nine in ten answers have 40 tokens or more, then half of 200 have at most ten",
        check=partial(_check, traits=(SHORT,), remedy=SHORT_FIX),
    ),
    Rule(
        id="Q003",
        title="Answers that run on to the token limit",
        severity=Severity.warning,
        category="answers",
        why="A model that no longer ends by itself is cut where answers used to be over. A lower "
        "max_tokens alone does not fire this: only answers longer than nine in ten whole ones of "
        "the past count.",
        fix=RUNS_ON_FIX,
        source=TEST,
        example="10% of answers are cut beyond the usual lengths, then 70%",
        check=partial(_check, traits=(RUNS_ON,), remedy=RUNS_ON_FIX),
    ),
    Rule(
        id="Q004",
        title="How sure the model is of its next token",
        severity=Severity.warning,
        category="answers",
        why="Weights, positions or an adapter that are off show first in the probability of the "
        "likeliest token, long before anybody reports an answer.",
        fix=COMPARE,
        source=TEST,
        example="one answer in ten had a mean probability below 0.4, then eight in ten",
        check=partial(_check, traits=(UNSURE, SURE), remedy=COMPARE),
    ),
    Rule(
        id="Q005",
        title="The script that answers are written in",
        severity=Severity.warning,
        category="answers",
        why="A model that answers in another script than it was asked in, or in three at once, "
        "has lost the thread; so has a translation client that nobody announced.",
        fix=SCRIPT_FIX,
        source=TEST,
        example="2% of answers stray from the prompt's script, then 60%",
        check=partial(_check, traits=(STRAYS,), remedy=SCRIPT_FIX),
    ),
)
