"""W017: a replica that does not answer, and what is no silence of its own.

Holds what is looked at first, by what became of the scrape. Who answers and does not work is
`liveness.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import Lacking, answering, seconds, tidy
from ullage.watch.rules.pods import begins, leaves
from ullage.watch.view import GONE

# Not the replica's own fault, or part of every rollout. What lasts too long for one is W025's.
MEANT_TO_BE_SILENT: tuple[tuple[str, Callable[[Subject], bool]], ...] = (
    ("a source of replicas that answers", lambda subject: not subject.view.asked),
    ("a replica that is still there (nothing names it any longer)",
     lambda subject: subject.view.error == GONE),
    ("an engine that has started (its pod has yet to be ready)", begins),
    ("an engine that is to go on (its pod was asked to end)", leaves),
)  # fmt: skip


UNEXPLAINED = (
    "See whether the process lives and whether its API answers: when only /metrics is silent, the "
    "path is guarded; when both are, the event loop is blocked."
)
# What `telemetry.wire` and `telemetry.scrape` say → what to look at first.
SILENCE: tuple[tuple[str, str], ...] = (
    (
        "connection refused",
        "Nothing listens there: see whether the process lives, still loads its weights, or listens "
        "on another address or port (a server on 127.0.0.1 is not reached from elsewhere).",
    ),
    (
        "up is 0",
        "See the target's error on Prometheus' page of targets (/targets), then whether the "
        "process lives.",
    ),
    ("has no address", "Check the name, and whether it is one that this machine's DNS knows."),
    ("wants a", "Give the server's key with --api-key, or let /metrics be read without one."),
    (
        "HTTP 404",
        "Check the path; SGLang serves metrics with --enable-metrics, llama.cpp with --metrics, "
        "TensorRT-LLM at /prometheus/metrics.",
    ),
    ("it sends elsewhere", "Give the address that it sends to, if that is the engine's own."),
    (
        "certificate",
        "Make this machine trust who signed it (SSL_CERT_FILE names a file of authorities).",
    ),
)


@answering
def _silent(subject: Subject) -> Answer:
    view = subject.view
    if not view.error:
        if view.now is None:
            raise Lacking("a scrape")
        ago = max(0.0, subject.time_s - view.now.time_s)
        return Clear((Evidence("last answer", tidy(round(ago, 1)), "s ago", "measured"),))
    for what, holds in MEANT_TO_BE_SILENT:
        if holds(subject):
            raise Lacking(what)
    facts = [Evidence("error", view.error, "", "the last scrape")]
    since = "It has never answered"
    if view.now is not None:
        ago = max(0.0, subject.time_s - view.now.time_s)
        facts.append(Evidence("last answer", tidy(round(ago, 1)), "s ago", "measured"))
        since = f"It answered {seconds(ago)} ago and does not now"
    return Fired(
        f"{since}: {view.error}.",
        next((remedy for said, remedy in SILENCE if said in view.error), UNEXPLAINED),
        tuple(facts),
    )


RULES = (
    Rule(
        id="W017",
        title="Answers to scrapes",
        severity=Severity.error,
        category="liveness",
        why="What does not answer is not watched, and often does not serve either: a blocked event "
        "loop silences /metrics and the API alike.",
        fix="See whether the process lives, then whether the path is right.",
        source="vllm#24910: a tokenizer blocks the event loop for 28.8 s",
        example="connection refused after it had answered",
        check=_silent,
    ),
)
