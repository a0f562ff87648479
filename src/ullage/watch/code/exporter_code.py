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
GPU = "{{url}} {{gpu}}"
P = "ullage_watch_"


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The series that the menus leave; `inner` are the matchers. Makes the board's panels."""

    inner: str

    def of(self, name: str, *more: str) -> str:
        return f"{P}{name}{{{','.join((*more, self.inner))}}}"

    def lines(
        self, title: str, unit: str, name: str, most: float | None = None, who: str = WHO
    ) -> Panel:
        return Panel(title, unit, (Query(self.of(name), who),), most=most)

    def spread(self, title: str, name: str) -> Panel:
        queries = tuple(
            Query(self.of(name, f'q="{q}"', f'bound="{bound}"'), f"{text} {bound} {WHO}")
            for q, text in (("0.5", "p50"), ("0.99", "p99"))
            for bound in ("low", "high")
        )
        return Panel(title, "s", queries, "Both ends of the bucket that holds it.")

    def stat(self, title: str, unit: str, promql: str) -> Panel:
        return Panel(title, unit, (Query(promql, ""),), kind="stat", width=4)


def exporter_board(matchers: str = "") -> Board:
    """Every replica that is watched, whatever its engine, and what the rules say of it."""
    chosen = _Chosen(",".join(part for part in (CHOSEN, matchers) if part))
    rows = (*_memory_rows(chosen), *_load_rows(chosen))
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


def _memory_rows(chosen: _Chosen) -> tuple[Row, ...]:
    """The fleet, its findings, its KV cache."""
    return (
        Row(
            "Fleet",
            (
                chosen.stat("Replicas that answer", "short", f"sum ({chosen.of('up')})"),
                chosen.stat("Rules that fire", "short", f"sum ({chosen.of('rule_fired')})"),
                chosen.stat(
                    "Rules that cannot tell", "short", f"sum ({chosen.of('rules_not_evaluable')})"
                ),
                chosen.stat("KV held", "bytes", f"sum ({chosen.of('kv_used_bytes')})"),
                chosen.stat("KV free", "bytes", f"sum ({chosen.of('kv_free_bytes')})"),
                chosen.stat("Waiting", "short", f"sum ({chosen.of('requests_waiting')})"),
            ),
        ),
        Row(
            "Findings",
            (
                Panel(
                    "Rules that fire",
                    "short",
                    (Query(f"{chosen.of('rule_fired')} == 1", f"{{{{rule}}}} {WHO}"),),
                    "ullage explain ID tells what a rule means.",
                    width=16,
                ),
                Panel(
                    "Incidents, for how long",
                    "s",
                    (
                        Query(
                            f"time() - {chosen.of('incident_start_timestamp_seconds')}",
                            f"{{{{rule}}}} {WHO}",
                        ),
                    ),
                ),
            ),
        ),
        _kv_row(chosen),
    )


def _kv_row(chosen: _Chosen) -> Row:
    return Row(
        "KV cache",
        (
            chosen.lines("KV held", "percentunit", "kv_used_ratio", 1.0),
            chosen.lines("KV bytes held", "bytes", "kv_used_bytes"),
            chosen.lines("KV tokens free", "short", "kv_free_tokens"),
            Panel(
                "Time to full",
                "s",
                tuple(
                    Query(chosen.of("time_to_full_seconds", f'bound="{bound}"'), f"{bound} {WHO}")
                    for bound in ("low", "high")
                ),
            ),
            chosen.lines("Room used in held pages", "percentunit", "page_utilization_ratio", 1.0),
            chosen.lines("Prefix hits", "percentunit", "prefix_hit_ratio", 1.0),
        ),
    )


def _load_rows(chosen: _Chosen) -> tuple[Row, ...]:
    """Requests, latency, devices."""
    return (
        Row(
            "Requests",
            (
                chosen.lines("Running", "short", "requests_running"),
                chosen.lines("Waiting", "short", "requests_waiting"),
                Panel(
                    "Waiting, by reason",
                    "short",
                    (
                        Query(
                            f"sum by (reason) ({chosen.of('requests_waiting_by_reason')})",
                            "{{reason}}",
                        ),
                    ),
                    kind="stacked",
                ),
                chosen.lines("Preemptions per second", "short", "preemptions_per_second"),
                chosen.lines(
                    "Tokens generated per second", "short", "generation_tokens_per_second"
                ),
                chosen.lines("Turned away per second", "short", "rejected_requests_per_second"),
            ),
        ),
        Row(
            "Latency",
            (
                chosen.spread("Time to first token", "ttft_seconds"),
                chosen.spread("Time between tokens", "itl_seconds"),
                chosen.spread("In the queue", "queue_seconds"),
            ),
        ),
        Row(
            "GPUs",
            (
                chosen.lines("GPU busy", "percentunit", "gpu_busy_ratio", 1.0, who=GPU),
                chosen.lines("GPU clock", "hertz", "gpu_sm_clock_hertz", who=GPU),
                Panel(
                    "GPU clock, of the highest",
                    "percentunit",
                    (
                        Query(
                            f"{chosen.of('gpu_sm_clock_hertz')}"
                            f" / ({chosen.of('gpu_max_sm_clock_hertz')} > 0)",
                            GPU,
                        ),
                    ),
                    "Half or less while busy is W018.",
                    most=1.0,
                ),
                chosen.lines("GPU memory", "bytes", "gpu_used_bytes", who=GPU),
                Panel(
                    "GPU clock held down",
                    "short",
                    (Query(chosen.of("gpu_clock_held"), f"{GPU} {{{{reason}}}}"),),
                    "Heat and a failing supply are W018; a power cap is how GPUs are run.",
                ),
                Panel(
                    "Last Xid error",
                    "short",
                    (Query(f"{chosen.of('gpu_last_xid')} > 0", GPU),),
                    "The driver tells it for ever; W019 judges those that came while watching.",
                ),
                chosen.lines("GPU temperature", "celsius", "gpu_temperature_celsius", who=GPU),
                chosen.lines("GPU power", "watt", "gpu_power_watts", who=GPU),
            ),
        ),
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
