"""Attention of one layer as single calls: naive, SDPA, and the engine's paths over paged KV.

Holds the building of inputs and calls; timing is `timing.py`, peak memory `peak.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ullage.engine.attention import ATTENTION_PATHS
from ullage.engine.batch import build_batch
from ullage.engine.kv import KVCache, KVShape
from ullage.engine.paging.layout import kv_layout
from ullage.engine.request import Request, SamplingParams
from ullage.engine.rule import AttentionRule
from ullage.engine.scheduling.scheduler import Plan, Work

NAIVE, SDPA, PAGED = "naive", "sdpa", "paged"
WORDS = {NAIVE: "naive: scores written out", SDPA: "SDPA, KV in one piece"}
BLOCK_SIZE = 16
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """Attention of `batch` sequences of `context` tokens: all rows (a prompt) or only the last."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    context: int
    prefill: bool

    @property
    def num_queries(self) -> int:
        return self.context if self.prefill else 1

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def engine_paths() -> tuple[str, ...]:
    """The engine's own paths that read paged KV for real work, the fastest first."""
    found = [name for name in (PAGED, "gathered") if name in ATTENTION_PATHS]
    assert found, "the engine has a path over paged KV"
    return tuple(found)


def path_words(name: str) -> str:
    return WORDS.get(name) or f"paged KV, {name}"


def attention_call(name: str, job: Job) -> Call:
    """Computes the job once, [batch × queries, heads, head_dim]; equal for all names."""
    draw = torch.Generator().manual_seed(3)

    def tensor(heads: int, length: int) -> torch.Tensor:
        return torch.randn(job.batch, length, heads, job.head_dim, generator=draw)

    q_BTHD = tensor(job.num_heads, job.num_queries)
    k_BSKD, v_BSKD = tensor(job.num_kv_heads, job.context), tensor(job.num_kv_heads, job.context)
    if name == NAIVE:
        return _naive(job, q_BTHD, k_BSKD, v_BSKD)
    if name == SDPA:
        return _sdpa(job, q_BTHD, k_BSKD, v_BSKD)
    return _paged(name, job, q_BTHD, k_BSKD, v_BSKD)


def _naive(job: Job, q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor) -> Call:
    group = job.num_heads // job.num_kv_heads
    seen_TS = torch.ones(job.num_queries, job.context, dtype=torch.bool)
    seen_TS = seen_TS.tril(diagonal=job.context - job.num_queries)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        k_BSHD = k_BSKD.repeat_interleave(group, dim=2)
        v_BSHD = v_BSKD.repeat_interleave(group, dim=2)
        scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD) * job.scale
        weights_BHTS = scores_BHTS.masked_fill(~seen_TS, -math.inf).softmax(dim=-1)
        return torch.einsum("bhts,bshd->bthd", weights_BHTS, v_BSHD).flatten(0, 1)

    return call


def _sdpa(job: Job, q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor) -> Call:
    @torch.inference_mode()
    def call() -> torch.Tensor:
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            is_causal=job.prefill,
            scale=job.scale,
            enable_gqa=True,
        )
        return out_BHTD.transpose(1, 2).flatten(0, 1)

    return call


def _paged(
    name: str, job: Job, q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor
) -> Call:
    """The engine's path: K and V lie in blocks in random order, as after a while of serving."""
    each = -(-job.context // BLOCK_SIZE)
    shapes = (KVShape(job.num_kv_heads, job.head_dim),)
    kv = KVCache(shapes, kv_layout([None], shapes), job.batch * each, BLOCK_SIZE)
    blocks = list(range(job.batch * each))
    random.Random(5).shuffle(blocks)  # noqa: S311 - repeatable, not secret
    work = tuple(
        Work(
            Request(str(b), (0,) * job.context, SamplingParams()),
            job.context - job.num_queries,
            job.num_queries,
            (tuple(blocks[b * each : (b + 1) * each]),),
            samples=True,
        )
        for b in range(job.batch)
    )
    for b in range(job.batch):
        table = torch.tensor(blocks[b * each : (b + 1) * each])
        slots_BS = table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        kv.write(0, slots_BS.flatten()[: job.context], k_BSKD[b], v_BSKD[b])
    batch = build_batch(Plan(work), BLOCK_SIZE)
    path = ATTENTION_PATHS[name](kv)
    rule = AttentionRule(job.scale)
    first = job.context - job.num_queries
    q_THD = q_BTHD.flatten(0, 1)
    k_TKD, v_TKD = k_BSKD[:, first:].flatten(0, 1), v_BSKD[:, first:].flatten(0, 1)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        return path.prepare(batch)(0, q_THD, k_TKD, v_TKD, rule)

    return call
