"""report.json: the parts of a checkup put together as one JSON document, schema `ullage.checkup/1`.

Holds assembly only: what a part says is made by `comparison`, `memory`, `run_part`, `verdict`.
Writing it, with the page, is `save.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ullage import __version__
from ullage.checkup.figures import figure, named
from ullage.checkup.gather import Evidence
from ullage.checkup.memory import MachineReading, device_ledger, fits_table, machine_ledger
from ullage.checkup.metrics import Series
from ullage.checkup.prediction_parts import (
    Gaps,
    comparison_part,
    gap,
    growth_part,
    roofline_part,
    weights_loaded,
)
from ullage.checkup.run_part import peak_usage, run_part
from ullage.checkup.subject_parts import audit_part, engine_part, machine_part, model_part
from ullage.checkup.verdict import paragraph, state_of
from ullage.costs.kv import compute_dtype, kv_bytes_per_token
from ullage.findings.finding import Finding
from ullage.pages.words import QUIET_LACKS
from ullage.traffic.summary import LoadSummary, summarise

SCHEMA = "ullage.checkup/1"


def build_document(evidence: Evidence) -> dict[str, Any]:
    """Everything that was gathered and what follows from it, as plain JSON data."""
    seen = evidence.seen
    summary = None if seen is None else summarise(seen.results)
    gaps: Gaps = []
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "ullage": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "wall": figure(evidence.wall_s, "s", "measured"),
        "model": model_part(evidence.model),
        "engine": engine_part(evidence),
        "machine": None if evidence.machine is None else machine_part(evidence.machine),
        "audit": audit_part(evidence),
        "ledgers": ledgers(evidence, gaps),
        "fits": fits_table(evidence.model.anatomy, evidence.options.deployment, evidence.refusals),
        "kv_growth": growth_part(evidence, gaps),
        "roofline": roofline_part(evidence, gaps),
        "run": None if seen is None or summary is None else run_part(seen, summary),
        "comparison": comparison_part(evidence, gaps),
        "highlights": [],
        "not_evaluated": gaps,
    }
    _name_gaps(evidence, gaps)
    document["highlights"] = highlights(evidence, document, summary)
    run = document["run"]
    document["verdict"] = {
        "state": state_of(
            document["audit"]["counts"],
            seen is not None,
            summary,
            (run["num_preemptions"] or 0) if run else 0,
            document["kv_growth"],
            document["comparison"]["allocation"],
        ),
        "paragraph": paragraph(document, evidence.not_run),
    }
    return document


# --- memory --------------------------------------------------------------------------------------


def ledgers(evidence: Evidence, gaps: Gaps) -> list[dict[str, Any]]:
    """The ledger of this machine with the embedded engine in it, and of the device named."""
    out: list[dict[str, Any]] = []
    reading = machine_reading(evidence)
    ledger = None if reading is None else machine_ledger(reading)
    if ledger is not None:
        out.append(ledger)
    elif evidence.engine is not None and evidence.engine.embedded:
        gaps.append(
            gap(
                "memory ledger of this machine",
                "the readings do not add up or are absent",
                "ledger",
            )
        )
    if evidence.ledger is not None:
        device = device_ledger(evidence.ledger, evidence.ledger_choice)
        out += [] if device is None else [device]
    else:
        here = evidence.options.server_is_here
        place = "this machine with vLLM" if here else "a GPU"
        gaps.append(gap(f"memory ledger of {place}", evidence.no_ledger, "ledger"))
    return out


def machine_reading(evidence: Evidence) -> MachineReading | None:
    """The readings of the idle engine, or None where one of them is missing."""
    engine, machine = evidence.engine, evidence.machine
    if engine is None or machine is None or machine.memory_bytes is None:
        return None
    kv_total = engine.idle.peak("kv_total_bytes")
    if engine.private_bytes is None or engine.available_bytes is None or kv_total is None:
        return None
    weights, source = weights_loaded(evidence)
    return MachineReading(
        total=machine.memory_bytes,
        available=engine.available_bytes,
        engine_private=engine.private_bytes,
        weights=weights,
        weights_source=source,
        kv_total=int(kv_total),
        kv_source="engine: ullage_kv_cache_total_bytes",
    )


# --- what stands at the top, and what is missing -------------------------------------------------


def highlights(
    evidence: Evidence, document: dict[str, Any], summary: LoadSummary | None
) -> list[dict[str, Any]]:
    """Six figures to remember, those of the run where there was one."""
    spec = evidence.model.anatomy.spec
    dtype = evidence.serving.kv_dtype if evidence.seen else compute_dtype(spec.dtype)
    each = kv_bytes_per_token(spec, kv_cache_dtype=dtype, dtype=dtype)
    rows = [
        named("KV cache per token", figure(each, "bytes/token", f"modelled, {dtype}")),
    ]
    checkpoint = evidence.model.checkpoint
    if checkpoint is not None and checkpoint.tensors:
        rows.insert(0, named("weights stored", figure(checkpoint.num_bytes, "bytes", "header")))
    if evidence.seen is not None and summary is not None:
        alone = figure(evidence.seen.growth.tokens_per_s, "tokens/s", "measured")
        rows.append(named("decode, one sequence", alone))
        if summary.output_tokens_per_s is not None:
            rate = figure(summary.output_tokens_per_s, "tokens/s", "measured")
            rows.append(named("output under the trace", rate))
        if summary.ttft is not None:
            first = figure(summary.ttft.quantile(0.5), "s", "measured, p50")
            rows.append(named("time to first token", first))
        peak = peak_usage(evidence.seen.series)
        if peak is not None:
            rows.append(named("KV cache at its fullest", {**peak["figure"], "source": "engine"}))
    else:
        rows.append(named("layers", document["model"]["num_layers"]))
        rows.append(named("positions", document["model"]["max_positions"]))
    return rows[:6]


def _name_gaps(evidence: Evidence, gaps: Gaps) -> None:
    """Everything that was not looked at, each with its reason."""
    if evidence.not_run is not None:
        gaps.insert(0, gap("the run", evidence.not_run, "run"))
    gaps += [
        gap(f"model field {unknown.field}", f"not understood: {unknown.found}", "field")
        for unknown in evidence.model.anatomy.spec.unknowns
    ]
    if evidence.model.anatomy.unread:
        listed = ", ".join(evidence.model.anatomy.unread[:20])
        count = len(evidence.model.anatomy.unread)
        gaps.append(gap("configuration keys that nothing read", listed, "key", count))
    gaps += rule_gaps(evidence.findings)
    if evidence.seen is not None:
        _name_absent_metrics(evidence.seen.series, gaps)
        if evidence.seen.batch.tokens_per_s is None:
            why = "the sequences never all decoded together, or one of them failed"
            gaps.append(gap("decoding in a batch", why))


def rule_gaps(findings: Sequence[Finding]) -> Gaps:
    """Rules that were not evaluated: those that another question answers by what it is, the rest
    together. Their ids are in the audit part, each with what it lacked."""
    missing = [f for f in findings if f.state == "not_evaluable"]
    gaps: Gaps = []
    counted = 0
    for lack, (what, command) in QUIET_LACKS.items():
        number = sum(tuple(f.missing) == (lack,) for f in missing)
        counted += number
        if number:
            rules = "1 audit rule" if number == 1 else f"{number} audit rules"
            gaps.append(gap(f"{rules} on {what}", command, "rule", number))
    rest = len(missing) - counted
    if rest:
        other = "other " if counted else ""
        name = f"1 {other}audit rule" if rest == 1 else f"{rest} {other}audit rules"
        gaps.append(gap(name, "each lacked something; see Findings", "rule", rest))
    return gaps


def _name_absent_metrics(series: Series, gaps: Gaps) -> None:
    if series.absent:
        read = f"{len(series.samples)} pages of /metrics were read, {series.num_failed} failed"
        gaps.append(
            gap("metrics that the engine does not export", f"{', '.join(series.absent)} ({read})")
        )
