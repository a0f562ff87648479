"""The parts of the document that say what was checked: model, audit, engine, machine.

Holds the translation to JSON data; what was measured is `run_part.py` and `prediction_parts.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ullage.anatomy import Model
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.checkup.figures import Figure, figure, named, span
from ullage.checkup.gather import Evidence
from ullage.checkup.machine import Machine, Rate
from ullage.findings.json import counts_document, finding_document
from ullage.pages.words import quantity


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
        "max_positions": figure(spec.max_positions or None, "", "config"),
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


def audit_part(evidence: Evidence) -> dict[str, Any]:
    """What `ullage audit` says of the same model and deployment."""
    deployment = evidence.audited_for
    return {
        "judged_for": f"{deployment.engine} {deployment.engine_version} on {deployment.platform}",
        "hint": ""
        if deployment.engine == evidence.options.deployment.engine
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
    typical = f"median {quantity(rate.median, unit)}, least {quantity(rate.low, unit)}"
    return named(
        name, figure(rate.high, unit, "measured", f"best of {rate.num_runs} runs; {typical}")
    )
