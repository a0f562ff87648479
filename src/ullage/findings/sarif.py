"""Findings as a SARIF 2.1.0 log: rules with their help, results with places and fingerprints.

Holds the mapping only (OASIS SARIF 2.1.0). Results are what fired; what a baseline accepts is
suppressed; a rule that could not be evaluated is a notification that says what was missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ullage.findings.baseline import fingerprint
from ullage.findings.finding import Finding, Severity
from ullage.findings.json import evidence_document
from ullage.findings.place import PlaceOf, RuleText, uri_of

LEVELS = {Severity.error: "error", Severity.warning: "warning", Severity.info: "note"}
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
FINGERPRINT = "ullageFinding/v1"


def sarif(
    findings: Sequence[Finding],
    rules: Mapping[str, RuleText],
    place_of: PlaceOf,
    *,
    version: str,
    compared: bool = False,
) -> dict[str, object]:
    """The log with one run. `compared` says that a baseline was at hand (then results are new or
    unchanged against it)."""
    used = [rules[rule_id] for rule_id in dict.fromkeys(f.id for f in findings)]
    index = {rule.id: number for number, rule in enumerate(used)}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "ullage",
                        "version": version,
                        "rules": [_rule(rule) for rule in used],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": [
                            _notification(f, index) for f in findings if f.state == "not_evaluable"
                        ],
                    }
                ],
                "results": [
                    _result(f, index, place_of, compared) for f in findings if f.state == "fired"
                ],
            }
        ],
    }


def _rule(rule: RuleText) -> dict[str, object]:
    return {
        "id": rule.id,
        "name": "".join(word[:1].upper() + word[1:] for word in _words(rule.title)),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {
            "text": f"{rule.why}\n\nFix: {rule.fix}\n\nSource: {rule.source}",
            "markdown": f"{rule.why}\n\n**Fix:** {rule.fix}\n\n**Source:** {rule.source}",
        },
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
        "properties": {"category": rule.category, "tags": [rule.category]},
    }


def _words(title: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in title).split()


def _result(
    finding: Finding, index: Mapping[str, int], place_of: PlaceOf, compared: bool
) -> dict[str, object]:
    place = place_of(finding)
    result: dict[str, object] = {
        "ruleId": finding.id,
        "ruleIndex": index[finding.id],
        "kind": "fail",
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.cause} {finding.remedy}"},
        "partialFingerprints": {FINGERPRINT: fingerprint(finding)},
        "properties": {"evidence": [evidence_document(item) for item in finding.evidence]},
    }
    if place is not None:
        physical: dict[str, object] = {"artifactLocation": {"uri": uri_of(place.file)}}
        if place.line is not None:
            physical["region"] = {"startLine": place.line}
        result["locations"] = [{"physicalLocation": physical}]
    if compared:
        result["baselineState"] = "unchanged" if finding.accepted else "new"
    if finding.accepted:
        result["suppressions"] = [{"kind": "external", "justification": "listed in the baseline"}]
    return result


def _notification(finding: Finding, index: Mapping[str, int]) -> dict[str, object]:
    return {
        "level": "note",
        "associatedRule": {"id": finding.id, "index": index[finding.id]},
        "message": {
            "text": f"{finding.id} {finding.title}: not evaluated, for want of "
            f"{'; '.join(finding.missing)}"
        },
    }
