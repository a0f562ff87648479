"""The alerts of engines: which rule of `watch` each stands for, when it fires, what it says.

Data only, on the names of `records`: `$key` is a recorded series of one engine; `$short`, `$recent`
and `$past` are spans, the past ended `$settled` ago; `$recent_s` and `$scrape_s` are seconds;
`$replica` are the labels that tell replicas apart, `$peers` those that replicas of one model share.
Causes, remedies, severities and thresholds are the rules' own.
"""

from __future__ import annotations

from ullage.findings.finding import Severity
from ullage.watch.code.alert import NUMBER, PERCENT, PLACE, SECONDS, WHO, Alert
from ullage.watch.rules import (
    balance,
    fragmentation,
    liveness,
    memory,
    outcomes,
    prefix,
    queues,
    sampling,
    shifts,
)

WAITS = (
    f"$waiting >= {queues.LEAST_WAITING:g} and min_over_time($waiting[$short]) >= 1"
    f" and $waiting > {queues.LONG_WAIT_S:g} * $through_rate"
)
"""A queue that is never empty and whose last waits long (Little's law)."""
STORM = (
    f"($preemptions_rate >= {memory.STORM_SHARE:g} * ($through_rate + $running / $recent_s))"
    f" and $preemptions_rate * $recent_s >= {memory.STORM_NUM:g}"
)
"""Each preemption frees much at once, and is no sign of room: then a queue waits for memory."""
BALANCED = "resets($started[$recent]) > 0"
"""No process starts before the one that it follows: there are several, and they answer in turn."""
MOST_REPLICAS = 1000
"""Of the fleets whose rate of false alarms is bounded: more replicas have proportionally more."""
NOISE = 100 * sampling.noise(10_000, MOST_REPLICAS)
"""What chance explains of a share of n requests is this over √n."""
LEAST_SHIFT = sampling.least_sample(sampling.DRIFT, MOST_REPLICAS)
LEAST_CUT = sampling.least_sample(shifts.MORE_CUT, MOST_REPLICAS)
PAST_HITS = (
    "(avg_over_time($prefix_hits_tokens_rate[$past] offset $settled)"
    " / avg_over_time($prefix_queries_tokens_rate[$past] offset $settled))"
)
PEER_HITS = "($peer_prefix_hits_tokens_rate / ($peer_prefix_queries_tokens_rate > 0))"
MORE_GENERATED, MORE_PROMPTS = (
    f"unless ${counter}_rate > 1.2 * max_over_time(${counter}_rate[$past] offset $settled)"
    for counter in ("generation_tokens", "prompt_tokens")
)
"""More is asked of it than at any time of the past: then load explains that it is slower."""


CUT_BEFORE = (
    "avg_over_time($finished_length_rate[$past] offset $settled)"
    " / (avg_over_time($finished_rate[$past] offset $settled) > 0)"
)


def _share_rose(part: str, of: str, was: str) -> str:
    """More of them ended in this way than before, beyond what chance explains."""
    return (
        f"${part}_rate / (${of}_rate > 0) - {was}"
        f" >= {shifts.MORE_CUT:g} + {NOISE:.4g} / sqrt(${of}_rate * $recent_s)"
        f" and ${of}_rate * $recent_s >= {LEAST_CUT}"
        f" and {_past_count('$finished_rate')} >= {shifts.PAST_REQUESTS}"
    )


def _slower(latency: str, requests: str) -> str:
    """The median is above what nine in ten stayed below at any time of the past."""
    return (
        f"${latency}_p50 > max_over_time(${latency}_p90[$past] offset $settled)"
        f" and ${latency}_p50 > {shifts.SLOWER:g}"
        f" * max_over_time(${latency}_p50[$past] offset $settled)"
        f" and {requests} * $recent_s >= {LEAST_SHIFT}"
        f" and {_past_count(requests)} >= {shifts.PAST_REQUESTS}"
    )


def _other_lengths(lengths: str) -> str:
    """The median is above nine in ten of the past's, or nine in ten are below its median."""
    few = f"${lengths}_count_rate * $recent_s >= {LEAST_SHIFT}"
    return (
        f"(${lengths}_p50 > max_over_time(${lengths}_p90[$past] offset $settled)"
        f" or ${lengths}_p90 < min_over_time(${lengths}_p50[$past] offset $settled))"
        f" and {few} and {_past_count(f'${lengths}_count_rate')} >= {shifts.PAST_REQUESTS}"
    )


def _past_count(rate: str) -> str:
    """How many were counted in the past, each scrape's mean times how long it was seen."""
    return f"sum_over_time({rate}[$past] offset $settled) * $scrape_s"


FOR_ELSE = "unless $waiting_deferred >= 0.5 * $waiting"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "UllageKVCacheNearFull",
        "W001",
        # The mean: a preemption leaves room for the length of a scrape.
        f"avg_over_time($kv_used_ratio[$short]) >= {memory.NEARLY_FULL:g}",
        "short",
        f"{WHO}: {PERCENT} of the KV cache is held",
    ),
    Alert(
        "UllageKVCacheFilling",
        "W001",
        f"$kv_used_ratio >= {memory.RISING_FROM:g}"
        f" and (1 - $kv_used_ratio) < {memory.SOON_S:g} * deriv($kv_used_ratio[$recent])"
        " and $kv_used_ratio - $kv_used_ratio offset $recent >= 0.1"
        " and $kv_used_ratio >= 0.99 * max_over_time($kv_used_ratio[$recent])",
        "short",
        f"{WHO}: {PERCENT} of the KV cache is held, and at this rate it is full in ten minutes",
    ),
    Alert(
        "UllageKVPagesHalfEmpty",
        "W002",
        f"avg_over_time($page_utilization_ratio[$recent]) < {fragmentation.POOR:g}"
        f" and max_over_time($kv_used_ratio[$recent]) >= {fragmentation.HELD:g}"
        " and avg_over_time($running[$recent]) >= 1",
        "short",
        f"{WHO}: held KV pages are filled to {PERCENT}",
    ),
    Alert(
        "UllagePreemptionStorm",
        "W003",
        STORM,
        "none",
        f"{WHO}: {NUMBER} preemptions a second",
    ),
    Alert(
        "UllagePrefixCacheThrash",
        "W004",
        f"$prefix_hits_tokens_rate / $prefix_queries_tokens_rate"
        f" <= {prefix.HALVED:g} * {PAST_HITS} and {PAST_HITS} >= {prefix.WORTH:g}"
        f" and avg_over_time($kv_used_ratio[$recent]) >= {prefix.TIGHT:g}"
        f" and $through_rate * $recent_s >= {prefix.LEAST_REQUESTS}",
        "short",
        f"{WHO}: prefix hits fell to {PERCENT} while requests hold most of the KV cache",
    ),
    Alert(
        "UllageQueueWhileKVFree",
        "W005",
        f"{WAITS} and avg_over_time($kv_used_ratio[$short]) < {queues.FULL:g}",
        "short",
        f"{WHO}: {NUMBER} requests wait while KV is free",
        also=(FOR_ELSE, f"unless ({STORM})"),
    ),
    Alert(
        "UllageQueueWhileKVFull",
        "W006",
        f"{WAITS} and avg_over_time($kv_used_ratio[$short]) >= {queues.FULL:g}",
        "short",
        f"{WHO}: {NUMBER} requests wait for KV blocks",
        also=(FOR_ELSE, f"or {WAITS} and {STORM}", FOR_ELSE),
    ),
    Alert(
        "UllageDeferredWaits",
        "W007",
        "avg_over_time($waiting_deferred[$short]) >= 1"
        " and avg_over_time($waiting_deferred[$short]) >= 0.5 * avg_over_time($waiting[$short])"
        f" and avg_over_time($waiting_deferred[$short]) > {queues.LONG_DEFERRED_S:g}"
        " * $through_rate",
        "short",
        f"{WHO}: {NUMBER} requests are deferred",
    ),
    Alert(
        "UllagePoolSmallerThanARequest",
        "W008",
        "$pool_below_a_request > 0",
        "none",
        f"{WHO}: the KV pool holds less than one request of the greatest length",
    ),
    Alert(
        "UllageEngineStuck",
        "W009",
        "min_over_time($running[$short]) >= 1 and $generation_tokens_soon == 0",
        "short",
        f"{WHO}: requests run and no token comes",
        # A long prompt's chunks take blocks before its first token is counted.
        also=(
            "unless $prompt_tokens_soon > 0",
            "unless changes($kv_used_ratio[$short]) > 0",
        ),
    ),
    Alert(
        "UllageReplicaOverloaded",
        "W010",
        f"avg_over_time($peer_waiting[$recent]) >= {max(balance.QUEUE, 1.5 * balance.TIMES):g}"
        " and on ($peers) count by ($peers) (avg_over_time($peer_waiting[$recent]) < 1"
        f" and avg_over_time($peer_kv_used_ratio[$recent]) <= {balance.ROOM:g})"
        " >= 0.5 * (count by ($peers) ($peer_waiting) - 1)",
        "short",
        f"{WHO}: {NUMBER} requests wait here while its peers have room",
    ),
    Alert(
        "UllageReplicaStarved",
        "W010",
        "$peer_finished_rate == 0 and max_over_time($peer_running[$recent]) == 0"
        " and max_over_time($peer_waiting[$recent]) == 0"
        f" and on ($peers) count by ($peers) ($peer_finished_rate * $recent_s"
        f" >= {balance.FAIR_SHARE:g}) >= 0.5 * (count by ($peers) ($peer_finished_rate) - 1)"
        " and on ($replica) time() - $started >= $recent_s",
        "short",
        f"{WHO}: it gets no request while its peers work",
        also=("unless on ($replica) $asleep > 0",),
    ),
    Alert(
        "UllageNothingToWatch",
        "W011",
        "absent($spoken)",
        "recent",
        "no replica of {{ $labels.ullage_engine }} is scraped: the other alerts can see nothing",
    ),
    Alert(
        "UllageBehindABalancer",
        "W011",
        f"changes($started[$recent]) >= {liveness.BALANCED} and {BALANCED}",
        "none",
        f"{WHO}: several processes answer at this address in turn",
    ),
    Alert(
        "UllageKVUseNeverSet",
        "W011",
        "max_over_time($kv_used_ratio[$recent]) == 0 and min_over_time($running[$recent]) >= 1"
        " and $generation_tokens_rate > 0",
        "none",
        f"{WHO}: KV use stays 0 while requests run and tokens come",
    ),
    Alert(
        "UllageRestarted",
        "W012",
        f"changes($started[$recent]) > 0 unless {BALANCED}",
        "none",
        f"{WHO}: the engine started anew",
        also=(f"or $resets > 0 unless {BALANCED}",),
    ),
    Alert(
        "UllageCrashLoop",
        "W012",
        f"changes($started[$recent]) >= {liveness.CRASHING} unless {BALANCED}",
        "none",
        f"{WHO}: the engine started anew {NUMBER} times",
        severity=Severity.error,
    ),
    Alert(
        "UllageAnswersCutShort",
        "W013",
        _share_rose("finished_length", "finished", CUT_BEFORE),
        "short",
        f"{WHO}: {PERCENT} of answers more than before end at a length limit",
    ),
    Alert(
        "UllageFirstTokensLate",
        "W014",
        _slower("ttft_s", "$ttft_s_count_rate"),
        "short",
        f"{WHO}: half of the first tokens take longer than {SECONDS}",
        also=("unless avg_over_time($waiting[$recent]) >= 1", MORE_GENERATED, MORE_PROMPTS),
    ),
    Alert(
        "UllageTokensLate",
        "W014",
        _slower("itl_s", "$through_rate"),
        "short",
        f"{WHO}: half of the times between tokens are longer than {SECONDS}",
        also=(MORE_GENERATED, MORE_PROMPTS),
    ),
    Alert(
        "UllageOtherPromptLengths",
        "W015",
        _other_lengths("request_prompt_tokens"),
        "short",
        f"{WHO}: prompts have other lengths than in the hour before",
    ),
    Alert(
        "UllageOtherAnswerLengths",
        "W015",
        _other_lengths("request_generation_tokens"),
        "short",
        f"{WHO}: answers have other lengths than in the hour before",
    ),
    Alert(
        "UllageOtherModel",
        "W016",
        "$models_gone > 0",
        "none",
        f"{WHO}: it served another model just now",
    ),
    Alert(
        "UllageOtherFlags",
        "W016",
        "$settings_gone > 0",
        "none",
        f"{WHO}: it ran with other flags just now",
    ),
    Alert(
        "UllageReplicaDown",
        "W017",
        "$up == 0",
        "short",
        f"{WHO}: the engine does not answer scrapes",
    ),
    Alert(
        "UllageKVHeldWhileIdle",
        "W020",
        f"min_over_time($kv_used_ratio[$recent]) >= {memory.HELD_RATIO:g}"
        " and max_over_time($running[$recent]) == 0 and max_over_time($waiting[$recent]) == 0",
        "none",
        f"{WHO}: {PERCENT} of the KV cache is held while nothing runs",
        also=("unless $generation_tokens_rate > 0",),
    ),
    Alert(
        "UllageAsleep",
        "W021",
        "$asleep > 0 and $running + $waiting > 0",
        "none",
        f"{WHO}: the engine sleeps and requests are with it",
    ),
    Alert(
        "UllagePrefixHitsBelowPeers",
        "W022",
        f"{PEER_HITS} <= on ($peers) group_left () ({prefix.HALVED:g}"
        f" * quantile by ($peers) (0.5, {PEER_HITS}))"
        f" and on ($peers) quantile by ($peers) (0.5, {PEER_HITS}) >= {2 * prefix.WORTH:g}"
        f" and on ($peers) count by ($peers) ({PEER_HITS}) >= 3"
        f" and on ($replica) $through_rate * $recent_s >= {prefix.LEAST_REQUESTS}"
        f" unless on ($replica) time() - $started < {prefix.COLD_S:g}",
        "short",
        f"{WHO}: prefix hits of {PERCENT}, half or less of its peers'",
    ),
    Alert(
        "UllageRequestsFail",
        "W023",
        f"$finished_error_rate / ($finished_rate > 0) >= {outcomes.SHARE:g}"
        f" and $finished_error_rate * $recent_s >= {outcomes.LEAST}"
        f" and $finished_rate * $recent_s >= {outcomes.REQUESTS}",
        "none",
        f"{WHO}: {PERCENT} of requests end in an error",
    ),
    Alert(
        "UllageRequestsRejected",
        "W023",
        f"$rejected_requests_rate / ($through_rate + $rejected_requests_rate > 0)"
        f" >= {outcomes.SHARE:g} and $rejected_requests_rate * $recent_s >= {outcomes.LEAST}"
        f" and ($through_rate + $rejected_requests_rate) * $recent_s >= {outcomes.REQUESTS}",
        "none",
        f"{WHO}: {PERCENT} of requests are turned away",
    ),
    Alert(
        "UllageRequestsGivenUp",
        "W024",
        _share_rose("given_up", "parted", "$given_up_past_ratio"),
        "short",
        f"{WHO}: {PERCENT} of requests more than before are given up",
    ),
    Alert(
        "UllageModelNotItself",
        "W026",
        "$probe_errors == 1",
        "none",
        f"{WHO}: by its own probe the model is not itself: {PLACE}",
    ),
    Alert(
        "UllageActivationsUnusual",
        "W026",
        "$probe_warnings == 1",
        "none",
        f"{WHO}: by its own probe what the model computes is unusual: {PLACE}",
        severity=Severity.warning,
    ),
)

FIELD = "{{ $labels.field }}"
ABSENT = Alert(
    "UllageNumberAbsent",
    "W011",
    "$spoken unless $FIELD",
    "short",
    f"{WHO}: {FIELD} is not on the engine's page",
)
"""One clause per field of CORE that the engine is known to export."""
IMPOSSIBLE = Alert(
    "UllageNumberImpossible",
    "W011",
    "$FIELD != $FIELD or $FIELD < 0",
    "short",
    f"{WHO}: {FIELD} is {{{{ $value }}}}, which it cannot be",
)
"""As ABSENT. A number that is not itself is NaN."""
CORE = ("running", "waiting", "kv_used_ratio")
SHARES = frozenset({"kv_used_ratio"})
ABOVE_ONE = " or $FIELD > 1.001"
