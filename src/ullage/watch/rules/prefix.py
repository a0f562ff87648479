"""Rules about the prefix cache: W004 thrash against its own past, W022 far below its peers.

Holds when a hit rate says something. How requests are spread is `balance.py`'s.
"""

from __future__ import annotations

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.snapshot import Snapshot
from ullage.watch.peers import HITS, Group, hit_ratio_in, key_of
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import (
    Lacking,
    answer_of,
    answering,
    past_of,
    percent,
    recent_of,
    requests_in,
    require,
    rise_of,
    seconds,
    source_of,
    tidy,
    trend_fact,
    trend_of,
)
from ullage.watch.rules.settings import setting
from ullage.watch.view import Span

LEAST_REQUESTS = 50
WORTH = 0.1
HALVED = 0.5
"""In Mooncake's hour of conversations, with caches of three sizes, no five minutes had less than
0.88 of the hit rate of the time before."""
TIGHT = 0.7
"""Of KV held by requests: the rest is all that prefixes can be kept in."""
PAST_NEEDED_S = 600.0
COLD_S = 600.0


def _hits(now: Snapshot, span: Span, of_what: str) -> float:
    """The share of prompt tokens found. Raises Lacking where too little was looked up."""
    require(now, "prefix_queries_tokens", "prefix_hits_tokens")
    rise_of(now, span, "prefix_queries_tokens")
    rise_of(now, span, "prefix_hits_tokens")
    num, _ = requests_in(now, span)
    ratio = hit_ratio_in(span)
    if ratio is None or num < LEAST_REQUESTS:
        raise Lacking(f"enough requests to tell ({num:,.0f} of {LEAST_REQUESTS} {of_what})")
    return ratio


def _source(now: Snapshot) -> str:
    return f"{source_of(now, 'prefix_hits_tokens')} / {source_of(now, 'prefix_queries_tokens')}"


@answering
def _thrash(subject: Subject) -> Answer:
    now = answer_of(subject)
    require(now, "kv_used_ratio", "prefix_queries_tokens", "prefix_hits_tokens")
    recent, past = recent_of(subject), past_of(subject, PAST_NEEDED_S)
    is_now, was = _hits(now, recent, "recently"), _hits(now, past, "in its past")
    held = trend_of(now, recent, "kv_used_ratio")
    preempted = recent.rises.get("preemptions", 0.0)
    facts: tuple[Evidence, ...] = (
        Evidence("prefix hits, past", tidy(was), "ratio", _source(now)),
        Evidence("prefix hits, recent", tidy(is_now), "ratio", _source(now)),
        trend_fact(now, recent, "kv_used_ratio"),
    )
    if was < WORTH or is_now > HALVED * was or held.mean < TIGHT:
        return Clear(facts)
    engine = now.identity.engine
    also = (
        f" {preempted:,.0f} preempted requests looked up their own blocks again meanwhile, which "
        "some versions count as hits."
        if preempted
        else ""
    )
    return Fired(
        f"Prefix hits fell from {percent(was)} to {percent(is_now)} while requests hold "
        f"{percent(held.mean)} of the KV cache: prefixes are thrown out before they are asked for "
        f"again.{also}",
        f"Give the cache more room ({setting(engine, 'kv_memory')}, {setting(engine, 'kv_dtype')}),"
        f" admit fewer requests at once ({setting(engine, 'max_requests')}), send requests of one "
        "session or system prompt to the same replica, or keep prefixes in host memory "
        "(vLLM: --kv-offloading-size; SGLang: --enable-hierarchical-cache).",
        facts,
    )


@answering
def _below_peers(subject: Subject) -> Answer:
    now = answer_of(subject)
    recent = recent_of(subject, COLD_S / 5)
    own = _hits(now, recent, "recently")
    group: Group | None = subject.peers.get(key_of(now.identity))
    others = group.median_of_others(HITS, own) if group else None
    if group is None or others is None or group.num(HITS) < 3:
        raise Lacking("two other replicas of the same model with a prefix cache")
    facts: tuple[Evidence, ...] = (
        Evidence("prefix hits", tidy(own), "ratio", _source(now)),
        Evidence("prefix hits of its peers, median", tidy(others), "ratio", _source(now)),
        Evidence("replicas compared", group.num(HITS), "", "measured"),
    )
    up_s = now.time_s - now.identity.started_s if now.identity.started_s is not None else None
    if up_s is not None:
        facts = (*facts, Evidence("up for", tidy(round(up_s, 1)), "s", "engine"))
    cold = recent.resets > 0 or (up_s is not None and up_s < COLD_S)
    if others < 2 * WORTH or own > HALVED * others or cold:
        return Clear(facts)
    return Fired(
        f"Its prefix cache finds {percent(own)} of prompt tokens and its peers' find "
        f"{percent(others)} over the same {seconds(recent.seconds)}: it computes again what they "
        "only look up.",
        "See whether the router sends it other traffic (sessions not kept together) and whether "
        "its flags are the peers' (--enable-prefix-caching, the hash algorithm, the block size).",
        facts,
    )


RULES = (
    Rule(
        id="W004",
        title="Prefix hits against the past",
        severity=Severity.warning,
        category="prefix cache",
        why="When requests hold nearly all blocks, prefixes are thrown out before they are used "
        "again, every prompt is computed in full, and that makes the pool fuller still.",
        fix="Room, fewer requests at once, sessions kept on one replica, or a second tier.",
        source="vllm#25787: preempted requests read their own blocks, 0.2% shown as 30%; the drift "
        "of healthy traffic: Mooncake's trace",
        example="hits 50% for an hour, then 8% with kv_used_ratio 0.9",
        check=_thrash,
    ),
    Rule(
        id="W022",
        title="Prefix hits against its peers",
        severity=Severity.warning,
        category="prefix cache",
        why="A replica whose cache finds little does more work for the same requests and is the "
        "first to queue.",
        fix="The same traffic and the same flags as its peers.",
        source="vllm 0.32: v1/core/kv_cache_manager.py (hits are counted in tokens)",
        example="hits 5% where two peers have 60%",
        check=_below_peers,
    ),
)
