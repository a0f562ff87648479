"""A round of watching as one JSON document: replicas, totals, findings, incidents.

Holds the mapping from a Sight to plain values; docs/watch.md says what each means. What JSON has no
number for (no upper bound, not known) is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from ullage.findings.json import counts_document, finding_document
from ullage.telemetry.histogram import Quantile
from ullage.telemetry.snapshot import Gpu
from ullage.watch.figures import (
    FINISHED,
    LABELLED,
    NUMBERS,
    SPREADS,
    TIME_TO_FULL,
    Figures,
    Spread,
    figures_of,
)
from ullage.watch.sight import Incident, Sight
from ullage.watch.totals import Total, Totals, totals_of
from ullage.watch.view import Change, View

SCHEMA = "ullage.watch/1"
GPU_FIELDS = tuple(name for name in Gpu.__dataclass_fields__ if name != "throttled_because")


def document(sight: Sight) -> dict[str, object]:
    """The whole round: {schema, time, replicas[], totals, findings[], counts, incidents[]}."""
    figures = [figures_of(view) for view in sight.views]
    return {
        "schema": SCHEMA,
        "time": iso_time(sight.time_s),
        "time_s": sight.time_s,
        "interval_s": sight.interval_s,
        "error": sight.error or None,
        "replicas": [
            replica_document(view, one) for view, one in zip(sight.views, figures, strict=True)
        ],
        "totals": totals_document(totals_of(sight.views, figures)),
        "findings": [
            {**finding_document(judged.finding), "url": judged.url} for judged in sight.judged
        ],
        "counts": counts_document([judged.finding for judged in sight.judged]),
        "incidents": [incident_document(incident) for incident in sight.incidents],
    }


def replica_document(view: View, figures: Figures) -> dict[str, object]:
    """One replica. Every field that is null is named in `absent`, with the reason."""
    identity = figures.identity
    return {
        "url": figures.url,
        "error": figures.error or None,
        "time_s": figures.time_s,
        "engine": (identity.engine if identity else "") or None,
        "version": (identity.version if identity else "") or None,
        "models": list(identity.models) if identity else [],
        "adapters": list(identity.adapters) if identity else [],
        "max_model_len": identity.max_model_len if identity else None,
        "block_size": identity.block_size if identity else None,
        "num_blocks": identity.num_blocks if identity else None,
        "num_engines": identity.num_engines if identity else None,
        "started_s": identity.started_s if identity else None,
        "settings": dict(identity.settings) if identity else {},
        **{name: _number(figures.numbers.get(name)) for name in NUMBERS},
        TIME_TO_FULL: _time_to_full(figures),
        **{name: _labelled(figures.labelled.get(name)) for name in (*LABELLED, FINISHED)},
        **{name: spread_document(figures.spreads.get(name)) for name in SPREADS},
        "unchanged_s": _number(view.unchanged_s) if figures.time_s is not None else None,
        "gpus": [gpu_document(gpu) for gpu in figures.gpus] or None,
        "pod": None if view.pod is None else dict(view.pod),
        "changes": [change_document(change) for change in view.changes],
        "dropped": (view.now.dropped or None) if figures.time_s is not None and view.now else None,
        "sources": dict(figures.sources),
        "approximate": sorted(figures.approximate),
        "absent": {**_absent_identity(figures), **figures.absent},
    }


def _absent_identity(figures: Figures) -> dict[str, str]:
    """Why the facts of the server that are null are so."""
    why = figures.identity.why_unsaid if figures.identity else figures.absent["engine"]
    names = ("max_model_len", "block_size", "num_blocks", "num_engines", "started_s")
    unknown = {
        name: why
        for name in names
        if figures.identity is None or getattr(figures.identity, name) is None
    }
    if figures.time_s is None:
        unknown |= {"time_s": why, "unchanged_s": why}
    return unknown


def totals_document(totals: Totals) -> dict[str, object]:
    """Sums over the replicas that know them: {field: {value, num_replicas}}."""
    ratio = totals.kv_used_ratio
    return {
        "num_replicas": totals.num_replicas,
        "num_answering": totals.num_answering,
        "kv_used_ratio": None if ratio is None else {**_total(ratio), "by": totals.basis},
        **{name: _total(total) for name, total in totals.sums.items()},
        "waiting_by_reason": _labelled(totals.waiting_by_reason),
        "gpus": _total_gpus(totals),
        **{
            name: {**(spread_document(spread) or {}), "num_replicas": num}
            for name, (spread, num) in totals.spreads.items()
        },
    }


def _total_gpus(totals: Totals) -> dict[str, object]:
    busy = totals.gpu_busy_ratio
    return {
        "num": totals.num_gpus,
        "num_throttled": totals.num_throttled_gpus,
        "busy_ratio": None
        if busy is None
        else {"value": _number(busy.value), "num": busy.num_replicas},
    }


def incident_document(incident: Incident) -> dict[str, object]:
    """{url, since_s, until_s, finding, changed[]}."""
    return {
        "url": incident.url,
        "since_s": incident.since_s,
        "until_s": incident.until_s,
        "finding": finding_document(incident.finding),
        "changed": [change_document(change) for change in incident.changed],
    }


def change_document(change: Change) -> dict[str, object]:
    """{time_s, what, before, after}."""
    return {
        "time_s": change.time_s,
        "what": change.what,
        "before": change.before,
        "after": change.after,
    }


def gpu_document(gpu: Gpu) -> dict[str, object]:
    """One accelerator; null is what it does not say."""
    known: dict[str, object] = {}
    for name in GPU_FIELDS:
        value = getattr(gpu, name)
        known[name] = _number(value) if isinstance(value, float) else value
    because = gpu.throttled_because
    return {**known, "throttled_because": None if because is None else list(because)}


def spread_document(spread: Spread | None) -> dict[str, object] | None:
    """{p50, p99, num, over_s}; each quantile {low, high, estimate}, `high` null: no upper bound."""
    if spread is None:
        return None
    return {
        "p50": _quantile(spread.p50),
        "p99": _quantile(spread.p99),
        "num": _number(spread.num),
        "over_s": spread.over_s,
    }


def iso_time(time_s: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _quantile(quantile: Quantile) -> dict[str, object]:
    return {
        "low": _number(quantile.low),
        "high": _number(quantile.high),
        "estimate": _number(quantile.estimate),
    }


def _time_to_full(figures: Figures) -> dict[str, object] | None:
    found = figures.time_to_full
    if found is None:
        return None
    return {"low": _number(found.low_s), "high": _number(found.high_s)}


def _total(total: Total) -> dict[str, object]:
    return {"value": _number(total.value), "num_replicas": total.num_replicas}


def _labelled(values: Mapping[str, float] | None) -> dict[str, object] | None:
    return None if values is None else {key: _number(value) for key, value in values.items()}


def _number(value: float | None) -> float | int | None:
    """A number as JSON has it: whole ones without a fraction, infinities and NaN as null."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else value
