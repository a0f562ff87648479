"""Where the memory goes: the ledger of this machine, of a named device, and what fits where.

Holds the parts of the document that say it. A ledger's rows are whole bytes and add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ullage.anatomy.spec import Anatomy
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import Gpus, HardwareSpec, catalogue
from ullage.errors import BadInput
from ullage.findings.finding import Finding
from ullage.pages.words import byte_size, percent
from ullage.planning.ledger import Case, Ledger, build_ledger
from ullage.planning.parallel_sizes import spread
from ullage.planning.vllm import allocate

# The lengths that the table of what fits asks about, as far as the model sees.
CONTEXTS = (2_048, 8_192, 32_768, 131_072, 1_048_576)
# How many devices are tried before "does not fit" is said: one server of eight.
DEVICE_COUNTS = (1, 2, 4, 8)
PART_NAMES = {
    "weights": ("weights", "weights"),
    "kv_and_state": ("KV cache and state", "kv"),
    "activations": ("activations", "activations"),
    "engine_and_graphs": ("engine and graphs", "engine"),
    "free": ("free", "free"),
}


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Memory of this machine at one instant while the engine was ready and idle, in bytes.

    `engine_private` is the engine's anonymous memory, weights included; `kv_total` is what its KV
    cache may grow to. It is allocated once but touched, and so taken, only as it is used.
    """

    total: int
    available: int
    engine_private: int
    weights: int
    weights_source: str
    kv_total: int
    kv_source: str


def machine_ledger(reading: MachineReading) -> dict[str, Any] | None:
    """This machine's memory as rows that add up, or None when the readings contradict each other.

    Free is what the kernel calls available less what the KV cache may still take.
    """
    rest = reading.engine_private - reading.weights
    others = reading.total - reading.available - reading.engine_private
    free = reading.available - reading.kv_total
    rows = [
        _row("weights", "weights", reading.weights, reading.weights_source),
        _row("KV cache", "kv", reading.kv_total, reading.kv_source, "whole, as it may fill"),
        _row("engine", "engine", rest, "measured", "its private memory less weights, when idle"),
        _row("other programs", "other", others, "measured", "total less available less engine"),
        _row("free", "free", free, "measured", "available less the whole KV cache"),
    ]
    if any(row["bytes"] < 0 for row in rows):
        return None
    return {
        "device": "This machine, embedded engine",
        "rows": rows,
        "total_bytes": reading.total,
        "total_source": "measured: MemTotal of the kernel",
        "caption": caption(free, reading.total, "this machine"),
    }


def caption(free_bytes: int, total_bytes: int, device: str) -> str:
    """What to conclude from a ledger."""
    return (
        f"Of {byte_size(total_bytes)} on {device}, {byte_size(free_bytes)} "
        f"({percent(free_bytes / total_bytes)}) stay free: that is the ullage."
    )


def _row(name: str, kind: str, num_bytes: int, source: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "kind": kind, "bytes": num_bytes, "source": source, "note": note}


# --- a named device ------------------------------------------------------------------------------


def deployed(anatomy: Anatomy, deployment: Deployment, gpus: Gpus) -> tuple[Deployment, str]:
    """The deployment over all devices that --gpu counts, and that choice in words ("" if none)."""
    if gpus.count == 1:
        return deployment, ""
    return spread(anatomy.high, deployment, gpus.count)


def device_ledger(ledger: Ledger, choice: str) -> dict[str, Any] | None:
    """The ledger of one rank on a named device, as vLLM plans it; None where no device is named."""
    if ledger.gpus is None:
        return None
    hardware, deployment = ledger.gpus.hardware, ledger.deployment
    rows = []
    for part in ledger.parts:
        name, kind = PART_NAMES[part.name]
        spread_note = (
            ""
            if part.bounds.exact
            else f"{byte_size(part.bounds.low)} to {byte_size(part.bounds.high)}"
        )
        rows.append(_row(name, kind, part.num_bytes, part.source, spread_note))
    free = rows[-1]["bytes"]
    engine = f"{deployment.engine} {deployment.engine_version}"
    return {
        "device": f"{hardware.name}, one rank of {engine}",
        "rows": rows,
        "total_bytes": hardware.memory_bytes,
        "total_source": hardware.source("memory_bytes"),
        "caption": _device_caption(ledger, free, choice),
    }


def _device_caption(ledger: Ledger, free: int, choice: str) -> str:
    assert ledger.gpus is not None, "asked only of a named device"
    hardware = ledger.gpus.hardware
    if ledger.fits is False:
        short = "" if ledger.deficit is None else f", {byte_size(ledger.deficit.high)} short"
        said = f"It does not fit on {hardware.name}{short}."
    elif ledger.fits is None:
        said = f"Whether it fits on {hardware.name} lies within what is not known."
    else:
        said = (
            f"On {hardware.name} the engine takes all but {byte_size(free)} "
            f"({percent(free / hardware.memory_bytes)}) of {byte_size(hardware.memory_bytes)}."
        )
    return f"{said} {choice[:1].upper()}{choice[1:]}." if choice else said


# --- what fits where -----------------------------------------------------------------------------


def fits_table(
    anatomy: Anatomy, deployment: Deployment, refusals: tuple[Finding, ...] = ()
) -> dict[str, Any]:
    """Device × context → how many sequences of that length the KV cache holds at once.

    Each device of the catalogue, in the least number (1, 2, 4 or 8) on which the weights and one
    longest request fit, over tensor-parallel ranks where the model allows it. `refusals` are the
    findings for which the engine would not take this checkpoint however much memory there is.
    """
    contexts = _contexts(anatomy.spec.max_positions)
    rows = [_fits_row(anatomy, deployment, hardware, contexts) for hardware in catalogue()]
    engine = f"{deployment.engine} {deployment.engine_version}"
    return {
        "contexts": contexts,
        "rows": rows,
        "engine": engine,
        "captions": [
            f"How many sequences of that length the KV cache holds at once under {engine} with its "
            "defaults. The engine may run fewer: max_num_seqs caps them.",
            "Where one device is too small, the least number that holds the model is shown.",
            *(f"Memory is not all: {finding.cause} ({finding.id})" for finding in refusals),
        ],
        "source": f"modelled: the ledger of {engine} and its block allocation",
    }


def _contexts(max_positions: int) -> list[int]:
    """The lengths to ask about: the usual ones below the model's own limit, and that limit."""
    if max_positions <= 0:
        return list(CONTEXTS[:3])
    return [*(c for c in CONTEXTS if c < max_positions), max_positions][-4:]


def _fits_row(
    anatomy: Anatomy, deployment: Deployment, hardware: HardwareSpec, contexts: list[int]
) -> dict[str, Any]:
    """The least number of this device that holds a sequence of the shortest context, and how many
    sequences of each context that number holds."""
    cells: list[dict[str, Any]] = []
    count = 1
    for count in DEVICE_COUNTS:
        cells = _cells(anatomy, deployment, Gpus(hardware, count, counted=True), contexts)
        if any(cell["max"] is None or cell["max"] > 0 for cell in cells):
            break
    return {
        "gpu": hardware.name if count == 1 else f"{count} × {hardware.name}",
        "memory_bytes": hardware.memory_bytes * count,
        "cells": cells,
    }


def _cells(
    anatomy: Anatomy, deployment: Deployment, gpus: Gpus, contexts: list[int]
) -> list[dict[str, Any]]:
    try:
        sizes, _ = deployed(anatomy, deployment, gpus)
        # The length only decides what one request takes; the budget does not depend on it.
        sizes = replace(sizes, max_model_len=contexts[0])
        ledger = build_ledger(anatomy, sizes, gpus)
        return [_cell(ledger, context) for context in contexts]
    except BadInput as error:
        return [
            {"context": context, "min": None, "max": None, "reason": str(error)}
            for context in contexts
        ]


def _cell(ledger: Ledger, context: int) -> dict[str, Any]:
    held = sorted(_held(ledger, case, context) for case in (ledger.heavy, ledger.light))
    replicas = ledger.deployment.parallel.data
    return {
        "context": context,
        "min": held[0] * replicas,
        "max": held[1] * replicas,
        "reason": "",
    }


def _held(ledger: Ledger, case: Case, context: int) -> int:
    """Sequences of `context` tokens that the KV cache of one replica holds at once; 0: refused."""
    assert ledger.gpus is not None and case.kv_budget_bytes is not None, "a device was named"
    deployment = replace(ledger.deployment, max_model_len=context)
    allocation = allocate(
        case.spec, deployment, max(0, case.kv_budget_bytes), hardware=ledger.gpus.hardware
    )
    if allocation.refusals:
        return 0
    if allocation.max_concurrency is None:
        return allocation.max_num_seqs
    return int(allocation.max_concurrency)
