"""Paged attention in machine code: blocks are read where they lie, whatever they are stored as.

Holds the arrays that `kernels.attention_batch` wants, made once per step. Long prefill chunks are
left to `gathered`, whose matrix products win there. Needs numba; takes every rule, and heads of a
multiple of 8 dimensions (16 for int4).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ullage.engine.attention.gathered import GatheredAttention
from ullage.engine.attention.protocol import AttentionStep
from ullage.engine.attention.row_blocks import block_tables, num_parts, row_blocks
from ullage.engine.batch import Batch
from ullage.engine.kernels.attention import EXTRA
from ullage.engine.kernels.attention_batch import attend_batch
from ullage.engine.kernels.product import team
from ullage.engine.kv import KVCache
from ullage.engine.kv.codecs import turned
from ullage.engine.rule import AttentionRule

# Prefill chunks of this many rows are gathered: SDPA's matrix products beat row by row there.
LEAST_GATHERED = 32


class PagedAttention:
    """Every row reads its sequence's blocks; the room to work in grows if it must and is kept."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._team = team()
        self._storage = [
            tuple(
                _as_array(x)
                for x in (kv.keys[n], kv.key_scales[n], kv.values[n], kv.value_scales[n])
            )
            for n in range(len(kv.shapes))
        ]
        self._gathered = GatheredAttention(kv)
        self._states = np.empty(0, np.float32)
        self._slopes: dict[AttentionRule, npt.NDArray[np.float32]] = {}

    def watches(self, batch: Batch) -> bool:  # noqa: ARG002
        return False

    def prepare(self, batch: Batch) -> AttentionStep:
        long = tuple(span for span in batch.prefills if span.count >= LEAST_GATHERED)
        fill = self._gathered.prepare_into(replace(batch, decodes=(), prefills=long))
        spans = batch.decodes + tuple(s for s in batch.prefills if s.count < LEAST_GATHERED)
        blocks_N4 = row_blocks(spans)
        tables_GBW = block_tables(spans, len(self._kv.layout.groups))
        longest = max((span.context for span in spans), default=0)

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,
            v_TKD: torch.Tensor,
            rule: AttentionRule,
        ) -> torch.Tensor:
            tokens, heads, dim = q_THD.shape
            kv_heads = self._kv.shapes[layer].num_kv_heads
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            fill(layer, q_THD, k_TKD, v_TKD, rule, out_THD)
            if not spans:
                return out_THD
            # Keys of four bits are stored turned, and a product wants both sides alike.
            q_TO = turned(q_THD) if self._kv.format.bits == 4 else q_THD
            if rule not in self._slopes:
                self._slopes[rule] = np.array(rule.slopes, np.float32)
            seen = longest if rule.window is None else min(longest, rule.window)
            parts = num_parts(len(blocks_N4) * kv_heads, seen, self._team.num_threads)
            size = (tokens, kv_heads, parts, heads // kv_heads, dim + EXTRA)
            if self._states.size < math.prod(size):
                self._states = np.empty(math.prod(size), np.float32)
            self._team.run(
                attend_batch,
                2,
                blocks_N4,
                q_TO.reshape(tokens, -1).numpy(),
                heads // kv_heads,
                *self._storage[layer],
                tables_GBW[self._kv.layout.group_of[layer]],
                np.float32(rule.scale),
                np.float32(rule.soft_cap or 0),
                rule.window or 0,
                self._slopes[rule],
                parts,
                self._states[: math.prod(size)].reshape(size),
                out_THD.view(tokens, -1).numpy(),
            )
            return out_THD

        return attend


def _as_array(x: torch.Tensor) -> npt.NDArray[np.generic]:
    """numpy knows no bfloat16: its patterns."""
    return x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy()
