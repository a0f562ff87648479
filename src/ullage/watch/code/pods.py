"""Rules on pods, as kube-state-metrics tells of them: the alerts of W025.

Holds the expressions and their file. How long a state may last is `watch.rules.pods`'. Source of
the names: kube-state-metrics 2, docs/metrics/workload/pod-metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

from ullage.findings.finding import Severity
from ullage.telemetry.promql_text import quoted
from ullage.watch.code.alert import SEVERITIES, Alert
from ullage.watch.code.expressions import Scope
from ullage.watch.code.records import ENGINE as LABEL
from ullage.watch.code.records import Spans, duration
from ullage.watch.code.ruleset import Written, alert_entry, group_text
from ullage.watch.rules import pods
from ullage.watch.rules.table import RULES

ENGINE = "kube-state-metrics"
POD = ("cluster", "exported_namespace", "exported_pod", "namespace", "pod", "uid")
"""What tells pods apart. Where Prometheus does not honour the exporter's labels, `pod` is the
exporter's own, and the one that is meant is `exported_pod`."""
CONTAINER = (*POD, "exported_container", "container")
SHOWN_S = 900.0
"""How long a pod that has failed is told of, as `ullage watch` shows it."""

# Name → (metric, matcher, what it is aggregated by).
SERIES = {
    "killed": ("kube_pod_container_status_last_terminated_reason", 'reason="OOMKilled"', CONTAINER),
    "waiting": (
        "kube_pod_container_status_waiting_reason",
        "reason=~" + quoted("|".join(sorted(pods.HOPELESS))),
        CONTAINER,
    ),
    "backs_off": (
        "kube_pod_container_status_waiting_reason",
        'reason="CrashLoopBackOff"',
        POD,
    ),
    "unschedulable": ("kube_pod_status_unschedulable", "", POD),
    "scheduled": ("kube_pod_status_scheduled", 'condition="true"', POD),
    "ready": ("kube_pod_status_ready", 'condition="true"', POD),
    "alive": ("kube_pod_status_phase", 'phase=~"Pending|Running"', POD),
    "failed": ("kube_pod_status_phase", 'phase="Failed"', POD),
    "created": ("kube_pod_created", "", POD),
    "gone_by": ("kube_pod_deletion_timestamp", "", POD),
}
RESTARTS = "kube_pod_container_status_restarts_total"
STAYS = " unless on ($of_pod) $gone_by"
LOOPS = (
    f"(sum by ($of_pod) (increase($restarts[$ago])) >= {pods.LOOP}"
    f" or $backs_off > 0 and on ($of_pod) sum by ($of_pod) ($restarts) >= {pods.LOOP})"
)
WHO = "{{ with $labels.exported_pod }}{{ . }}{{ else }}{{ $labels.pod }}{{ end }}"


@dataclass(frozen=True, slots=True)
class Lasting:
    """An alert, and for how many seconds what it tells of may be so."""

    alert: Alert
    hold_s: float = 0.0


def _alert(
    name: str, expr: str, summary: str, hold_s: float = 0.0, severity: Severity | None = None
) -> Lasting:
    return Lasting(
        Alert(name, "W025", expr, "none", f"{WHO}: {summary}", severity=severity), hold_s
    )


ALERTS: tuple[Lasting, ...] = (
    _alert(
        "UllagePodKilledForMemory",
        # The reason is told for ever; with it goes a restart.
        "$killed > 0 and on ($of_container) max by ($of_container) (increase($restarts[$ago])) > 0"
        + STAYS,
        "a container was killed for want of host memory",
    ),
    _alert("UllagePodRestartsInALoop", LOOPS + STAYS, "its containers start again and again"),
    _alert(
        "UllagePodFailed",
        "$failed == 1 and on ($of_pod) (min_over_time($each_failed[$shown]) == 0"
        f" or time() - $created < {SHOWN_S:g})" + STAYS,
        "it has failed and will not run again",
    ),
    _alert(
        "UllagePodCannotStart",
        "$waiting > 0" + STAYS,
        "a container waits for an image or a configuration that does not come",
        pods.HOPELESS_S,
    ),
    _alert(
        "UllagePodWithoutNode",
        "$unschedulable > 0" + STAYS,
        "no node has room for it",
        pods.UNSCHEDULED_S,
    ),
    _alert(
        "UllagePodNotReady",
        "$ready == 0 and on ($of_pod) $alive == 1 and on ($of_pod) $scheduled == 1"
        f" unless on ($of_pod) {LOOPS} unless on ($of_pod) $waiting > 0" + STAYS,
        "it is not ready, longer than weights take to load",
        pods.LOADING_S,
    ),
    _alert(
        "UllagePodStillThere",
        f"time() - $gone_by > {pods.OVERDUE_S:g}",
        "it should have been gone {{ $value | humanizeDuration }} ago",
        severity=Severity.warning,
    ),
    Lasting(
        Alert(
            "UllageNoPodSeen",
            "W011",
            "absent($alive)",
            "none",
            "kube-state-metrics tells of no pod that is chosen: the other alerts see nothing",
        ),
        pods.HOPELESS_S,
    ),
)


def pod_rule_file(matchers: str, spans: Spans) -> str:
    """The YAML of the rules on the pods that `matchers` choose."""
    scope = Scope(matchers)
    names = {
        key: f"max by ({', '.join(by)}) ({scope.select(metric, matcher)})"
        for key, (metric, matcher, by) in SERIES.items()
    }
    names |= {
        "restarts": scope.select(RESTARTS),
        "each_failed": scope.select(*SERIES["failed"][:2]),
        "of_pod": ", ".join(POD),
        "of_container": ", ".join(CONTAINER),
        "ago": duration(pods.AGO_S),
        "shown": duration(SHOWN_S),
    }
    labels = {LABEL: ENGINE}
    entries = [
        alert_entry(written_of(lasting, Template(lasting.alert.expr).substitute(names)), labels)
        for lasting in ALERTS
    ]
    head = (
        "Rules for pods, on what kube-state-metrics exports, written by `ullage watch rules`.",
        "Names are from its documents; none was seen.",
    )
    return group_text(head, ENGINE, spans, entries)


def written_of(lasting: Lasting, expr: str) -> Written:
    """The alert with its expression filled in."""
    rule = next(rule for rule in RULES if rule.id == lasting.alert.rule)
    severity = rule.severity if lasting.alert.severity is None else lasting.alert.severity
    return Written(lasting.alert, expr, lasting.hold_s, SEVERITIES[severity], rule)
