"""A stand-in for vLLM 0.32's engine core: the names and rules that the plugin reads, nothing else.

Blocks are counted by reference and shared by prefix; requests grow, are preempted and end. What a
real vLLM does with the same calls is in tests/vllm/test_plugin.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

BYTES_PER_BLOCK = 4096


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: object = None
    is_null: bool = False


@dataclass(eq=False)
class Request:
    request_id: str
    arrival_time: float
    num_computed_tokens: int = 0
    client_index: int = 0


class Pool:
    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._free = self.blocks[1:]

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def take(self) -> Block:
        block = self._free.pop()
        block.ref_cnt, block.block_hash = 1, None
        return block

    def release(self, block: Block) -> None:
        if not block.is_null:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free.insert(0, block)


class FullAttentionSpec: ...


class MambaSpec: ...


class FullAttentionManager:
    """Any group; the name is what the plugin looks at."""

    def __init__(self, pool: Pool, block_size: int, spec: Any = None) -> None:
        self.block_pool, self.block_size = pool, block_size
        self.kv_cache_spec = spec or FullAttentionSpec()
        self.req_to_blocks: dict[str, list[Block]] = {}


class SlidingWindowManager(FullAttentionManager): ...


class Scheduler:
    def __init__(self, pool: Pool, groups: list[FullAttentionManager]) -> None:
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool, coordinator=SimpleNamespace(single_type_managers=groups)
        )
        self.kv_cache_config = SimpleNamespace(
            kv_cache_tensors=[SimpleNamespace(size=pool.num_gpu_blocks * BYTES_PER_BLOCK)],
            num_blocks=pool.num_gpu_blocks,
        )
        self.cache_config = SimpleNamespace(block_size=groups[0].block_size if groups else 16)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.connector: object = None
        self.not_yet: set[str] = set()
        """Requests whose blocks a step in flight still writes."""

    # --- what vLLM has ---

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Request]:
        ended = [self.requests[one] for one in request_ids if one in self.requests]
        for request in ended:
            (self.running if request in self.running else self.waiting).remove(request)
            if self._request_blocks_can_be_freed(request):
                self.free(request)
            del self.requests[request.request_id]
        return ended

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        return request.request_id not in self.not_yet

    def _preempt_request(self, request: Request, timestamp: float, drop: bool = False) -> None:
        self.free(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += count

    # --- what happens to it in tests ---

    def add(self, request: Request, *, shared: tuple[list[Block], ...] = ()) -> None:
        """A running request; `shared` blocks of another at the start of each group's table."""
        self.requests[request.request_id] = request
        self.running.append(request)
        for at, group in enumerate(self.groups):
            blocks = list(shared[at]) if shared else []
            for block in blocks:
                block.ref_cnt += not block.is_null
            group.req_to_blocks[request.request_id] = blocks

    def compute(self, request: Request, tokens: int) -> None:
        """`tokens` more of a running request, with the blocks for them."""
        total = request.num_computed_tokens + tokens
        for group in self.groups:
            blocks = group.req_to_blocks.setdefault(request.request_id, [])
            while len(blocks) * group.block_size < total:
                blocks.append(group.block_pool.take())
        self._update_after_schedule(
            SimpleNamespace(num_scheduled_tokens={request.request_id: tokens})
        )

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._preempt_request(request, 0.0)

    def resume(self, request: Request, hit: int = 0) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed_tokens = hit

    def free(self, request: Request) -> None:
        for group in self.groups:
            for block in reversed(group.req_to_blocks.pop(request.request_id, [])):
                group.block_pool.release(block)

    @property
    def groups(self) -> list[FullAttentionManager]:
        return self.kv_cache_manager.coordinator.single_type_managers


class EngineCore:
    """As vLLM's: a scheduler, and a way to tell clients that their requests ended."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.told: list[str] = []

    def _send_abort_outputs(self, aborted_reqs: list[Request]) -> None:
        self.told += [request.request_id for request in aborted_reqs]


@dataclass
class Client:
    """As vLLM's AsyncMPClient: calls methods of engine cores by name."""

    cores: list[EngineCore]
    failure: Exception | None = None
    silent: bool = False
    client_index: int = 0
    client_count: int = 1
    calls: list[str] = field(default_factory=list)
    before: dict[str, Callable[[EngineCore], None]] = field(default_factory=dict)
    """What a step does to each engine core before it answers this method."""

    @property
    def core_engines(self) -> list[bytes]:
        return [number.to_bytes(2, "little") for number in range(len(self.cores))]

    @property
    def engine_ranks_managed(self) -> list[int]:
        return list(range(len(self.cores)))

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        import asyncio

        self.calls.append(method)
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        core = self.cores[int.from_bytes(engine, "little")]
        self.before.get(method, lambda _: None)(core)
        return getattr(core, method)(*args)


def core_of(
    num_blocks: int = 65, sizes: tuple[int, ...] = (16,), kinds: tuple[type, ...] = ()
) -> EngineCore:
    """An engine core that the plugin watches: groups of these block sizes and kinds."""
    from ullage_vllm import engine

    pool = Pool(num_blocks)
    kinds = kinds or (FullAttentionManager,) * len(sizes)
    groups = [kind(pool, size) for size, kind in zip(sizes, kinds, strict=True)]

    class Watched(EngineCore): ...

    engine.add_methods(Watched)
    core = Watched(Scheduler(pool, groups))
    assert core.ullage_attach() == []
    return core
