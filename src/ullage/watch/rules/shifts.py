"""Rules about a replica against its own past: W013 answers cut short, W014 slower, W015 other
lengths.

Holds what is compared and when a difference matters; what chance explains is `sampling.py`'s, those
who leave are `leaving.py`'s.
"""

from __future__ import annotations

import math

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.histogram import Histogram, Quantile
from ullage.telemetry.snapshot import Histograms, Snapshot
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    histogram_of,
    knows,
    past_of,
    percent,
    recent_of,
    requests_in,
    require,
    rises_of,
    seconds,
    source_of,
    tidy,
    unit_of,
)
from ullage.watch.rules.sampling import DRIFT, distance, least_sample, noise, share_above
from ullage.watch.rules.settings import setting
from ullage.watch.view import Span

PAST_NEEDED_S = 600.0
"""A past shorter than two recent spans may be one burst."""
PAST_REQUESTS = 100
MORE_CUT = 0.2
"""A rise by one answer in five, beyond what chance explains."""


def both(subject: Subject) -> tuple[Snapshot, Span, Span]:
    """The answer, what is recent, and the past. Raises Lacking."""
    now = answer_of(subject)
    return now, recent_of(subject), past_of(subject, PAST_NEEDED_S)


def enough(subject: Subject, recent: float, past: float, threshold: float) -> None:
    """Raises Lacking where so few requests can tell nothing."""
    least = least_sample(threshold, len(subject.fleet))
    if recent < least:
        raise Lacking(f"enough requests to tell ({recent:,.0f} of {least} recently)")
    if past < PAST_REQUESTS:
        raise Lacking(f"enough requests to tell ({past:,.0f} of {PAST_REQUESTS} in its past)")


def _pair(name: str, past: float, recent: float, unit: str, source: str) -> tuple[Evidence, ...]:
    return (
        Evidence(f"{name}, past", tidy(past), unit, source),
        Evidence(f"{name}, recent", tidy(recent), unit, source),
    )


def share_rise(subject: Subject, reason: str) -> tuple[float, float, float, tuple[Evidence, ...]]:
    """(share before, share now, what it must rise by, the evidence) of one way to end."""
    now, recent, past = both(subject)
    after, before = (
        rises_of(now, recent, "finished_by_reason"),
        rises_of(now, past, "finished_by_reason"),
    )
    num, num_past = sum(after.values()), sum(before.values())
    enough(subject, num, num_past, MORE_CUT)
    was, is_now = before.get(reason, 0.0) / num_past, after.get(reason, 0.0) / num
    source = source_of(now, "finished_by_reason")
    facts = (
        *_pair(f"ended by {reason}", was, is_now, "ratio", source),
        Evidence("requests, recent", tidy(num), "requests", source),
    )
    return was, is_now, MORE_CUT + noise(num, len(subject.fleet)), facts


@answering
def _cut_short(subject: Subject) -> Answer:
    was, is_now, needed, facts = share_rise(subject, "length")
    now, recent, past = both(subject)
    asked = _asked(subject, now, recent, past)
    facts = (*facts, *(asked[1] if asked else ()))
    fell = asked is not None and asked[0]
    if is_now - was < needed and not fell:
        return Clear(facts)
    engine = now.identity.engine
    if is_now - was < needed:
        return Fired(
            "Requests ask for far fewer tokens than before (max_tokens): answers that were whole "
            "may soon be cut, and load falls without the reason being visible in the engine.",
            "See which client or gateway changed its default for max_tokens.",
            facts,
            severity=Severity.info,
        )
    why = " Requests also ask for fewer tokens (max_tokens)." if fell else ""
    return Fired(
        f"{percent(is_now)} of answers now end at a length limit and not where the model stops; "
        f"before it was {percent(was)}.{why}",
        "Raise max_tokens in the client or gateway that lowered it, or "
        f"{setting(engine, 'max_length')} if the limit is the server's; if neither changed, look "
        "for answers that never stop: a wrong chat template or end-of-text token.",
        facts,
    )


def _asked(
    subject: Subject, now: Snapshot, recent: Span, past: Span
) -> tuple[bool, tuple[Evidence, ...]] | None:
    """Whether requests ask for far fewer tokens; None where the engine does not tell."""
    after = recent.histograms.get("request_max_tokens")
    before = past.histograms.get("request_max_tokens")
    if after is None or before is None or min(after.count, before.count) < 1:
        return None
    gap = distance(before, after)
    medians = before.quantile(0.5), after.quantile(0.5)
    if gap is None or medians[0] is None or medians[1] is None:
        return None
    source = source_of(now, "request_max_tokens")
    facts = (
        _asked_fact("past", medians[0], source),
        _asked_fact("recent", medians[1], source),
    )
    beyond = -gap >= DRIFT + noise(after.count, len(subject.fleet))
    return beyond and before.count >= PAST_REQUESTS and medians[1].high <= medians[0].low, facts


def _asked_fact(when: str, median: Quantile, source: str) -> Evidence:
    """The side of the median that is known: beyond the last bucket there is no upper one."""
    if math.isinf(median.high):
        return Evidence(f"max_tokens median above, {when}", tidy(median.low), "tokens", source)
    return Evidence(f"max_tokens median below, {when}", tidy(median.high), "tokens", source)


SLOWER = 1.5
LOAD_POWER = 2.0
"""Latency may grow with load faster than load: within this power of it, load explains it."""
LATENCIES: tuple[Histograms, ...] = ("ttft_s", "itl_s")
WORDS = {"ttft_s": "first tokens", "itl_s": "tokens"}


@answering
def _slower(subject: Subject) -> Answer:
    now, recent, past = both(subject)
    if not any(knows(now, name) for name in LATENCIES):
        require(now, *LATENCIES)
    facts: list[Evidence] = []
    lacking: list[str] = []
    told: list[str] = []
    for name in LATENCIES:
        try:
            slower, seen = _one_latency(subject, now, recent, past, name)
        except Lacking as one:
            lacking += one.missing
            continue
        facts += seen
        told += [slower] if slower else []
    if not facts:
        raise Lacking(*dict.fromkeys(lacking))
    if not told:
        return Clear(tuple(facts))
    return Fired(
        f"{' '.join(told)} The load did not grow enough to explain it.",
        "See what changed on the host: clocks held down (W018), a neighbour on the device or its "
        "CPUs, compilation while serving, another version or flag (W016). If this replica alone is "
        "slow, drain it and compare.",
        tuple(facts),
    )


def _one_latency(
    subject: Subject, now: Snapshot, recent: Span, past: Span, name: Histograms
) -> tuple[str, tuple[Evidence, ...]]:
    """(a sentence where it shifted beyond load and chance, else "", the evidence).

    Shifted: more than half of the recent ones lie above what nine in ten stayed below before.
    """
    after, before = histogram_of(now, recent, name), histogram_of(now, past, name, "its past")
    # Tokens of one step, and of one request, are late together: the sample is the requests.
    num = min(after.count, requests_in(now, recent)[0])
    enough(subject, num, min(before.count, requests_in(now, past)[0]), DRIFT)
    usual, tail, typical = before.quantile(0.5), before.quantile(0.9), after.quantile(0.5)
    if usual is None or tail is None or typical is None or before.bounds != after.bounds:
        raise Lacking(f"{name} in the same buckets as before")
    source = source_of(now, name)
    facts = _pair(f"{name} median, estimate", usual.estimate, typical.estimate, "s", source)
    if math.isinf(tail.high):
        return "", facts  # its past lies beyond the last bucket: nothing can be above that
    above, load, queued = share_above(after, tail.high), *_load(now, recent, past)
    facts = (
        *facts,
        Evidence(f"{name} above {seconds(tail.high)}, recent", tidy(above), "ratio", source),
        Evidence("load, recent over past", tidy(load), "", "measured: tokens and requests per s"),
    )
    before_above = share_above(before, tail.high)
    if above - before_above < DRIFT + noise(num, len(subject.fleet)):
        return "", facts
    # What is known of the medians: the recent one's lower bound over the past one's upper.
    if typical.low < usual.high or typical.estimate < SLOWER * load**LOAD_POWER * usual.estimate:
        return "", facts
    if name == "ttft_s" and queued:
        return "", (*facts, Evidence("requests queue", True, "", source_of(now, "waiting")))
    return (
        f"{percent(above)} of {WORDS[name]} now take longer than {seconds(tail.high)}, which "
        f"{percent(1 - before_above)} stayed within before (median {seconds(usual.estimate)} → "
        f"{seconds(typical.estimate)})."
    ), facts


def _load(now: Snapshot, recent: Span, past: Span) -> tuple[float, bool]:
    """(how much more is asked of it than before, at least 1; whether requests queue now)."""
    ratios = [1.0]
    for counter in ("prompt_tokens", "generation_tokens"):
        before, after = past.rate(counter), recent.rate(counter)
        if before and after:
            ratios.append(after / before)
    ratios.append(
        _ratio(requests_in(now, recent)[0] / recent.seconds,
               requests_in(now, past)[0] / past.seconds)
    )  # fmt: skip
    lengths = [span.histograms.get("request_prompt_tokens") for span in (recent, past)]
    if all(one is not None and one.mean for one in lengths):
        ratios.append(_ratio(*(one.mean if one and one.mean else 1.0 for one in lengths)))
    waiting, waited = recent.trends.get("waiting"), past.trends.get("waiting")
    queued = waiting is not None and waiting.mean >= max(1.0, 2 * (waited.mean if waited else 0.0))
    return max(ratios), queued


def _ratio(after: float, before: float) -> float:
    return after / before if before > 0 else 1.0


LENGTHS: tuple[tuple[Histograms, str], ...] = (
    ("request_prompt_tokens", "Prompts"),
    ("request_generation_tokens", "Answers"),
)
OTHER_LENGTH = 1.5


@answering
def _other_lengths(subject: Subject) -> Answer:
    now, recent, past = both(subject)
    require(now, *(name for name, _ in LENGTHS))
    facts: list[Evidence] = []
    told: list[str] = []
    lacking: list[str] = []
    for name, words in LENGTHS:
        after, before = histogram_of(now, recent, name), histogram_of(now, past, name, "its past")
        try:
            enough(subject, after.count, before.count, DRIFT)
        except Lacking as one:
            lacking += one.missing
            continue
        facts += _lengths_facts(now, name, before, after)
        gap = distance(before, after)
        if gap is None:
            lacking.append(f"{name} in the same buckets as before")
        elif abs(gap) >= DRIFT + noise(after.count, len(subject.fleet)):
            told += _told(words, before, after)
    if not told and lacking:
        raise Lacking(*dict.fromkeys(lacking))
    if not told:
        return Clear(tuple(facts))
    return Fired(
        f"{' '.join(told)} What fits, the block size and the limits were chosen for other traffic.",
        "See whose traffic it is (a new client, another prompt or template); then size again with "
        "these lengths: ullage size, and W001, W002 and W006 say what becomes tight.",
        tuple(facts),
    )


def _told(words: str, before: Histogram, after: Histogram) -> list[str]:
    was, is_now = before.quantile(0.5), after.quantile(0.5)
    if was is None or is_now is None:
        return []
    return [
        f"{words} have other lengths than before: median {_between(was)} → {_between(is_now)} "
        "tokens."
    ]


def _between(median: Quantile) -> str:
    """`500–1,000`; `above 10,000` where the last bucket holds it."""
    if math.isinf(median.high):
        return f"above {median.low:,.0f}"
    return f"{median.low:,.0f}–{median.high:,.0f}"


def _lengths_facts(
    now: Snapshot, name: Histograms, before: Histogram, after: Histogram
) -> tuple[Evidence, ...]:
    source = source_of(now, name)
    facts: tuple[Evidence, ...] = (
        Evidence(f"{name}, recent", tidy(after.count), "requests", source),
    )
    if before.mean is not None and after.mean is not None:
        facts += _pair(f"{name} mean", before.mean, after.mean, unit_of(name), source)
    return facts


RULES = (
    Rule(
        id="W013",
        title="Answers that end at a length limit",
        severity=Severity.warning,
        category="traffic",
        why="An answer cut at a limit looks like success to every counter, and shorter answers "
        "look like a faster server.",
        fix="Find the limit that fell; else the answers that no longer stop by themselves.",
        source="OpenAI's finish_reason; vllm 0.32: v1/metrics/loggers.py (request_success by "
        "finished_reason, request_params_max_tokens)",
        example="finish_reason=length 5% for an hour, then 70% of 200 answers",
        check=_cut_short,
    ),
    Rule(
        id="W014",
        title="Latency against this replica's own past",
        severity=Severity.warning,
        category="traffic",
        why="A replica that became slower without more to do has a fault that no threshold on load "
        "shows.",
        fix="Look at the host first, then at what was changed.",
        source="Hoeffding's bound with FALSE_ALARMS_PER_DAY over all looks and replicas, and a "
        "drift taken from four public traces (watch/rules/sampling.py)",
        example="median time between tokens 30 → 90 ms with the same tokens per second asked",
        check=_slower,
    ),
    Rule(
        id="W015",
        title="Lengths of prompts and answers against the past",
        severity=Severity.info,
        category="traffic",
        why="Lengths decide how many requests fit and how long a prefill is; a new kind of traffic "
        "changes both at the same request rate.",
        fix="Find whose traffic it is and size for it.",
        source="Dvoretzky, Kiefer, Wolfowitz and Massart's bound, with a drift taken from four "
        "public traces (watch/rules/sampling.py)",
        example="median prompt 200 → 6,000 tokens over 150 requests",
        check=_other_lengths,
    ),
)
