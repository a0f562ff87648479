"""Figures as the page reads them: a number with unit and source, a range, or why it is absent.

Pure functions of Figures and Totals; no end of a range is "inf" but by that word. Rounds, replicas
and incidents are `documents.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ullage.telemetry.histogram import Quantile
from ullage.telemetry.snapshot import Gpu, Histograms
from ullage.watch.figures import Figures, Spread
from ullage.watch.totals import Totals
from ullage.watch.web.series import CHARTED, NAMES
from ullage.watch.web.wording import FIGURES, plain

Document = dict[str, Any]
MOST_LABELS = 40
FIELD_OF: Mapping[str, Histograms] = {
    f"{short}_{word}_s": field for short, field in CHARTED for word in ("p50", "p99")
}
"""Column of the series → the histogram that it is a quantile of."""


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
                    **quantile_document(both[0].p50 if word == "p50" else both[0].p99, "s"),
                    "num": both[1],
                    "of": of,
                }
            )
    return out


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


def all_figures(known: Figures) -> list[Document]:
    out = []
    for name, (words, _) in FIGURES.items():
        if name in known.numbers:
            out.append({"words": words, **number_of(known, name)})
        elif name in known.spreads:
            field: Histograms = name  # type: ignore[assignment]
            for label, pick in (("p50", p50), ("p99", p99)):
                out.append({"words": f"{words}, {label}", **spread_of(known, field, pick)})
        elif name == "time_to_full_s" and known.time_to_full is not None:
            to_full = known.time_to_full
            bounds = {"low": end_of(to_full.low_s), "high": end_of(to_full.high_s)}
            out.append({"words": words, "unit": "s", **bounds, "source": source_of(known, name)})
        elif name in known.labelled:
            out.extend(_labelled(known, name, words))
    return out


def _labelled(known: Figures, name: str, words: str) -> list[Document]:
    source = source_of(known, name)
    unit = FIGURES[name][1]
    return [
        {
            "words": f"{words}: {plain(label, 60)}",
            "value": finite(value),
            "unit": unit,
            "source": source,
        }
        for label, value in list(known.labelled[name].items())[:MOST_LABELS]
    ]


def p50(spread: Spread) -> Quantile:
    return spread.p50


def p99(spread: Spread) -> Quantile:
    return spread.p99


def number_of(known: Figures, name: str) -> Document:
    if name not in known.numbers:
        return {"absent": plain(known.absent.get(name, "the endpoint does not say"))}
    figure: Document = {
        "value": known.numbers[name],
        "unit": FIGURES[name][1] if name in FIGURES else "",
        "source": source_of(known, name),
    }
    if name in known.approximate:
        figure["approximate"] = True
    return figure


def spread_of(known: Figures, name: Histograms, pick: Callable[[Spread], Quantile]) -> Document:
    spread = known.spreads.get(name)
    if spread is None:
        return {"absent": plain(known.absent.get(name, "the endpoint does not say"))}
    return {**quantile_document(pick(spread), FIGURES[name][1]), "source": source_of(known, name)}


def quantile_document(quantile: Quantile, unit: str) -> Document:
    return {
        "value": finite(quantile.estimate),
        "unit": unit,
        "low": end_of(quantile.low),
        "high": end_of(quantile.high),
    }


def source_of(known: Figures, name: str) -> str:
    return plain(known.sources.get(name, ""))


def gpu_document(gpu: Gpu) -> Document:
    return {
        "index": plain(gpu.index, 60),
        "name": plain(gpu.name, 80),
        "used_bytes": finite(gpu.used_bytes),
        "total_bytes": finite(gpu.total_bytes),
        "busy_ratio": finite(gpu.busy_ratio),
        "sm_clock_hz": finite(gpu.sm_clock_hz),
        "max_sm_clock_hz": finite(gpu.max_sm_clock_hz),
        "power_watts": finite(gpu.power_watts),
        "temperature_celsius": finite(gpu.temperature_celsius),
        "throttled_because": [plain(r, 80) for r in (gpu.throttled_because or ())[:12]],
        "xid_errors": finite(gpu.xid_errors),
    }


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def end_of(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def cell(number: float) -> float | str | None:
    if number != number:
        return None
    return "inf" if math.isinf(number) else float(f"{number:.6g}")
