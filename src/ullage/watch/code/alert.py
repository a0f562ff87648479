"""What an alert is, before it is written for an engine, and the words of Prometheus' templates.

Holds the type. The alerts of engines are `alerts`', those of GPUs `gpu_alerts`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template
from typing import Literal

from ullage.findings.finding import Severity

Hold = Literal["none", "short", "recent"]
SEVERITIES: Mapping[Severity, str] = {
    Severity.error: "critical",
    Severity.warning: "warning",
    Severity.info: "info",
}
SPANS = frozenset(
    {"short", "recent", "settled", "past", "recent_s", "scrape_s", "replica", "peers"}
)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `expr` and `also` are templates; what `expr` needs is what it names.

    `also` are clauses that follow where the engine has what they name. `hold` is how long it must
    be so before the alert fires. `summary` is Prometheus' template of one line. `severity` None:
    the rule's.
    """

    name: str
    rule: str
    expr: str
    hold: Hold
    summary: str
    also: tuple[str, ...] = ()
    severity: Severity | None = None


def keys_in(template: str) -> frozenset[str]:
    """The records that a template names."""
    return frozenset(Template(template).get_identifiers()) - SPANS


WHO = "{{ if $labels.pod }}{{ $labels.pod }}{{ else }}{{ $labels.instance }}{{ end }}"
PERCENT = "{{ $value | humanizePercentage }}"
NUMBER = "{{ $value | humanize }}"
SECONDS = "{{ $value | humanizeDuration }}"
PLACE = (
    "{{ $labels.id }} {{ $labels.kind }}"
    '{{ if eq $labels.layer "many" }}, several layers'
    "{{ else if $labels.layer }}, layer {{ $labels.layer }}{{ end }}"
)
