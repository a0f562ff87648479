"""report.json: the parts of a checkup put together as one JSON document, schema `ullage.checkup/1`.

Holds assembly only: what a part says is made by `comparison`, `memory`, `run_part`, `verdict`.
Writing it, with the page, is `save.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ullage import __version__
from ullage.anatomy import Model
from ullage.anatomy.tensors import expected_tensors
from ullage.checkup import comparison as compare
from ullage.checkup.figures import Figure, figure, named, span
from ullage.checkup.gather import Evidence
from ullage.checkup.html.words import quantity
from ullage.checkup.machine import Machine, Rate
from ullage.checkup.memory import MachineReading, device_ledger, fits_table, machine_ledger
from ullage.checkup.metrics import Series
from ullage.checkup.run_part import peak_usage, run_part
from ullage.checkup.summary import LoadSummary, summarise
from ullage.checkup.verdict import paragraph, state_of
from ullage.costs.kv import compute_dtype, kv_bytes_per_token
from ullage.findings.json import counts_document, finding_document

SCHEMA = "ullage.checkup/1"


def build_document(evidence: Evidence) -> dict[str, Any]:
    """Everything that was gathered and what follows from it, as plain JSON data."""
    seen = evidence.seen
    summary = None if seen is None else summarise(seen.results)
    gaps: list[dict[str, str]] = []
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
        ),
        "paragraph": paragraph(document, evidence.not_run),
    }
    return document


# --- the model -----------------------------------------------------------------------------------


def model_part(model: Model) -> dict[str, Any]:
    """What the model is, in a few figures with their sources."""
    spec = model.anatomy.spec
    return {
        "path": str(model.files.path),
        "name": display_name(model.files.path),
        "model_type": spec.model_type,
        "architecture": spec.architecture,
        "family": spec.family,
        "parameters": parameters_figure(model),
        "num_layers": figure(spec.num_layers, "", "config"),
        "max_positions": figure(spec.max_positions, "", "config"),
        "stored_as": stored_as(model),
        "unknowns": [{"field": u.field, "found": u.found} for u in spec.unknowns],
        "unread": list(model.anatomy.unread),
    }


def display_name(path: Path) -> str:
    """The file's or directory's own name, without what only says the format."""
    name = path.resolve().name
    return name.removesuffix(".gguf").removesuffix(".safetensors") or str(path)


def parameters_figure(model: Model) -> Figure:
    """Parameters that the spec predicts; a range where the anatomy is one."""
    low, high = (
        sum(t.num_elements for t in expected_tensors(spec) if t.stack != "mtp")
        for spec in (model.anatomy.low, model.anatomy.high)
    )
    return span(low, high, "parameters", "modelled from the spec, tied embeddings once")


def stored_as(model: Model) -> str:
    """The dtypes that hold the weights, widest share first, or what the configuration says."""
    spec, checkpoint = model.anatomy.spec, model.checkpoint
    if checkpoint is None or not checkpoint.tensors:
        method = "" if spec.quantization is None else f", {spec.quantization.method}"
        return f"{spec.dtype}{method} (config)"
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    ranked = sorted(sizes, key=lambda name: -sizes[name])
    return f"{checkpoint.format} {', '.join(ranked[:3])}"


# --- audit, engine, machine ----------------------------------------------------------------------


def audit_part(evidence: Evidence) -> dict[str, Any]:
    """What `ullage audit` says of the same model and deployment."""
    deployment = evidence.audited_for
    return {
        "judged_for": f"{deployment.engine} {deployment.engine_version} on {deployment.platform}",
        "hint": ""
        if deployment == evidence.options.deployment
        else "Name a device with --gpu to judge the model for vLLM on it.",
        "findings": [finding_document(finding) for finding in evidence.findings],
        "counts": counts_document(evidence.findings),
    }


def engine_part(evidence: Evidence) -> dict[str, Any] | None:
    """The engine that ran: where, with which flags, what it says of its cache."""
    engine = evidence.engine
    if engine is None:
        return None
    cache = engine.idle.cache
    return {
        "description": engine.description,
        "url": engine.url,
        "embedded": engine.embedded,
        "flags": list(engine.flags),
        "load": None if engine.load_s is None else figure(engine.load_s, "s", "measured"),
        "num_blocks": None if cache is None else cache.num_blocks,
        "block_size": None if cache is None else cache.block_size,
        "kv_cache_tokens": None if cache is None else cache.kv_cache_tokens,
    }


def machine_part(machine: Machine) -> dict[str, Any]:
    """The measured limits of this computer, with their spread."""
    rows = [
        named("cores that this process may use", figure(machine.num_cores, "", "measured")),
        _rate_row("memory read, 1 thread", machine.read_one_thread, "bytes/s"),
        _rate_row("memory read, all threads", machine.read_all_threads, "bytes/s"),
        _rate_row("float32 matrix multiply, 1 thread", machine.gemm_one_thread, "FLOP/s"),
        _rate_row("float32 matrix multiply, all threads", machine.gemm_all_threads, "FLOP/s"),
    ]
    if machine.memory_bytes is not None:
        memory = figure(machine.memory_bytes, "bytes", "measured", "MemTotal of the kernel")
        rows.insert(1, named("memory", memory))
    return {"cpu": machine.cpu, "figures": rows}


def _rate_row(name: str, rate: Rate, unit: str) -> dict[str, Any]:
    spread = f"{quantity(rate.low, unit)} to {quantity(rate.high, unit)} in {rate.num_runs} runs"
    return named(name, figure(rate.median, unit, "measured", f"median; {spread}"))


# --- memory --------------------------------------------------------------------------------------


def ledgers(evidence: Evidence, gaps: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The ledger of this machine with the embedded engine in it, and of the device named."""
    out: list[dict[str, Any]] = []
    reading = machine_reading(evidence)
    ledger = None if reading is None else machine_ledger(reading)
    if ledger is not None:
        out.append(ledger)
    elif evidence.engine is not None and evidence.engine.embedded:
        gaps.append(
            _gap("memory ledger of this machine", "the readings do not add up or are absent")
        )
    if evidence.ledger is not None:
        device = device_ledger(evidence.ledger, evidence.ledger_choice)
        out += [] if device is None else [device]
    else:
        gaps.append(_gap("memory ledger of a GPU", evidence.no_ledger))
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


def weights_loaded(evidence: Evidence) -> tuple[int, str]:
    """Bytes of weights that the engine holds: its own word, else what the spec predicts."""
    said = None if evidence.engine is None else evidence.engine.idle.peak("weights_bytes")
    if said is not None:
        return int(said), "engine: ullage_weights_bytes"
    return predicted_weights(evidence), "modelled: parameters × bytes of an element"


def predicted_weights(evidence: Evidence) -> int:
    """Parameters of the spec at the engine's bytes per element."""
    tensors = expected_tensors(evidence.model.anatomy.spec)
    elements = sum(t.num_elements for t in tensors if t.stack != "mtp")
    return round(elements * evidence.serving.weight_bytes_per_element)


# --- growth, roofline, comparison ----------------------------------------------------------------


def _fit(evidence: Evidence) -> compare.GrowthFit | None:
    if evidence.seen is None:
        return None
    spec = evidence.model.anatomy.spec
    return compare.fit_growth(spec, evidence.seen.growth, _cache(evidence), evidence.serving)


def _cache(evidence: Evidence) -> Any:
    return None if evidence.engine is None else evidence.engine.idle.cache


def growth_part(evidence: Evidence, gaps: list[dict[str, str]]) -> dict[str, Any] | None:
    """KV growth of one sequence, predicted and measured."""
    fit = _fit(evidence)
    if fit is None:
        if evidence.seen is not None:
            why = "the engine exports no block size, no cache occupancy or no count of tokens"
            gaps.append(_gap("growth of the KV cache", why))
        return None
    measured = fit.measured_bytes_per_token
    resolution = "" if fit.resolution is None else f"sampling resolves ±{fit.resolution:.1%}"
    return {
        "captions": [
            f"Every block of {fit.block_size} tokens is taken whole, so a sequence holds up to "
            f"{fit.block_size - 1} tokens of memory that it does not use yet.",
            "Where dots lie on the dashed stairs the price of a token is right.",
        ],
        "block_size": figure(fit.block_size, "tokens", "engine: vllm:cache_config_info"),
        "bytes_per_token_predicted": figure(
            fit.predicted_bytes_per_token, "bytes/token", "modelled from the spec, exact"
        ),
        "bytes_per_token_measured": figure(
            measured, "bytes/token", "measured", f"{fit.bytes_source}; {resolution}".rstrip("; ")
        ),
        # What sampling can resolve: within it the price is called right.
        "tolerance": fit.resolution or 0.0,
        "measured": [list(pair) for pair in fit.seen],
        "predicted": [list(pair) for pair in fit.predicted],
    }


def roofline_part(evidence: Evidence, gaps: list[dict[str, str]]) -> dict[str, Any] | None:
    """The roof from measured limits, and where each experiment lies beneath it."""
    hardware = evidence.serving.hardware
    if evidence.seen is None:
        return None
    if evidence.serving.unbounded is not None:
        gaps.append(_gap("roofline and predicted speeds", evidence.serving.unbounded))
        return None
    assert hardware is not None, "bounded means that the hardware is known"
    flops = hardware.flops_per_s(evidence.serving.compute_dtype) or 0.0
    points = compare.roofline_points(evidence.model.anatomy.spec, evidence.seen, evidence.serving)
    return {
        "captions": [
            "Left of the ridge a step is bound by reading memory, right of it by multiplying. "
            "Decoding lies left, and batching moves it right: that is why it pays.",
            "The gap up to the roof is what the engine leaves on the table.",
            _above_roof(points, hardware.bandwidth_bytes_per_s, flops),
        ],
        "bandwidth": figure(
            hardware.bandwidth_bytes_per_s, "bytes/s", hardware.source("bandwidth")
        ),
        "flops": figure(flops, "FLOP/s", hardware.source("flops")),
        "points": points,
    }


def _above_roof(points: list[dict[str, Any]], bandwidth: float, flops: float) -> str:
    """A point above the roof says that the roof was measured on a busier machine."""
    above = [p for p in points if p["flops_per_s"] > min(flops, bandwidth * p["flops_per_byte"])]
    if not above:
        return ""
    return (
        f"{above[0]['name'].capitalize()} lies above the roof: the machine was busier while its "
        "limits were measured than while the engine ran."
    )


def comparison_part(evidence: Evidence, gaps: list[dict[str, str]]) -> dict[str, Any]:
    """Each prediction beside what happened."""
    rows: list[dict[str, Any]] = []
    seen = evidence.seen
    if seen is not None:
        fit = _fit(evidence)
        growth = None if fit is None else compare.growth_row(fit)
        if growth is not None:
            rows.append(growth)
        rows += _weight_rows(evidence, gaps)
        if evidence.serving.unbounded is None:
            rows += compare.speed_rows(evidence.model.anatomy.spec, seen, evidence.serving)
    return {
        "captions": [
            "Sizes should match to the byte. Speeds are predicted as bounds: the least time that "
            "the measured limits allow, without any of the engine's own costs.",
            "The error is (actual − predicted) / predicted; bars end at ±100%.",
        ],
        "rows": rows,
    }


def _weight_rows(evidence: Evidence, gaps: list[dict[str, str]]) -> list[dict[str, Any]]:
    said = None if evidence.engine is None else evidence.engine.idle.peak("weights_bytes")
    if said is None:
        gaps.append(_gap("weights as loaded", "the engine does not export ullage_weights_bytes"))
        return []
    return [
        compare.compared(
            "weights in memory",
            figure(predicted_weights(evidence), "bytes", "modelled: parameters × 4 bytes"),
            figure(int(said), "bytes", "engine: ullage_weights_bytes"),
        )
    ]


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


def _name_gaps(evidence: Evidence, gaps: list[dict[str, str]]) -> None:
    """Everything that was not looked at, each with its reason."""
    if evidence.not_run is not None:
        gaps.insert(0, _gap("the run", evidence.not_run))
    gaps += [
        _gap(f"model field {unknown.field}", f"not understood: {unknown.found}")
        for unknown in evidence.model.anatomy.spec.unknowns
    ]
    if evidence.model.anatomy.unread:
        listed = ", ".join(evidence.model.anatomy.unread[:20])
        gaps.append(_gap("configuration keys that nothing read", listed))
    missing = sum(f.state == "not_evaluable" for f in evidence.findings)
    if missing:
        gaps.append(_gap(f"{missing} audit rules", "each lacked something; see Findings"))
    if evidence.seen is not None:
        _name_absent_metrics(evidence.seen.series, gaps)
        if evidence.seen.batch.tokens_per_s is None:
            why = "the sequences never all decoded together, or one of them failed"
            gaps.append(_gap("decoding in a batch", why))


def _name_absent_metrics(series: Series, gaps: list[dict[str, str]]) -> None:
    if series.absent:
        read = f"{len(series.samples)} pages of /metrics were read, {series.num_failed} failed"
        gaps.append(
            _gap("metrics that the engine does not export", f"{', '.join(series.absent)} ({read})")
        )


def _gap(what: str, why: str) -> dict[str, str]:
    return {"what": what, "why": why}
