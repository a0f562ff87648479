"""Attention probed in the embedded engine: any of its paths, watched at sampled rows.

Holds the path that watches another, and the reading of a whole prompt. The arithmetic is
`entropy`; models that the engine does not run are read by `through_transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ullage.anatomy import load
from ullage.engine.attention import AttentionPath, AttentionStep, choose_path
from ullage.engine.attention.protocol import first_visible
from ullage.engine.batch import Batch, Span, build_batch
from ullage.engine.compiled import DTYPES
from ullage.engine.kv import KVCache
from ullage.engine.linear import LINEARS
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.engine.options import EngineOptions
from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.layout import kv_layout
from ullage.engine.paging.tables import Tables, blocks_of_group
from ullage.engine.request import Request, SamplingParams
from ullage.engine.rule import AttentionRule
from ullage.engine.scheduling.scheduler import Plan, Work
from ullage.errors import BadUsage
from ullage.probes.attention.entropy import HeadTotals, RowReadings, attention_rows
from ullage.probes.attention.readings import AttentionReading, LayerReading

SOURCE = "embedded engine"
# The engine's path unless another is asked for; where all rows are read, one pass does both.
DEFAULT = "gathered"
# Positions that are decoded at once from a cache that stores them small.
_PIECE = 512


@dataclass(frozen=True, slots=True)
class Sampled:
    """Query rows of one sequence in a batch, by position: each lies within its span."""

    span: Span
    positions: tuple[int, ...]


Choose = Callable[[Batch], Iterable[Sampled]]
Take = Callable[[int, Sampled, RowReadings], None]


class ProbedAttention:
    """Another path, and `take(layer, sampled, readings)` for the rows that `choose` picks.

    The path's output is untouched. A step of which nothing is chosen is the other path's own, or
    the compiled step's; `choose` is asked once for each step.
    """

    def __init__(
        self,
        inner: AttentionPath,
        kv: KVCache,
        choose: Choose,
        take: Take,
        layers: Collection[int] | None = None,
    ) -> None:
        """`layers` None: all."""
        self._inner, self._kv = inner, kv
        self._choose, self._take, self._layers = choose, take, layers
        self._chosen: tuple[Batch, list[Sampled]] | None = None

    def watches(self, batch: Batch) -> bool:
        """Whether anything of the step is read: then it must run through this path."""
        return bool(self._sampled(batch))

    def _sampled(self, batch: Batch) -> list[Sampled]:
        if self._chosen is None or self._chosen[0] is not batch:
            self._chosen = (batch, [one for one in self._choose(batch) if one.positions])
        return self._chosen[1]

    def prepare(self, batch: Batch) -> AttentionStep:
        step = self._inner.prepare(batch)
        sampled = self._sampled(batch)
        self._chosen = None
        if not sampled:
            return step

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,
            v_TKD: torch.Tensor,
            rule: AttentionRule,
        ) -> torch.Tensor:
            out_THD = step(layer, q_THD, k_TKD, v_TKD, rule)
            if self._layers is None or layer in self._layers:
                for one in sampled:
                    self._take(layer, one, self._read(layer, one, q_THD, rule))
            return out_THD

        return attend

    def _read(
        self, layer: int, one: Sampled, q_THD: torch.Tensor, rule: AttentionRule
    ) -> RowReadings:
        rows_R = torch.tensor(one.positions)
        q_RHD = q_THD.index_select(0, rows_R + (one.span.first - one.span.start))
        return attention_rows(q_RHD, self._pieces(layer, one, rule.window), rows_R, rule)

    def _pieces(
        self, layer: int, one: Sampled, window: int | None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The keys that any of the rows sees, read where they lie, as attention reads them."""
        end = max(one.positions) + 1
        for at, blocks in _seen_blocks(self._kv, layer, one.span, window, end):
            yield at, self._kv.read_keys(layer, blocks)[: end - at]


class WholeAttention:
    """An attention path that reads every row on the way, as `ProbedAttention` reads some.

    Its output comes of the same pass over the keys, which takes less than SDPA and another would.
    """

    def __init__(self, kv: KVCache, take: Take, layers: Collection[int] | None = None) -> None:
        """`layers` None: all are told of."""
        self._kv, self._take, self._layers = kv, take, layers

    def watches(self, batch: Batch) -> bool:  # noqa: ARG002
        """Every row of every step is read."""
        return True

    def prepare(self, batch: Batch) -> AttentionStep:
        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,  # noqa: ARG001
            v_TKD: torch.Tensor,  # noqa: ARG001
            rule: AttentionRule,
        ) -> torch.Tensor:
            out_THD = torch.empty_like(q_THD)
            for span in batch.decodes + batch.prefills:
                rows = slice(span.first, span.first + span.count)
                positions = range(span.start, span.context)
                pieces = self._pieces(layer, span, rule.window)
                found = attention_rows(q_THD[rows], pieces, torch.tensor(positions), rule)
                assert found.output_RHD is not None
                out_THD[rows] = found.output_RHD
                if self._layers is None or layer in self._layers:
                    one = Sampled(span, tuple(positions))
                    self._take(layer, one, replace(found, output_RHD=None))
            return out_THD

        return attend

    def _pieces(
        self, layer: int, span: Span, window: int | None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for at, blocks in _seen_blocks(self._kv, layer, span, window, span.context):
            k_SKD, v_SKD = self._kv.read(layer, blocks)
            yield at, k_SKD[: span.context - at], v_SKD[: span.context - at]


def _seen_blocks(
    kv: KVCache, layer: int, span: Span, window: int | None, end: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Some of the blocks at a time that rows before `end` see, with the first's position."""
    size = kv.block_size
    table = span.tables[kv.layout.group_of[layer]]
    last = -(-end // size)
    step = max(_PIECE // size, 1)
    for at in range(first_visible(span, window) // size, last, step):
        yield at * size, table[at : min(at + step, last)]


def spread_rows(num_tokens: int, count: int | None) -> tuple[int, ...]:
    """`count` positions of a prompt at even distances, the last one among them; None: all."""
    if count is None or count >= num_tokens:
        return tuple(range(num_tokens))
    return tuple((index + 1) * num_tokens // count - 1 for index in range(count))


def read_prompt(
    model: str | Path,
    prompt_ids: tuple[int, ...],
    *,
    name: str | None = None,
    rows: int | None = None,
    layers: Collection[int] | None = None,
    options: EngineOptions | None = None,
) -> AttentionReading:
    """How every head of `model` attends to a prompt, at `rows` positions (None: all).

    The prompt runs in chunks of `options.max_num_batched_tokens`, keys and values stored as they
    would be served. Raises UnsupportedModel for a spec that the engine would not run exactly,
    BadUsage for a prompt that is empty or longer than the model's positions.
    """
    options = options or EngineOptions(attention=DEFAULT)
    found = load(model)
    spec = found.anatomy.spec
    # Without a limit of its own, as under ALiBi, a model takes what it is given.
    limited = spec.max_positions > 0 or options.max_model_len is not None
    max_model_len = options.resolve_max_model_len(spec) if limited else len(prompt_ids)
    require_prompt(prompt_ids, max_model_len, spec.vocab_size)
    decoder = Decoder(
        spec,
        Weights(found),
        LINEARS[options.quantization],
        max_model_len,
        DTYPES[options.dtype],
    )
    wanted = set(spread_rows(len(prompt_ids), rows))
    seen: dict[int, HeadTotals] = {}

    def choose(batch: Batch) -> Iterator[Sampled]:
        for span in batch.decodes + batch.prefills:
            inside = range(span.start, span.start + span.count)
            yield Sampled(span, tuple(position for position in inside if position in wanted))

    def take(layer: int, sampled: Sampled, readings: RowReadings) -> None:  # noqa: ARG001
        seen.setdefault(layer, HeadTotals()).add(readings)

    def path(kv: KVCache) -> AttentionPath:
        if options.attention == DEFAULT and len(wanted) == len(prompt_ids):
            return WholeAttention(kv, take, layers)
        return ProbedAttention(choose_path(options.attention, kv)[1], kv, choose, take, layers)

    _run(decoder, prompt_ids, options, path)
    return AttentionReading(
        str(model) if name is None else name,
        SOURCE,
        len(prompt_ids),
        len(wanted),
        tuple(LayerReading(layer, seen[layer].readings()) for layer in sorted(seen)),
    )


def require_prompt(prompt_ids: tuple[int, ...], max_model_len: int, vocab_size: int) -> None:
    """Raise BadUsage for a prompt that the model has no positions or no embeddings for."""
    if not prompt_ids:
        raise BadUsage("no tokens", field="prompt", expected="at least one")
    if len(prompt_ids) > max_model_len:
        raise BadUsage(
            f"{len(prompt_ids)} tokens", field="prompt", expected=f"at most {max_model_len}"
        )
    if not all(0 <= token_id < vocab_size for token_id in prompt_ids):
        raise BadUsage(
            f"token {max(prompt_ids)}", field="prompt", expected=f"ids below {vocab_size}"
        )


def _run(
    decoder: Decoder,
    prompt_ids: tuple[int, ...],
    options: EngineOptions,
    path: Callable[[KVCache], AttentionPath],
) -> None:
    """The prompt through the decoder, in a cache that holds just this."""
    layout = kv_layout(decoder.windows, decoder.kv_shapes)
    size, chunk = options.block_size, options.max_num_batched_tokens
    num_blocks = sum(
        blocks_of_group(len(prompt_ids), group.window, chunk, size) for group in layout.groups
    )
    kv = KVCache(decoder.kv_shapes, layout, num_blocks, size, options.kv_format)
    tables = Tables(BlockPool(num_blocks, size), layout.groups, chunk, caching=False)
    attention = path(kv)
    request = Request("probe", prompt_ids, SamplingParams())
    while request.num_uncomputed > 0:
        count = min(request.num_uncomputed, chunk)
        tables.slide(request)
        tables.extend(request, count)
        work = Work(
            request, request.num_computed, count, tuple(map(tuple, request.tables)), samples=True
        )
        decoder.forward(build_batch(Plan((work,)), size), kv, attention)
        request.num_computed += count
