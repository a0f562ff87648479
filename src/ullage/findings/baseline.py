"""Known findings that a team has accepted: the identity of a finding, and the file that lists them.

Holds reading, writing and marking. A finding is known by its rule and by what it speaks of, never
by numbers, so that it stays known when a figure moves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ullage.errors import BadInput
from ullage.findings.finding import Finding
from ullage.findings.written import write_whole

SCHEMA = "ullage.baseline/1"
MAX_BYTES = 4 << 20
EXPECTED = f'a file that --write-baseline made: {{"schema": "{SCHEMA}", "accepted": […]}}'


def fingerprint(finding: Finding) -> str:
    """32 hexadecimal digits over the rule's id and the names of its evidence, order and values
    aside."""
    from hashlib import sha256  # costs start-up, and only some outputs need it

    names = sorted({evidence.name for evidence in finding.evidence})
    text = "\0".join((finding.id, *names))
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Accepted:
    """One entry: the identity, and the title and evidence names for those who read the file."""

    rule: str
    fingerprint: str
    title: str = ""


def accept(
    findings: Sequence[Finding], entries: Sequence[Accepted]
) -> tuple[tuple[Finding, ...], tuple[Accepted, ...]]:
    """The findings with the known ones marked, and the stale entries.

    An entry is stale when its rule was looked at and no longer fires so. A rule that was not
    evaluable or not selected says nothing about its entries.
    """
    known = {entry.fingerprint for entry in entries}
    fired = {fingerprint(f): f for f in findings if f.state == "fired"}
    looked_at = {f.id for f in findings if f.state != "not_evaluable"}
    marked = tuple(
        replace(f, accepted=True) if f.state == "fired" and fingerprint(f) in known else f
        for f in findings
    )
    stale = tuple(e for e in entries if e.rule in looked_at and e.fingerprint not in fired)
    return marked, stale


def read_baseline(path: str) -> tuple[Accepted, ...]:
    """The entries of the file.

    Raises:
        BadInput: it cannot be read, or is not a baseline.
    """
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a usable path"
        raise BadInput(f"cannot be read ({reason})", file=path, expected=EXPECTED) from error
    if len(data) > MAX_BYTES:
        raise BadInput(f"more than {MAX_BYTES:,} bytes", file=path, expected=EXPECTED)
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput("not JSON", file=path, expected=EXPECTED) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BadInput(f"no schema {SCHEMA!r}", file=path, field="schema", expected=EXPECTED)
    entries = document.get("accepted")
    if not isinstance(entries, list):
        raise BadInput("no list", file=path, field="accepted", expected=EXPECTED)
    return tuple(_entry(path, number, entry) for number, entry in enumerate(entries))


def _entry(path: str, number: int, entry: object) -> Accepted:
    if isinstance(entry, dict):
        rule, mark, title = entry.get("rule"), entry.get("fingerprint"), entry.get("title", "")
        if isinstance(rule, str) and isinstance(mark, str) and isinstance(title, str):
            return Accepted(rule, mark, title)
    raise BadInput(
        "not an entry", file=path, field=f"accepted[{number}]",
        expected="an object with the texts rule and fingerprint",
    )  # fmt: skip


def write_baseline(path: str, findings: Sequence[Finding]) -> int:
    """Write every fired finding as an entry, whole or not at all; returns how many.

    Raises:
        BadUsage: the file cannot be written.
    """
    entries = [
        {
            "rule": f.id,
            "fingerprint": fingerprint(f),
            "title": f.title,
            "evidence": sorted({evidence.name for evidence in f.evidence}),
        }
        for f in findings
        if f.state == "fired"
    ]
    text = json.dumps({"schema": SCHEMA, "accepted": entries}, indent=1) + "\n"
    write_whole(path, text, field="--write-baseline")
    return len(entries)
