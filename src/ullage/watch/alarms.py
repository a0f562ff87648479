"""What fired, on a terminal: each rule once, with the replicas, since when, cause, remedy, changes.

Holds grouping and text. Which rules fired is the rules', when an incident begins `incidents.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.text import Text

from ullage.findings.finding import Evidence, Finding, Severity
from ullage.findings.table import show_value, summary
from ullage.watch import cells
from ullage.watch.cards import INDENT, STYLES, wrapped
from ullage.watch.rule import Judged
from ullage.watch.sight import Incident, Sight
from ullage.watch.view import Change

MAX_NAMED = 3
MAX_ENDED = 3
MAX_CHANGES = 3
MAX_MISSING = 6


@dataclass(frozen=True, slots=True)
class Alarm:
    """One rule that fired: on which replicas, the gravest finding, since when the first of them."""

    finding: Finding
    url: str
    urls: tuple[str, ...]
    since_s: float | None
    changed: tuple[Change, ...]


def alarms_of(sight: Sight) -> tuple[Alarm, ...]:
    """Every rule that fires now, the gravest first."""
    open_ones = {
        (incident.url, incident.finding.id): incident
        for incident in sight.incidents
        if incident.until_s is None
    }
    by_rule: dict[str, list[Judged]] = {}
    for judged in sight.judged:
        if judged.finding.state == "fired":
            by_rule.setdefault(judged.finding.id, []).append(judged)
    found = [_alarm(group, open_ones) for group in by_rule.values()]
    return tuple(sorted(found, key=lambda alarm: (-alarm.finding.severity, alarm.finding.id)))


def _alarm(group: Sequence[Judged], open_ones: dict[tuple[str, str], Incident]) -> Alarm:
    incidents = [
        incident
        for judged in group
        if (incident := open_ones.get((judged.url, judged.finding.id))) is not None
    ]
    first = min(incidents, key=lambda incident: incident.since_s, default=None)
    # The replica on which it is gravest, and of those the one on which it began.
    shown = max(
        group,
        key=lambda judged: (
            judged.finding.severity,
            first is not None and judged.url == first.url,
        ),
    )
    return Alarm(
        shown.finding,
        shown.url,
        tuple(judged.url for judged in group),
        None if first is None else first.since_s,
        () if first is None else first.changed,
    )


def severity_counts(sight: Sight) -> list[Text]:
    """`2 errors`, `1 warning`: rules that fire now, by severity."""
    severities = [alarm.finding.severity for alarm in alarms_of(sight)]
    parts = []
    for severity in sorted(Severity, reverse=True):
        if num := severities.count(severity):
            plural = "s" if num > 1 and severity is not Severity.info else ""
            parts.append(Text(f"{num} {severity.name}{plural}", STYLES[severity]))
    return parts


def alarms(sight: Sight, width: int, *, verbose: bool = False) -> list[Text]:
    """What fires, and what ended lately."""
    lines: list[Text] = []
    for alarm in alarms_of(sight):
        lines += _lines_of(alarm, width, verbose=verbose)
    lines += _quiet(sight, width)
    lines += _ended(sight, width)
    return lines


def verdicts(sight: Sight, width: int, *, verbose: bool = False) -> list[Text]:
    """What could not be evaluated, what is clear, and the count."""
    lines = _not_evaluated(sight, width)
    if verbose:
        lines += _clear(sight, width)
    if sight.judged:
        findings = [judged.finding for judged in sight.judged]
        lines += wrapped(f"{summary(findings)} (rules × replicas)", width, "", "dim")
    return lines


def _lines_of(alarm: Alarm, width: int, *, verbose: bool) -> list[Text]:
    finding = alarm.finding
    head = f"{finding.severity.name} {finding.id}  {finding.title}"
    lines = wrapped(head, width, "", STYLES[finding.severity])
    where = _where(alarm)
    since = "" if alarm.since_s is None else f"since {clock(alarm.since_s)}"
    if where or since:
        lines += wrapped(", ".join(part for part in (where, since) if part), width, INDENT, "dim")
    lines += wrapped(finding.cause, width, INDENT)
    lines += wrapped(f"→ {finding.remedy}", width, INDENT)
    for change in alarm.changed[:MAX_CHANGES]:
        text = f"changed {_when(change, alarm.since_s)}: {_change(change)}"
        lines += wrapped(text, width, INDENT)
    if verbose:
        lines += _facts(finding.evidence, width)
    return lines


def _where(alarm: Alarm) -> str:
    """The replica that is told of first, then the others."""
    return _on([alarm.url, *(url for url in alarm.urls if url != alarm.url)]).strip()


def _on(urls: Sequence[str]) -> str:
    """` on A, B, C and 4 more`; nothing where the fleet as a whole is meant."""
    named = [cells.clean(url, 80) for url in urls if url][:MAX_NAMED]
    if not named:
        return ""
    more = len(urls) - len(named)
    return f" on {', '.join(named)}" + (f" and {more:,} more" if more else "")


def _when(change: Change, since_s: float | None) -> str:
    """The time of day; of a change that was seen only after it began also that, since a cause comes
    before its effect, or is seen with the next scrape."""
    after_s = 0.0 if since_s is None else change.time_s - since_s
    if after_s < 1.0:
        return clock(change.time_s)
    return f"{clock(change.time_s)}, {cells.duration(after_s)} after it began"


def _change(change: Change) -> str:
    before, after = cells.clean(change.before, 60), cells.clean(change.after, 60)
    return f"{cells.clean(change.what, 40)} {before or 'nothing'} → {after or 'nothing'}"


def _facts(evidence: Iterable[Evidence], width: int) -> list[Text]:
    lines: list[Text] = []
    for item in dict.fromkeys(evidence):
        value = "none" if item.value is None else f"{show_value(item.value)} {item.unit}".rstrip()
        lines += wrapped(f"{item.name}  {value}  [{item.source}]", width, INDENT * 2, "dim")
    return lines


def _ended(sight: Sight, width: int) -> list[Text]:
    """Incidents that are over, the latest first."""
    over = [
        (incident.until_s, incident) for incident in sight.incidents if incident.until_s is not None
    ]
    over.sort(key=lambda pair: -pair[0])
    lines: list[Text] = []
    for until_s, incident in over[:MAX_ENDED]:
        lasted = cells.duration(until_s - incident.since_s)
        where = f" on {cells.clean(incident.url, 80)}" if incident.url else ""
        text = (
            f"ended {clock(until_s)} after {lasted}: {incident.finding.id} "
            f"{incident.finding.title}{where}"
        )
        lines += wrapped(text, width, "", "dim")
    if len(over) > MAX_ENDED:
        lines += wrapped(f"and {len(over) - MAX_ENDED:,} more that ended", width, "", "dim")
    return lines


def _quiet(sight: Sight, width: int) -> list[Text]:
    """Incidents that are not over, of rules that do not fire in this round."""
    firing = {(j.url, j.finding.id) for j in sight.judged if j.finding.state == "fired"}
    by_rule: dict[str, list[Incident]] = {}
    for incident in sight.incidents:
        key = (incident.url, incident.finding.id)
        if incident.until_s is None and key not in firing:
            by_rule.setdefault(incident.finding.id, []).append(incident)
    lines: list[Text] = []
    for rule, incidents in sorted(by_rule.items()):
        where = _on([incident.url for incident in incidents])
        began = clock(min(incident.since_s for incident in incidents))
        title = incidents[0].finding.title
        text = f"not over yet, though quiet now: {rule} {title}{where}, since {began}"
        lines += wrapped(text, width, "", "dim")
    return lines


def _not_evaluated(sight: Sight, width: int) -> list[Text]:
    """What was missing, each once, with the rules that it kept from being evaluated: what kept
    most of them first, as replicas may each have reasons of their own."""
    by_missing: dict[tuple[str, ...], dict[str, int]] = {}
    for judged in sight.judged:
        if judged.finding.state == "not_evaluable":
            rules = by_missing.setdefault(judged.finding.missing, {})
            rules[judged.finding.id] = rules.get(judged.finding.id, 0) + 1
    ranked = sorted(by_missing.items(), key=lambda pair: -sum(pair[1].values()))
    lines: list[Text] = []
    for missing, rules in ranked[:MAX_MISSING]:
        ids = ", ".join(sorted(rules))
        text = f"not evaluated for want of {'; '.join(missing)}: {ids}"
        lines += wrapped(text, width, "", "dim")
    if len(ranked) > MAX_MISSING:
        text = f"and for {len(ranked) - MAX_MISSING:,} more reasons"
        lines += wrapped(text, width, "", "dim")
    return lines


def _clear(sight: Sight, width: int) -> list[Text]:
    """The rules that were evaluated and are content, by replica."""
    lines: list[Text] = []
    for judged in sight.judged:
        finding = judged.finding
        if finding.state == "clear":
            where = f"  {cells.clean(judged.url, 80)}" if judged.url else ""
            lines += wrapped(f"clear {finding.id}  {finding.title}{where}", width, "")
            lines += _facts(finding.evidence, width)
    return lines


def clock(time_s: float) -> str:
    """The time of day in UTC, as the header says it."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%H:%M:%S")
