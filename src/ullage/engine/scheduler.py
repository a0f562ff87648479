"""Who runs in the next step: one token budget, decodes first, then prefill chunks.

Decides and accounts for blocks; runs nothing and imports no torch. When blocks run out the newest
running request is preempted: its blocks are freed and it is recomputed later, output kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from ullage.engine.blocks import BlockPool
from ullage.engine.request import Request, State


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's names: sequences in one step, tokens in one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: run `count` tokens from position `start`.

    `tables`, one per group of the KV layout, hold them and all before that may be seen; `samples`
    is true when the last of them is the sequence's newest token, so that its logits choose the
    next one.
    """

    request: Request
    start: int
    count: int
    tables: tuple[tuple[int, ...], ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: decodes before prefill chunks, and who was preempted to make room."""

    work: tuple[Work, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.work)


class Scheduler:
    """First come, first served, over one block pool.

    Every request must fit the pool alone (the engine refuses others): then the oldest running
    request can always proceed and no plan stays empty while somebody waits.
    """

    def __init__(self, pool: BlockPool, limits: Limits, num_groups: int = 1) -> None:
        self.pool = pool
        self._num_groups = num_groups
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # A few blocks stay free at admission, for those who run will need one soon; without them
        # a request would be admitted only to be preempted by the next decode.
        self._watermark_blocks = pool.num_blocks // 100

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Choose the next step's work, taking blocks for it. Empty when nobody can run."""
        planned: dict[Request, Work] = {}
        preempted: list[Request] = []
        budget = self.limits.max_num_batched_tokens
        decodes = [r for r in self.running if r.num_uncomputed == 1]
        prefills = [r for r in self.running if r.num_uncomputed > 1]
        for request in decodes + prefills:
            if request.state is not State.RUNNING or budget == 0:
                continue
            count = min(request.num_uncomputed, budget)
            if self._make_room(request, count, planned, preempted):
                planned[request] = self._work(request, count)
            budget = self.limits.max_num_batched_tokens - sum(w.count for w in planned.values())
        if not preempted:
            self._admit(planned, budget)
        return Plan(tuple(planned.values()), tuple(preempted))

    def finish(self, request: Request) -> None:
        """Take `request` out, wherever it stands, and free its blocks at once."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        self._release(request)
        request.state = State.FINISHED

    def check(self) -> None:
        """Raise AssertionError unless blocks and tables agree."""
        self.pool.check(table for request in self.running for table in request.tables)
        for request in self.running:
            for table in request.tables:
                held = len(table) * self.pool.block_size
                assert request.num_computed <= held, f"{request.id}: tokens without a block"
        assert all(not request.tables for request in self.waiting), "a waiting request holds blocks"

    def _admit(self, planned: dict[Request, Work], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            # Blocks are taken chunk by chunk, but those already promised to the prefills that
            # run must not be promised twice.
            promised = sum(
                self._blocks_for(other.num_tokens) - sum(map(len, other.tables))
                for other in self.running
            )
            spare = self._watermark_blocks if self.running else 0
            needed = self._blocks_for(request.num_tokens) + promised + spare
            if needed > self.pool.num_free:
                return
            self.waiting.popleft()
            request.state = State.RUNNING
            self.running.append(request)
            count = min(request.num_uncomputed, budget)
            self._extend(request, count)
            planned[request] = self._work(request, count)
            budget -= count

    def _make_room(
        self,
        request: Request,
        count: int,
        planned: dict[Request, Work],
        preempted: list[Request],
    ) -> bool:
        """Give `request` blocks for `count` more tokens; False if it had to be preempted itself."""
        while self._blocks_missing(request, count) > self.pool.num_free:
            victim = self.running[-1]
            planned.pop(victim, None)
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        self._extend(request, count)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = State.WAITING
        self.waiting.appendleft(request)

    def _blocks_missing(self, request: Request, count: int) -> int:
        return self._blocks_for(request.num_computed + count) - sum(map(len, request.tables))

    def _blocks_for(self, num_tokens: int) -> int:
        """Blocks over all groups."""
        return self._num_groups * self.pool.blocks_for(num_tokens)

    def _extend(self, request: Request, count: int) -> None:
        if not request.tables:
            request.tables = [[] for _ in range(self._num_groups)]
        needed = self.pool.blocks_for(request.num_computed + count)
        for table in request.tables:
            if needed > len(table):
                table += self.pool.allocate(needed - len(table))

    def _release(self, request: Request) -> None:
        for table in request.tables:
            self.pool.release(table)
        request.tables = []

    def _work(self, request: Request, count: int) -> Work:
        num_blocks = self.pool.blocks_for(request.num_computed + count)
        return Work(
            request,
            request.num_computed,
            count,
            tuple(tuple(islice(table, num_blocks)) for table in request.tables),
            samples=count == request.num_uncomputed,
        )
