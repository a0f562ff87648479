"""Rules about whether a replica that answers works: W009 stuck, W011 inert, W012 restarts, W021
asleep.

Holds no thresholds on load (`memory.py`, `queues.py`); who does not answer is `silence.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.snapshot import Gauge, Snapshot
from ullage.watch.peers import finished_in
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    TOKENS,
    Lacking,
    answer_of,
    answering,
    gauge_fact,
    recent_of,
    require,
    seconds,
    source_of,
    span_fact,
    tidy,
    tokenless_s_of,
    trend_fact,
)
from ullage.watch.view import RECENT_S, Span

STUCK_S = 60.0
"""A prompt chunk of 8,192 tokens took 3.5 s on the slowest report of a GPU (a DGX recipe's issue
9), and a compile while serving up to half a minute; a minute without any token is neither."""
FROZEN_S = 60.0
SLOW_PREFILLS = 3.0
STUCK_AT_MOST_S = 600.0
FIRST_PROMPT_S = 300.0
"""CPUs prefill long prompts for minutes, and a prompt counts when it is done: there the slowest
prefill that the engine has told, so many times, is waited for, up to ten minutes; and five minutes
for the first of all, which may compile as well."""


@answering
def _stuck(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "running")
    if _sleeps(now):
        raise Lacking("an engine that is awake (see W021)")
    still_s, facts = _tokenless(subject, now)
    running, waiting = now.gauges["running"], now.gauges.get("waiting", 0.0)
    facts = (gauge_fact(now, "running"), *facts)
    if "waiting" in now.gauges:
        facts = (gauge_fact(now, "waiting"), *facts)
    patience_s, slowest = _patience(now)
    facts = (*facts, *slowest)
    if running + waiting < 1 or still_s < patience_s:
        return Clear(facts)
    if _process_stood(subject) is True:
        raise Lacking("numbers that move (the page is a copy: see W011)")
    copied = "" if _process_stood(subject) is False else " (or the page is an old copy)"
    return Fired(
        f"{running:,.0f} requests run, {waiting:,.0f} wait and no token was counted for "
        f"{seconds(still_s)}, while the process answers: the engine stands still{copied}.",
        "Take it out of the router and restart it; before that keep its log and a stack dump "
        "(py-spy dump --pid of the engine core). With several devices suspect a hanging "
        "collective first; where requests only wait, one that is larger than the pool (W008).",
        facts,
    )


def _tokenless(subject: Subject, now: Snapshot) -> tuple[float, tuple[Evidence, ...]]:
    """(seconds without a token, the evidence). Raises Lacking where neither counter is known."""
    known = [name for name in TOKENS if name in now.counters]
    if not known:
        require(now, "generation_tokens", "prompt_tokens")
    source = ", ".join(source_of(now, name) for name in known)
    still_s, recent = tokenless_s_of(subject), subject.view.recent
    if recent is not None and not any(recent.rises.get(name) for name in known):
        ended = finished_in(recent)
        if ended:  # requests end, so it works: an engine for embeddings may count no tokens
            raise Lacking(f"tokens that are counted ({ended:,.0f} requests ended without any)")
    if still_s is None:
        raise Lacking("two scrapes that answered")
    return still_s, (Evidence("without a token", tidy(round(still_s, 1)), "s", source),)


def _patience(now: Snapshot) -> tuple[float, tuple[Evidence, ...]]:
    """(how long this engine may be without a token, the evidence where that is not STUCK_S)."""
    prefills = now.histograms.get("prefill_s")
    if prefills is None:
        return STUCK_S, ()
    slowest = prefills.quantile(1.0)
    if slowest is None:
        return FIRST_PROMPT_S, (Evidence("prefills", 0, "", source_of(now, "prefill_s")),)
    slow_s = slowest.high if math.isfinite(slowest.high) else STUCK_AT_MOST_S
    patience_s = min(STUCK_AT_MOST_S, SLOW_PREFILLS * slow_s)
    if patience_s <= STUCK_S:
        return STUCK_S, ()
    fact = Evidence("slowest prefill below", tidy(slow_s), "s", source_of(now, "prefill_s"))
    return patience_s, (fact,)


def _process_stood(subject: Subject) -> bool | None:
    """Whether the process used no CPU for FROZEN_S or more, which none that answers can.

    None where it does not tell.
    """
    still_s = subject.view.still_s.get("process_cpu_s")
    return None if still_s is None else still_s >= FROZEN_S


NOTICED = 1_000.0
"""So many tokens cannot be made without KV that a gauge of any precision shows."""
CORE: tuple[Gauge, ...] = ("running", "waiting")
WITHOUT_KV = frozenset({"llamacpp", "tgi", ""})
"""Engines that export no KV use: llama.cpp since #13660; TGI gives a proxy at best."""


@answering
def _inert(subject: Subject) -> Answer:
    now = answer_of(subject)
    troubles = (*_many_in_turn(subject), *_dead_numbers(now))
    if not troubles and (span := subject.view.recent) is not None:
        troubles = tuple(_dead_over_time(subject, now, span))
    if troubles:
        whats = "; ".join(what for what, _, _ in troubles)
        return Fired(
            f"It answers, but its numbers can move no decision: {whats}.",
            "Do not scale or alert on it as it is. "
            + " ".join(dict.fromkeys(remedy for _, remedy, _ in troubles)),
            tuple(fact for _, _, fact in troubles),
        )
    frozen = subject.view.unchanged_s >= FROZEN_S and now.gauges.get("running", 0.0) > 0
    if frozen and _process_stood(subject) is None:
        require(now, "process_cpu_s")
    facts = [gauge_fact(now, name) for name in (*CORE, "kv_used_ratio") if name in now.gauges]
    return Clear(tuple(facts))


Trouble = tuple[str, str, Evidence]
"""What is wrong, what to do, the evidence."""


BALANCED = 2
"""Another may take an address over once (blue, green); where it swaps again a balancer is."""


def _many_in_turn(subject: Subject) -> Iterator[Trouble]:
    """Several replicas behind one address: each scrape is of another."""
    swaps = subject.view.num_swaps
    if swaps >= BALANCED:
        yield (
            "several processes answer at this address in turn, so that nothing can be told over "
            "time",
            "Name each replica by its own address (pods, not their service): a balancer gives one "
            "or another.",
            Evidence("swaps", swaps, "", f"start times told in {RECENT_S:.0f} s"),
        )


def _dead_numbers(now: Snapshot) -> Iterator[Trouble]:
    """What is wrong with one page by itself."""
    if not now.identity.engine:
        yield (
            "no engine's metrics are on the page",
            "Check the address and the path (vLLM: /metrics unless --disable-log-stats; SGLang: "
            "--enable-metrics; llama.cpp: --metrics).",
            Evidence("engine", "unknown", "", "the metric names on the page"),
        )
        return
    wanted = CORE if now.identity.engine in WITHOUT_KV else (*CORE, "kv_used_ratio")
    for name in wanted:
        value = now.gauges.get(name)
        if value is None:
            reason = now.why_absent(name)
            yield (
                f"{name} cannot be read ({reason})",
                "Compare the page with the engine's version: a renamed metric, another label or a "
                "proxy that drops it.",
                Evidence(name, "absent", "", reason),
            )
        elif not math.isfinite(value) or value < 0 or (name == "kv_used_ratio" and value > 1.001):
            yield (
                f"{name} is {value:g}, which it cannot be",
                "Look at what exports it: an aggregation, a unit or a relabelling is wrong.",
                Evidence(name, f"{value:g}", "", source_of(now, name)),
            )


def _dead_over_time(subject: Subject, now: Snapshot, span: Span) -> Iterator[Trouble]:
    """What is wrong with pages that look well one by one."""
    if span.seconds < FROZEN_S or span.num_scrapes < 3:
        return
    if subject.view.unchanged_s >= FROZEN_S and _process_stood(subject) is True:
        still = tidy(round(subject.view.unchanged_s, 1))
        yield (
            f"every number has stood still for {seconds(subject.view.unchanged_s)}, the process's "
            "own CPU time too, which answering alone would move",
            "What answers is a copy (a proxy's cache, an exporter that died behind its page): "
            "scrape the engine itself.",
            Evidence("page unchanged", still, "s", "all of its numbers"),
        )
    running, held = span.trends.get("running"), span.trends.get("kv_used_ratio")
    made = span.rises.get("generation_tokens", 0.0)
    if running is None or held is None or made <= 0:
        return
    if running.mean >= 0.5 and held.most <= 0 and made >= NOTICED:
        yield (
            f"kv_used_ratio stays 0 while requests run and {made:,.0f} tokens were generated",
            "Take KV use from another metric: this one is never set.",
            trend_fact(now, span, "kv_used_ratio", "most"),
        )


CRASHING = 3


@answering
def _restarted(subject: Subject) -> Answer:
    now = answer_of(subject)
    span = recent_of(subject)
    facts: list[Evidence] = [
        Evidence("restarts", span.resets, "", "counters that went back, or a later start"),
        span_fact(span),
    ]
    if now.identity.started_s is not None:
        up_s = max(0.0, now.time_s - now.identity.started_s)
        facts.append(Evidence("up for", tidy(round(up_s, 1)), "s", "engine"))
    for key, value in sorted((subject.view.pod or {}).items()):
        if "restart" in key or "terminat" in key or "reason" in key:
            facts.append(Evidence(f"pod {key}", value, "", "Kubernetes"))
    if not span.resets:
        return Clear(tuple(facts))
    often = span.resets >= CRASHING
    times = "once" if span.resets == 1 else f"{span.resets} times"
    return Fired(
        f"It started anew {times} within {seconds(span.seconds)}: requests in flight were lost, "
        "its prefix cache is empty and its first requests pay for warm-up.",
        "Look for the reason in the log of the run before (kubectl logs --previous) and in the "
        "pod's last state (OOMKilled, a failing liveness probe)."
        + (" It is crashing in a loop: take it out of service." if often else ""),
        tuple(facts),
        severity=Severity.error if often else None,
    )


def _sleeps(now: Snapshot) -> tuple[str, ...]:
    """How it sleeps; empty where it is awake, or one of its engines is, or it does not tell."""
    states = now.labelled.get("sleep_state", {})
    if states.get("awake", 0.0) > 0:
        return ()
    return tuple(sorted(name for name, value in states.items() if value > 0))


@answering
def _asleep(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "sleep_state", "running", "waiting")
    asleep = _sleeps(now)
    source = source_of(now, "sleep_state")
    facts = (
        Evidence("sleep_state", ", ".join(asleep) or "awake", "", source),
        gauge_fact(now, "running"),
        gauge_fact(now, "waiting"),
    )
    asked = now.gauges["running"] + now.gauges["waiting"]
    if not asleep or asked < 1:
        return Clear(facts)
    return Fired(
        f"The engine sleeps ({', '.join(asleep)}) and {asked:,.0f} requests are with it: none will "
        "be answered before it is woken.",
        "Wake it (POST /wake_up), or take it out of the router while it sleeps.",
        facts,
    )


RULES = (
    Rule(
        id="W009",
        title="Tokens while requests run",
        severity=Severity.error,
        category="liveness",
        why="An engine that hangs (a collective, a dead worker, a lock) still answers /health and "
        "/metrics; routers go on sending to it.",
        fix="Take it out, keep the evidence, restart it.",
        source="vllm#51513: a collective hangs, no progress; vllm#39734: the queue blocks",
        example="running 12 and no token counted for a minute",
        check=_stuck,
    ),
    Rule(
        id="W011",
        title="Numbers that can move a decision",
        severity=Severity.error,
        category="liveness",
        why="A metric that is absent, not a number, frozen or always 0 never trips a threshold: "
        "autoscalers and alerts look healthy and do nothing.",
        fix="Name a metric that the engine does export, with its labels; scrape the engine itself.",
        source="llm-d workload-variant-autoscaler: a label mismatch leaves it inert; "
        "production-stack: scales on a metric that is no more",
        example="a page without vllm:num_requests_waiting, or one whose every number stands still",
        check=_inert,
    ),
    Rule(
        id="W012",
        title="Restarts",
        severity=Severity.warning,
        category="liveness",
        why="A restart loses requests in flight and the prefix cache, and is easily read as a fall "
        "in load because counters begin at 0 again.",
        fix="Find out why the run before ended.",
        source="Prometheus: counters are reset by restarts; vllm 0.32 aborts requests on SIGTERM",
        example="process_start_time_seconds later than in the scrape before",
        check=_restarted,
    ),
    Rule(
        id="W021",
        title="Sleeping engine",
        severity=Severity.error,
        category="liveness",
        why="A sleeping engine has given up its weights or its KV; requests that reach it wait.",
        fix="Wake it, or keep requests away from it.",
        source="vllm 0.32: v1/metrics/loggers.py (engine_sleep_state)",
        example='sleep_state{sleep_state="weights_offloaded"} 1 with waiting 3',
        check=_asleep,
    ),
)
