"""A serving engine in a few lines: requests → snapshots, with vLLM's buckets and its rules.

One token budget a step, decodes first; blocks are taken as requests grow, the newest is preempted
when there are none; a step takes as long as its batch. Faults are what tests set while it runs.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ullage.telemetry.histogram import Histogram
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    PROBED,
    Identity,
    Snapshot,
)

START_S = 1_796_000_000.0


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … as vLLM makes its buckets of tokens."""
    values = [m * 10**e for e in range(8) for m in (1, 2, 5)]
    return tuple(float(value) for value in values if value <= most)


# vLLM 0.32, v1/metrics/loggers.py; time_to_first_token and inter_token_latency.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
       20.0, 40.0, 80.0)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
           120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
TOKENS = one_two_five(131_072)
BOUNDS = {
    "ttft_s": TTFT,
    "itl_s": ITL,
    "e2e_s": LATENCY,
    "queue_s": LATENCY,
    "prefill_s": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_tokens": TOKENS,
}


class Counts:
    """A histogram that is being filled."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = (*bounds, math.inf)
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def histogram(self) -> Histogram:
        total, cumulative = 0, []
        for count in self.counts:
            total += count
            cumulative.append(float(total))
        return Histogram(self.bounds, tuple(cumulative), self.sum)


@dataclass
class Request:
    """One request; `ends` is how it will end, `max_tokens` what it asks for."""

    arrival_s: float
    prompt: int
    answer: int
    ends: str = "stop"
    max_tokens: int = 1024
    deferred_s: float = 0.0
    hits: int = 0
    computed: int = 0
    made: int = 0
    started_s: float = -1.0
    first_s: float = -1.0

    @property
    def held(self) -> int:
        return self.computed


@dataclass
class Machine:
    """How fast and how large. Seconds per step, per running request, per prompt token."""

    step_s: float = 0.012
    per_request_s: float = 0.00015
    per_prompt_token_s: float = 0.00003
    pool_tokens: int = 400_000
    block_size: int = 16
    max_num_seqs: int = 256
    budget: int = 8192
    max_model_len: int = 131_072


WHO = Identity("vllm", "0.32.0", ("acme/seven-b",))


@dataclass
class Engine:
    """A replica. `slow`, `hung`, `frozen`, `hit_ratio`, `identity` may be set while it runs."""

    url: str = "http://replica-0:8000"
    machine: Machine = field(default_factory=Machine)
    identity: Identity = WHO
    hit_ratio: float = 0.0
    slow: float = 1.0
    hung: bool = False
    leaked_tokens: int = 0

    def __post_init__(self) -> None:
        self.time_s = 0.0
        self.start()

    def start(self) -> None:
        """As after a (re)start: nothing in flight, all counters 0."""
        self.began_s = self.time_s
        self.waiting: deque[Request] = deque()
        self.deferred: list[Request] = []
        self.running: list[Request] = []
        self.blocks = 0
        self.cpu_s = 0.0
        self.counters = dict.fromkeys(
            ("preemptions", "recomputed_tokens", "prompt_tokens", "generation_tokens",
             "prefix_queries_tokens", "prefix_hits_tokens", "rejected_requests"), 0.0
        )  # fmt: skip
        self.ended = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
        self.seen = {name: Counts(bounds) for name, bounds in BOUNDS.items()}

    # --- what happens -----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.seen["request_max_tokens"].observe(request.max_tokens)
        (self.deferred if request.deferred_s > 0 else self.waiting).append(request)

    def run(self, until_s: float, arrivals: deque[Request]) -> None:
        """Steps up to `until_s`, taking what arrives."""
        while self.time_s < until_s:
            while arrivals and arrivals[0].arrival_s <= self.time_s:
                self.submit(arrivals.popleft())
            for request in list(self.deferred):
                if self.time_s - request.arrival_s >= request.deferred_s:
                    self.deferred.remove(request)
                    self.waiting.append(request)
            if self.hung or not (self.running or self.waiting):
                following = arrivals[0].arrival_s if arrivals else until_s
                if self.deferred:
                    following = min(following, self.time_s + 0.1)
                self.time_s = max(self.time_s + 1e-6, min(following, until_s))
                continue
            self._step(min(until_s, arrivals[0].arrival_s if arrivals else until_s))

    def _step(self, horizon_s: float) -> None:
        budget = self.machine.budget - len(self.running)
        prefilled = self._prefill(budget)
        batch = [r for r in self.running if r.computed >= r.prompt + r.made]
        took_s = self.slow * (
            self.machine.step_s
            + self.machine.per_request_s * len(batch)
            + self.machine.per_prompt_token_s * prefilled
        )
        # Steps that are alike are taken together: until something arrives, ends or is prefilled.
        times = 1
        if not prefilled and not self.waiting and batch:
            least = min(r.answer - r.made for r in batch)
            times = max(1, min(least, 16, int((horizon_s - self.time_s) / took_s)))
        self.time_s += took_s * times
        self.cpu_s += took_s * times * 0.9
        decoding = 0
        for request in batch:
            if request not in self.running:
                continue  # preempted by an older one in this very step
            if not self._grow(request, times):
                continue
            if request.first_s < 0:
                request.first_s = self.time_s
                self.counters["prompt_tokens"] += request.prompt
                self.seen["ttft_s"].observe(self.time_s - request.arrival_s)
                self.seen["prefill_s"].observe(self.time_s - request.started_s)
                decoding += times - 1
            else:
                decoding += times
            request.made += times
            self.counters["generation_tokens"] += times
            if request.made >= request.answer:
                self._end(request, request.ends)
        if decoding:
            self.seen["itl_s"].observe(took_s, decoding)

    def _prefill(self, budget: int) -> int:
        """Admit and compute prompts within the budget; the tokens computed."""
        used = 0
        for request in self.running:
            used += self._chunk(request, budget - used)
        while self.waiting and used < budget and len(self.running) < self.machine.max_num_seqs:
            request = self.waiting[0]
            if self._blocks_for(request.prompt + request.made) > self._free():
                break
            self.waiting.popleft()
            self.running.append(request)
            self.blocks += self._blocks_for(request.prompt + request.made)
            if request.started_s < 0:
                request.started_s = self.time_s
                self.seen["queue_s"].observe(self.time_s - request.arrival_s)
                request.hits = int(request.prompt * self.hit_ratio)
                self.counters["prefix_queries_tokens"] += request.prompt
                self.counters["prefix_hits_tokens"] += request.hits
            request.computed = min(request.hits, request.prompt - 1)
            used += self._chunk(request, budget - used)
        return used

    def _chunk(self, request: Request, budget: int) -> int:
        chunk = min(budget, request.prompt + request.made - request.computed)
        request.computed += max(0, chunk)
        return max(0, chunk)

    def _grow(self, request: Request, times: int) -> bool:
        """Room for its next tokens, taken from the newest if need be; whether it got it."""
        length = request.prompt + request.made
        needed = self._blocks_for(length + times) - self._blocks_for(length)
        while needed > self._free():
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self.blocks += needed
        request.computed += times
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks -= self._blocks_for(request.prompt + request.made)
        self.counters["preemptions"] += 1
        self.counters["recomputed_tokens"] += request.computed
        request.computed = 0
        self.waiting.appendleft(request)

    def _end(self, request: Request, reason: str) -> None:
        self.running.remove(request)
        self.blocks -= self._blocks_for(request.prompt + request.made)
        if reason == "abort":
            return  # vLLM counts nobody who left
        self.ended[reason] += 1
        self.seen["e2e_s"].observe(self.time_s - request.arrival_s)
        self.seen["request_prompt_tokens"].observe(request.prompt)
        self.seen["request_generation_tokens"].observe(request.made)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.machine.block_size)

    def _free(self) -> int:
        total = (self.machine.pool_tokens - self.leaked_tokens) // self.machine.block_size
        return total - self.blocks

    # --- what it says -----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What a scrape finds now."""
        self.cpu_s += 0.02
        machine = self.machine
        used = self.blocks * machine.block_size + self.leaked_tokens
        held = sum(request.computed for request in self.running)
        waiting = len(self.waiting) + len(self.deferred)
        gauges = {
            "kv_used_ratio": used / machine.pool_tokens,
            "kv_used_tokens": float(used),
            "kv_total_tokens": float(machine.pool_tokens),
            "running": float(len(self.running)),
            "waiting": float(waiting),
        }
        if self.blocks:
            gauges["page_utilization_ratio"] = held / (self.blocks * machine.block_size)
        who = replace(
            self.identity,
            max_model_len=machine.max_model_len,
            block_size=machine.block_size,
            num_blocks=machine.pool_tokens // machine.block_size,
            started_s=START_S + self.began_s,
        )
        return said(
            START_S + self.time_s,
            who,
            gauges=gauges,
            counters={**self.counters, "process_cpu_s": self.cpu_s},
            labelled={
                "finished_by_reason": dict(self.ended),
                "waiting_by_reason": {
                    "capacity": float(len(self.waiting)),
                    "deferred": float(len(self.deferred)),
                },
                "sleep_state": {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0},
            },
            histograms={name: counts.histogram() for name, counts in self.seen.items()},
        )


def said(time_s: float, who: Identity, **known: Mapping[str, object]) -> Snapshot:
    """A snapshot of what is known; the rest of the vocabulary is absent."""
    names = {name for values in known.values() for name in values}
    return Snapshot(
        time_s,
        who,
        known.get("gauges", {}),
        known.get("counters", {}),
        known.get("labelled", {}),
        known.get("histograms", {}),
        sources={name: f"vllm:{name}" for name in names},
        absent={
            name: "the simulated engine does not say"
            for name in (*GAUGES, *COUNTERS, *LABELLED, *HISTOGRAMS, *PROBED)
            if name not in names
        },
    )


# --- traffic --------------------------------------------------------------------------------------


def poisson(
    per_s: float,
    until_s: float,
    *,
    seed: int = 0,
    prompt: int = 600,
    answer: int = 150,
    from_s: float = 0.0,
    **more: object,
) -> Iterator[Request]:
    """Requests at random, their lengths lognormal around the medians."""
    rng = random.Random(seed)  # noqa: S311
    time_s = from_s
    while True:
        time_s += rng.expovariate(per_s)
        if time_s >= until_s:
            return
        yield Request(
            time_s,
            max(1, int(prompt * rng.lognormvariate(0, 0.6))),
            max(1, int(answer * rng.lognormvariate(0, 0.6))),
            **more,
        )


def merged(*streams: Iterable[Request]) -> deque[Request]:
    """All of the streams in order of arrival."""
    return deque(sorted((r for stream in streams for r in stream), key=lambda r: r.arrival_s))


Fault = Callable[[Engine, float], None]


def looks(
    engine: Engine,
    arrivals: deque[Request],
    until_s: float,
    *,
    interval_s: float = 5.0,
    fault: Fault | None = None,
    tell: Callable[[Snapshot, float], Snapshot] | None = None,
) -> Iterator[Look]:
    """A scrape every interval. `fault(engine, time)` may change the engine before each of them,
    `tell(snapshot, time)` what it says."""
    for number in range(1, int(until_s / interval_s) + 1):
        time_s = number * interval_s
        if fault is not None:
            fault(engine, time_s)
        engine.run(time_s, arrivals)
        engine.time_s = max(engine.time_s, time_s)
        seen = engine.snapshot()
        seen = replace(seen, time_s=START_S + time_s)
        yield Look(engine.url, START_S + time_s, tell(seen, time_s) if tell else seen)
