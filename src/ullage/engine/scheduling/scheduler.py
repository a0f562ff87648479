"""Who runs in the next step: one token budget, decodes first, then prefill chunks, then newcomers.

Decides only; runs nothing and imports no torch. When blocks run out the last in order is
preempted: its blocks are freed and it is recomputed later, output kept. Blocks are `tables`'.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from ullage.engine.paging.prefix import Hit
from ullage.engine.paging.tables import Copy, Tables, held_blocks
from ullage.engine.request import Request, State
from ullage.engine.scheduling.admission import Line

# Why a request waits. vLLM calls the first four "capacity" and the others "deferred".
WAIT_CAUSES = ("kv_blocks", "max_num_seqs", "token_budget", "static_batch", "long_prefill", "fork")

# How many long prompts are looked up in the prefix cache per step, in case it makes them short.
PASSED_LOOKS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's names: sequences in one step, tokens in one step, and how they are shared out.

    Who has more than `long_prefill_token_threshold` tokens to compute (0: nobody) is long: it gets
    that many per step while others want the rest, and `max_long_partial_prefills` of them run at
    once. `by_priority` orders by priority before arrival. A `static` batch runs to its end before
    the next is admitted. `watermark` of the blocks stay free when somebody is admitted beside
    others, for those who run will need one soon.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 1
    by_priority: bool = False
    static: bool = False
    watermark: float = 0.01


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
    """One step: decodes before prefill chunks, and who was preempted to make room.

    `copies` of blocks, (source, target), come before anything is written; all sources are read
    first. `waits` counts who still waits, by WAIT_CAUSES. Of `prefix_queries` tokens of requests
    that began, `prefix_hits` were in the prefix cache.
    """

    work: tuple[Work, ...]
    preempted: tuple[Request, ...] = ()
    copies: tuple[Copy, ...] = ()
    waits: Mapping[str, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.work)


@dataclass(slots=True)
class _Share:
    count: int
    copies: list[Copy]


@dataclass(slots=True)
class _Draft:
    """A plan in the making. `budget` tokens are left."""

    budget: int
    shares: dict[Request, _Share] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    queries: int = 0
    hits: int = 0

    def take(self, request: Request, count: int, copies: list[Copy]) -> None:
        self.shares[request] = _Share(count, copies)
        self.budget -= count

    def num_left(self, request: Request) -> int:
        """Tokens that the plan leaves for later steps."""
        share = self.shares.get(request)
        return request.num_uncomputed - (0 if share is None else share.count)

    def drop(self, request: Request) -> None:
        """A victim that was planned already gives its tokens back; its copies are not made."""
        share = self.shares.pop(request, None)
        if share is not None:
            self.budget += share.count


class Scheduler:
    """Continuous or static batching over one block pool.

    Every request must fit the pool alone (the engine refuses others): then the first in order can
    always proceed, and no plan stays empty while somebody waits.
    """

    def __init__(self, tables: Tables, limits: Limits) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.limits = limits
        self.running: list[Request] = []
        self._line = Line(by_priority=limits.by_priority)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Everybody who does not run, followers behind their leader."""
        waiting = [r for leader in self._line for r in (leader, *leader.followers)]
        return (*waiting, *(f for leader in self.running for f in leader.followers))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._line)

    def add(self, request: Request, *followers: Request) -> None:
        """Queue a request, and others of the same prompt that begin when it has computed that."""
        for one in (request, *followers):
            self._line.arrive(one)
        self._lead(request, list(followers))

    def schedule(self) -> Plan:
        """Choose the next step's work, taking blocks for it. Empty when nobody can run."""
        draft = _Draft(self.limits.max_num_batched_tokens)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            (decodes if request.num_uncomputed == 1 else prefills).append(request)
        for request in decodes + prefills:
            if request.state is State.RUNNING and draft.budget > 0:
                count = min(self._wish(request), draft.budget)
                self.tables.slide(request)
                if self.tables.has_room(request, count):
                    draft.take(request, count, [])
                elif self._make_room(request, count, draft):
                    draft.take(request, count, self.tables.extend(request, count))
        self._admit(draft, num_going_on=sum(request in draft.shares for request in prefills))
        self._spread(draft)
        while draft.budget > 0 and "long_prefill" in draft.waits:
            # A long prompt that ends in this step makes room for the next one in this step.
            num_planned = len(draft.shares)
            self._admit(draft)
            self._spread(draft)
            if len(draft.shares) == num_planned:
                break
        return Plan(
            tuple(self._work(request, share.count) for request, share in draft.shares.items()),
            tuple(draft.preempted),
            tuple(copy for share in draft.shares.values() for copy in share.copies),
            draft.waits,
            draft.queries,
            draft.hits,
        )

    def fork(self, leader: Request) -> list[Request]:
        """Let the followers of `leader`, whose prompt is computed, go on from its blocks.

        Who finds no seat waits, and recomputes through the prefix cache.
        """
        followers, leader.followers = leader.followers, []
        for follower in followers:
            follower.leader = None
            if len(self.running) < self.limits.max_num_seqs:
                self.tables.fork(leader, follower)
                self._run(follower)
            else:
                self._line.add(follower)
        return followers

    def finish(self, request: Request) -> None:
        """Take `request` out, wherever it stands, and free its blocks at once."""
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
        elif request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self._line.remove(request)
        self.tables.release(request)
        request.state = State.FINISHED
        if request.followers:
            heir, *others = request.followers
            request.followers = []
            self._lead(heir, others)

    def check(self) -> None:
        """Raise AssertionError unless blocks and tables agree and everybody stands once."""
        self.tables.check(self.running)
        waiting = self.waiting
        assert all(not request.tables for request in waiting), "a waiting request holds blocks"
        assert all(r.state is State.RUNNING for r in self.running), "runs, but is not said to"
        assert all(r.state is State.WAITING for r in waiting), "waits, but is not said to"
        everybody = [*self.running, *waiting]
        assert len(set(everybody)) == len(everybody), "a request stands twice"
        keys = [self._line.key(request) for request in self.running]
        assert keys == sorted(keys), "those who run are out of order"

    # --- those who run ---

    def _wish(self, request: Request) -> int:
        """Tokens for the next step, if there are others who want some."""
        threshold = self.limits.long_prefill_token_threshold
        return min(request.num_uncomputed, threshold or request.num_uncomputed)

    def _is_long(self, num_left: int) -> bool:
        return 0 < self.limits.long_prefill_token_threshold < num_left

    def _make_room(self, request: Request, count: int, draft: _Draft) -> bool:
        """See to it that `count` more tokens have blocks; False if it had to go itself."""
        while self.tables.missing(request, count) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, draft)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, draft: _Draft) -> None:
        draft.drop(request)
        draft.preempted.append(request)
        self.running.remove(request)
        self.tables.release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = State.WAITING
        self._line.add(request)

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        insort(self.running, request, key=self._line.key)

    def _lead(self, request: Request, followers: list[Request]) -> None:
        request.leader, request.followers = None, followers
        for follower in followers:
            follower.leader = request
        self._line.add(request)

    # --- those who come in ---

    def _admit(self, draft: _Draft, num_going_on: int = 0) -> None:
        """Let in whom there is room for, in order; only a long prompt may be passed by others.

        `num_going_on` prompts have a share of this step: even with their last chunks they stand
        for long ones, or those and the next would take two shares of what is for short ones.
        """
        closed = "static_batch" if self.limits.static and self.running else None
        if draft.preempted and closed is None:
            closed = "kv_blocks"
        draft.waits.clear()
        num_long = sum(self._is_long(draft.num_left(request)) for request in self.running)
        num_long = max(num_long, num_going_on)
        # A static batch waits for its slowest anyway: nobody in it is spared the long ones.
        spares_short = not self.limits.static
        passed = 0
        for request in list(self._line):
            cause = closed
            if cause is None and passed >= PASSED_LOOKS and self._is_long(request.num_tokens):
                cause = "long_prefill"
            if cause is None:
                hit = self.tables.hit(request)
                num_left = request.num_tokens - hit.num_blocks * self.pool.block_size
                is_long = self._is_long(num_left)
                if is_long and spares_short and num_long >= self.limits.max_long_partial_prefills:
                    cause = "long_prefill"
                    passed += 1
                else:
                    # Who finds no room closes the door: nobody behind may take it first.
                    cause = closed = self._obstacle(request, hit, draft)
            if cause is None:
                num_long += is_long
                self._begin(request, hit, draft)
            else:
                _count(draft.waits, cause, 1 + len(request.followers))
        forking = sum(len(request.followers) for request in self.running)
        if forking:
            _count(draft.waits, "fork", forking)

    def _obstacle(self, request: Request, hit: Hit, draft: _Draft) -> str | None:
        """Why `request` cannot begin now, None: it can. The lower in priority make way for it."""
        if draft.budget <= 0 and not self.limits.static:
            return "token_budget"
        if self._seats_short() and not self._yields(request):
            return "max_num_seqs"
        short = self._blocks_short(request, hit)
        if short > 0 and self._yieldable_blocks(request) < short:
            return "kv_blocks"
        while self._seats_short() or self._blocks_short(request, hit) > 0:
            if not self._yields(request):
                return "kv_blocks"
            victim, cause = self.running[-1], "max_num_seqs" if self._seats_short() else "kv_blocks"
            self._preempt(victim, draft)
            _count(draft.waits, cause, 1 + len(victim.followers))
        return None

    def _seats_short(self) -> bool:
        return len(self.running) >= self.limits.max_num_seqs

    def _blocks_short(self, request: Request, hit: Hit) -> int:
        """Blocks that are missing to let `request` in.

        Blocks are taken chunk by chunk, but those already promised to the prefills that run must
        not be promised twice.
        """
        held = sum(self.pool.references(block) > 0 for block in hit.blocks)
        needed = self.tables.most_blocks(request.num_tokens) - held
        if self.running:
            needed += int(self.limits.watermark * self.pool.num_blocks)
            needed += sum(map(self.tables.to_come, self.running))
        return needed - self.pool.num_free

    def _yields(self, request: Request) -> bool:
        """Whether the last of those who run has to make way for `request`."""
        last = self.running[-1] if self.running else None
        return self.limits.by_priority and last is not None and last.priority > request.priority

    def _yieldable_blocks(self, request: Request) -> int:
        """Blocks that those held, and were promised, who have to make way for `request`."""
        if not self.limits.by_priority:
            return 0
        lower = [other for other in self.running if other.priority > request.priority]
        held = [block for other in lower for block in held_blocks(other)]
        alone = sum(self.pool.references(block) == 1 for block in held)
        return alone + sum(map(self.tables.to_come, lower))

    def _begin(self, request: Request, hit: Hit, draft: _Draft) -> None:
        self._line.remove(request)
        self.tables.begin(request, hit)
        num_cached = request.num_computed
        if request.num_preemptions == 0:
            # As in vLLM a request that comes back is not counted: it would find its own blocks.
            request.num_cached_tokens = num_cached
            if self.tables.caching:
                draft.queries += request.num_tokens
                draft.hits += num_cached
        self._run(request)
        count = min(self._wish(request), draft.budget)
        if count > 0:
            draft.take(request, count, self.tables.extend(request, count))

    def _spread(self, draft: _Draft) -> None:
        """What nobody else wants goes to the long prefills, as far as there are blocks."""
        for request, share in draft.shares.items():
            more = min(request.num_uncomputed - share.count, draft.budget)
            count = share.count + more
            if more > 0 and self.tables.missing(request, count) <= self.pool.num_free:
                share.copies += self.tables.extend(request, count)
                share.count = count
                draft.budget -= more

    def _work(self, request: Request, count: int) -> Work:
        return Work(
            request,
            request.num_computed,
            count,
            tuple(map(tuple, request.tables)),
            samples=count == request.num_uncomputed,
        )


def _count(waits: dict[str, int], cause: str, number: int) -> None:
    waits[cause] = waits.get(cause, 0) + number
