"""Gathered attention: blocks are copied side by side, then one SDPA call reads many sequences.

Holds the workspace, the gathering and the masks. PyTorch does the arithmetic, except under a soft
cap, which SDPA does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ullage.engine.attention.protocol import AttentionStep, first_visible, hidden
from ullage.engine.batch import Batch, Span
from ullage.engine.kv import KVCache
from ullage.engine.rule import AttentionRule


@dataclass(frozen=True, slots=True)
class _Gather:
    """Sequences that run in one call: their visible blocks, padded to one length, and a bias.

    `rows` of the batch; `blocks` int64 [sequences × blocks each]; `bias` broadcasts over
    [sequences, heads, queries, positions], None when nothing is hidden. `behind` are the gathered
    positions past the end of a sequence: whoever had the block before may have left NaN there,
    which no bias hides.
    """

    rows: slice
    num_sequences: int
    num_positions: int
    blocks: torch.Tensor
    bias: torch.Tensor | None
    behind: torch.Tensor


_Fill = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, AttentionRule, torch.Tensor], None]


class GatheredAttention:
    """Blocks are copied to a workspace, then SDPA with grouped KV heads reads them in one piece.

    Decodes are grouped so that padding at most doubles what is read. The workspace grows if it
    must and is never given back: fresh pages at every step cost up to twice the time.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        widest = max(shape.num_kv_heads * shape.head_dim for shape in kv.shapes)
        num_elements = kv.num_blocks * kv.block_size * widest
        self._workspace_k = torch.empty(num_elements)
        self._workspace_v = torch.empty(num_elements)

    def watches(self, batch: Batch) -> bool:  # noqa: ARG002
        return False

    def prepare(self, batch: Batch) -> AttentionStep:
        fill = self.prepare_into(batch)

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,
            v_TKD: torch.Tensor,
            rule: AttentionRule,
        ) -> torch.Tensor:
            out_THD = torch.empty_like(q_THD)
            fill(layer, q_THD, k_TKD, v_TKD, rule, out_THD)
            return out_THD

        return attend

    def prepare_into(self, batch: Batch) -> _Fill:
        """As `prepare`, but the step writes the batch's rows into the tensor given last."""
        plans: dict[tuple[int, AttentionRule], list[_Gather]] = {}
        # What a lossy cache gives back must not depend on how a prompt was cut into chunks.
        is_exact = self._kv.format.is_exact
        fresh = [span for span in batch.prefills if span.start == 0 and is_exact]

        def fill(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,
            v_TKD: torch.Tensor,
            rule: AttentionRule,
            out_THD: torch.Tensor,
        ) -> None:
            group = self._kv.layout.group_of[layer]
            if (group, rule) not in plans:
                plans[group, rule] = _plan(batch, fresh, group, rule, self._kv.block_size)
            for gather in plans[group, rule]:
                k_BSKD, v_BSKD = self._gather(layer, gather)
                # Decodes: [sequences, heads, 1, dim]; a prefill: [1, heads, tokens, dim].
                q_BTHD = q_THD[gather.rows].view(gather.num_sequences, -1, *q_THD.shape[1:])
                out_BTHD = _attend(q_BTHD, k_BSKD, v_BSKD, gather.bias, rule)
                out_THD[gather.rows] = out_BTHD.flatten(0, 1)
            for span in fresh:
                # A whole prompt so far: its keys are at hand, nothing to gather.
                rows = slice(span.first, span.first + span.count)
                q_BTHD, k_BSKD, v_BSKD = (x[rows].unsqueeze(0) for x in (q_THD, k_TKD, v_TKD))
                plain = not rule.slopes and rule.soft_cap is None
                causal = plain and (rule.window is None or span.count <= rule.window)
                bias = None if causal else _bias((span,), [0], span.count, rule)
                out_THD[rows] = _attend(q_BTHD, k_BSKD, v_BSKD, bias, rule, causal=causal)[0]

        return fill

    def _gather(self, layer: int, gather: _Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [sequences, positions, kv_heads, dim], lying in the workspace."""
        shape = self._kv.shapes[layer]
        size = (self._kv.block_size, shape.num_kv_heads, shape.head_dim)
        num_elements = gather.blocks.numel() * math.prod(size)
        if num_elements > self._workspace_k.numel():
            self._workspace_k = torch.empty(num_elements)
            self._workspace_v = torch.empty(num_elements)
        k_NBKD, v_NBKD = (
            workspace[:num_elements].view(gather.blocks.numel(), *size)
            for workspace in (self._workspace_k, self._workspace_v)
        )
        self._kv.gather(layer, gather.blocks, k_NBKD, v_NBKD)
        if len(gather.behind):
            for x_NBKD in (k_NBKD, v_NBKD):
                x_NBKD.flatten(0, 1).index_fill_(0, gather.behind, 0.0)
        k_BSKD, v_BSKD = (
            x.view(gather.num_sequences, -1, *size[1:])[:, : gather.num_positions]
            for x in (k_NBKD, v_NBKD)
        )
        return k_BSKD, v_BSKD


def _attend(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    bias: torch.Tensor | None,
    rule: AttentionRule,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """[sequences, queries, heads, dim]; `bias` is added to the scores after scale and cap."""
    q_BHTD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    if rule.soft_cap is None:
        out_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            attn_mask=bias,
            is_causal=causal,
            scale=rule.scale,
            enable_gqa=True,
        )
        return out_BHTD.transpose(1, 2)
    group = q_BHTD.shape[1] // k_BKSD.shape[1]
    k_BHSD = k_BKSD.repeat_interleave(group, dim=1)
    v_BHSD = v_BKSD.repeat_interleave(group, dim=1)
    scores_BHTS = torch.matmul(q_BHTD, k_BHSD.transpose(2, 3)).mul_(rule.scale / rule.soft_cap)
    scores_BHTS = scores_BHTS.tanh_().mul_(rule.soft_cap)
    if bias is not None:
        scores_BHTS += bias
    return torch.matmul(scores_BHTS.softmax(-1), v_BHSD).transpose(1, 2)


def _plan(
    batch: Batch, fresh: list[Span], group: int, rule: AttentionRule, block_size: int
) -> list[_Gather]:
    alike = _similar_lengths(batch.decodes, rule.window)
    alike += [(span,) for span in batch.prefills if span not in fresh]
    return [_gather_plan(spans, group, rule, block_size) for spans in alike]


def _similar_lengths(decodes: tuple[Span, ...], window: int | None) -> list[tuple[Span, ...]]:
    """Cut decodes (longest first) where less than half of the group's longest is seen."""
    groups: list[list[Span]] = []
    for span in decodes:
        seen = span.context - first_visible(span, window)
        if groups and 2 * seen >= groups[-1][0].context - first_visible(groups[-1][0], window):
            groups[-1].append(span)
        else:
            groups.append([span])
    return [tuple(group) for group in groups]


def _gather_plan(
    spans: tuple[Span, ...], group: int, rule: AttentionRule, block_size: int
) -> _Gather:
    firsts = [first_visible(span, rule.window) // block_size for span in spans]
    num_positions = max(
        span.context - first * block_size for span, first in zip(spans, firsts, strict=True)
    )
    num_blocks = -(-num_positions // block_size)
    blocks: list[int] = []
    for span, first in zip(spans, firsts, strict=True):
        own = span.tables[group][first : first + num_blocks]
        # Padding repeats the sequence's own last block; the bias hides it.
        blocks += own + own[-1:] * (num_blocks - len(own))
    starts = [first * block_size for first in firsts]
    bias = _bias(spans, starts, num_positions, rule)
    rows = slice(spans[0].first, spans[-1].first + spans[-1].count)
    index = torch.tensor(blocks, dtype=torch.int64)
    each = num_blocks * block_size
    behind = [
        position
        for n, (span, start) in enumerate(zip(spans, starts, strict=True))
        for position in range(n * each + span.context - start, n * each + num_positions)
    ]
    return _Gather(
        rows, len(spans), num_positions, index, bias, torch.tensor(behind, dtype=torch.int64)
    )


def _bias(
    spans: tuple[Span, ...], starts: list[int], num_positions: int, rule: AttentionRule
) -> torch.Tensor | None:
    """Float [sequences, 1 or heads, queries, positions]: −inf where hidden, else ALiBi's share.

    Sequence i's positions begin at starts[i]; all spans have as many rows.
    """
    rows_BT = torch.tensor([range(span.start, span.context) for span in spans])
    positions_BS = torch.tensor(starts)[:, None] + torch.arange(num_positions)
    hidden_BTS = hidden(rows_BT[:, :, None], positions_BS[:, None, :], rule.window)
    if rule.slopes:
        distance_BTS = positions_BS[:, None, :] - rows_BT[:, :, None]
        bias_BHTS = torch.tensor(rule.slopes)[:, None, None] * distance_BTS[:, None]
        return bias_BHTS.masked_fill_(hidden_BTS[:, None], -math.inf)
    if not hidden_BTS.any():
        return None
    bias_BTS = torch.zeros(hidden_BTS.shape).masked_fill_(hidden_BTS, -math.inf)
    return bias_BTS[:, None]
