"""A fleet that lives by arithmetic: Sights of some hours, for tests and for looking at the page.

Twelve replicas by default: one in a preemption storm since a flag changed, one slow since its model
was swapped, one that does not answer, one engine that tells little, the rest as usual.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from tests.watch import sights
from ullage.findings.finding import Evidence, Finding, Severity
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import Gpu
from ullage.watch.rule import Judged
from ullage.watch.sight import Incident, Sight
from ullage.watch.view import Change, View

START_S = float(int(time.time()))
"""The end of the story: now, so that the page takes it for live."""
TOTAL_BYTES = 55e9
BYTES_PER_TOKEN = 131_072.0
TTFT_BOUNDS = (
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    math.inf,
)
ITL_BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.3, math.inf)
STORM_S, SWAP_S = 2400.0, 1500.0
"""How long before the end they began."""
SETTINGS = {
    "block_size": "16",
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "num_gpu_blocks": "26224",
}


def rounds(
    seconds: float, *, num: int = 12, interval_s: float = 5.0, every: int = 1
) -> Iterator[Sight]:
    """Sights from `seconds` before START_S until then, each `every`-th round."""
    steps = int(seconds / interval_s)
    for step in range(0, steps + 1, every):
        yield sight_at(START_S - seconds + step * interval_s, num=num, interval_s=interval_s)


def sight_at(time_s: float, *, num: int = 12, interval_s: float = 5.0) -> Sight:
    """The fleet at one moment."""
    views = tuple(_view(i, time_s) for i in range(num))
    judged = tuple(found for i, view in enumerate(views) for found in _judged(i, view, time_s))
    return Sight(time_s, interval_s, views, judged, _incidents(num, time_s))


def name_of(i: int) -> str:
    return f"http://10.4.{i // 250}.{11 + i % 250}:8000"


def _kind(i: int) -> str:
    return {2: "storm", 5: "swapped", 7: "down", 9: "quiet"}.get(i % 100, "usual")


def _histogram(bounds: tuple[float, ...], middle: float, num: float) -> Histogram:
    """Log-normal, with a wide tail."""
    counts = tuple(
        num
        if math.isinf(bound)
        else round(num * 0.5 * (1 + math.erf(math.log(bound / middle) / (0.7 * math.sqrt(2)))))
        for bound in bounds
    )
    return Histogram(bounds, counts, num * middle)


def _view(i: int, time_s: float) -> View:
    url, kind = name_of(i), _kind(i)
    ago = START_S - time_s
    wave = math.sin(ago / 700 + i) + 0.4 * math.sin(ago / 130 + 3 * i)
    storm = kind == "storm" and ago < STORM_S
    slow = kind == "swapped" and ago < SWAP_S
    if kind == "down" and ago < 900:
        last = sights.snapshot(START_S - 900, models=("acme/thirty-two-b",))
        return View(url, last, "connection refused", None, None, None)
    ratio = min(0.999, max(0.02, 0.52 + 0.16 * wave + (0.5 if storm else 0.0)))
    running = round(24 + 8 * wave)
    waiting = max(0, round(14 + 9 * wave)) if storm else 0
    deferred = 3 if i % 6 == 4 else 0
    gauges = {
        "kv_used_ratio": ratio,
        "kv_used_bytes": ratio * TOTAL_BYTES,
        "kv_total_bytes": TOTAL_BYTES,
        "kv_used_tokens": ratio * TOTAL_BYTES / BYTES_PER_TOKEN,
        "kv_total_tokens": TOTAL_BYTES / BYTES_PER_TOKEN,
        "running": float(running),
        "waiting": float(waiting + deferred),
    }
    histograms = {
        "ttft_s": _histogram(TTFT_BOUNDS, (2.2 if storm else 0.9 if slow else 0.21), 900.0),
        "itl_s": _histogram(ITL_BOUNDS, 0.034 if storm or slow else 0.016, 60_000.0),
    }
    rises = {
        "preemptions": (11.0 + 5 * wave) if storm else 0.0,
        "prompt_tokens": 41_000.0 + 9000 * wave,
        "generation_tokens": 5200.0 + 900 * wave,
        "prefix_queries_tokens": 41_000.0,
        "prefix_hits_tokens": 41_000.0 * (0.61 + 0.1 * wave),
    }
    if kind == "quiet":
        gauges = {"running": float(running % 4), "waiting": 0.0}
        now = sights.snapshot(
            time_s, gauges=gauges, counters={}, labelled={}, histograms={},
            engine="llamacpp", version="b6100", models=("small-8b-q4",),
        )  # fmt: skip
        usual = sights.span(5.0, rises={}, histograms={}, trends={})
        return View(url, now, "", usual, usual, None)
    revision = "rev-b71c" if slow else "rev-0a41"
    now = sights.snapshot(
        time_s,
        gauges=gauges,
        labelled={"waiting_by_reason": {"capacity": float(waiting), "deferred": float(deferred)}},
        histograms=histograms,
        models=("acme/thirty-two-b",),
        max_model_len=32_768,
        block_size=16,
        num_blocks=26_224,
        settings={
            **SETTINGS,
            "gpu_memory_utilization": "0.80" if storm else "0.92",
            "revision": revision,
        },
        started_s=START_S - (STORM_S + 40 if kind == "storm" else 90_000.0),
        gpus=(Gpu("0", "H200", 118e9, 141e9, 0.93, 1.755e9, 1.98e9, 610.0, 67.0),),
    )
    changes: tuple[Change, ...] = ()
    if storm:
        changes = (STORM_CHANGE,)
    if slow:
        changes = (SWAP_CHANGE,)
    trends = {"kv_used_ratio": sights.trend(ratio - 0.01 * wave, ratio, 300.0)}
    recent = sights.span(300.0, rises=rises, histograms=histograms, trends=trends)
    last = sights.span(5.0, rises=rises, histograms=histograms, trends=trends)
    return View(url, now, "", last, recent, None, changes)


STORM_CHANGE = Change(START_S - STORM_S - 40, "gpu_memory_utilization", "0.92", "0.80")
SWAP_CHANGE = Change(START_S - SWAP_S, "revision", "rev-0a41", "rev-b71c")
LENGTH_CHANGE = Change(
    START_S - STORM_S - 300, "length of answers, p99", "410 tokens", "1,900 tokens"
)
LATER_CHANGE = Change(START_S - STORM_S + 4, "num_blocks", "12,000", "10,400")


def _storm() -> Finding:
    return Finding(
        "W003",
        "how often requests are preempted",
        Severity.error,
        "fired",
        (
            Evidence("preemptions", 2.3, "1/s", "vllm:num_preemptions_total over 300 s"),
            Evidence("KV cache used", 0.998, "ratio", "vllm:kv_cache_usage_perc"),
            Evidence("recomputed", 3100.0, "tokens/s", "preemptions × mean length of the prompts"),
        ),
        "2.3 requests a second are preempted: the cache is 99.8% full, and each one that is let in "
        "pushes out another, whose prompt is then computed again.",
        "Give the cache back what --gpu-memory-utilization 0.80 took from it, or let fewer "
        "requests run at once: --max-num-seqs 20.",
    )


def _shift() -> Finding:
    return Finding(
        "W014",
        "time to first token against this replica's own past",
        Severity.warning,
        "fired",
        (Evidence("first token, p50", 0.9, "s", "vllm:time_to_first_token_seconds over 300 s"),),
        "The median first token takes 0.75 to 1.0 s; it took 0.1 to 0.25 s an hour ago at the same "
        "load.",
        "Compare the revision that is served now with the one before.",
    )


def _judged(i: int, view: View, time_s: float) -> list[Judged]:
    ago, kind = START_S - time_s, _kind(i)
    if view.error:
        return []
    found = [sights.clear("W001", "how full the KV cache is")]
    found.append(_storm() if kind == "storm" and ago < STORM_S else sights.clear())
    found.append(
        _shift() if kind == "swapped" and ago < SWAP_S else sights.clear("W014", _shift().title)
    )
    found.append(sights.lacking())
    if kind == "quiet":
        found = [
            sights.lacking("W001", "kv_used_ratio"),
            sights.lacking("W003", "preemptions"),
            sights.lacking(),
            sights.lacking("W014", "ttft_s"),
        ]
    return [Judged(view.url, finding) for finding in found]


def _incidents(num: int, time_s: float) -> tuple[Incident, ...]:
    ago = START_S - time_s
    out = []
    if num > 5 and ago < SWAP_S:
        out.append(Incident(name_of(5), _shift(), START_S - SWAP_S + 120, None, (SWAP_CHANGE,)))
    if num > 2 and ago < STORM_S:
        changed = (STORM_CHANGE, LENGTH_CHANGE, LATER_CHANGE)
        out.append(Incident(name_of(2), _storm(), START_S - STORM_S, None, changed))
    if ago < 5000:
        since = START_S - 6000
        full = sights.fired(title="how full the KV cache is")
        out.append(Incident(name_of(0), full, since, since + 700))
    return tuple(out)
