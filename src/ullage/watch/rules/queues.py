"""Rules about waiting: W005 for compute, W006 for KV, W007 for something else than either.

Holds what counts as a queue and what it waits for. Imbalance between replicas is `balance.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.snapshot import Snapshot
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    percent,
    recent_of,
    requests_in,
    require,
    rise_fact,
    seconds,
    source_of,
    stands_still,
    tidy,
    trend_fact,
    trend_of,
)
from ullage.watch.rules.memory import storms
from ullage.watch.rules.settings import setting
from ullage.watch.view import Span, Trend

WATCHED_S = 30.0
STANDING_S = 60.0
LEAST_WAITING = 2.0
LASTED_S = 30.0
"""Waiting summed over time, in present lengths: a queue that stood for so long, or grew for twice
as long. A burst's jump in the last scrapes is neither."""
LONG_WAIT_S = 10.0
"""A wait for a seat that any interactive client notices; bursts that drain sooner are none."""
STILL_S = 15.0
"""Behind an engine that makes no token a queue says nothing of compute or memory."""
FULL = 0.9
"""Of KV held: from here on the next request's prompt is likely to be what does not fit."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that have waited over a span, and for what.

    `wait_s` is what the last to arrive waits at the rate at which requests get through (Little's
    law); infinite where none does. `long` says that it matters: a queue that grew, or that was
    never empty, and a wait above LONG_WAIT_S. `deferred_ratio` is the share that waits for
    neither compute nor KV; None where the engine does not tell.
    """

    waiting: Trend
    wait_s: float
    grew: bool
    long: bool
    deferred_ratio: float | None
    facts: tuple[Evidence, ...]


def queue_of(now: Snapshot, span: Span) -> Queue:
    """The queue of a span of at least WATCHED_S. Raises Lacking where it cannot be told."""
    waiting = trend_of(now, span, "waiting")
    facts: tuple[Evidence, ...] = (
        trend_fact(now, span, "waiting", "first"),
        trend_fact(now, span, "waiting", "last"),
    )
    grown = waiting.slope_per_s * span.seconds
    grew = (
        grown >= max(LEAST_WAITING, 0.3 * waiting.last)
        and waiting.last >= 0.75 * waiting.most
        and waiting.last - waiting.first >= LEAST_WAITING
        and waiting.mean * span.seconds >= LASTED_S * waiting.last
    )
    stands = span.seconds >= STANDING_S and waiting.least >= 1 and waiting.mean >= LEAST_WAITING
    wait_s = 0.0
    if grew or stands:
        through, source = requests_in(now, span)
        wait_s = waiting.last * span.seconds / through if through > 0 else math.inf
        facts = (
            *facts,
            Evidence("requests that got through", tidy(through), "requests",
                     f"{source}, over {span.seconds:.0f} s"),
            Evidence("wait of the last to arrive", tidy(wait_s) if through > 0 else "no end",
                     "s" if through > 0 else "", "modelled: waiting / requests per second"),
        )  # fmt: skip
    deferred, told = _deferred(now, span)
    return Queue(waiting, wait_s, grew, wait_s >= LONG_WAIT_S, deferred, (*facts, *told))


def _deferred(now: Snapshot, span: Span) -> tuple[float | None, tuple[Evidence, ...]]:
    trend = span.waiting_by_reason.get("deferred")
    if trend is None:
        return None, ()
    source = f"{source_of(now, 'waiting_by_reason')}, {trend.num} scrapes"
    fact = Evidence("waiting, deferred, mean", tidy(trend.mean), "requests", source)
    mean = span.trends["waiting"].mean
    return (min(1.0, trend.mean / mean) if mean > 0 else 0.0), (fact,)


def _why_waiting(subject: Subject) -> tuple[Snapshot, Span, Queue]:
    now = answer_of(subject)
    require(now, "waiting", "kv_used_ratio")
    if stands_still(subject, STILL_S):
        raise Lacking("an engine that moves (see W009)")
    span = recent_of(subject, WATCHED_S)
    return now, span, queue_of(now, span)


def _lacks_room(now: Snapshot, span: Span) -> bool:
    """Whether the pool is what is waited for: full, or less is free than a usual prompt takes, or
    it keeps running out: each preemption frees much at once, and is no sign of room."""
    held = span.trends["kv_used_ratio"]
    if max(held.last, held.mean) >= FULL or storms(now, span):
        return True
    used, total = now.gauges.get("kv_used_tokens"), now.gauges.get("kv_total_tokens")
    prompts = span.histograms.get("request_prompt_tokens")
    usual = prompts.quantile(0.9) if prompts is not None else None
    if used is None or total is None or usual is None:
        return False
    return max(0.0, total - used) < usual.low


@answering
def _compute_bound(subject: Subject) -> Answer:
    now, span, queue = _why_waiting(subject)
    held = trend_of(now, span, "kv_used_ratio")
    facts = (*queue.facts, trend_fact(now, span, "kv_used_ratio", "last"))
    if not queue.long or (queue.deferred_ratio or 0.0) >= 0.5 or _lacks_room(now, span):
        return Clear(facts)
    engine = now.identity.engine
    seats = _seats(now, span)
    cause = (
        f"{queue.waiting.last:,.0f} requests wait{_wait(queue)} while {percent(1 - held.last)} of "
        "the KV cache is free: "
    )
    if seats is not None:
        return Fired(
            f"{cause}every scrape found {seats.value} running, so the seats are the limit and not "
            "the memory.",
            f"Raise {setting(engine, 'max_requests')} above {seats.value} as long as the time "
            "between tokens allows; otherwise add a replica: more KV memory would change nothing.",
            (*facts, seats),
        )
    return Fired(
        f"{cause}the steps are too slow for what arrives, not the memory too small.",
        f"Add a replica, or make steps cheaper (fewer prompt tokens each: "
        f"{setting(engine, 'step_tokens')}, a quantised model, more devices); more KV memory would "
        "change nothing.",
        facts,
    )


def _seats(now: Snapshot, span: Span) -> Evidence | None:
    """The number that run, where it never changed: then it is a limit."""
    running = span.trends.get("running")
    if running is None or running.num < 6 or running.least != running.most or running.most < 1:
        return None
    source = f"{source_of(now, 'running')}, the same in {running.num} scrapes"
    return Evidence("running", tidy(running.last), "requests", source)


def _wait(queue: Queue) -> str:
    if math.isinf(queue.wait_s):
        return " and none gets through"
    return f", the last of them about {seconds(queue.wait_s)}"


@answering
def _memory_bound(subject: Subject) -> Answer:
    now, span, queue = _why_waiting(subject)
    held = trend_of(now, span, "kv_used_ratio")
    facts = (*queue.facts, trend_fact(now, span, "kv_used_ratio", "last"))
    if not queue.long or (queue.deferred_ratio or 0.0) >= 0.5 or not _lacks_room(now, span):
        return Clear(facts)
    engine = now.identity.engine
    ran_out = ""
    if held.last < FULL and storms(now, span):
        facts = (*facts, rise_fact(now, span, "preemptions"))
        lost = f"{span.rises['preemptions']:,.0f} times in {seconds(span.seconds)}"
        ran_out = f" and ran out {lost}, so that running requests lost their blocks"
    return Fired(
        f"{queue.waiting.last:,.0f} requests wait{_wait(queue)}, and {percent(held.last)} of the "
        f"KV cache is held{ran_out}: they wait for blocks.",
        f"More KV memory ({setting(engine, 'kv_memory')}), a narrower KV dtype "
        f"({setting(engine, 'kv_dtype')}), a lower {setting(engine, 'max_length')} if answers are "
        "longer than anyone needs, or a replica: faster steps alone change little.",
        facts,
    )


LONG_DEFERRED_S = 5.0
"""Transfers and grammars take milliseconds to a second or two; waits above are a shortage."""


@answering
def _deferred_waits(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "waiting", "waiting_by_reason")
    span = recent_of(subject, WATCHED_S)
    deferred = span.waiting_by_reason.get("deferred")
    if deferred is None:
        raise Lacking("waiting_by_reason: deferred (the engine gives no such reason)")
    facts: tuple[Evidence, ...] = (
        Evidence("waiting, deferred, mean", tidy(deferred.mean), "requests",
                 f"{source_of(now, 'waiting_by_reason')}, {deferred.num} scrapes"),
        trend_fact(now, span, "waiting"),
    )  # fmt: skip
    if deferred.num < 4 or deferred.mean < 1 or deferred.last < 1:
        return Clear(facts)
    wait_s, told = _deferred_wait(now, span, deferred)
    facts = (*facts, *told)
    total = trend_of(now, span, "waiting").mean
    if wait_s < LONG_DEFERRED_S or deferred.mean < 0.5 * total:
        return Clear(facts)
    engine = now.identity.engine
    how_long = "none gets through" if math.isinf(wait_s) else f"{seconds(wait_s)} and more"
    return Fired(
        f"On average {deferred.mean:.3g} requests are deferred ({how_long}): they wait neither "
        "for compute nor for KV but for an adapter's slot, a KV transfer or a grammar, which looks "
        "like load and is none.",
        f"With more adapters in use than slots raise {setting(engine, 'adapter_slots')}; with a KV "
        "connector look at the other side and the network between; with structured output at the "
        "size of the schemas. Another replica helps only the first.",
        facts,
    )


def _deferred_wait(
    now: Snapshot, span: Span, deferred: Trend
) -> tuple[float, tuple[Evidence, ...]]:
    """(seconds that those deferred wait, the evidence): spread over all requests, which is the
    least that it can be, or what the slowest in twenty waited where the engine tells that."""
    through, source = requests_in(now, span)
    wait_s = deferred.mean * span.seconds / through if through > 0 else math.inf
    over = f"{source}, over {span.seconds:.0f} s"
    facts = [Evidence("requests that got through", tidy(through), "requests", over)]
    waits = span.histograms.get("queue_s")
    tail = waits.quantile(0.95) if waits is not None and waits.count >= 20 else None
    if tail is not None:
        facts.append(Evidence("queue_s p95 above", tidy(tail.low), "s", source_of(now, "queue_s")))
        wait_s = max(wait_s, tail.low)
    return wait_s, tuple(facts)


RULES = (
    Rule(
        id="W005",
        title="Waiting requests while KV is free",
        severity=Severity.warning,
        category="queues",
        why="Requests that wait beside free KV wait for compute or for a seat. Scaling on KV use "
        "alone never sees them.",
        fix="More replicas, cheaper steps or more seats; not more KV memory.",
        source="llm-d workload-variant-autoscaler#662: KV at 32% while the queue grows",
        example="waiting 4 → 60 in two minutes with kv_used_ratio 0.32",
        check=_compute_bound,
    ),
    Rule(
        id="W006",
        title="Waiting requests while KV is full",
        severity=Severity.warning,
        category="queues",
        why="Requests that wait for blocks are helped by memory, not by faster steps, and the next "
        "stage is preemption.",
        fix="More KV memory, a narrower KV dtype, shorter requests, or a replica.",
        source="vllm 0.32: v1/core/sched/scheduler.py (admission stops when blocks do not suffice)",
        example="waiting 4 → 60 in two minutes with kv_used_ratio 0.97",
        check=_memory_bound,
    ),
    Rule(
        id="W007",
        title="Deferred requests",
        severity=Severity.warning,
        category="queues",
        why="A deferred request waits for an adapter's slot, a KV transfer or a grammar. Counted "
        "as load it makes autoscalers add replicas that change nothing.",
        fix="Look at what is waited for: slots, the transfer, the schema.",
        source="sglang#13349: 16 adapters on 8 slots, TTFT 40 ms → 6.3 s; vllm 0.32: "
        "v1/metrics/loggers.py (reasons of waiting)",
        example='waiting_by_reason{reason="deferred"} 12 of 14 while 30 requests a minute end',
        check=_deferred_waits,
    ),
)
