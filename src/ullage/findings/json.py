"""Findings as plain JSON values, for documents that programs read.

Holds the mapping only; which document they stand in is the verb's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from ullage.findings.finding import Evidence, Finding, Severity

STATES = ("fired", "clear", "not_evaluable")


def evidence_document(evidence: Evidence) -> dict[str, object]:
    """{name, value, unit, source}; a value that JSON has no number for becomes its text."""
    value = evidence.value
    if isinstance(value, float) and not isfinite(value):
        value = str(value)
    return {
        "name": evidence.name,
        "value": value,
        "unit": evidence.unit,
        "source": evidence.source,
    }


def finding_document(finding: Finding) -> dict[str, object]:
    """{id, title, severity, state, evidence[], cause, remedy, missing[], accepted}."""
    return {
        "id": finding.id,
        "title": finding.title,
        "severity": finding.severity.name,
        "state": finding.state,
        "evidence": [evidence_document(item) for item in finding.evidence],
        "cause": finding.cause,
        "remedy": finding.remedy,
        "missing": list(finding.missing),
        "accepted": finding.accepted,
    }


def counts_document(findings: Sequence[Finding]) -> dict[str, int]:
    """How many findings are in each state, how many fired by severity, how many are accepted.

    Accepted ones count among `fired` and among their severity.
    """
    counts = {state: sum(1 for f in findings if f.state == state) for state in STATES}
    for severity in sorted(Severity, reverse=True):
        counts[severity.name] = sum(
            1 for f in findings if f.state == "fired" and f.severity == severity
        )
    counts["accepted"] = sum(1 for f in findings if f.accepted)
    return counts
