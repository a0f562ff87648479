"""Rules on GPUs, as NVIDIA's DCGM exporter tells of them: the alerts of W018 and W019.

Holds which series are read, the records, the alerts and their file. Names, factors and what stands
for "not known" are `telemetry.gpus`'; thresholds, causes and remedies the rules' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from string import Template

from ullage.findings.finding import Severity
from ullage.telemetry.gpus import FIELDS, LABELS, OF_THE_WHOLE_GPU, REASONS, Field
from ullage.telemetry.promql_text import quoted
from ullage.watch.code.alert import NUMBER, PERCENT, Alert
from ullage.watch.code.expressions import Scope
from ullage.watch.code.records import ENGINE as LABEL
from ullage.watch.code.records import Spans, duration
from ullage.watch.code.ruleset import alert_entry, group_text, written_of
from ullage.watch.rules import gpus
from ullage.watch.rules.table import RULES

ENGINE = "dcgm"
WHOLE = (
    "cluster",
    *(label for what in ("hostname", "index", "uuid", "name") for label in LABELS[what]),
)
DEVICE = (*WHOLE, *LABELS["mig_instance"], *LABELS["mig_profile"])
"""What tells devices apart whichever exporter tells of them. Who has one is left out: an error
ends its pod, and must not begin anew with the next one. A label that is not there does no harm."""
PERCENTS = "DCGM_FI_DEV_GPU_UTIL_RATIO"
"""A ratio, but in headers of DCGM 4.6 a percentage (`telemetry.gpus`)."""
NEEDED = {"held": "CLOCKS_EVENT_REASONS", "xid": "XID_ERRORS", "clock": "SM_CLOCK"}
ALWAYS = ("temperature_celsius", "busy_ratio", "sm_clock_hz", "used_bytes")
"""One of these is among the counters of every exporter."""
COUNTED = "DCGM_EXP_XID_ERRORS_COUNT"
"""The exporter's own count by code within its window, where it is asked for."""


def device(field: str, scope: Scope) -> str:
    """PromQL of a field in base units, one series per device; the first name that it has counts."""
    told = [_one(metric, scope) for metric in FIELDS[field]]
    return told[0] if len(told) == 1 else " or ".join(f"({text})" for text in told)


def _one(metric: Field, scope: Scope) -> str:
    whole = 'GPU_I_ID=""' if metric.metric in OF_THE_WHOLE_GPU else ""
    select = scope.select(metric.metric, whole)
    text = f"max by ({', '.join(DEVICE)}) ({select} < {metric.blank:.0f})"
    if metric.metric == PERCENTS:
        most = f"max_over_time({scope.select(metric.metric)}[1h])"
        text = f"{text} and on () max ({most} < {metric.blank:.0f}) <= 1"
    text = text if metric.factor == 1.0 else f"{metric.factor:.10g} * {text}"
    return text if metric.over == 1.0 else f"{text} / {metric.over:.10g}"


def reasons(bits: Iterable[int], held: str) -> str:
    """How many of those reasons `held`, a bitmask, has."""
    return " + ".join(f"floor({held} / {bit}) % 2" for bit in bits)


def bits_of(*parts: str) -> list[int]:
    """The reasons whose name has one of the parts; what the driver says in passing is left out."""
    return [
        bit
        for bit, name in REASONS.items()
        if name != gpus.AMBIGUOUS and any(part in name for part in parts)
    ]


(SLOWED,) = (bit for bit, name in REASONS.items() if name == gpus.AMBIGUOUS)
FATAL = " or ".join(f"$xid == {code}" for code in gpus.FATAL_XIDS)
CODES = "xid=~" + quoted("|".join(map(str, gpus.FATAL_XIDS)))

WHERE = "{{ $labels.Hostname }}{{ $labels.hostname }} GPU {{ $labels.gpu }}"
ALERTS: tuple[Alert, ...] = (
    Alert(
        "UllageGpuHeldDown",
        "W018",
        f"({reasons(bits_of(*gpus.HARMFUL), '$held')}) > 0"
        f" or (({reasons([SLOWED], '$held')}) > 0 and $busy >= {gpus.BUSY:g})",
        "short",
        f"{WHERE}: its clocks are held down by heat or for want of power",
    ),
    Alert(
        "UllageGpuClockLow",
        "W018",
        f"$clock / ($max_clock > 0) < {gpus.SLOW:g} and $busy >= {gpus.BUSY:g}",
        "short",
        f"{WHERE}: busy at {PERCENT} of its highest clock",
    ),
    Alert(
        "UllageGpuError",
        "W019",
        # The last code is told for ever, and a later one of an application hides it.
        "last_over_time($fatal_xid_came[$past])"
        " or on ($device) max_over_time($fatal_xids[$past]) > 0",
        "none",
        f"{WHERE}: Xid {{{{ if $labels.xid }}}}{{{{ $labels.xid }}}}{{{{ else }}}}{NUMBER}"
        "{{ end }}",
    ),
    Alert(
        "UllageGpuNotTold",
        "W011",
        " or ".join(
            f"label_replace(count by (cluster) (max by ($whole) ($seen) unless on ($whole) ${key}),"
            f' "what", "{what}", "", "")'
            for key, what in NEEDED.items()
        ),
        "recent",
        "{{ $value }} GPUs: their exporter does not tell DCGM_FI_DEV_{{ $labels.what }}",
        severity=Severity.info,
    ),
    Alert(
        "UllageNoGpuSeen",
        "W011",
        "absent($seen)",
        "recent",
        "no DCGM exporter is scraped: the other alerts on GPUs can see nothing",
    ),
)


def gpu_rule_file(matchers: str, spans: Spans) -> str:
    """The YAML of the rules on what DCGM's exporter exports."""
    scope = Scope(matchers)
    own = f'{LABEL}="{ENGINE}"'
    records = {
        "seen": " or ".join(f"({device(field, scope)})" for field in ALWAYS),
        "busy": device("busy_ratio", scope),
        "clock": device("sm_clock_hz", scope),
        "max_clock": device("max_sm_clock_hz", scope),
        "held": device("reasons", scope),
        "xid": device("xid_errors", scope),
        "fatal_xids": f"max by ({', '.join(DEVICE)}, xid) ({scope.select(COUNTED, CODES)})",
    }
    names = {
        **{key: f"ullage:gpu_{key}{{{own}}}" for key in (*records, "fatal_xid_came")},
        "device": ", ".join(DEVICE),
        "whole": ", ".join(WHOLE),
        "short": duration(spans.short_s),
        "recent": duration(spans.recent_s),
        "past": duration(spans.past_s),
    }
    came = Template(f"({FATAL}) and changes($xid[$recent]) > 0").substitute(names)
    labels = {LABEL: ENGINE}
    entries: list[dict[str, object]] = [
        {"record": f"ullage:gpu_{key}", "expr": expr, "labels": labels}
        for key, expr in (*records.items(), ("fatal_xid_came", came))
    ]
    by_id = {rule.id: rule for rule in RULES}
    for alert in ALERTS:
        expr = Template(alert.expr).substitute(names)
        entries.append(alert_entry(written_of(alert, expr, spans, by_id[alert.rule]), labels))
    head = (
        "Rules for GPUs, on what NVIDIA's DCGM exporter exports, written by `ullage watch rules`.",
        "Names are from what is published of it; no exporter was seen.",
        f"For scrapes every {duration(spans.scrape_s)}: --scrape-interval says another.",
        "UllageGpuClockLow needs DCGM_FI_DEV_MAX_SM_CLOCK among its counters, UllageGpuHeldDown "
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS.",
    )
    return group_text(head, ENGINE, spans, entries)
