"""Rules about the KV pool: W001 nearly full, W003 preemption storm, W008 smaller than a request,
W020 held while nothing runs.

How requests queue for it is `queues.py`'s.
"""

from __future__ import annotations

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.snapshot import Snapshot
from ullage.watch.peers import finished_in
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    gauge_fact,
    percent,
    recent_of,
    requests_in,
    require,
    rise_fact,
    rise_of,
    seconds,
    source_of,
    span_fact,
    tidy,
    trend_fact,
    trend_of,
)
from ullage.watch.rules.settings import setting
from ullage.watch.view import Span

NEARLY_FULL = 0.95
"""vLLM's --watermark of 5% was what stopped a storm (vllm#44594): above this, growth preempts."""
RISING_FROM = 0.5
SOON_S = 600.0
"""Time to full that is worth a warning: about what a new replica of a large model takes to load."""
TREND_S = 240.0
LIFETIMES = 3.0
"""A pool fills whenever load begins, until the first requests end: only what lasts for several of
their lifetimes is growth."""
GROWN = 0.2
EVEN = 0.15
"""How far from a straight line, of what it grew by. A burst is a step, what levels off is bent."""

STORM_NUM = 10
STORM_SHARE = 0.1
"""Preemptions per request. Below, the odd request is computed twice; the storm of vllm#44594 had
1,065, and 187 once it was mended."""


@answering
def _nearly_full(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "kv_used_ratio")
    last = subject.view.last
    if last is None:
        raise Lacking("two scrapes that answered")
    just = trend_of(now, last, "kv_used_ratio")
    facts: tuple[Evidence, ...] = (gauge_fact(now, "kv_used_ratio"), *_free(now))
    remedy = (
        f"Give the cache more room ({setting(now.identity.engine, 'kv_memory')}), store it "
        f"narrower ({setting(now.identity.engine, 'kv_dtype')}), admit fewer requests at once "
        f"({setting(now.identity.engine, 'max_requests')}), or add a replica."
    )
    if just.least >= NEARLY_FULL:
        return Fired(
            f"{percent(just.last)} of the KV cache is held by requests: what grows now takes "
            "blocks from others (preemption), and what arrives waits.",
            remedy,
            facts,
        )
    left_s, slope = _time_to_full(subject, now)
    facts = (*facts, *slope)
    if left_s is None or left_s > SOON_S:
        return Clear(facts)
    return Fired(
        f"{percent(just.last)} of the KV cache is held and more from scrape to scrape: at the rate "
        f"of the last minutes it is full in {seconds(left_s)}.",
        remedy,
        (*facts, Evidence("time to full", tidy(round(left_s, 1)), "s", "modelled: free / slope")),
    )


def _time_to_full(subject: Subject, now: Snapshot) -> tuple[float | None, tuple[Evidence, ...]]:
    """(seconds until full, the evidence), the first None where the pool is not steadily filling:
    by GROWN or more, in a straight line, to a height that its past did not know."""
    recent, past = subject.view.recent, subject.view.past
    trend = None if recent is None else recent.trends.get("kv_used_ratio")
    if recent is None or trend is None or trend.num < 12 or recent.seconds < TREND_S:
        return None, ()
    source = f"{source_of(now, 'kv_used_ratio')}, least squares of {trend.num} scrapes"
    facts = (Evidence("kv_used_ratio slope", tidy(trend.slope_per_s), "ratio/s", source),)
    grown = trend.slope_per_s * recent.seconds
    straight = (
        abs(trend.mean - (trend.first + trend.last) / 2) <= EVEN * grown
        and trend.last >= trend.most - EVEN * grown
        and trend.first <= trend.least + EVEN * grown
    )
    before = past.trends.get("kv_used_ratio") if past is not None else None
    known = before is not None and trend.last < before.most + GROWN / 4
    lives = recent.histograms.get("e2e_s")
    life = lives.quantile(0.9) if lives is not None else None
    short = life is not None and recent.seconds < LIFETIMES * life.estimate
    if trend.last < RISING_FROM or grown < GROWN or not straight or known or short:
        return None, facts
    return max(0.0, 1.0 - trend.last) / trend.slope_per_s, facts


def _free(now: Snapshot) -> tuple[Evidence, ...]:
    used, total = now.gauges.get("kv_used_tokens"), now.gauges.get("kv_total_tokens")
    if used is None or total is None:
        return ()
    about = "about, " if "kv_used_tokens" in now.approximate else ""
    source = f"{about}{source_of(now, 'kv_total_tokens')} − {source_of(now, 'kv_used_tokens')}"
    return (Evidence("kv free", tidy(round(max(0.0, total - used))), "tokens", source),)


@answering
def _storm(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "preemptions")
    span = recent_of(subject)
    num = rise_of(now, span, "preemptions")
    facts: tuple[Evidence, ...] = (rise_fact(now, span, "preemptions"), span_fact(span))
    if num < STORM_NUM:
        return Clear(facts)
    through, source = requests_in(now, span)
    running, share = _running(span), _preempted_share(span, through)
    facts = (
        *facts,
        Evidence("requests that ended", tidy(through), "requests", source),
        Evidence("preemptions per request", tidy(share), "ratio", "of those ended or running"),
        *_storm_facts(now, span),
    )
    if share < STORM_SHARE:
        return Clear(facts)
    engine = now.identity.engine
    fits, told = _fits(now, span)
    return Fired(
        f"Running requests lost their KV blocks {num:,.0f} times in {seconds(span.seconds)}, "
        f"{share:.2g} times per request: their prompts and answers so far are computed again, and "
        f"everyone's tokens come late meanwhile.{_crowd(running, fits)}",
        f"Admit fewer requests at once ({setting(engine, 'max_requests')}"
        + (f"; the pool holds about {max(1, int(fits)):,} of the mean length seen" if fits else "")
        + f"), keep a reserve at admission ({setting(engine, 'reserve')}), or give the cache more "
        f"room ({setting(engine, 'kv_memory')}, {setting(engine, 'kv_dtype')}).",
        (*facts, *told),
        severity=Severity.error if share >= 1 else None,
    )


def storms(now: Snapshot, span: Span) -> bool:
    """Whether W003 fires on the span. Raises Lacking where requests are not counted."""
    if span.rises.get("preemptions", 0.0) < STORM_NUM:
        return False
    return _preempted_share(span, requests_in(now, span)[0]) >= STORM_SHARE


def _running(span: Span) -> float:
    return span.trends["running"].mean if "running" in span.trends else 0.0


def _preempted_share(span: Span, through: float) -> float:
    """Preemptions per request that ended or runs."""
    return span.rises["preemptions"] / max(1.0, through + _running(span))


def _storm_facts(now: Snapshot, span: Span) -> tuple[Evidence, ...]:
    facts: list[Evidence] = []
    if "recomputed_tokens" in span.rises:
        facts.append(rise_fact(now, span, "recomputed_tokens"))
    if "kv_used_ratio" in span.trends:
        facts.append(trend_fact(now, span, "kv_used_ratio"))
    itl = span.histograms.get("itl_s")
    tail = itl.quantile(0.99) if itl is not None else None
    if tail is not None:
        source = f"{source_of(now, 'itl_s')}, over {span.seconds:.0f} s"
        facts.append(Evidence("itl_s p99 above", tidy(tail.low), "s", source))
    return tuple(facts)


def _fits(now: Snapshot, span: Span) -> tuple[float | None, tuple[Evidence, ...]]:
    """(how many requests of the mean length the pool holds, None where that cannot be known; the
    evidence, with how many run)."""
    total = now.gauges.get("kv_total_tokens")
    prompt = span.histograms.get("request_prompt_tokens")
    answer = span.histograms.get("request_generation_tokens")
    if total is None or prompt is None or answer is None:
        return None, ()
    if prompt.mean is None or answer.mean is None or prompt.mean + answer.mean <= 0:
        return None, ()
    length = prompt.mean + answer.mean
    source = (
        f"{source_of(now, 'request_prompt_tokens')}, {source_of(now, 'request_generation_tokens')}"
    )
    facts: tuple[Evidence, ...] = (
        Evidence("mean length", round(length), "tokens", source),
        Evidence("requests that fit", tidy(round(total / length, 1)), "requests",
                 f"modelled: {source_of(now, 'kv_total_tokens')} / mean length"),
    )  # fmt: skip
    if "running" in span.trends:
        facts = (*facts, trend_fact(now, span, "running"))
    return total / length, facts


def _crowd(running: float, fits: float | None) -> str:
    """Why there is a storm, where the means explain it."""
    if fits is None or running <= fits:
        return ""
    return (
        f" On average {running:.3g} run at once and the pool has room for {fits:.2g} of the mean "
        "length seen: more are admitted than can grow to their ends."
    )


@answering
def _smaller_than_a_request(subject: Subject) -> Answer:
    now = answer_of(subject)
    longest = now.identity.max_model_len
    if "kv_total_tokens" not in now.gauges or longest is None:
        missing = [] if longest is not None else [f"max_model_len ({now.identity.why_unsaid})"]
        if "kv_total_tokens" not in now.gauges:
            missing.insert(0, f"kv_total_tokens ({now.why_absent('kv_total_tokens')})")
        raise Lacking(*missing)
    engines = max(1, now.identity.num_engines)
    pool = now.gauges["kv_total_tokens"] / engines
    about = "about, " if "kv_total_tokens" in now.approximate else ""
    source = f"{about}{source_of(now, 'kv_total_tokens')}" + (
        f" / {engines}" if engines > 1 else ""
    )
    facts: tuple[Evidence, ...] = (
        Evidence("kv of one engine", tidy(round(pool)), "tokens", source),
        Evidence("max_model_len", longest, "tokens", "engine"),
    )
    if pool >= longest:
        return Clear(facts)
    if "kv_total_tokens" in now.approximate and pool >= longest / 2:
        raise Lacking("kv_total_tokens exactly (blocks × block size is not, with mixed layers)")
    engine = now.identity.engine
    return Fired(
        f"A request may be {longest:,} tokens long and an engine's KV cache holds {pool:,.0f}: one "
        "that grows beyond that can never be served; it waits for ever, and what is behind it "
        "waits too, or it is cut off.",
        f"Lower {setting(engine, 'max_length')} to {int(pool)}, or give the cache more room "
        f"({setting(engine, 'kv_memory')}, {setting(engine, 'kv_dtype')}).",
        facts,
    )


HELD_S = 120.0
"""vLLM's prefill side lets go of blocks that no decode side fetched after 480 s
(VLLM_NIXL_ABORT_REQUEST_TIMEOUT); without a transfer nothing is held at all."""
HELD_RATIO = 0.05


@answering
def _held(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "kv_used_ratio", "running", "waiting")
    span = recent_of(subject, HELD_S)
    held = trend_of(now, span, "kv_used_ratio")
    running, waiting = trend_of(now, span, "running"), trend_of(now, span, "waiting")
    facts = (
        trend_fact(now, span, "kv_used_ratio", "least"),
        trend_fact(now, span, "running", "most"),
        trend_fact(now, span, "waiting", "most"),
    )
    moved = finished_in(span) or span.rises.get("generation_tokens", 0.0)
    if held.least < HELD_RATIO or running.most > 0 or waiting.most > 0 or moved:
        return Clear(facts)
    return Fired(
        f"{percent(held.least)} of the KV cache has been held for {seconds(span.seconds)} with no "
        "request running or waiting: blocks of requests that are gone, for example prompts whose "
        "client left before a decode server fetched them.",
        "Look for aborted transfers in the log and compare the connector's timeouts on both sides; "
        "a restart frees the blocks.",
        facts,
    )


RULES = (
    Rule(
        id="W001",
        title="KV cache held by requests",
        severity=Severity.warning,
        category="memory",
        why="When the cache is full, a request that grows takes blocks from another, which is then "
        "computed again. It shows first as late tokens, then as a queue.",
        fix="More KV memory, a narrower KV dtype, fewer requests at once or another replica, while "
        "there is time.",
        source="vllm#44594; vllm 0.32: v1/core/sched/scheduler.py (preemption), "
        "config/scheduler.py (watermark)",
        example="kv_used_ratio 0.97 in two scrapes, or 0.7 and rising 0.1 a minute",
        check=_nearly_full,
    ),
    Rule(
        id="W003",
        title="Preemptions per request",
        severity=Severity.warning,
        category="memory",
        why="A preempted request loses its KV and is prefilled again from its prompt and all that "
        "it had answered. Above one in ten requests the engine works for nothing and feeds its own "
        "queue.",
        fix="Fewer requests at once or a reserve at admission; then more KV memory.",
        source="vllm#44594: a reserve of 5% cut preemptions from 1,065 to 187 and ITL p99 from "
        "40.6 to 17.7 ms",
        example="60 preemptions while 100 requests end",
        check=_storm,
    ),
    Rule(
        id="W008",
        title="KV cache against the longest request",
        severity=Severity.error,
        category="memory",
        why="A request that does not fit the whole pool can never be scheduled. Some engines admit "
        "it and stand still, others cut it off.",
        fix="A length limit that the pool can hold, or a larger pool.",
        source="vllm#39734: a prompt above the pool but within max-model-len blocks the queue",
        example="kv_total_tokens 20,000 with max_model_len 32,768",
        check=_smaller_than_a_request,
    ),
    Rule(
        id="W020",
        title="KV cache held while nothing runs",
        severity=Severity.warning,
        category="memory",
        why="Blocks that belong to no request are lost to all others until a restart.",
        fix="Find who holds them: aborted KV transfers first.",
        source="vllm#50425: clients that leave pin the KV of their prefill",
        example="kv_used_ratio 0.3 for two minutes with running 0 and waiting 0",
        check=_held,
    ),
)
