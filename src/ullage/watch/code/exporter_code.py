"""The board and the rules for what `ullage watch --exporter` itself exports.

Holds data, and the assembly of its few rules. Names are held by a test to `watch.exporter`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.watch.code.panels import Board, Panel, Query, Row
from ullage.watch.code.records import ENGINE as LABEL
from ullage.watch.code.records import Spans, duration
from ullage.watch.code.ruleset import group_text

ENGINE = "exporter"
CHOSEN = 'job=~"$job",url=~"$url"'
WHO = "{{url}}"
P = "ullage_watch_"


def exporter_board(matchers: str = "") -> Board:
    """Every replica that is watched, whatever its engine, and what the rules say of it."""
    inner = ",".join(part for part in (CHOSEN, matchers) if part)

    def of(name: str, *more: str) -> str:
        return f"{P}{name}{{{','.join((*more, inner))}}}"

    def lines(title: str, unit: str, name: str, most: float | None = None) -> Panel:
        return Panel(title, unit, (Query(of(name), WHO),), most=most)

    def spread(title: str, name: str) -> Panel:
        queries = tuple(
            Query(of(name, f'q="{q}"', f'bound="{bound}"'), f"{text} {bound} {WHO}")
            for q, text in (("0.5", "p50"), ("0.99", "p99"))
            for bound in ("low", "high")
        )
        return Panel(title, "s", queries, "Both ends of the bucket that holds it.")

    def stat(title: str, unit: str, promql: str) -> Panel:
        return Panel(title, unit, (Query(promql, ""),), kind="stat", width=4)

    rows = (
        Row(
            "Fleet",
            (
                stat("Replicas that answer", "short", f"sum ({of('up')})"),
                stat("Rules that fire", "short", f"sum ({of('rule_fired')})"),
                stat("Rules that cannot tell", "short", f"sum ({of('rules_not_evaluable')})"),
                stat("KV held", "bytes", f"sum ({of('kv_used_bytes')})"),
                stat("KV free", "bytes", f"sum ({of('kv_free_bytes')})"),
                stat("Waiting", "short", f"sum ({of('requests_waiting')})"),
            ),
        ),
        Row(
            "Findings",
            (
                Panel(
                    "Rules that fire",
                    "short",
                    (Query(f"{of('rule_fired')} == 1", f"{{{{rule}}}} {WHO}"),),
                    "ullage explain ID tells what a rule means.",
                    width=16,
                ),
                Panel(
                    "Incidents, for how long",
                    "s",
                    (
                        Query(
                            f"time() - {of('incident_start_timestamp_seconds')}",
                            f"{{{{rule}}}} {WHO}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "KV cache",
            (
                lines("KV held", "percentunit", "kv_used_ratio", 1.0),
                lines("KV bytes held", "bytes", "kv_used_bytes"),
                lines("KV tokens free", "short", "kv_free_tokens"),
                Panel(
                    "Time to full",
                    "s",
                    tuple(
                        Query(of("time_to_full_seconds", f'bound="{bound}"'), f"{bound} {WHO}")
                        for bound in ("low", "high")
                    ),
                ),
                lines("Room used in held pages", "percentunit", "page_utilization_ratio", 1.0),
                lines("Prefix hits", "percentunit", "prefix_hit_ratio", 1.0),
            ),
        ),
        Row(
            "Requests",
            (
                lines("Running", "short", "requests_running"),
                lines("Waiting", "short", "requests_waiting"),
                Panel(
                    "Waiting, by reason",
                    "short",
                    (Query(f"sum by (reason) ({of('requests_waiting_by_reason')})", "{{reason}}"),),
                    kind="stacked",
                ),
                lines("Preemptions per second", "short", "preemptions_per_second"),
                lines("Tokens generated per second", "short", "generation_tokens_per_second"),
                lines("Turned away per second", "short", "rejected_requests_per_second"),
            ),
        ),
        Row(
            "Latency",
            (
                spread("Time to first token", "ttft_seconds"),
                spread("Time between tokens", "itl_seconds"),
                spread("In the queue", "queue_seconds"),
            ),
        ),
        Row(
            "GPUs",
            (
                lines("GPU busy", "percentunit", "gpu_busy_ratio", 1.0),
                lines("GPU clock", "hertz", "gpu_sm_clock_hertz"),
                lines("GPU memory", "bytes", "gpu_used_bytes"),
            ),
        ),
    )
    chosen_by = f"{P}up{{{matchers}}}" if matchers else f"{P}up"
    return Board(
        uid="ullage-exporter",
        title="ullage: watched engines",
        description="What ullage watch --exporter tells of every engine that it watches.",
        rows=rows,
        absent=(),
        chosen_by=chosen_by,
        menus=("job", "url"),
        alerts='ALERTS{alertstate="firing",ullage_engine="exporter"}',
    )


@dataclass(frozen=True, slots=True)
class Own:
    """An alert on what is exported. `expr` is given what selects (a name, more matchers);
    `scrapes` is for how many it must hold."""

    name: str
    expr: Callable[[Callable[[str, str], str]], str]
    scrapes: int
    severity: str
    summary: str
    remedy: str


EXPLAIN = "ullage explain {{ $labels.rule }} tells what it means and what to do."
OWN: tuple[Own, ...] = (
    Own(
        "UllageFinding",
        lambda of: of("rule_fired", 'severity="error"') + " == 1",
        8,
        "critical",
        "{{ $labels.url }}: {{ $labels.rule }} fires",
        EXPLAIN,
    ),
    Own(
        "UllageFindingOfWarning",
        lambda of: of("rule_fired", 'severity="warning"') + " == 1",
        20,
        "warning",
        "{{ $labels.url }}: {{ $labels.rule }} fires",
        EXPLAIN,
    ),
    Own(
        "UllageWatchStands",
        lambda of: (
            f"time() - {of('last_round_timestamp_seconds', '')}"
            f" > 10 * {of('interval_seconds', '')} + 60"
        ),
        0,
        "critical",
        "ullage watch at {{ $labels.instance }} does no rounds",
        "Look at its log and start it again.",
    ),
    Own(
        "UllageWatchSourceDown",
        lambda of: f"{of('source_up', '')} == 0",
        8,
        "critical",
        "what names the replicas does not answer ullage watch at {{ $labels.instance }}",
        "See whether Prometheus or Kubernetes can be reached from where it runs.",
    ),
    Own(
        "UllageNothingWatched",
        lambda of: f"absent({of('up', '')})",
        20,
        "critical",
        "ullage watch is not scraped, or watches nothing",
        "Start it, or take this file away.",
    ),
)


def exporter_rule_file(matchers: str, spans: Spans) -> str:
    """The YAML of the rules on what `ullage watch --exporter` exports."""

    def of(name: str, more: str) -> str:
        inner = ",".join(part for part in (more, matchers) if part)
        return f"{P}{name}{{{inner}}}" if inner else f"{P}{name}"

    entries = [
        {
            "alert": own.name,
            "expr": own.expr(of),
            **({"for": duration(own.scrapes * spans.scrape_s)} if own.scrapes else {}),
            "labels": {LABEL: ENGINE, "severity": own.severity},
            "annotations": {"summary": own.summary, "remedy": own.remedy},
        }
        for own in OWN
    ]
    head = ("Rules for what `ullage watch --exporter` exports, written by `ullage watch rules`.",)
    return group_text(head, ENGINE, spans, entries)
