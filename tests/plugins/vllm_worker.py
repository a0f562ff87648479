"""A stand-in for a worker of vLLM 0.32: paged keys, batches, both model runners, full graphs.

Holds the names and rules that the plugin's probe reads, nothing else. What a real vLLM does with
the same calls is in tests/vllm/test_probe_live.py.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

BLOCK, BLOCKS, DIM, HEADS, KV_HEADS = 4, 64, 8, 4, 2


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass
class Metadata:
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool = True


class Impl:
    """Attention over the cache, written out."""

    def __init__(self, layer: Attention) -> None:
        self.scale, self.logits_soft_cap, self.alibi_slopes, self.sinks = 0.3, 0, None, None
        self._layer = layer
        self.really_scaled_by = 0.3

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        if attn_metadata is None:
            return output
        window = self._layer.sliding_window
        for at, length in enumerate(attn_metadata.seq_lens.tolist()):
            first, end = attn_metadata.query_start_loc[at : at + 2].tolist()
            keys, values = self._layer.held(attn_metadata.block_table[at], length)
            for row in range(first, end):
                position = length - (end - row)
                low = max(0, position + 1 - window) if window else 0
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    scores = keys[low : position + 1, group] @ query[row, head]
                    weights = torch.softmax(scores * self.really_scaled_by, 0)
                    output[row, head] = weights @ values[low : position + 1, group]
        return output


class Attention:
    def __init__(self, window: int | None = None, backend: str = "FLASH_ATTN") -> None:
        self.num_heads, self.num_kv_heads = HEADS, KV_HEADS
        self.head_size = self.head_size_v = DIM
        self.attn_type, self.sliding_window = "decoder", window
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.kv_cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
        self.impl = Impl(self)

    def held(self, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(length)
        found = self.kv_cache[table[places // BLOCK].long(), :, places % BLOCK]
        return found[..., :DIM], found[..., DIM:]


class Dispatcher:
    """CudagraphDispatcher: a full graph for decodes, pieces for all else, none where barred."""

    def dispatch(
        self, num_tokens: int, uniform_decode: bool = False, has_lora: bool = False,
        num_active_loras: int = 0, valid_modes: Any = None, invalid_modes: Any = None,
    ) -> tuple[CUDAGraphMode, int]:  # fmt: skip
        allowed = set(valid_modes or CUDAGraphMode) - set(invalid_modes or ())
        if uniform_decode and CUDAGraphMode.FULL in allowed:
            return CUDAGraphMode.FULL, 8
        piecewise = CUDAGraphMode.PIECEWISE in allowed
        return (CUDAGraphMode.PIECEWISE, 8) if piecewise else (CUDAGraphMode.NONE, num_tokens)


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    num_active_loras: int = 0
    num_ubatches: int = 1


class Manager:
    """CudaGraphManager of the second runner."""

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int
    ) -> BatchExecutionDescriptor:
        mode = CUDAGraphMode.FULL if uniform_token_count == 1 else CUDAGraphMode.NONE
        return BatchExecutionDescriptor(mode, 8, num_reqs, num_active_loras)


@dataclass
class Sequence:
    """Its keys are drawn as it grows; `table` are its blocks."""

    table: list[int]
    prompt: list[int] = field(default_factory=list)
    computed: int = 0


class Runner:
    """Either runner: `second` has its batch in what prepare_inputs returns."""

    def __init__(self, layers: dict[str, Any], second: bool = False, graphs: bool = True) -> None:
        self.model = SimpleNamespace(modules=lambda: list(layers.values()))
        self.layers = layers
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers)
        )
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.modes: list[CUDAGraphMode] = []
        self.queries: list[torch.Tensor] = []
        self.sequences: dict[str, Sequence] = {}
        self.fail = False
        self._second, self._graphs = second, graphs
        self._draw = torch.Generator().manual_seed(5)
        if second:
            self.cudagraph_manager = Manager()
        else:
            self.cudagraph_dispatcher = Dispatcher()
            self.input_batch = SimpleNamespace(req_ids=[])

    def prepare_inputs(self, scheduler_output: Any, batch_req_state: Any) -> Any:
        counts = [scheduler_output.num_scheduled_tokens[one] for one in batch_req_state]
        return SimpleNamespace(req_ids=batch_req_state, num_scheduled_tokens=counts)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> str:
        counts = scheduler_output.num_scheduled_tokens
        ids = sorted(counts, key=lambda one: (counts[one], one))  # not as they were scheduled
        decodes = all(count == 1 for count in counts.values())
        if self._second:
            self.prepare_inputs(scheduler_output, ids)
            own = self.cudagraph_manager.dispatch(
                len(ids), len(ids), 1 if decodes and self._graphs else None, 0
            )
            mode = own.cg_mode
        else:
            self.input_batch.req_ids = ids
            mode, _ = self.cudagraph_dispatcher.dispatch(
                num_tokens=len(ids), uniform_decode=decodes and self._graphs
            )
        self.modes.append(mode)
        metadata = self._grown(ids, counts)
        if self.fail:
            raise RuntimeError("out of memory")
        if mode is not CUDAGraphMode.FULL:
            for layer in self.layers.values():
                self._run(layer, metadata)
        return "done"

    def _grown(self, ids: list[str], counts: dict[str, int]) -> Metadata:
        starts, lengths, tables = [0], [], torch.zeros(len(ids), 16, dtype=torch.int32)
        for at, one in enumerate(ids):
            sequence = self.sequences[one]
            for position in range(sequence.computed, sequence.computed + counts[one]):
                block = sequence.table[position // BLOCK]
                for layer in self.layers.values():
                    drawn = torch.randn(KV_HEADS, 2 * DIM, generator=self._draw)
                    layer.kv_cache[block, :, position % BLOCK] = drawn
            sequence.computed += counts[one]
            starts.append(starts[-1] + counts[one])
            lengths.append(sequence.computed)
            tables[at, : len(sequence.table)] = torch.tensor(sequence.table)
        return Metadata(torch.tensor(starts), torch.tensor(lengths), tables)

    def _run(self, layer: Any, metadata: Metadata) -> None:
        rows = int(metadata.query_start_loc[-1])
        query = torch.randn(rows, HEADS, DIM, generator=self._draw) * 2
        self.queries.append(query)
        output = torch.zeros(rows, HEADS, DIM)
        layer.impl.forward(layer, query, None, None, layer.kv_cache, metadata, output=output)

    # --- what happens to it in tests ---

    def step(self, new: dict[str, int] | None = None, **counts: int) -> str:
        """`new`: tokens of the prompts of requests that come with this step."""
        first = dict(new or {})
        for one, tokens in first.items():
            used = sum(len(sequence.table) for sequence in self.sequences.values())
            table = list(range(used, used + 16))[::-1]
            self.sequences[one] = Sequence(table, list(range(tokens)))
        cached = [one for one in counts if one not in first]
        return self.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=counts,
                scheduled_spec_decode_tokens={},
                scheduled_new_reqs=[
                    SimpleNamespace(
                        req_id=one,
                        num_computed_tokens=0,
                        prompt_token_ids=self.sequences[one].prompt,
                    )
                    for one in first
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=cached,
                    num_computed_tokens=[self.sequences[one].computed for one in cached],
                ),
            )
        )


def model(*windows: int | None) -> dict[str, Any]:
    return {
        f"model.layers.{number}.self_attn.attn": Attention(window)
        for number, window in enumerate(windows)
    }


def entropy(query_D: torch.Tensor, keys_SD: torch.Tensor, scale: float) -> float:
    """Of one row, written out in float64."""
    weights = torch.softmax((keys_SD.double() @ query_D.double()) * scale, 0).tolist()
    return -sum(one * math.log(one) for one in weights if one)
