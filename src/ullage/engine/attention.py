"""Attention over paged KV, behind one protocol: prepared once per step, called once per layer.

`ReferenceAttention` is the plain formula, one sequence at a time; `GatheredAttention` copies the
blocks of many sequences into a workspace that is allocated once and calls SDPA. Same results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ullage.engine.batch import Batch, Span
from ullage.engine.kv import KVCache


class AttentionStep(Protocol):
    """One step's attention: masks and indices are ready, each layer only computes."""

    def __call__(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] of what each row sees; this step's K and V are in the cache."""


class AttentionPath(Protocol):
    """A way to compute attention over a KV cache."""

    def prepare(self, batch: Batch) -> AttentionStep:
        """Everything that all layers of one step share."""


# --- the reference -------------------------------------------------------------------------------


class ReferenceAttention:
    """softmax(q·kᵀ·scale)·v with the matrix of scores written out, float32."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def prepare(self, batch: Batch) -> AttentionStep:
        spans = batch.decodes + batch.prefills

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,  # noqa: ARG001
            v_TKD: torch.Tensor,  # noqa: ARG001
            scale: float,
        ) -> torch.Tensor:
            out = torch.empty_like(q_THD)
            for span in spans:
                rows = slice(span.first, span.first + span.count)
                out[rows] = self._one(layer, span, q_THD[rows], scale)
            return out

        return attend

    def _one(self, layer: int, span: Span, q_THD: torch.Tensor, scale: float) -> torch.Tensor:
        table = torch.tensor(span.tables[self._kv.layout.group_of[layer]], dtype=torch.int64)
        k_SKD = self._kv.keys[layer][table].flatten(0, 1)[: span.context]
        v_SKD = self._kv.values[layer][table].flatten(0, 1)[: span.context]
        group = q_THD.shape[1] // k_SKD.shape[1]
        k_SHD = k_SKD.repeat_interleave(group, dim=1)
        v_SHD = v_SKD.repeat_interleave(group, dim=1)
        scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * scale
        seen_TS = _causal(span)
        weights_HTS = scores_HTS.masked_fill(~seen_TS, -math.inf).softmax(dim=-1)
        return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)


def _causal(span: Span) -> torch.Tensor:
    """bool [count, context]: row t sees positions 0 … start+t."""
    return torch.ones(span.count, span.context, dtype=torch.bool).tril(diagonal=span.start)


# --- gathered ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gather:
    """Sequences that run in one SDPA call: their blocks, padded to one length, and a float mask.

    `rows` of the batch; `blocks` int64 [sequences × blocks each]; `mask` broadcasts over
    [sequences, heads, queries, positions], None when nothing is hidden.
    """

    rows: slice
    num_sequences: int
    num_positions: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


class GatheredAttention:
    """Blocks are copied to a workspace, then SDPA with grouped KV heads reads them in one piece.

    Decodes are grouped so that padding at most doubles what is read. The workspace grows if it
    must and is never given back: fresh pages at every step cost up to twice the time.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        widest = max(shape.num_kv_heads * shape.head_dim for shape in kv.shapes)
        num_elements = kv.num_blocks * kv.block_size * widest
        self._workspace_k = torch.empty(num_elements, dtype=kv.keys[0].dtype)
        self._workspace_v = torch.empty(num_elements, dtype=kv.keys[0].dtype)

    def prepare(self, batch: Batch) -> AttentionStep:
        block_size = self._kv.block_size
        gathers = [_gather_decodes(g, block_size) for g in _similar_lengths(batch.decodes)]
        fresh = [span for span in batch.prefills if span.start == 0]
        gathers += [_gather_prefill(s, block_size) for s in batch.prefills if s.start > 0]

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,
            v_TKD: torch.Tensor,
            scale: float,
        ) -> torch.Tensor:
            out_THD = torch.empty_like(q_THD)
            for gather in gathers:
                k_BSKD, v_BSKD = self._gather(layer, gather)
                # Decodes: [sequences, heads, 1, dim]; a prefill: [1, heads, tokens, dim].
                q_BTHD = q_THD[gather.rows].view(gather.num_sequences, -1, *q_THD.shape[1:])
                out_BHTD = F.scaled_dot_product_attention(
                    q_BTHD.transpose(1, 2),
                    k_BSKD.transpose(1, 2),
                    v_BSKD.transpose(1, 2),
                    attn_mask=gather.mask,
                    scale=scale,
                    enable_gqa=True,
                )
                out_THD[gather.rows] = out_BHTD.transpose(1, 2).flatten(0, 1)
            for span in fresh:
                # A whole prompt so far: its keys are at hand, nothing to gather.
                rows = slice(span.first, span.first + span.count)
                out_HTD = F.scaled_dot_product_attention(
                    q_THD[rows].transpose(0, 1).unsqueeze(0),
                    k_TKD[rows].transpose(0, 1).unsqueeze(0),
                    v_TKD[rows].transpose(0, 1).unsqueeze(0),
                    is_causal=True,
                    scale=scale,
                    enable_gqa=True,
                )[0]
                out_THD[rows] = out_HTD.transpose(0, 1)
            return out_THD

        return attend

    def _gather(self, layer: int, gather: _Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [sequences, positions, kv_heads, dim], lying in the workspace."""
        shape = self._kv.keys[layer].shape[1:]
        num_elements = gather.blocks.numel() * shape.numel()
        if num_elements > self._workspace_k.numel():
            self._workspace_k = torch.empty(num_elements, dtype=self._workspace_k.dtype)
            self._workspace_v = torch.empty(num_elements, dtype=self._workspace_v.dtype)
        pieces = []
        for storage, workspace in (
            (self._kv.keys[layer], self._workspace_k),
            (self._kv.values[layer], self._workspace_v),
        ):
            target = workspace[:num_elements].view(gather.blocks.numel(), *shape)
            torch.index_select(storage, 0, gather.blocks, out=target)
            by_sequence = target.view(gather.num_sequences, -1, *shape[1:])
            pieces.append(by_sequence[:, : gather.num_positions])
        return pieces[0], pieces[1]


def _similar_lengths(decodes: tuple[Span, ...]) -> list[tuple[Span, ...]]:
    """Cut decodes (longest first) where the context falls under half of the group's longest."""
    groups: list[list[Span]] = []
    for span in decodes:
        if groups and 2 * span.context >= groups[-1][0].context:
            groups[-1].append(span)
        else:
            groups.append([span])
    return [tuple(group) for group in groups]


def _gather_decodes(spans: tuple[Span, ...], block_size: int) -> _Gather:
    longest = spans[0].context
    num_blocks = -(-longest // block_size)
    # Padding repeats the sequence's own first block; the mask hides it.
    blocks = [
        block
        for span in spans
        for block in span.tables[0] + span.tables[0][:1] * (num_blocks - len(span.tables[0]))
    ]
    contexts = torch.tensor([span.context for span in spans])
    mask = None
    if spans[-1].context < longest:
        hidden = torch.arange(longest)[None, :] >= contexts[:, None]
        mask = _as_bias(hidden)[:, None, None, :]
    rows = slice(spans[0].first, spans[-1].first + 1)
    index = torch.tensor(blocks, dtype=torch.int64)
    return _Gather(rows, len(spans), longest, index, mask)


def _gather_prefill(span: Span, block_size: int) -> _Gather:
    num_blocks = -(-span.context // block_size)
    index = torch.tensor(span.tables[0][:num_blocks], dtype=torch.int64)
    rows = slice(span.first, span.first + span.count)
    return _Gather(rows, 1, span.context, index, _as_bias(~_causal(span)))


def _as_bias(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -math.inf)


ATTENTION_PATHS: Mapping[str, type[ReferenceAttention] | type[GatheredAttention]] = {
    "gathered": GatheredAttention,
    "reference": ReferenceAttention,
}
