"""The JSON that the page reads: a round, one replica in full, the past of either.

Pure functions of a Round; every text in them went through `wording.plain`. A single figure is
`numbers.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ullage.findings.finding import Evidence, Finding, Severity
from ullage.telemetry.snapshot import Identity
from ullage.watch.sight import Incident
from ullage.watch.view import Change
from ullage.watch.web.feed import STATES, Replica, Round, id_of
from ullage.watch.web.numbers import (
    Document,
    all_figures,
    cell,
    finite,
    fleet_figures,
    gpu_document,
    number_of,
    p99,
    source_of,
    spread_of,
)
from ullage.watch.web.series import NAMES
from ullage.watch.web.wording import plain, words_of

MOST_ROWS = 200
MOST_INCIDENTS = 100
MOST_EVIDENCE = 24
MOST_SETTINGS = 300
MOST_CHANGES = 60
MOST_NAMES = 40


def round_document(
    latest: Round, *, search: str = "", sort: str = "worst", limit: int = 50
) -> Document:
    """A round: all together, the replicas that match (worst first), incidents, rules."""
    matching = [r for r in latest.replicas if _matches(r, search)]
    matching.sort(key=SORTS.get(sort, SORTS["worst"]))
    sight = latest.sight
    counts = dict.fromkeys(STATES, 0)
    for replica in latest.replicas:
        counts[replica.state] += 1
    now = [i for i in sight.incidents if i.until_s is None]
    ended = [i for i in sight.incidents if i.until_s is not None]
    now.sort(key=lambda i: (-i.finding.severity, -i.since_s))
    return {
        "round": latest.num,
        "time_s": sight.time_s,
        "interval_s": sight.interval_s,
        "fleet": {
            "num": len(latest.replicas),
            "answering": latest.totals.num_answering,
            "models": _models(latest.replicas),
            "engines": _engines(latest.replicas),
            "figures": fleet_figures(latest.totals),
            "findings": [finding_document(f) for f in latest.fleet_findings],
        },
        "states": counts,
        "replicas": {
            "matched": len(matching),
            "rows": [row_document(r) for r in matching[: min(limit, MOST_ROWS)]],
        },
        "incidents": {
            "now": [incident_document(i, latest) for i in now[:MOST_INCIDENTS]],
            "num_now": len(now),
            "ended": [incident_document(i, latest) for i in ended[:MOST_INCIDENTS]],
            "num_ended": len(ended),
        },
        "rules": _rules(latest),
    }


def replica_document(replica: Replica) -> Document:
    """All that is known of one replica, with sources, and what is not, with reasons."""
    view = replica.view
    known = replica.figures
    identity = known.identity or (view.now.identity if view.now is not None else Identity())
    settings = sorted(identity.settings.items())
    return {
        **_named(replica),
        "error": plain(view.error),
        "answered_s": None if view.now is None else view.now.time_s,
        "unchanged_s": view.unchanged_s,
        "identity": {
            "engine": plain(identity.engine),
            "version": plain(identity.version),
            "models": [plain(m) for m in identity.models[:MOST_NAMES]],
            "adapters": [plain(a) for a in identity.adapters[:MOST_NAMES]],
            "num_adapters": len(identity.adapters),
            "max_model_len": identity.max_model_len,
            "block_size": identity.block_size,
            "num_blocks": identity.num_blocks,
            "num_engines": identity.num_engines,
            "started_s": finite(identity.started_s),
        },
        "settings": [[plain(k, 120), plain(v)] for k, v in settings[:MOST_SETTINGS]],
        "num_settings": len(settings),
        "figures": all_figures(known),
        "absent": _by_reason(known.absent),
        "gpus": [gpu_document(gpu) for gpu in known.gpus[:64]],
        "pod": [[plain(k, 120), plain(v)] for k, v in sorted((view.pod or {}).items())[:60]],
        "changes": [change_document(c) for c in _latest(view.changes)],
        "findings": [finding_document(f) for f in replica.findings],
    }


def history_document(
    rows: Iterable[tuple[float, Sequence[float]]],
    absent: Mapping[str, str],
    partial: Mapping[str, tuple[int, int]] | None = None,
) -> Document:
    """Rows of the series, oldest first; null where a number is not known. `absent`: why a column
    is not known now. `partial`: of how many of the replicas that answer a column speaks now."""
    times, cells = [], []
    for time_s, row in rows:
        times.append(round(time_s, 3))
        cells.append([cell(number) for number in row])
    return {
        "columns": list(NAMES),
        "times": times,
        "rows": cells,
        "absent": dict(absent),
        "partial": dict(partial or {}),
    }


def incident_document(incident: Incident, latest: Round) -> Document:
    """An incident; `now` is what its rule says in this round, `lacks` what it could not be
    evaluated without. It goes on while it is not known to be over."""
    where = latest.by_id.get(id_of(incident.url)) if incident.url else None
    said = where.findings if where is not None else () if incident.url else latest.fleet_findings
    current = next((f for f in said if f.id == incident.finding.id), None)
    return {
        "now": None if current is None else current.state,
        "lacks": [] if current is None else [plain(m) for m in current.missing[:4]],
        "replica": id_of(incident.url) if incident.url else None,
        "name": plain(incident.url, 200),
        "since_s": incident.since_s,
        "until_s": incident.until_s,
        "changed": [change_document(c) for c in incident.changed[:MOST_CHANGES]],
        **finding_document(incident.finding),
    }


def finding_document(finding: Finding) -> Document:
    return {
        "id": finding.id,
        "title": plain(finding.title),
        "severity": finding.severity.name,
        "state": finding.state,
        "accepted": finding.accepted,
        "cause": plain(finding.cause, 1200),
        "remedy": plain(finding.remedy, 1200),
        "missing": [plain(m) for m in finding.missing[:MOST_EVIDENCE]],
        "evidence": [_evidence(e) for e in finding.evidence[:MOST_EVIDENCE]],
    }


def change_document(change: Change) -> Document:
    return {
        "time_s": change.time_s,
        "what": plain(change.what, 120),
        "before": plain(change.before),
        "after": plain(change.after),
    }


def row_document(replica: Replica) -> Document:
    """What the list shows of a replica: fewer figures, the rules that fired."""
    known = replica.figures
    numbers = ("kv_used_bytes", "kv_total_bytes", "running", "waiting", "preemptions_per_s")
    figures = {name: number_of(known, name) for name in numbers}
    ratio = known.used_ratio
    figures["kv_used_ratio"] = (
        {"absent": plain(known.absent.get("kv_used_ratio", ""))}
        if ratio is None
        else {"value": ratio, "unit": "ratio", "source": source_of(known, "kv_used_ratio")}
    )
    figures["ttft_p99_s"] = spread_of(known, "ttft_s", p99)
    figures["itl_p99_s"] = spread_of(known, "itl_s", p99)
    evaluated = sum(f.state != "not_evaluable" for f in replica.findings)
    return {
        **_named(replica),
        "error": plain(replica.view.error),
        "engine": plain(known.identity.engine if known.identity else "", 40),
        "version": plain(known.identity.version if known.identity else "", 60),
        "models": [plain(m, 160) for m in (known.identity.models if known.identity else ())[:3]],
        "fired": [f.id for f in replica.findings if f.state == "fired" and not f.accepted],
        "evaluated": evaluated,
        "rules": len(replica.findings),
        "figures": figures,
        "waiting_by_reason": {
            plain(reason, 60): number
            for reason, number in known.labelled.get("waiting_by_reason", {}).items()
        },
    }


def _named(replica: Replica) -> Document:
    return {"id": replica.id, "name": plain(replica.view.url, 200), "state": replica.state}


def _matches(replica: Replica, search: str) -> bool:
    """Every word of the search is in its url, state, engine, version, models or fired rules."""
    if not search:
        return True
    now = replica.view.now
    who = now.identity if now is not None else Identity()
    fired = (f.id for f in replica.findings if f.state == "fired")
    text = " ".join((replica.view.url, replica.state, who.engine, who.version, *who.models, *fired))
    text = text.lower()
    return all(word in text for word in search.lower().split())


def _by_most(column: str) -> Callable[[Replica], tuple[Any, ...]]:
    def key(replica: Replica) -> tuple[Any, ...]:
        number = replica.at(column)
        return (number is None, -(number or 0.0), replica.view.url)

    return key


def _by_worst(replica: Replica) -> tuple[Any, ...]:
    ratio = replica.at("kv_used_ratio")
    return (STATES.index(replica.state), -(ratio or 0.0), replica.view.url)


SORTS: Mapping[str, Callable[[Replica], tuple[Any, ...]]] = {
    "worst": _by_worst,
    "name": lambda replica: (replica.view.url,),
    "kv": _by_most("kv_used_ratio"),
    "running": _by_most("running"),
    "waiting": _by_most("waiting"),
    "preemptions": _by_most("preemptions_per_s"),
    "ttft": _by_most("ttft_p99_s"),
    "itl": _by_most("itl_p99_s"),
}


def _models(replicas: Iterable[Replica]) -> list[str]:
    names = dict.fromkeys(
        model
        for replica in replicas
        if replica.view.now is not None
        for model in replica.view.now.identity.models[:1]
    )
    return [plain(name, 160) for name in list(names)[:MOST_NAMES]]


def _engines(replicas: Iterable[Replica]) -> list[str]:
    names = dict.fromkeys(
        f"{who.engine} {who.version}".strip()
        for replica in replicas
        if replica.view.now is not None
        for who in (replica.view.now.identity,)
        if who.engine
    )
    return [plain(name, 80) for name in list(names)[:MOST_NAMES]]


def _rules(latest: Round) -> list[Document]:
    """Per rule: on how many it fired, was clear, could not be evaluated, and what was lacking."""
    out: dict[str, Document] = {}
    findings = [latest.fleet_findings, *(r.findings for r in latest.replicas)]
    for finding in (f for several in findings for f in several):
        rule = out.setdefault(
            finding.id,
            {
                "id": finding.id,
                "title": plain(finding.title),
                "severity": finding.severity.name,
                "fired": 0,
                "clear": 0,
                "not_evaluable": 0,
                "missing": {},
            },
        )
        if finding.state == "fired":
            worst = max(finding.severity, Severity[rule["severity"]] if rule["fired"] else 0)
            rule["severity"] = Severity(worst).name
        rule[finding.state] += 1
        for lack in finding.missing:
            rule["missing"][lack] = rule["missing"].get(lack, 0) + 1
    for rule in out.values():
        most = sorted(rule["missing"].items(), key=lambda item: -item[1])[:4]
        rule["missing"] = [[plain(lack), num] for lack, num in most]
    return [out[name] for name in sorted(out)]


def _evidence(evidence: Evidence) -> Document:
    value = evidence.value
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)
    return {
        "name": plain(evidence.name),
        "value": plain(value) if isinstance(value, str) else value,
        "unit": plain(evidence.unit, 40),
        "source": plain(evidence.source),
    }


def _by_reason(absent: Mapping[str, str]) -> list[Document]:
    """Each reason once, with all that it keeps from being known."""
    reasons: dict[str, list[str]] = {}
    for name, reason in absent.items():
        reasons.setdefault(plain(reason), []).append(words_of(name))
    return [
        {"reason": reason, "what": list(dict.fromkeys(names))} for reason, names in reasons.items()
    ]


def _latest(changes: Sequence[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: -change.time_s)[:MOST_CHANGES]
