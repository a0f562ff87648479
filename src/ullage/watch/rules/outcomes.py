"""Rules about how requests end: W023 errors and rejections.

Holds shares of what ended recently. Shares against the past are `shifts.py`'s.
"""

from __future__ import annotations

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.watch.peers import finished_in
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    knows,
    percent,
    recent_of,
    require,
    seconds,
    source_of,
    tidy,
)
from ullage.watch.view import Span

SHARE = 0.05
LEAST = 5
REQUESTS = 20


@answering
def _failed(subject: Subject) -> Answer:
    now = answer_of(subject)
    if not knows(now, "finished_by_reason") and not knows(now, "rejected_requests"):
        require(now, "finished_by_reason", "rejected_requests")
    span = recent_of(subject)
    errors, refused = _errors(span), span.rises.get("rejected_requests")
    if errors is None and refused is None:
        raise Lacking("finished_by_reason or rejected_requests at both ends of the span")
    ended = (finished_in(span) or 0.0) + (refused or 0.0)
    facts = [Evidence("requests", tidy(ended), "requests", f"over {span.seconds:.0f} s")]
    if errors is not None:
        facts.append(Evidence("ended by error", tidy(errors), "requests",
                              source_of(now, "finished_by_reason")))  # fmt: skip
    if refused is not None:
        facts.append(Evidence("rejected", tidy(refused), "requests",
                              source_of(now, "rejected_requests")))  # fmt: skip
    told = [
        f"{number:,.0f} of {ended:,.0f} requests {how} in {seconds(span.seconds)} "
        f"({percent(number / ended)})."
        for number, how in ((errors, "ended in an error"), (refused, "were turned away"))
        if number is not None and number >= LEAST and number >= SHARE * ended
    ]
    if not told or ended < REQUESTS:
        return Clear(tuple(facts))
    turned_away = refused is not None and refused >= max(LEAST, SHARE * ended)
    return Fired(
        " ".join(told),
        (
            "It is at its admission limit: add a replica or raise the limit (vLLM, ullage: "
            "--max-num-queued-reqs, --max-num-queued-tokens; SGLang: --max-queued-requests)."
            if turned_away
            else "Look for the first error in the server's log; errors of one client's requests "
            "point at their parameters, of all of them at the engine."
        ),
        tuple(facts),
    )


def _errors(span: Span) -> float | None:
    reasons = span.labelled_rises.get("finished_by_reason")
    return None if reasons is None else reasons.get("error", 0.0)


RULES = (
    Rule(
        id="W023",
        title="Requests that fail or are turned away",
        severity=Severity.error,
        category="traffic",
        why="Errors and rejections shorten the queue and the latency of the rest, so load looks "
        "well while users are refused.",
        fix="Find the first error; for rejections add capacity or raise the limit on purpose.",
        source="vllm 0.32: v1/metrics/loggers.py (request_success by finished_reason, "
        "admission_rejections)",
        example="12 of 100 requests end with finished_reason=error",
        check=_failed,
    ),
)
