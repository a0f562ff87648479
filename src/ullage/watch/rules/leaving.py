"""A rule about clients that leave before their answer ends, against the past: W024.

Holds how those are told whom an engine does not count. Other shifts are `shifts.py`'s.
"""

from __future__ import annotations

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.snapshot import Snapshot
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    histogram_of,
    percent,
    require,
    rises_of,
    source_of,
    tidy,
    trend_of,
)
from ullage.watch.rules.sampling import noise
from ullage.watch.rules.shifts import MORE_CUT, both, enough, share_rise
from ullage.watch.view import Span

UNCOUNTED = frozenset({"vllm"})
"""Engines that count nobody who left: vLLM ends such a request beside its statistics (0.32:
v1/engine/output_processor.py, abort_requests; of 2,457 requests 126 were left, and abort stayed
0). What began and did not end tells of those who left after their first token."""


def _left(now: Snapshot, span: Span, of_what: str) -> tuple[float, float]:
    """(the fewest, the most) that left after their first token. Raises Lacking.

    Begun − ended = left + the growth of those in flight, of which those without a first token are
    not known apart.
    """
    begun = histogram_of(now, span, "ttft_s", of_what).count
    ended = sum(rises_of(now, span, "finished_by_reason").values())
    flight = [trend_of(now, span, "running"), trend_of(now, span, "waiting")]
    if span.resets:
        raise Lacking(f"{of_what} without a restart, which ends requests too")
    if sum(trend.last for trend in flight) > begun:
        raise Lacking(f"more requests that begin than are in flight, in {of_what}")
    return (
        max(0.0, begun - ended - sum(trend.last for trend in flight)),
        max(0.0, begun - ended + sum(trend.first for trend in flight)),
    )


@answering
def _given_up(subject: Subject) -> Answer:
    now = answer_of(subject)
    if now.identity.engine in UNCOUNTED:
        return _given_up_uncounted(subject)
    was, is_now, needed, facts = share_rise(subject, "abort")
    if is_now - was < needed:
        return Clear(facts)
    return _many_left(percent(is_now), percent(was), facts)


def _given_up_uncounted(subject: Subject) -> Answer:
    now, recent, past = both(subject)
    require(now, "finished_by_reason", "ttft_s", "running", "waiting")
    fewest, _ = _left(now, recent, "the last minutes")
    _, most = _left(now, past, "its past")
    after, before = (rises_of(now, one, "finished_by_reason") for one in (recent, past))
    num, num_past = sum(after.values()) + fewest, sum(before.values()) + most
    enough(subject, num, num_past, MORE_CUT)
    was, is_now = (
        (most + before.get("abort", 0.0)) / num_past,
        (fewest + after.get("abort", 0.0)) / num,
    )
    source = f"modelled: {source_of(now, 'ttft_s')}, {source_of(now, 'finished_by_reason')}"
    facts = (
        Evidence("given up after the first token, past, at most", tidy(was), "ratio", source),
        Evidence("given up after the first token, recent, at least", tidy(is_now), "ratio", source),
        Evidence("given up before the first token", "not told", "", "the engine counts none"),
        Evidence("requests, recent", tidy(num), "requests", source),
    )
    if is_now - was < MORE_CUT + noise(num, len(subject.fleet)):
        return Clear(facts)
    return _many_left(f"At least {percent(is_now)}", f"at most {percent(was)}", facts)


def _many_left(is_now: str, was: str, facts: tuple[Evidence, ...]) -> Fired:
    return Fired(
        f"{is_now} of requests are now given up before they end; before it was {was}: clients or a "
        "gateway time out, and what was computed for them is wasted.",
        "Compare the time to first token and the length of answers with the timeouts on the way; "
        "look for a gateway that was changed.",
        facts,
    )


RULES = (
    Rule(
        id="W024",
        title="Requests that are given up",
        severity=Severity.warning,
        category="traffic",
        why="Clients that time out often ask again: the engine works for nobody, twice.",
        fix="Match timeouts to what the server can do, or the server to the timeouts.",
        source="vllm 0.32: v1/engine/output_processor.py (abort_requests counts nobody: there "
        "it is told by what began and did not end)",
        example="finished_reason=abort 2% for an hour, then 60% of 200 requests; vLLM: 300 first "
        "tokens and 100 ends in five minutes",
        check=_given_up,
    ),
)
