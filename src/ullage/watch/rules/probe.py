"""W026: a model that is not itself, as the server's own probe says. Which rules only warn.

Holds what is made of the probe's verdicts; the verdicts are the server's (`ullage serve
--probe-baseline`), and what each of its rules means `ullage explain P001` tells.
"""

from __future__ import annotations

from collections.abc import Iterable

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.snapshot import ProbeFinding
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import Lacking, answer_of, answering, source_of

WARNING = ("P008", "P009")
"""Other texts than the baseline's move these too. Any other id is a fault of the model's own, also
one that is not known here."""
MOST_TOLD = 8
"""Places in the evidence; a server tells at most 32."""
OUT = "Take the replica out of service, then see"
LOOK = (
    "at GET /ullage/entropy (--enable-control-routes) or with `ullage probe check URL --baseline "
    "FILE` where it is, and with `ullage explain {}` what to do."
)


@answering
def _itself(subject: Subject) -> Answer:
    now = answer_of(subject)
    told = now.probe_findings
    if told is None:
        raise Lacking(f"probe_findings ({now.why_absent('probe_findings')})")
    source = source_of(now, "probe_findings")
    fired = sorted(
        (one for one in told if one.state == "fired"),
        key=lambda one: (one.id in WARNING, one.id),
    )
    if fired:
        return _not_itself(fired, source)
    unread = _ids(one for one in told if one.state == "not_evaluable")
    clear = _ids(one for one in told if one.state == "clear")
    if not clear:
        raise Lacking(f"probe_findings (the probe can evaluate none of {unread} now)")
    facts = [Evidence("clear by the server's probe", clear, "", source)]
    if unread:
        facts.append(Evidence("not evaluable by it", unread, "", source))
    return Clear(tuple(facts))


def _not_itself(fired: list[ProbeFinding], source: str) -> Fired:
    first = fired[0]
    more = f", and {len(fired) - 1:,} more" if len(fired) > 1 else ""
    facts = tuple(Evidence(f"{one.id} fires", _place(one), "", source) for one in fired[:MOST_TOLD])
    look = LOOK.format(first.id)
    if first.id in WARNING:
        return Fired(
            f"By the server's own probe what the model computes is no longer usual: {first.id}, "
            f"{_place(first)}{more}. Texts of another sort than the baseline's do that as well.",
            f"See {look}",
            facts,
            Severity.warning,
        )
    return Fired(
        f"By the server's own probe the model does not compute what its baseline holds it to: "
        f"{first.id}, {_place(first)}{more}. It goes on answering, as another model would.",
        f"{OUT} {look}",
        facts,
    )


def _place(one: ProbeFinding) -> str:
    where = {"": "outside of the layers", "many": "several layers"}
    return f"{one.kind or 'no kind told'}, {where.get(one.layer, f'layer {one.layer}')}"


def _ids(findings: Iterable[ProbeFinding]) -> str:
    return ", ".join(sorted({one.id for one in findings}))


RULES = (
    Rule(
        id="W026",
        title="The model as its baseline has it",
        severity=Severity.error,
        category="identity",
        why="A changed weight, a wrong scale or a processor that miscounts makes wrong answers at "
        "full speed: no latency, queue or error counter moves, and only the server that reads its "
        "own activations can say so.",
        fix="Where it is P001 to P007, take the replica out; where it is P008 or P009 alone, see "
        "first whether the texts are of another sort. GET /ullage/entropy and `ullage probe check "
        "URL --baseline FILE` name the part.",
        source="ullage_probe_findings of `ullage serve --probe-baseline FILE` (docs/probes.md, In "
        "a running server)",
        example='ullage_probe_findings{id="P001",kind="q",layer="12"} 1',
        check=_itself,
    ),
)
