"""The rule files: Prometheus takes them, they keep to the tables, and say what they leave out."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.telemetry.prometheus_server import NEEDS_PROMTOOL
from ullage.cli.watch_code import add_arguments
from ullage.telemetry.dialects.table import DIALECTS
from ullage.telemetry.promql_text import metrics_in
from ullage.watch.code import gpus, pods
from ullage.watch.code.alert import keys_in
from ullage.watch.code.alerts import ABSENT, ALERTS, IMPOSSIBLE
from ullage.watch.code.expressions import Scope
from ullage.watch.code.records import Spans, duration, records_of
from ullage.watch.code.ruleset import rule_file, ruleset_of, written_of
from ullage.watch.rules.table import RULES

ENGINES = {dialect.engine: dialect for dialect in DIALECTS}
EVERY = [*ALERTS, ABSENT, IMPOSSIBLE]


@NEEDS_PROMTOOL
def test_promtool_takes_every_file(tmp_path: Path) -> None:
    for engine, dialect in ENGINES.items():
        for scope in (Scope(), Scope('job="a\\"b",pod=~"x.*"', ("job", "instance"))):
            (tmp_path / f"{engine}-{len(scope.by)}.yml").write_text(
                rule_file(ruleset_of(dialect, scope, Spans(1.0)))
            )
    files = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(["promtool", "check", "rules", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SUCCESS") == 2 * len(ENGINES)


def test_every_rule_has_an_alert_and_every_alert_a_rule() -> None:
    ids = {rule.id for rule in RULES}
    elsewhere = (*gpus.ALERTS, *(lasting.alert for lasting in pods.ALERTS))
    assert {alert.rule for alert in (*EVERY, *elsewhere)} == ids


@pytest.mark.parametrize("engine", ENGINES)
def test_an_alert_is_written_or_left_out_with_a_reason(engine: str) -> None:
    rules = ruleset_of(ENGINES[engine])
    written = {one.alert.name for one in rules.alerts}
    left_out = {alert.name: why for alert, why in rules.left_out}
    assert written | left_out.keys() == {alert.name for alert in EVERY}
    assert not written & left_out.keys()
    head = "".join(line for line in rule_file(rules).splitlines(True) if line.startswith("# "))
    for name, why in left_out.items():
        assert f"Left out: {name} " in head
        assert why in head


def test_what_any_alert_names_is_recorded_for_some_engine() -> None:
    recorded = {
        record.key
        for dialect in DIALECTS
        for record in records_of(dialect, Scope(), Spans()).records
    }
    for alert in ALERTS:
        for template in (alert.expr, *alert.also):
            assert keys_in(template) <= recorded, alert.name


@pytest.mark.parametrize("engine", ENGINES)
def test_only_metrics_of_the_dialects_table_are_read(engine: str) -> None:
    dialect = ENGINES[engine]
    known = {
        metric
        for sources in dialect.fields.values()
        for source in sources
        for metric in metrics_in(source)
    }
    known |= {*dialect.info.settings}
    for record in records_of(dialect, Scope(), Spans()).records:
        for word in _metric_names(record.promql, dialect.marks):
            base = word.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert {word, base} & known, (record.name, word)


def _metric_names(promql: str, marks: tuple[str, ...]) -> list[str]:
    words = promql.replace("(", " ").replace(")", " ").replace("{", " ").replace("[", " ").split()
    return [word for word in words if word.startswith(marks) and ".*" not in word]


def test_a_file_carries_labels_cause_and_remedy() -> None:
    document = yaml.safe_load(rule_file(ruleset_of(ENGINES["vllm"])))
    (group,) = document["groups"]
    assert group["interval"] == "15s"
    alerts = {entry["alert"]: entry for entry in group["rules"] if "alert" in entry}
    storm = alerts["UllagePreemptionStorm"]
    rule = next(rule for rule in RULES if rule.id == "W003")
    assert storm["labels"] == {"ullage_engine": "vllm", "severity": "warning", "rule": "W003"}
    assert storm["annotations"]["cause"] == rule.why
    assert storm["annotations"]["remedy"] == rule.fix
    assert storm["annotations"]["explain"] == "ullage explain W003"
    assert alerts["UllageEngineStuck"]["labels"]["severity"] == "critical"
    assert alerts["UllageEngineStuck"]["for"] == "2m"
    records = [entry for entry in group["rules"] if "record" in entry]
    assert all(entry["labels"] == {"ullage_engine": "vllm"} for entry in records)
    # A record is there before what reads it.
    seen: set[str] = set()
    for entry in group["rules"]:
        read = {record["record"] for record in records if f"{record['record']}{{" in entry["expr"]}
        assert read <= seen, entry
        seen |= {entry["record"]} if "record" in entry else set()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(15, "15s"), (300, "5m"), (3600, "1h"), (5400, "1h30m"), (0.8, "800ms"), (1.5, "1s500ms")],
)
def test_durations_are_prometheus(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_every_alert_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "alerts.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `Ullage")]
    sets = [ruleset_of(dialect) for dialect in DIALECTS]
    expected = []
    for alert in EVERY:
        having = {
            rules.dialect.title: one
            for rules in sets
            for one in rules.alerts
            if one.alert.name == alert.name
        }
        one = next(iter(having.values()))
        lacking = [rules.dialect.title for rules in sets if rules.dialect.title not in having]
        whose = ", ".join(having)
        if not lacking:
            whose = "all"
        elif len(lacking) <= len(having):
            whose = f"all but {', '.join(lacking)}"
        hold = duration(one.hold_s) if one.hold_s else "at once"
        link = f"[{alert.rule}](rules/{alert.rule}.md)"
        expected.append(f"| `{alert.name}` | {link} | {one.severity} | {hold} | {whose} |")
    by_id = {rule.id: rule for rule in RULES}
    for alert in gpus.ALERTS:
        one = written_of(alert, "", Spans(), by_id[alert.rule])
        hold = duration(one.hold_s) if one.hold_s else "at once"
        link = f"[{alert.rule}](rules/{alert.rule}.md)"
        expected.append(f"| `{alert.name}` | {link} | {one.severity} | {hold} | GPUs |")
    for lasting in pods.ALERTS:
        one = pods.written_of(lasting, "")
        hold = duration(one.hold_s) if one.hold_s else "at once"
        link = f"[{one.rule.id}](rules/{one.rule.id}.md)"
        expected.append(f"| `{one.alert.name}` | {link} | {one.severity} | {hold} | pods |")
    assert rows == expected


def test_every_flag_of_the_words_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "alerts.md").read_text()
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        assert f"| `{action.option_strings[0]} " in text
        for choice in action.choices or ():
            assert f"`{choice}`" in text
