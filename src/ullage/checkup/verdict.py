"""The verdict: one paragraph written from findings and numbers, and the state it amounts to.

Holds the sentences and when each is said. It claims only what was evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ullage.pages.words import (
    count,
    figure_text,
    percent,
    seconds,
    signed_percent,
    significant,
)
from ullage.traffic.summary import LoadSummary

State = Literal["sound", "attention", "fault", "incomplete"]


def state_of(
    severities: Mapping[str, int],
    ran: bool,
    summary: LoadSummary | None,
    num_preemptions: float,
    growth: Mapping[str, Any] | None,
    allocation: Mapping[str, Any] | None = None,
) -> State:
    """The gravest that holds: an error or failed requests; no run; warnings, preemption or a KV
    cache that does not grow, or was not allocated, as the spec says."""
    if severities.get("error") or (summary is not None and summary.num_failed):
        return "fault"
    if not ran:
        return "incomplete"
    if severities.get("warning") or num_preemptions or not _grows_as_predicted(growth):
        return "attention"
    if allocation is not None and allocation["state"] == "differs" and not allocation["assumed"]:
        return "attention"
    return "sound"


def _grows_as_predicted(growth: Mapping[str, Any] | None) -> bool:
    """Whether nothing contradicts the predicted price of a token."""
    if growth is None or growth["bytes_per_token_measured"]["value"] is None:
        return True
    measured = growth["bytes_per_token_measured"]["value"]
    difference = abs(measured / growth["bytes_per_token_predicted"]["value"] - 1)
    return bool(difference <= growth["tolerance"])


def paragraph(document: Mapping[str, Any], reason_not_run: str | None) -> str:
    """The whole verdict, from the parts of the document that are there."""
    sentences = [
        _ran(document, reason_not_run),
        _findings(document["audit"]),
        _allocation(document["comparison"]),
        _memory(document),
        _speed(document),
        _model_error(document["comparison"]["rows"]),
        gaps_sentence(document["not_evaluated"]),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _ran(document: Mapping[str, Any], reason: str | None) -> str:
    name = document["model"]["name"]
    run = document["run"]
    if run is None:
        why = (reason or "no reason was given").rstrip(".")
        return f"{name} was not run: {why}. What follows is from its files alone."
    answered, planned = run["num_succeeded"], run["num_planned"]
    engine = document["engine"]["description"]
    if answered == planned:
        return f"{name} ran on {engine} and answered all {planned} requests of the trace slice."
    return (
        f"{name} ran on {engine} but answered only {answered} of {planned} requests of the trace "
        f"slice; the commonest reason was: {run['errors'][0]['reason'].rstrip('.')}."
    )


def _findings(audit: Mapping[str, Any] | None) -> str:
    if audit is None:
        return ""
    fired = [f for f in audit["findings"] if f["state"] == "fired"]
    evaluated = sum(f["state"] != "not_evaluable" for f in audit["findings"])
    if not fired:
        return f"Of {evaluated} audit rules that could be evaluated, none fired."
    weighty = [f for f in fired if f["severity"] in ("error", "warning")]
    if not weighty:
        return (
            f"Of {evaluated} audit rules that could be evaluated, {len(fired)} fired, none above "
            "info."
        )
    first = min(weighty, key=lambda f: f["severity"] != "error")
    return (
        f"Of {evaluated} audit rules that could be evaluated, {len(fired)} fired, the gravest "
        f"{'an' if first['severity'] == 'error' else 'a'} {first['severity']}, {first['id']}: "
        f"{first['cause']}"
    )


def _allocation(comparison: Mapping[str, Any]) -> str:
    """Whether the engine's own word on its KV cache is what was predicted."""
    part = comparison["allocation"]
    rows = [row for row in comparison["rows"] if row["name"] in part["rows"]]
    if part["state"] == "not_evaluable":
        return ""
    if part["state"] == "differs":
        row = next(r for r in rows if r["predicted"]["value"] != r["actual"]["value"])
        said = (
            f"The KV allocation differs from the prediction: for {row['name']} "
            f"{figure_text(row['predicted'])} were predicted and the engine says "
            f"{figure_text(row['actual'])}"
        )
        if part["assumed"]:
            said += f" with vLLM's default for {' and '.join(part['assumed'])}, which it hides"
        return f"{said}."
    told = ", ".join(f"{row['name']} {figure_text(row['actual'])}" for row in rows)
    whose = "The embedded engine's KV pool" if part["embedded"] else "vLLM's own KV allocation"
    given = ", given its number of blocks," if part["derived"] else ""
    return f"{whose}{given} is exactly as predicted: {told}."


def _memory(document: Mapping[str, Any]) -> str:
    growth = document["kv_growth"]
    if growth is None:
        return ""
    predicted = growth["bytes_per_token_predicted"]["value"]
    measured = growth["bytes_per_token_measured"]["value"]
    each = f"Every token of context takes {count(predicted)} bytes of KV cache"
    if measured is None:
        said = f"{each} by the model; the growth was too short to measure it"
    elif not growth["bytes_seen"]:
        matches = (
            f"as often as predicted within ±{percent(growth['tolerance'], 1)}"
            if _grows_as_predicted(growth)
            else "otherwise than predicted"
        )
        said = f"{each} by the model; the engine tells blocks, not bytes, and takes one {matches}"
    elif _grows_as_predicted(growth):
        said = f"{each} by the model; {_agreement(growth)}"
    else:
        said = f"{each} by prediction but {count(measured)} as measured"
    peak = document["run"]["peak_kv_usage"] if document["run"] else None
    if peak is None:
        return f"{said}."
    said += f"; at its fullest the cache was {percent(peak, 0 if peak > 0.1 else 1)} used"
    preempted = document["run"]["num_preemptions"]
    if preempted is None:
        return f"{said}."
    if preempted == 0:
        return f"{said} and nothing was preempted."
    if preempted == 1:
        return f"{said} and one request was preempted to make room."
    return f"{said} and requests were preempted {preempted:.0f} times to make room."


def _agreement(growth: Mapping[str, Any]) -> str:
    """How closely a growth agrees: exact only where the samples tell bytes of a token apart."""
    predicted = growth["bytes_per_token_predicted"]["value"]
    if growth["tolerance"] * predicted < 0.5:
        return "what was measured is exactly that"
    measured = count(growth["bytes_per_token_measured"]["value"])
    return f"{measured} were measured, which agrees within ±{percent(growth['tolerance'], 1)}"


def _speed(document: Mapping[str, Any]) -> str:
    run = document["run"]
    if run is None:
        return ""
    alone = f"One sequence decodes at {significant(run['decode_alone'])} tokens/s"
    batch = run["decode_batch"]
    if batch is not None:
        alone += f", {run['batch_size']} together at {significant(batch)}"
    first = run["distributions"]["ttft"]
    if first is None:
        return f"{alone}."
    return (
        f"{alone}; under the trace the first token came after {seconds(first['p50']['value'], 2)} "
        f"at the median and {seconds(first['p99']['value'], 2)} at p99."
    )


def _model_error(rows: list[Mapping[str, Any]]) -> str:
    modelled = [r for r in rows if r["actual"]["unit"] in ("tokens/s", "s")]
    if not modelled:
        return ""
    worst = max(modelled, key=lambda r: abs(r["error"]["value"]))
    return (
        "Speeds are predicted as bounds from the hardware's limits, without the engine's own "
        f"costs: their largest error is {signed_percent(worst['error']['value'])} "
        f"({worst['name']})."
    )


# Kind of gap → how many are named, singular and plural. The order is that of the sentence.
GAP_NOUNS: Mapping[str, tuple[str, str]] = {
    "run": ("run", "runs"),
    "rule": ("rule", "rules"),
    "measurement": ("measurement", "measurements"),
    "ledger": ("memory ledger", "memory ledgers"),
    "field": ("model field", "model fields"),
    "key": ("configuration key", "configuration keys"),
}


def gaps_sentence(items: list[Mapping[str, Any]]) -> str:
    """How many things of each kind were not evaluated; "" when there are none."""
    totals = dict.fromkeys(GAP_NOUNS, 0)
    for item in items:
        totals[item["kind"]] += item["count"]
    told = [
        f"{count(number)} {GAP_NOUNS[kind][number != 1]}"
        for kind, number in totals.items()
        if number
    ]
    if not told:
        return ""
    listed = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
    those = "it is" if sum(totals.values()) == 1 else "they are"
    reason = "its reason" if sum(totals.values()) == 1 else "their reasons"
    return f"{listed} could not be evaluated; {those} named below with {reason}."
