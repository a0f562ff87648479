"""All replicas together: sums and shares over those that know them, and of how many that is.

Holds arithmetic over Figures and Views only. A total never counts what is not known as nothing:
it says of how many replicas it speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import Histograms
from ullage.watch.figures import FREE, LABELLED, PREFIX_HITS, RATES, SPREADS, Figures, Spread
from ullage.watch.view import View

PAIRED = tuple(dict.fromkeys(name for pair in FREE.values() for name in pair))
SUMMED: tuple[str, ...] = (*PAIRED, *FREE, "kv_cached_tokens", "running", "waiting", *RATES)


@dataclass(frozen=True, slots=True)
class Total:
    """A sum or a share over `num_replicas` of the replicas."""

    value: float
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Totals:
    """`num_replicas` are watched, `num_answering` of them answered last time.

    Used, free and total KV are of the replicas that know all of it, so that they add up. A field
    that no replica knows is in neither mapping. `kv_used_ratio` is by bytes where every replica
    that answers knows them, else by tokens, else the mean of the replicas' own; `basis` says which.
    `gpu_busy_ratio` is the mean over the GPUs that say it (`num_replicas` counts those GPUs).
    """

    num_replicas: int
    num_answering: int
    sums: Mapping[str, Total]
    waiting_by_reason: Mapping[str, float]
    kv_used_ratio: Total | None
    basis: str
    spreads: Mapping[Histograms, tuple[Spread, int]]
    num_gpus: int = 0
    num_throttled_gpus: int = 0
    gpu_busy_ratio: Total | None = None


def totals_of(views: Sequence[View], figures: Sequence[Figures]) -> Totals:
    """Everything together; `figures` are the views', in their order."""
    answering = [one for one in figures if one.time_s is not None]
    sums = {name: total for name in SUMMED if (total := _sum(name, answering)) is not None}
    by_reason: dict[str, float] = {}
    for one in answering:
        for reason, number in one.labelled.get(LABELLED[0], {}).items():
            by_reason[reason] = by_reason.get(reason, 0.0) + number
    ratio, basis = _used_ratio(answering, sums)
    hits = _prefix_hits(views)
    if hits is not None:
        sums[PREFIX_HITS] = hits
    spreads = {name: both for name in SPREADS if (both := _spread(name, views)) is not None}
    gpus = [gpu for one in answering for gpu in one.gpus]
    busy = [gpu.busy_ratio for gpu in gpus if gpu.busy_ratio is not None]
    return Totals(
        len(figures),
        len(answering),
        sums,
        by_reason,
        ratio,
        basis,
        spreads,
        len(gpus),
        sum(1 for gpu in gpus if gpu.throttled_because),
        Total(sum(busy) / len(busy), len(busy)) if busy else None,
    )


def _sum(name: str, figures: Sequence[Figures]) -> Total | None:
    needed = next(((free, *pair) for free, pair in FREE.items() if name in (free, *pair)), (name,))
    values = [one.numbers[name] for one in figures if all(part in one.numbers for part in needed)]
    return Total(sum(values), len(values)) if values else None


def _used_ratio(figures: Sequence[Figures], sums: Mapping[str, Total]) -> tuple[Total | None, str]:
    for used, whole in FREE.values():
        total = sums.get(whole)
        if total is not None and total.num_replicas == len(figures) and total.value > 0:
            return Total(sums[used].value / total.value, len(figures)), used.rpartition("_")[2]
    ratios = [ratio for one in figures if (ratio := one.used_ratio) is not None]
    if not ratios:
        return None, ""
    return Total(sum(ratios) / len(ratios), len(ratios)), "mean of replicas"


def _prefix_hits(views: Sequence[View]) -> Total | None:
    queries = hits = 0.0
    num = 0
    for view in views:
        rises = view.recent.rises if view.recent is not None and not view.error else {}
        if "prefix_queries_tokens" in rises and "prefix_hits_tokens" in rises:
            queries += rises["prefix_queries_tokens"]
            hits += rises["prefix_hits_tokens"]
            num += 1
    return Total(hits / queries, num) if 0 <= hits <= queries and queries > 0 else None


def _spread(name: Histograms, views: Sequence[View]) -> tuple[Spread, int] | None:
    """Quantiles over all replicas, and of how many; None where their buckets differ."""
    merged: Histogram | None = None
    num = 0
    over_s = 0.0
    for view in views:
        if view.recent is None or view.error or name not in view.recent.histograms:
            continue
        one = view.recent.histograms[name]
        merged = one if merged is None else merged.plus(one)
        if merged is None:
            return None
        num += 1
        over_s = max(over_s, view.recent.seconds)
    p50, p99 = (None, None) if merged is None else (merged.quantile(0.5), merged.quantile(0.99))
    if merged is None or p50 is None or p99 is None:
        return None
    return Spread(p50, p99, merged.count, over_s), num
