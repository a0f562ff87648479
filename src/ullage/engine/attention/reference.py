"""The plain formula, one sequence at a time, with the matrix of scores written out.

The oracle of the other paths, and what a reader should read first. Slow: it holds every score.
"""

from __future__ import annotations

import math

import torch

from ullage.engine.attention.protocol import AttentionStep, first_visible, hidden
from ullage.engine.batch import Batch, Span
from ullage.engine.kv import KVCache
from ullage.engine.rule import AttentionRule


class ReferenceAttention:
    """softmax(cap(q·kᵀ·scale) + slope·(s − t))·v over what the rule lets a row see, float32."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def watches(self, batch: Batch) -> bool:  # noqa: ARG002
        return False

    def prepare(self, batch: Batch) -> AttentionStep:
        spans = batch.decodes + batch.prefills

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,  # noqa: ARG001
            v_TKD: torch.Tensor,  # noqa: ARG001
            rule: AttentionRule,
        ) -> torch.Tensor:
            out = torch.empty_like(q_THD)
            for span in spans:
                rows = slice(span.first, span.first + span.count)
                out[rows] = self._one(layer, span, q_THD[rows], rule)
            return out

        return attend

    def _one(
        self, layer: int, span: Span, q_THD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        block_size, group = self._kv.block_size, self._kv.layout.group_of[layer]
        block = first_visible(span, rule.window) // block_size
        first = block * block_size
        k_SKD, v_SKD = self._kv.read(layer, span.tables[group][block:])
        k_SKD, v_SKD = k_SKD[: span.context - first], v_SKD[: span.context - first]
        num_queries = q_THD.shape[1] // k_SKD.shape[1]
        k_SHD = k_SKD.repeat_interleave(num_queries, dim=1)
        v_SHD = v_SKD.repeat_interleave(num_queries, dim=1)
        rows_T1 = torch.arange(span.start, span.context)[:, None]
        positions_S = torch.arange(first, span.context)
        scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * rule.scale
        if rule.soft_cap is not None:
            scores_HTS = rule.soft_cap * torch.tanh(scores_HTS / rule.soft_cap)
        if rule.slopes:
            slopes_H11 = torch.tensor(rule.slopes)[:, None, None]
            scores_HTS = scores_HTS + slopes_H11 * (positions_S - rows_T1)
        hidden_TS = hidden(rows_T1, positions_S, rule.window)
        # What is hidden may hold anything: zero times NaN would be NaN.
        v_SHD = v_SHD.masked_fill(hidden_TS.all(0)[:, None, None], 0.0)
        weights_HTS = scores_HTS.masked_fill(hidden_TS, -math.inf).softmax(dim=-1)
        return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)
