"""Findings as GitHub workflow commands: an annotation each, at its file and line.

Holds the form and its escapes (GitHub's actions toolkit: `%`, CR and LF in a message; `:` and `,`
too in a property). Accepted findings and rules that could not be evaluated are plain lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ullage.findings.finding import Finding
from ullage.findings.place import PlaceOf
from ullage.findings.table import summary

COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def workflow_commands(findings: Sequence[Finding], place_of: PlaceOf) -> str:
    """A command a line for what fired and is not accepted, then plain lines; ends in a newline."""
    return "".join(f"{line}\n" for line in _lines(findings, place_of))


def _lines(findings: Sequence[Finding], place_of: PlaceOf) -> Iterator[str]:
    for finding in sorted(findings, key=lambda f: (-f.severity, f.id)):
        if finding.state == "fired" and not finding.accepted:
            yield _command(finding, place_of)
    for finding in findings:
        if finding.state == "not_evaluable":
            yield _plain(f"not evaluated: {finding.id} {finding.title}: for want of "
                         f"{'; '.join(finding.missing)}")  # fmt: skip
        elif finding.accepted:
            yield _plain(f"accepted by the baseline: {finding.id} {finding.title}")
    yield summary(findings)


def _command(finding: Finding, place_of: PlaceOf) -> str:
    place = place_of(finding)
    properties = {"title": f"{finding.id} {finding.title}"}
    if place is not None:
        properties = {"file": place.file, **properties}
        if place.line is not None:
            properties["line"] = str(place.line)
    shown = ",".join(f"{name}={escape_property(text)}" for name, text in properties.items())
    return f"::{COMMANDS[finding.severity.name]} {shown}::" + escape_data(
        f"{finding.cause}\n{finding.remedy}"
    )


def escape_data(text: str) -> str:
    """A message: whatever stands in it, it stays one line and starts no other command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """A property's value: as a message, and without the marks that end it."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
