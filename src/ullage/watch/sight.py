"""One round of watching: every replica's view, what the rules say, the incidents so far.

Holds the values that the terminal, the page, the exporter, JSON and actions all show.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.findings.finding import Finding
from ullage.watch.rule import Judged
from ullage.watch.view import Change, View


@dataclass(frozen=True, slots=True)
class Incident:
    """A rule that fired on a replica (url "": the fleet) without a pause.

    `finding` is its latest answer; `until_s` None while it lasts. Times are Unix seconds.
    `changed` is what was different about the replica or its traffic shortly before it began; what
    was seen to change only after that (a cause may be seen a scrape late) has a later `time_s`.
    """

    url: str
    finding: Finding
    since_s: float
    until_s: float | None
    changed: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Sight:
    """A round, at `time_s` (Unix). `incidents` newest first, the ended ones of the last day too.

    `error` says why the source itself (not a replica) could not be asked this time, "" if it could.
    """

    time_s: float
    interval_s: float
    views: tuple[View, ...]
    judged: tuple[Judged, ...]
    incidents: tuple[Incident, ...]
    error: str = ""
