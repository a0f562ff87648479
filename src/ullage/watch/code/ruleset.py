"""An engine's Prometheus rule file: its records, the alerts that they allow, and why not the rest.

Holds the assembly and the YAML. What is recorded is `records`, what alerts is `alerts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from ullage.telemetry.dialects.source import Dialect
from ullage.watch.code.alert import SEVERITIES, Alert, keys_in
from ullage.watch.code.alerts import ABOVE_ONE, ABSENT, ALERTS, CORE, IMPOSSIBLE, SHARES
from ullage.watch.code.expressions import OF_ONE, Scope
from ullage.watch.code.records import ENGINE, Records, Spans, duration, of_engine, records_of
from ullage.watch.rule import Rule
from ullage.watch.rules.liveness import WITHOUT_KV
from ullage.watch.rules.table import RULES


@dataclass(frozen=True, slots=True)
class Written:
    """An alert as Prometheus reads it."""

    alert: Alert
    expr: str
    hold_s: float
    severity: str
    rule: Rule


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All that one engine's file says. `left_out`: (alert, why), in the table's order."""

    dialect: Dialect
    scope: Scope
    spans: Spans
    records: Records
    alerts: tuple[Written, ...]
    left_out: tuple[tuple[Alert, str], ...]


def ruleset_of(dialect: Dialect, scope: Scope = Scope(), spans: Spans = Spans()) -> RuleSet:  # noqa: B008
    """The rules for one engine, of what its dialect's table has."""
    records = records_of(dialect, scope, spans)
    names = {
        **{key: of_engine(name, dialect) for key, name in records.names().items()},
        "short": duration(spans.short_s),
        "recent": duration(spans.recent_s),
        "settled": duration(spans.settled_s),
        "past": duration(spans.past_s),
        "recent_s": f"{spans.recent_s:g}",
        "scrape_s": f"{spans.scrape_s:g}",
        "replica": scope.replica(),
        "peers": ", ".join(
            (*(label for label in scope.by if label not in OF_ONE), dialect.info.model_label)
        ),
    }
    by_id = {rule.id: rule for rule in RULES}
    alerts: list[Written] = []
    left_out: list[tuple[Alert, str]] = []
    for alert in (*ALERTS, *_of_fields(dialect, names)):
        rule = by_id[alert.rule]
        lacking = sorted(keys_in(alert.expr) - names.keys())
        if lacking:
            why = dict.fromkeys(records.unsaid[key] for key in lacking)
            left_out.append((alert, f"{', '.join(lacking)}: {'; '.join(why)}"))
            continue
        said = [clause for clause in alert.also if keys_in(clause) <= names.keys()]
        expr = Template(" ".join((alert.expr, *said))).substitute(names)
        alerts.append(written_of(alert, expr, spans, rule))
    return RuleSet(dialect, scope, spans, records, tuple(alerts), tuple(left_out))


def written_of(alert: Alert, expr: str, spans: Spans, rule: Rule) -> Written:
    """The alert with its expression filled in."""
    hold_s = {"none": 0.0, "short": spans.short_s, "recent": spans.recent_s}[alert.hold]
    severity = SEVERITIES[rule.severity if alert.severity is None else alert.severity]
    return Written(alert, expr, hold_s, severity, rule)


def _of_fields(dialect: Dialect, names: Mapping[str, str]) -> Iterator[Alert]:
    """The alerts whose text is one clause per field: of fields that the engine exports."""
    fields = [field for field in CORE if field in names]
    if dialect.engine in WITHOUT_KV:
        fields.remove("kv_used_ratio")
    for alert in (ABSENT, IMPOSSIBLE):
        clauses = []
        for field in fields:
            more = ABOVE_ONE if alert is IMPOSSIBLE and field in SHARES else ""
            text = (alert.expr + more).replace("$FIELD", f"${field}")
            clauses.append(f'label_replace({text}, "field", "{field}", "", "")')
        if clauses:
            yield Alert(alert.name, alert.rule, " or ".join(clauses), alert.hold, alert.summary)


def rule_file(rules: RuleSet) -> str:
    """The YAML of a Prometheus rule file: one group, records before the alerts that read them."""
    labels = {ENGINE: rules.dialect.engine}
    entries: list[dict[str, object]] = [
        {"record": record.name, "expr": record.promql, "labels": labels}
        for record in rules.records.records
    ]
    entries += [alert_entry(written, labels) for written in rules.alerts]
    return group_text(_head(rules), rules.dialect.engine, rules.spans, entries)


def group_text(
    head: Iterable[str], name: str, spans: Spans, entries: Sequence[Mapping[str, object]]
) -> str:
    """The YAML of one group of rules, evaluated once for each scrape; `head` as comments."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Each text written out where it stands, not once for all places."""

        def ignore_aliases(self, _data: object) -> bool:
            return True

    # Some alerts add up what the records said at each scrape.
    group = {"name": f"ullage-{name}", "interval": duration(spans.scrape_s), "rules": list(entries)}
    text = yaml.dump(
        {"groups": [group]}, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100_000
    )
    return "".join(f"# {line}\n" for line in head) + text


def alert_entry(written: Written, labels: Mapping[str, str]) -> dict[str, object]:
    """The alert as an entry of a group, with the cause and the remedy of its rule."""
    rule = written.rule
    hold = {"for": duration(written.hold_s)} if written.hold_s else {}
    return {
        "alert": written.alert.name,
        "expr": written.expr,
        **hold,
        "labels": {**labels, "severity": written.severity, "rule": rule.id},
        "annotations": {
            "summary": written.alert.summary,
            "cause": _literal(rule.why),
            "remedy": _literal(rule.fix),
            "explain": f"ullage explain {rule.id}",
        },
    }


def _literal(text: str) -> str:
    """Text that Prometheus' templates leave alone."""
    return re.sub(r"\{\{", '{{ "{{" }}', text)


def _head(rules: RuleSet) -> Iterator[str]:
    dialect = rules.dialect
    yield f"Rules for {dialect.title} ({dialect.versions}), written by `ullage watch rules`."
    if dialect.proof == "published":
        yield "Names are from what is published of it; no server of it was seen."
    yield f"For scrapes every {duration(rules.spans.scrape_s)}: --scrape-interval says another."
    for alert, why in rules.left_out:
        yield f"Left out: {alert.name} ({alert.rule}), for want of {why}."
