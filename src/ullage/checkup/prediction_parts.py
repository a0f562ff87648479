"""The parts of the document that set predictions beside measurements: growth, roofline, errors.

Holds the translation to JSON data and the captions; the arithmetic is `comparison.py`. What could
not be evaluated is added to `gaps`.
"""

from __future__ import annotations

from typing import Any

from ullage.anatomy.tensors.expected import expected_tensors
from ullage.checkup import comparison as compare
from ullage.checkup.allocation import Compared, Server, compare_with_embedded, compare_with_vllm
from ullage.checkup.figures import figure
from ullage.checkup.gather import Evidence
from ullage.checkup.metrics import CacheInfo
from ullage.costs.deployment import Platform
from ullage.pages.words import quantity

Gaps = list[dict[str, Any]]


def gap(what: str, why: str, kind: str = "measurement", count: int = 1) -> dict[str, Any]:
    """One thing that was not evaluated, and why; `kind` and `count` are for summing up."""
    return {"what": what, "why": why, "kind": kind, "count": count}


def _fit(evidence: Evidence) -> compare.GrowthFit | None:
    if evidence.seen is None:
        return None
    spec = evidence.model.anatomy.spec
    return compare.fit_growth(spec, evidence.seen.growth, _cache(evidence), evidence.serving)


def _cache(evidence: Evidence) -> CacheInfo | None:
    return None if evidence.engine is None else evidence.engine.idle.cache


def growth_part(evidence: Evidence, gaps: Gaps) -> dict[str, Any] | None:
    """KV growth of one sequence, predicted and measured."""
    fit = _fit(evidence)
    if fit is None:
        if evidence.seen is not None:
            why = "the engine exports no block size, no cache occupancy or no count of tokens"
            gaps.append(gap("growth of the KV cache", why))
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
        "bytes_seen": fit.bytes_seen,
        "measured": [list(pair) for pair in fit.seen],
        "predicted": [list(pair) for pair in fit.predicted],
    }


def roofline_part(evidence: Evidence, gaps: Gaps) -> dict[str, Any] | None:
    """The roof from measured limits, and where each experiment lies beneath it."""
    hardware = evidence.serving.hardware
    if evidence.seen is None:
        return None
    if evidence.serving.unbounded is not None:
        gaps.append(gap("roofline and predicted speeds", evidence.serving.unbounded))
        return None
    assert hardware is not None, "bounded means that the hardware is known"
    flops = hardware.flops_per_s(evidence.serving.compute_dtype) or 0.0
    points = compare.roofline_points(evidence.model.anatomy.spec, evidence.seen, evidence.serving)
    return {
        "captions": [
            "Left of the ridge a step is bound by reading memory, right of it by multiplying. "
            "Decoding lies left, and batching moves it right: that is why it pays.",
            "The gap up to the roof is what the engine leaves on the table.",
            _typical(evidence),
            _above_roof(points, hardware.bandwidth_bytes_per_s, flops),
        ],
        "bandwidth": figure(
            hardware.bandwidth_bytes_per_s, "bytes/s", hardware.source("bandwidth")
        ),
        "flops": figure(flops, "FLOP/s", hardware.source("flops")),
        "points": points,
    }


def _typical(evidence: Evidence) -> str:
    """What the measured machine did at the median, beside the best run that is the roof."""
    machine = evidence.machine
    if machine is None or not evidence.options.on_this_machine:
        return ""
    read, gemm = machine.read.median, machine.gemm.median
    return (
        "The roof is the best run that was seen. Typical, at the median, were "
        f"{quantity(read, 'bytes/s')} and {quantity(gemm, 'FLOP/s')}."
    )


def _above_roof(points: list[dict[str, Any]], bandwidth: float, flops: float) -> str:
    """A point above the roof says that the roof was measured on a busier machine."""
    above = [p for p in points if p["flops_per_s"] > min(flops, bandwidth * p["flops_per_byte"])]
    if not above:
        return ""
    return (
        f"{above[0]['name'].capitalize()} lies above the roof: the machine was busier while its "
        "limits were measured than while the engine ran."
    )


def comparison_part(evidence: Evidence, gaps: Gaps) -> dict[str, Any]:
    """Each prediction beside what happened."""
    rows: list[dict[str, Any]] = []
    seen = evidence.seen
    allocated = Compared()
    if seen is not None:
        allocated = _allocation(evidence)
        rows += allocated.rows
        gaps += [gap(what, why) for what, why in allocated.missing]
        fit = _fit(evidence)
        growth = None if fit is None else compare.growth_row(fit)
        if growth is not None:
            rows.append(growth)
        rows += _weight_rows(evidence, gaps)
        if evidence.serving.unbounded is None:
            rows += compare.speed_rows(evidence.model.anatomy.spec, seen, evidence.serving)
    return {
        "captions": [
            "Sizes and allocations should match exactly. Speeds are predicted as bounds: the least "
            "time that the measured limits allow, without any of the engine's own costs.",
            "The error is (actual − predicted) / predicted; bars end at ±100%.",
        ],
        "rows": rows,
        "allocation": {
            "state": allocated.state,
            "rows": [row["name"] for row in allocated.rows],
            "derived": allocated.derived,
            "assumed": list(allocated.assumed),
            "embedded": _is_ours(evidence),
        },
    }


def _is_ours(evidence: Evidence) -> bool:
    """Whether the engine is ullage's own, wherever it runs: it alone tells bytes of KV."""
    engine = evidence.engine
    return engine is not None and (
        engine.embedded or engine.idle.peak("kv_total_bytes") is not None
    )


def _allocation(evidence: Evidence) -> Compared:
    """The engine's own word on its KV cache, beside the prediction for the same bytes."""
    engine, cache = evidence.engine, _cache(evidence)
    spec, options = evidence.model.anatomy.spec, evidence.options
    if engine is None or cache is None:
        why = "the engine does not export vllm:cache_config_info"
        return Compared(missing=(("the engine's KV allocation", why),))
    if _is_ours(evidence):
        total = engine.idle.peak("kv_total_bytes")
        return compare_with_embedded(spec, cache, total, evidence.serving.kv_dtype)
    ledger = evidence.ledger
    deployment = options.deployment if ledger is None else ledger.deployment
    hardware = evidence.serving.hardware
    platform: Platform | None
    platform = None if hardware is None else "cpu" if hardware.platform == "cpu" else "cuda"
    return compare_with_vllm(
        spec,
        Server(
            cache=cache,
            deployment=deployment,
            max_model_len=engine.max_model_len or options.max_model_len,
            platform=platform,
            hardware=hardware,
            kv_bytes_named=options.kv_cache_memory_bytes,
        ),
    )


def _weight_rows(evidence: Evidence, gaps: Gaps) -> list[dict[str, Any]]:
    said = None if evidence.engine is None else evidence.engine.idle.peak("weights_bytes")
    if said is None:
        gaps.append(gap("weights as loaded", "the engine does not export ullage_weights_bytes"))
        return []
    return [
        compare.compared(
            "weights in memory",
            figure(predicted_weights(evidence), "bytes", "modelled: parameters × 4 bytes"),
            figure(int(said), "bytes", "engine: ullage_weights_bytes"),
        )
    ]


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
