"""Rules about KV blocks against the lengths of requests: W002.

Holds the arithmetic of pages that are not full, and the block size that would suit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import Snapshot
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    knows,
    percent,
    recent_of,
    require,
    source_of,
    tidy,
    trend_fact,
    trend_of,
)
from ullage.watch.rules.settings import setting
from ullage.watch.view import Span

POOR = 0.7
GOOD = 0.9
LEAST_REQUESTS = 20
MEASURED_SCRAPES = 4
MEASURED = f"in {MEASURED_SCRAPES} scrapes, with requests that run"
HELD = 0.5
"""Below half a pool, room lost inside pages is room that nobody asks for."""
SIZES = (16, 32, 64, 128, 256, 512)
"""Kernels take multiples of 16 (FlashAttention, Triton), 32 on CPU, 64 on XPU."""


@dataclass(frozen=True, slots=True)
class Use:
    """Tokens over the room of the pages that hold them lies in [low, high]."""

    low: float
    high: float


def use_of_pages(block_size: int, prompts: Histogram, grown_tokens: float) -> Use | None:
    """How full the pages are of requests with these prompts that have grown by `grown_tokens`.

    A request of L tokens holds ⌈L / block_size⌉ pages. L is known to its bucket only, and the mean
    of all exactly, so the answer is a range. None where the mean is not known.
    """
    if prompts.mean is None or prompts.count <= 0:
        return None
    mean = prompts.mean + grown_tokens
    fewest = most = 0.0
    below, low = 0.0, 0.0
    for bound, count in zip(prompts.bounds, prompts.counts, strict=True):
        share = (count - below) / prompts.count
        shortest = max(1.0, low + 1 + grown_tokens)
        fewest += share * block_size * math.ceil(shortest / block_size)
        longest = bound + grown_tokens
        most += (
            share * block_size * math.ceil(longest / block_size)
            if share > 0 and math.isfinite(longest)
            else (math.inf if share > 0 else 0.0)
        )
        below, low = count, bound
    room_most = min(most, mean + block_size - 1)
    room_least = min(room_most, max(fewest, mean))
    return Use(min(1.0, mean / room_most), min(1.0, mean / room_least))


def better_size(prompts: Histogram, grown_tokens: float) -> int:
    """The largest of SIZES that surely keeps pages GOOD full; the smallest where none does."""
    for size in reversed(SIZES):
        use = use_of_pages(size, prompts, grown_tokens)
        if use is not None and use.low >= GOOD:
            return size
    return SIZES[0]


@answering
def _fragmentation(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "kv_used_ratio")
    size = now.identity.block_size
    if size is None:
        raise Lacking(f"block_size ({now.identity.why_unsaid})")
    span = recent_of(subject)
    held = trend_of(now, span, "kv_used_ratio")
    facts: tuple[Evidence, ...] = (
        Evidence("block_size", size, "tokens", "engine"),
        trend_fact(now, span, "kv_used_ratio", "most"),
    )
    measured = _measured(span)
    lengths = _lengths(now, span)
    if measured is None and lengths is None:
        known = knows(now, "page_utilization_ratio")
        why = "(" + now.why_absent("page_utilization_ratio") + ")"
        raise Lacking(
            f"page_utilization_ratio {MEASURED if known else why}",
            f"{LEAST_REQUESTS} requests in request_prompt_tokens, and their answers",
        )
    modelled = use_of_pages(size, *lengths) if lengths else None
    best = modelled.high if modelled else 1.0
    if measured is not None:
        facts = (*facts, trend_fact(now, span, "page_utilization_ratio"))
        best = measured
    elif modelled is not None:
        low, high = tidy(round(modelled.low, 3)), tidy(round(modelled.high, 3))
        source = f"modelled from {source_of(now, 'request_prompt_tokens')}"
        facts = (*facts, Evidence("pages filled", f"{low} to {high}", "ratio", source))
    if best >= POOR or held.most < HELD:
        return Clear(facts)
    better = better_size(*lengths) if lengths else None
    if better is not None and better >= size:
        better = None  # blocks are not what leaves the pages empty
    engine = now.identity.engine
    if better is not None:
        facts = (*facts, Evidence("better block size", better, "tokens", "modelled: lengths seen"))
    return Fired(
        f"Only {percent(best)} of the room in held KV pages is used: blocks of {size:,} tokens are "
        "large for the requests seen, so the pool is full before it holds what it could.",
        (
            f"Set {setting(engine, 'block_size')} to {better}."
            if better is not None
            else f"Try a smaller {setting(engine, 'block_size')}."
        )
        + " A hybrid model's block follows from its state's size (vLLM logs 'Setting attention "
        "block size'): there only fewer, longer requests or a wider KV dtype help.",
        facts,
    )


def _measured(span: Span) -> float | None:
    trend, running = span.trends.get("page_utilization_ratio"), span.trends.get("running")
    if trend is None or trend.num < MEASURED_SCRAPES or running is None or running.mean < 1:
        return None
    return trend.mean


def _lengths(now: Snapshot, span: Span) -> tuple[Histogram, float] | None:
    """(prompts, by how much a running request has grown on average): half its answer."""
    for source in (span.histograms, now.histograms):  # recent ones, else all since the start
        prompts = source.get("request_prompt_tokens")
        answers = source.get("request_generation_tokens")
        if prompts is None or answers is None or answers.mean is None:
            continue
        if prompts.count >= LEAST_REQUESTS:
            return prompts, answers.mean / 2
    return None


RULES = (
    Rule(
        id="W002",
        title="Room inside KV pages",
        severity=Severity.warning,
        category="memory",
        why="A request holds whole blocks. With blocks that are large for its length most of the "
        "pool is held and empty.",
        fix="A block size that suits the lengths; it is computed from the histogram of prompts.",
        source="vllm#54458: a hybrid's block of 7,808 tokens gives a 12-token prompt a third of "
        "the pool",
        example="block_size 512 with prompts below 100 tokens and the pool more than half held",
        check=_fragmentation,
    ),
)
