"""A plan as tensors: ragged token ids, positions, KV slots, and the sequences they belong to.

Pure translation of the scheduler's `Plan`; nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage.engine.lora import LoraAdapter, Rows, rows_by_adapter
from ullage.engine.request import Request
from ullage.engine.scheduling.scheduler import Plan, Work


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in the batch: rows first … first+count−1 are positions start … start+count−1.

    `tables` has one block table per group of the KV layout. An entry is FREED where no row of the
    span may look any more.
    """

    first: int
    count: int
    start: int
    tables: tuple[tuple[int, ...], ...]

    @property
    def context(self) -> int:
        """Tokens that the last row may see, itself included."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """All int64. `decodes` are spans of one row, longest context first; they fill the first rows.

    `slots` has one entry per group of the KV layout: where each row's key and value go.
    `sampled_rows` are the rows whose logits are wanted: for `sampled` in the same order, then for
    `proved`, the prompts that go on in a later step; their logits only show that the numbers so
    far are good. `lora` says which rows an adapter changes, `sampled_lora` which of the sampled.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    decodes: tuple[Span, ...]
    prefills: tuple[Span, ...]
    sampled_rows: torch.Tensor
    sampled: tuple[Request, ...]
    proved: tuple[Request, ...] = ()
    lora: tuple[Rows, ...] = ()
    sampled_lora: tuple[Rows, ...] = ()


def build_batch(plan: Plan, block_size: int) -> Batch:
    """The plan's work as one batch of plan.num_tokens rows."""
    decodes = [work for work in plan.work if work.count == 1]
    decodes.sort(key=lambda work: -work.start)
    prefills = [work for work in plan.work if work.count > 1]
    token_ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    rows: list[int] = []
    proved_rows: list[int] = []
    sampled: list[Request] = []
    proved: list[Request] = []
    adapters: list[LoraAdapter | None] = []
    for work in decodes + prefills:
        spans.append(Span(len(token_ids), work.count, work.start, work.tables))
        token_ids += work.request.tokens(work.start, work.count)
        positions += range(work.start, work.start + work.count)
        adapters += [work.request.lora] * work.count
        if work.samples:
            rows.append(len(token_ids) - 1)
            sampled.append(work.request)
        else:
            proved_rows.append(len(token_ids) - 1)
            proved.append(work.request)
    return Batch(
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        _slots(decodes + prefills, block_size),
        tuple(spans[: len(decodes)]),
        tuple(spans[len(decodes) :]),
        torch.tensor(rows + proved_rows, dtype=torch.int64),
        tuple(sampled),
        tuple(proved),
        rows_by_adapter(adapters),
        rows_by_adapter([request.lora for request in sampled + proved]),
    )


def _slots(all_work: list[Work], block_size: int) -> tuple[torch.Tensor, ...]:
    """Per group the slot of every row, int64: block × block_size + offset."""
    num_groups = len(all_work[0].tables) if all_work else 0
    return tuple(
        torch.tensor(
            [
                work.tables[group][position // block_size] * block_size + position % block_size
                for work in all_work
                for position in range(work.start, work.start + work.count)
            ],
            dtype=torch.int64,
        )
        for group in range(num_groups)
    )
