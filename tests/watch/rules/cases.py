"""For every rule: what fires it, what it says, and what it cannot do without. Data, no tests.

A case changes a `World`, which is a healthy replica with everything known, and two peers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace

from tests.watch.rules.simulator import BOUNDS, START_S
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.pods import iso
from ullage.telemetry.snapshot import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    PROBED,
    Gpu,
    Identity,
    ProbeFinding,
    Snapshot,
)
from ullage.watch.peers import peers_of
from ullage.watch.rule import Subject
from ullage.watch.view import Change, Span, Trend, View

NOW_S = START_S + 10_000.0
URL = "http://replica-0:8000"
WHY = "it is not on the page"


def level(value: float, num: int = 60) -> Trend:
    return Trend(value, value, value, value, value, num, 0.0)


def ramp(first: float, last: float, seconds: float = 300.0, num: int = 60) -> Trend:
    low, high = sorted((first, last))
    return Trend(first, last, low, high, (first + last) / 2, num, (last - first) / seconds)


def seen_as(name: str, *observed: tuple[float, float]) -> Histogram:
    """A histogram of so many observations of each value, in vLLM's buckets."""
    bounds = (*BOUNDS[name], math.inf)
    counts = tuple(float(sum(n for v, n in observed if v <= bound)) for bound in bounds)
    return Histogram(bounds, counts, sum(v * n for v, n in observed))


def usual(requests: float) -> dict[str, Histogram]:
    """What healthy requests leave in the histograms."""
    return {
        "ttft_s": seen_as("ttft_s", (0.07, 0.6 * requests), (0.12, 0.4 * requests)),
        "itl_s": seen_as("itl_s", (0.02, 60 * requests), (0.04, 40 * requests)),
        "e2e_s": seen_as("e2e_s", (2.0, requests)),
        "queue_s": seen_as("queue_s", (0.1, requests)),
        "prefill_s": seen_as("prefill_s", (0.2, requests)),
        "request_prompt_tokens": seen_as(
            "request_prompt_tokens", (300, 0.5 * requests), (1500, 0.5 * requests)
        ),
        "request_generation_tokens": seen_as(
            "request_generation_tokens", (90, 0.5 * requests), (150, 0.5 * requests)
        ),
        "request_max_tokens": seen_as("request_max_tokens", (1024, requests)),
    }


@dataclass
class Past:
    """What a span holds, free to be changed."""

    seconds: float
    requests: float
    num_scrapes: int
    rises: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    trends: dict[str, Trend] = field(default_factory=dict)
    deferred: Trend | None = None
    resets: int = 0

    def __post_init__(self) -> None:
        n = self.requests
        self.rises = {
            "preemptions": 0.0,
            "recomputed_tokens": 0.0,
            "prompt_tokens": 900.0 * n,
            "generation_tokens": 120.0 * n,
            "prefix_queries_tokens": 900.0 * n,
            "prefix_hits_tokens": 400.0 * n,
            "rejected_requests": 0.0,
            "process_cpu_s": 0.3 * self.seconds,
        }
        self.ended = {"stop": 0.9 * n, "length": 0.08 * n, "abort": 0.02 * n, "error": 0.0}
        self.histograms = usual(n)
        self.trends = {
            "kv_used_ratio": level(0.6, self.num_scrapes),
            "running": level(6.0, self.num_scrapes),
            "waiting": level(0.0, self.num_scrapes),
            "page_utilization_ratio": level(0.95, self.num_scrapes),
        }
        self.deferred = level(0.0, self.num_scrapes)

    def end(self, **reasons: float) -> None:
        """So many ended, each of whom began in the same span."""
        self.ended = reasons
        self.histograms["ttft_s"] = usual(sum(reasons.values()))["ttft_s"]

    def span(self, without: frozenset[str]) -> Span:
        def kept(values: dict[str, object]) -> dict[str, object]:
            return {name: value for name, value in values.items() if name not in without}

        waits = {"capacity": level(0.0), "deferred": self.deferred}
        return Span(
            self.seconds,
            kept(self.rises),
            kept({"finished_by_reason": self.ended}),
            kept(self.histograms),
            kept(self.trends),
            {} if "waiting_by_reason" in without else waits,
            self.num_scrapes,
            0,
            self.resets,
        )


@dataclass
class World:
    """A healthy replica at NOW_S. `without` names what its page does not tell."""

    who: Identity = field(
        default_factory=lambda: Identity(
            "vllm", "0.32.0", ("acme/seven-b",), 32_768, 16, 25_000, started_s=START_S
        )
    )
    gauges: dict[str, float] = field(
        default_factory=lambda: {
            "kv_used_ratio": 0.6,
            "kv_used_tokens": 240_000.0,
            "kv_total_tokens": 400_000.0,
            "running": 6.0,
            "waiting": 0.0,
            "page_utilization_ratio": 0.95,
        }
    )
    sleep: dict[str, float] = field(
        default_factory=lambda: {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
    )
    gpus: tuple[Gpu, ...] = (
        Gpu("0", "H100", busy_ratio=0.9, sm_clock_hz=1.7e9, max_sm_clock_hz=1.98e9, xid_errors=0.0),
    )
    probed: tuple[ProbeFinding, ...] = (
        ProbeFinding("P001", "", "", "clear"),
        ProbeFinding("P006", "", "", "not_evaluable"),
    )
    last: Past | None = field(default_factory=lambda: Past(5.0, 5.0, 2))
    recent: Past | None = field(default_factory=lambda: Past(300.0, 300.0, 60))
    past: Past | None = field(default_factory=lambda: Past(3600.0, 3600.0, 720))
    changes: tuple[Change, ...] = ()
    error: str = ""
    pod: dict[str, str] | None = field(
        default_factory=lambda: {
            "name": "seven-b-0",
            "namespace": "llm",
            "uid": "1",
            "phase": "Running",
            "ready": "true",
            "restarts": "0",
            "created": iso(START_S),
        }
    )
    unchanged_s: float = 0.0
    still_s: dict[str, float] = field(
        default_factory=lambda: {
            "generation_tokens": 0.0,
            "prompt_tokens": 0.0,
            "process_cpu_s": 0.0,
        }
    )
    busy_s: float = 600.0
    num_swaps: int = 0
    without: frozenset[str] = frozenset()
    alone: bool = False
    peers: list[Past] = field(
        default_factory=lambda: [Past(300.0, 300.0, 60), Past(300.0, 300.0, 60)]
    )
    approximate: frozenset[str] = frozenset()

    def trend(self, name: str, trend: Trend) -> None:
        """How a gauge went: over the recent span, at both last scrapes, and now."""
        self.recent.trends[name] = trend
        self.last.trends[name] = level(trend.last, 2)
        self.gauges[name] = trend.last

    def snapshot(self) -> Snapshot:
        def kept(values: dict[str, object]) -> dict[str, object]:
            return {name: value for name, value in values.items() if name not in self.without}

        # Cumulative numbers since the start; only the last of them are looked at one by one.
        total = Past(10_000.0, 10_000.0, 2)
        parts = {
            "gauges": kept(self.gauges),
            "counters": kept(total.rises),
            "labelled": kept(
                {
                    "finished_by_reason": total.ended,
                    "waiting_by_reason": {"capacity": 0.0, "deferred": 0.0},
                    "sleep_state": self.sleep,
                }
            ),
            "histograms": kept(total.histograms),
        }
        names = {name for values in parts.values() for name in values}
        names |= set(PROBED) - self.without
        vocabulary = (*GAUGES, *COUNTERS, *LABELLED, *HISTOGRAMS, *PROBED)
        return Snapshot(
            NOW_S,
            self.who,
            **parts,
            sources={name: f"vllm:{name}" for name in names},
            absent={name: WHY for name in vocabulary if name not in names},
            gpus=self.gpus,
            probe_findings=self.probed if "probe_findings" in names else None,
            approximate=self.approximate,
        )

    def view(self) -> View:
        spans = [
            None if part is None else part.span(self.without)
            for part in (self.last, self.recent, self.past)
        ]
        still_s = {name: s for name, s in self.still_s.items() if name not in self.without}
        return View(
            URL,
            self.snapshot(),
            self.error,
            *spans,
            changes=self.changes,
            unchanged_s=self.unchanged_s,
            still_s=still_s,
            busy_s=self.busy_s,
            num_swaps=self.num_swaps,
            pod=self.pod,
        )

    def subject(self) -> Subject:
        fleet = [self.view()]
        if not self.alone:
            for number, part in enumerate(self.peers, 1):
                peer = World(who=self.who, recent=part).view()
                fleet.append(replace(peer, url=f"http://replica-{number}:8000", past=None))
        return Subject(fleet[0], tuple(fleet), NOW_S, peers_of(fleet))


Change_ = Callable[[World], None]


@dataclass
class Case:
    """`fires` changes a healthy World until the rule fires; its cause then contains `says`.

    Without any one of `needs` (a name, or several of which one would do) it is not evaluable and
    names them. `needs_past`, `needs_peers`, `needs_spans`: what else it cannot do without.
    """

    fires: Change_
    says: str
    needs: tuple[tuple[str, ...], ...] = ()
    severity: str | None = None
    also: frozenset[str] = frozenset()
    needs_past: bool = False
    needs_peers: bool = False
    needs_recent: bool = True


def names(*each: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(one.split("|")) for one in each)


def _full(w: World) -> None:
    w.trend("kv_used_ratio", ramp(0.6, 0.97))
    w.last.trends["kv_used_ratio"] = ramp(0.96, 0.97, 5.0, 2)


def _filling(w: World) -> None:
    w.trend("kv_used_ratio", ramp(0.5, 0.8))


def _fragmented(w: World) -> None:
    w.trend("page_utilization_ratio", level(0.3))
    w.who = Identity("vllm", "0.32.0", ("acme/seven-b",), 32_768, 8192, 48, started_s=START_S)


def _storm(w: World) -> None:
    w.recent.rises |= {"preemptions": 60.0, "recomputed_tokens": 90_000.0}


def _bad_storm(w: World) -> None:
    w.recent.rises |= {"preemptions": 600.0}


def _thrash(w: World) -> None:
    w.recent.rises["prefix_hits_tokens"] = 15_000.0
    w.trend("kv_used_ratio", level(0.85))


def _queue(w: World) -> None:
    w.trend("waiting", ramp(0.0, 60.0))


def _queue_on_full(w: World) -> None:
    w.trend("waiting", ramp(0.0, 60.0))
    w.trend("kv_used_ratio", level(0.92))


def _queue_of_seats(w: World) -> None:
    w.trend("waiting", level(40.0))
    w.trend("kv_used_ratio", level(0.3))


def _deferred(w: World) -> None:
    w.trend("waiting", level(12.0))
    w.recent.deferred = level(11.0)
    w.recent.end(stop=90.0)


def _small_pool(w: World) -> None:
    w.gauges["kv_total_tokens"] = 20_000.0


def _stuck(w: World) -> None:
    w.still_s |= {"generation_tokens": 90.0, "prompt_tokens": 95.0}
    w.unchanged_s = 90.0


def _imbalance(w: World) -> None:
    w.trend("waiting", level(8.0))
    w.recent.end(stop=900.0)  # they wait for some seconds: W005 is silent


def _starved(w: World) -> None:
    w.trend("running", level(0.0))
    w.recent.end(stop=0.0)
    w.recent.rises |= dict.fromkeys(w.recent.rises, 0.0)
    w.trend("kv_used_ratio", level(0.0))
    w.busy_s = 0.0


def _frozen(w: World) -> None:
    w.unchanged_s = 90.0
    w.still_s = dict.fromkeys(w.still_s, 90.0)


def _balanced(w: World) -> None:
    w.num_swaps = 5


def _negative(w: World) -> None:
    w.gauges["waiting"] = -3.0


def _in_percent(w: World) -> None:
    w.gauges["kv_used_ratio"] = 61.0


def _restart(w: World) -> None:
    w.recent.resets = 1


def _crash_loop(w: World) -> None:
    w.recent.resets = 4


def _cut(w: World) -> None:
    w.recent.ended = {"stop": 100.0, "length": 200.0}


def _asked_less(w: World) -> None:
    w.recent.histograms["request_max_tokens"] = seen_as("request_max_tokens", (64, 300))


def _slower(w: World) -> None:
    w.recent.histograms["itl_s"] = seen_as("itl_s", (0.12, 30_000))


def _late_first(w: World) -> None:
    w.recent.histograms["ttft_s"] = seen_as("ttft_s", (0.9, 300))


def _longer(w: World) -> None:
    w.recent.histograms["request_prompt_tokens"] = seen_as("request_prompt_tokens", (9000, 300))


def _swapped(w: World) -> None:
    w.changes = (Change(NOW_S - 20, "version", "0.31.0", "0.32.0"),)


def _other_model(w: World) -> None:
    w.changes = (Change(NOW_S - 20, "models", "acme/six-b", "acme/seven-b"),)


def _silent(w: World) -> None:
    w.error = "connection refused"


def _hot(w: World) -> None:
    w.gpus = (Gpu("0", "H100", throttled_because=("sw_thermal_slowdown",)),)


def _slow_clock(w: World) -> None:
    w.gpus = (Gpu("3", busy_ratio=0.9, sm_clock_hz=4e8, max_sm_clock_hz=1.98e9),)


def _xid(w: World) -> None:
    w.gpus = (Gpu("0", xid_errors=0.0), Gpu("1", xid_errors=79.0, xid_s=NOW_S - 60))


def _held(w: World) -> None:
    w.trend("kv_used_ratio", level(0.3))
    w.trend("running", level(0.0))
    w.recent.end(**dict.fromkeys(w.recent.ended, 0.0))
    w.recent.rises = dict.fromkeys(w.recent.rises, 0.0)
    w.peers = [Past(300.0, 20.0, 60), Past(300.0, 20.0, 60)]
    w.busy_s = 0.0


def _asleep(w: World) -> None:
    w.sleep = {"awake": 0.0, "weights_offloaded": 1.0, "discard_all": 0.0}
    w.gauges["waiting"] = 3.0


def _few_hits(w: World) -> None:
    w.recent.rises["prefix_hits_tokens"] = 0.1 * w.recent.rises["prefix_queries_tokens"]


def _errors(w: World) -> None:
    w.recent.ended = {"stop": 270.0, "error": 30.0}


def _rejections(w: World) -> None:
    w.recent.rises["rejected_requests"] = 100.0


def _given_up(w: World) -> None:
    """300 began; vLLM counts nobody who left."""
    w.recent.ended = {"stop": 100.0, "abort": 0.0}


def _given_up_and_counted(w: World) -> None:
    w.who = replace(w.who, engine="ullage")
    w.recent.ended = {"stop": 100.0, "abort": 200.0}


def _killed(w: World) -> None:
    w.pod |= {"last_termination": f"vllm: OOMKilled, exit code 137 at {iso(NOW_S - 240)}"}


def _unready(w: World) -> None:
    w.pod |= {"ready": "false", "unready_since": iso(NOW_S - 2400)}


def _another_model(w: World) -> None:
    w.probed = (
        ProbeFinding("P009", "size", "3", "fired"),
        ProbeFinding("P002", "norm", "3", "fired"),
        ProbeFinding("P003", "rope", "many", "fired"),
        ProbeFinding("P001", "", "", "clear"),
    )


def _other_texts(w: World) -> None:
    w.probed = (*w.probed, ProbeFinding("P008", "entropy", "many", "fired"))


KV = names("kv_used_ratio")
ENDS = names("finished_by_reason")
FEW = names("waiting", "kv_used_ratio")
HITS = names("prefix_queries_tokens", "prefix_hits_tokens")

# In order of the rules; a rule has a case for each thing that it may say.
CASES: tuple[tuple[str, Case], ...] = (
    ("W001", Case(_full, "97% of the KV cache is held", KV)),
    ("W001", Case(_filling, "it is full in", KV)),
    ("W002", Case(_fragmented, "Only 30% of the room", KV)),
    ("W003", Case(_storm, "60 times in 5 min", names("preemptions"))),
    ("W003", Case(_bad_storm, "600 times", names("preemptions"), severity="error")),
    ("W004", Case(_thrash, "from 44% to 5.6%", (*KV, *HITS), needs_past=True,
                  also=frozenset({"W022"}))),
    ("W005", Case(_queue, "while 40% of the KV cache is free", FEW, also=frozenset({"W010"}))),
    ("W005", Case(_queue_of_seats, "every scrape found 6 running", FEW,
                  also=frozenset({"W010"}))),
    ("W006", Case(_queue_on_full, "they wait for blocks", FEW, also=frozenset({"W010"}))),
    ("W007", Case(_deferred, "11 requests are deferred", names("waiting", "waiting_by_reason"),
                  also=frozenset({"W010"}))),
    ("W008", Case(_small_pool, "holds 20,000", names("kv_total_tokens"), needs_recent=False)),
    ("W009", Case(_stuck, "no token was counted for 90 s",
                  names("running", "generation_tokens|prompt_tokens"), needs_recent=False)),
    ("W010", Case(_imbalance, "8 requests wait here", names("running", "waiting"),
                  needs_peers=True)),
    ("W010", Case(_starved, "It got no request for 5 min", names("running", "waiting"),
                  needs_peers=True)),
    ("W011", Case(_frozen, "stood still for 90 s", needs_recent=False)),
    ("W011", Case(_balanced, "several processes answer", needs_recent=False)),
    ("W011", Case(_negative, "waiting is -3", needs_recent=False)),
    ("W011", Case(_in_percent, "kv_used_ratio is 61", needs_recent=False)),
    ("W012", Case(_restart, "anew once within 5 min")),
    ("W012", Case(_crash_loop, "4 times", severity="error")),
    ("W013", Case(_cut, "67% of answers now end at a length limit", ENDS, needs_past=True)),
    ("W013", Case(_asked_less, "ask for far fewer tokens", ENDS, severity="info",
                  needs_past=True)),
    ("W014", Case(_slower, "100% of tokens now take longer than 50 ms", names("ttft_s|itl_s"),
                  needs_past=True)),
    ("W014", Case(_late_first, "100% of first tokens now take longer than 250 ms",
                  names("ttft_s|itl_s"), needs_past=True)),
    ("W015", Case(_longer, "Prompts have other lengths",
                  names("request_prompt_tokens", "request_generation_tokens"), needs_past=True)),
    ("W016", Case(_swapped, "another version: 0.31.0 → 0.32.0", needs_recent=False)),
    ("W016", Case(_other_model, "It serves another model", needs_recent=False)),
    ("W017", Case(_silent, "connection refused", needs_recent=False)),
    ("W018", Case(_hot, "held down by sw_thermal_slowdown", needs_recent=False)),
    ("W018", Case(_slow_clock, "busy and runs at 20% of its clock", needs_recent=False)),
    ("W019", Case(_xid, "GPU 1: Xid 79", needs_recent=False)),
    ("W020", Case(_held, "with no request running", names("kv_used_ratio", "running", "waiting"))),
    ("W021", Case(_asleep, "sleeps (weights_offloaded)",
                  names("sleep_state", "running", "waiting"), needs_recent=False)),
    ("W022", Case(_few_hits, "finds 10% of prompt tokens", HITS, needs_peers=True)),
    ("W023", Case(_errors, "30 of 300 requests ended in an error",
                  names("finished_by_reason|rejected_requests"))),
    ("W023", Case(_rejections, "100 of 400 requests were turned away",
                  names("finished_by_reason|rejected_requests"))),
    ("W024", Case(_given_up, "At least 66% of requests are now given up",
                  names("finished_by_reason", "ttft_s", "running", "waiting"), needs_past=True)),
    ("W024", Case(_given_up_and_counted, "67% of requests are now given up", ENDS,
                  needs_past=True)),
    ("W025", Case(_killed, "vllm was killed 4 min ago", needs_recent=False)),
    ("W025", Case(_unready, "not been ready for 40 min", severity="warning", needs_recent=False)),
    ("W026", Case(_another_model, "P002, norm, layer 3, and 2 more", names("probe_findings"),
                  needs_recent=False)),
    ("W026", Case(_other_texts, "P008, entropy, several layers", names("probe_findings"),
                  severity="warning", needs_recent=False)),
)  # fmt: skip


def changed(case: Case) -> World:
    """A healthy World after the case's change."""
    world = deepcopy(World())
    case.fires(world)
    return world
