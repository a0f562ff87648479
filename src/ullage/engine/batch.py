"""A plan as tensors: ragged token ids, positions, KV slots, and the sequences they belong to.

Pure translation of the scheduler's `Plan`; nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage.engine.lora import LoraAdapter, Rows, rows_by_adapter
from ullage.engine.request import Request
from ullage.engine.scheduler import Plan, Work


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in the batch: rows first … first+count−1 are positions start … start+count−1."""

    first: int
    count: int
    start: int
    table: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens that the last row may see, itself included."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """All int64. `decodes` are spans of one row, longest context first; they fill the first rows.

    `sampled_rows` are the rows whose logits are wanted, for `sampled` in the same order. `lora`
    says which rows an adapter changes, `sampled_lora` which of the sampled ones.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    decodes: tuple[Span, ...]
    prefills: tuple[Span, ...]
    sampled_rows: torch.Tensor
    sampled: tuple[Request, ...]
    lora: tuple[Rows, ...] = ()
    sampled_lora: tuple[Rows, ...] = ()


def build_batch(plan: Plan, block_size: int) -> Batch:
    """The plan's work as one batch of plan.num_tokens rows."""
    decodes = [work for work in plan.work if work.count == 1]
    decodes.sort(key=lambda work: -work.start)
    prefills = [work for work in plan.work if work.count > 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    rows: list[int] = []
    sampled: list[Request] = []
    adapters: list[LoraAdapter | None] = []
    for work in decodes + prefills:
        spans.append(Span(len(token_ids), work.count, work.start, work.table))
        token_ids += work.request.tokens(work.start, work.count)
        positions += range(work.start, work.start + work.count)
        slots += _slots(work, block_size)
        adapters += [work.request.lora] * work.count
        if work.samples:
            rows.append(len(token_ids) - 1)
            sampled.append(work.request)
    return Batch(
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        tuple(spans[: len(decodes)]),
        tuple(spans[len(decodes) :]),
        torch.tensor(rows, dtype=torch.int64),
        tuple(sampled),
        rows_by_adapter(adapters),
        rows_by_adapter([request.lora for request in sampled]),
    )


def _slots(work: Work, block_size: int) -> list[int]:
    return [
        work.table[position // block_size] * block_size + position % block_size
        for position in range(work.start, work.start + work.count)
    ]
