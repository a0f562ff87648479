"""The JSON that the page reads: a round, one replica in full, the past of either.

Pure functions of a Round; every text in them went through `wording.plain`. Unknown numbers are left
out of a figure, which then says why in `absent`; no end of a range is "inf".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ullage.findings.finding import Evidence, Finding, Severity
from ullage.telemetry.histogram import Quantile
from ullage.telemetry.snapshot import Gpu, Histograms, Identity
from ullage.watch.figures import Figures, Spread
from ullage.watch.sight import Incident
from ullage.watch.totals import Totals
from ullage.watch.view import Change
from ullage.watch.web.feed import STATES, Replica, Round, id_of
from ullage.watch.web.series import CHARTED, NAMES
from ullage.watch.web.wording import FIGURES, plain, words_of

Document = dict[str, Any]
MOST_ROWS = 200
MOST_INCIDENTS = 100
MOST_EVIDENCE = 24
MOST_SETTINGS = 300
MOST_CHANGES = 60
MOST_NAMES = 40
FIELD_OF: Mapping[str, Histograms] = {
    f"{short}_{word}_s": field for short, field in CHARTED for word in ("p50", "p99")
}
"""Column of the series → the histogram that it is a quantile of."""


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
            "started_s": _finite(identity.started_s),
        },
        "settings": [[plain(k, 120), plain(v)] for k, v in settings[:MOST_SETTINGS]],
        "num_settings": len(settings),
        "figures": _all_figures(known),
        "absent": _by_reason(known.absent),
        "gpus": [_gpu(gpu) for gpu in known.gpus[:64]],
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
        cells.append([_cell(number) for number in row])
    return {
        "columns": list(NAMES),
        "times": times,
        "rows": cells,
        "absent": dict(absent),
        "partial": dict(partial or {}),
    }


def partial_columns(totals: Totals) -> dict[str, tuple[int, int]]:
    """Column of the fleet's series → (replicas that know it, replicas that answer), where fewer."""
    of = totals.num_answering
    known = {name: total.num_replicas for name, total in totals.sums.items()}
    if totals.kv_used_ratio is not None:
        known["kv_used_ratio"] = totals.kv_used_ratio.num_replicas
    for column, field in FIELD_OF.items():
        if field in totals.spreads:
            known[column] = totals.spreads[field][1]
    return {name: (num, of) for name, num in known.items() if name in NAMES and num < of}


def absent_columns(figures: Figures) -> dict[str, str]:
    """Column of the series → why this replica's is not known."""
    out = {}
    for column in NAMES:
        field: str = FIELD_OF.get(column, column)
        if field in figures.absent and not (
            column == "kv_used_ratio" and figures.used_ratio is not None
        ):
            out[column] = plain(figures.absent[field])
    return out


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
    figures = {name: _number(known, name) for name in numbers}
    ratio = known.used_ratio
    figures["kv_used_ratio"] = (
        {"absent": plain(known.absent.get("kv_used_ratio", ""))}
        if ratio is None
        else {"value": ratio, "unit": "ratio", "source": _source(known, "kv_used_ratio")}
    )
    figures["ttft_p99_s"] = _spread(known, "ttft_s", _p99)
    figures["itl_p99_s"] = _spread(known, "itl_s", _p99)
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


FLEET = (
    "kv_used_bytes",
    "kv_free_bytes",
    "kv_total_bytes",
    "kv_used_tokens",
    "kv_total_tokens",
    "running",
    "waiting",
    "preemptions_per_s",
    "prompt_tokens_per_s",
    "generation_tokens_per_s",
    "prefix_hit_ratio",
)


def fleet_figures(totals: Totals) -> Document:
    """All together. `num` of the replicas that answer know a figure, `of` answer."""
    of = totals.num_answering
    none = {"absent": "no replica answers" if of == 0 else "no replica says it"}
    out: Document = {}
    for name in FLEET:
        total = totals.sums.get(name)
        out[name] = (
            none
            if total is None or not math.isfinite(total.value)
            else {
                "value": total.value,
                "unit": FIGURES[name][1],
                "num": total.num_replicas,
                "of": of,
            }
        )
    ratio = totals.kv_used_ratio
    out["kv_used_ratio"] = (
        none
        if ratio is None
        else {
            "value": ratio.value,
            "unit": "ratio",
            "num": ratio.num_replicas,
            "of": of,
            "source": "mean of replicas"
            if totals.basis == "mean of replicas"
            else f"by {totals.basis}",
        }
    )
    for short, field in CHARTED:
        both = totals.spreads.get(field)
        for word in ("p50", "p99"):
            out[f"{short}_{word}_s"] = (
                {
                    "absent": "nothing was observed lately, or buckets differ"
                    if of
                    else none["absent"]
                }
                if both is None
                else {
                    **_quantile(both[0].p50 if word == "p50" else both[0].p99, "s"),
                    "num": both[1],
                    "of": of,
                }
            )
    return out


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


def _all_figures(known: Figures) -> list[Document]:
    out = []
    for name, (words, _) in FIGURES.items():
        if name in known.numbers:
            out.append({"words": words, **_number(known, name)})
        elif name in known.spreads:
            field: Histograms = name  # type: ignore[assignment]
            for label, pick in (("p50", _p50), ("p99", _p99)):
                out.append({"words": f"{words}, {label}", **_spread(known, field, pick)})
        elif name == "time_to_full_s" and known.time_to_full is not None:
            to_full = known.time_to_full
            bounds = {"low": _end(to_full.low_s), "high": _end(to_full.high_s)}
            out.append({"words": words, "unit": "s", **bounds, "source": _source(known, name)})
        elif name in known.labelled:
            out.extend(_labelled(known, name, words))
    return out


def _labelled(known: Figures, name: str, words: str) -> list[Document]:
    source = _source(known, name)
    unit = FIGURES[name][1]
    return [
        {
            "words": f"{words}: {plain(label, 60)}",
            "value": _finite(value),
            "unit": unit,
            "source": source,
        }
        for label, value in list(known.labelled[name].items())[:MOST_NAMES]
    ]


def _p50(spread: Spread) -> Quantile:
    return spread.p50


def _p99(spread: Spread) -> Quantile:
    return spread.p99


def _number(known: Figures, name: str) -> Document:
    if name not in known.numbers:
        return {"absent": plain(known.absent.get(name, "the endpoint does not say"))}
    figure: Document = {
        "value": known.numbers[name],
        "unit": FIGURES[name][1] if name in FIGURES else "",
        "source": _source(known, name),
    }
    if name in known.approximate:
        figure["approximate"] = True
    return figure


def _spread(known: Figures, name: Histograms, pick: Callable[[Spread], Quantile]) -> Document:
    spread = known.spreads.get(name)
    if spread is None:
        return {"absent": plain(known.absent.get(name, "the endpoint does not say"))}
    return {**_quantile(pick(spread), FIGURES[name][1]), "source": _source(known, name)}


def _quantile(quantile: Quantile, unit: str) -> Document:
    return {
        "value": _finite(quantile.estimate),
        "unit": unit,
        "low": _end(quantile.low),
        "high": _end(quantile.high),
    }


def _source(known: Figures, name: str) -> str:
    return plain(known.sources.get(name, ""))


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


def _gpu(gpu: Gpu) -> Document:
    return {
        "index": plain(gpu.index, 60),
        "name": plain(gpu.name, 80),
        "used_bytes": _finite(gpu.used_bytes),
        "total_bytes": _finite(gpu.total_bytes),
        "busy_ratio": _finite(gpu.busy_ratio),
        "sm_clock_hz": _finite(gpu.sm_clock_hz),
        "max_sm_clock_hz": _finite(gpu.max_sm_clock_hz),
        "power_watts": _finite(gpu.power_watts),
        "temperature_celsius": _finite(gpu.temperature_celsius),
        "throttled_because": [plain(r, 80) for r in gpu.throttled_because[:12]],
        "xid_errors": _finite(gpu.xid_errors),
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


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _end(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def _cell(number: float) -> float | str | None:
    if number != number:
        return None
    return "inf" if math.isinf(number) else float(f"{number:.6g}")
