"""Findings as JUnit XML: a test case per rule.

Fired is a failure, not evaluable is skipped with what was missing, clear and accepted pass. Holds
the form and the escapes only; characters that XML 1.0 cannot hold become U+FFFD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ullage.findings.finding import Evidence, Finding
from ullage.findings.place import Place, PlaceOf, RuleText
from ullage.findings.table import show_value

_MARKS = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_SPACES = {"\t": "&#9;", "\n": "&#10;", "\r": "&#13;"}


def junit(
    name: str,
    findings: Sequence[Finding],
    rules: Mapping[str, RuleText],
    place_of: PlaceOf,
) -> str:
    """The document, ending in a newline. `name` is the subject; `rules` are looked up by id."""
    failures = sum(1 for f in findings if f.state == "fired" and not f.accepted)
    skipped = sum(1 for f in findings if f.state == "not_evaluable")
    counts = f'tests="{len(findings)}" failures="{failures}" errors="0" skipped="{skipped}"'
    cases = "".join(_case(f, rules[f.id], place_of) for f in findings)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuites name="ullage audit" {counts} time="0">\n'
        f'<testsuite name="{escape(name)}" {counts} time="0">\n{cases}</testsuite>\n'
        "</testsuites>\n"
    )


def _case(finding: Finding, rule: RuleText, place_of: PlaceOf) -> str:
    place = place_of(finding) if finding.state == "fired" else None
    where = f' file="{escape(place.file)}"' if place is not None else ""
    if place is not None and place.line is not None:
        where += f' line="{place.line}"'
    head = (
        f'<testcase classname="ullage.{escape(rule.category)}" '
        f'name="{escape(f"{finding.id} {finding.title}")}" time="0"{where}'
    )
    body = _body(finding, place)
    return f"{head}/>\n" if not body else f"{head}>{body}</testcase>\n"


def _body(finding: Finding, place: Place | None) -> str:
    if finding.state == "clear":
        return ""
    if finding.state == "not_evaluable":
        return f'<skipped message="{escape("for want of " + "; ".join(finding.missing))}"/>'
    lines = [finding.cause, finding.remedy, *(_fact(item) for item in finding.evidence)]
    if place is not None:
        lines.append(place.file if place.line is None else f"{place.file}:{place.line}")
    text = escape("\n".join(lines))
    if finding.accepted:
        return f"<system-out>{escape('accepted by the baseline')}&#10;{text}</system-out>"
    kind = finding.severity.name
    return f'<failure type="{kind}" message="{escape(finding.cause)}">{text}</failure>'


def _fact(item: Evidence) -> str:
    return f"{item.name}: {show_value(item.value)} {item.unit}".rstrip() + f" [{item.source}]"


def escape(text: str) -> str:
    """Text for an element or an attribute in double quotes; line breaks survive in both."""
    return "".join(
        _MARKS.get(c) or _SPACES.get(c) or (c if _allowed(c) else "\ufffd") for c in text
    )


def _allowed(character: str) -> bool:
    """XML 1.0, production 2 (Char), less the C1 controls, which some readers refuse."""
    code = ord(character)
    return (
        0x20 <= code <= 0x7E
        or 0xA0 <= code <= 0xD7FF
        or 0xE000 <= code <= 0xFFFD
        or (0x10000 <= code <= 0x10FFFF)
    )
