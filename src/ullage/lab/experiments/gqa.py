"""KV heads against bytes and time, the query heads staying as many.

Holds the experiment on one layer's decode attention; the calls are `kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage.engine.kv import KVCache, KVShape
from ullage.engine.paging.layout import kv_layout
from ullage.lab.kernels import BLOCK_SIZE, Job, attention_call, engine_paths
from ullage.lab.result import Axis, Column, Lines, Result, Series, Table
from ullage.lab.setting import Setting
from ullage.lab.shape import AttentionShape, attention_shape
from ullage.lab.timing import race
from ullage.lab.units import times
from ullage.pages.words import byte_size

BATCH, CONTEXT = 8, 2048
QUICK_BATCH, QUICK_CONTEXT = 2, 256
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One number of KV heads: bytes per token of all layers, modelled and as the cache has them."""

    num_kv_heads: int
    modelled_bytes: int
    measured_bytes: int
    seconds: float


def run(setting: Setting) -> Result:
    shape = attention_shape(setting.model)
    batch, context = (QUICK_BATCH, QUICK_CONTEXT) if setting.quick else (BATCH, CONTEXT)
    path = engine_paths()[0]
    divisors = [n for n in range(1, shape.num_heads + 1) if shape.num_heads % n == 0]
    setting.progress(f"gqa: {', '.join(map(str, divisors))} KV heads")
    jobs = {
        n: Job(shape.num_heads, n, shape.head_dim, batch, context, prefill=False) for n in divisors
    }
    calls = {str(n): attention_call(path, job) for n, job in jobs.items()}
    for n, job in jobs.items():
        expected = attention_call("sdpa", job)()
        assert torch.allclose(calls[str(n)](), expected, atol=1e-4), "wrong attention"
    timings = race(calls, budget_s=0.5 if setting.quick else 8.0)
    rows = [
        Row(
            n,
            2 * n * shape.head_dim * FLOAT32_BYTES * shape.num_layers,
            _cache_bytes(shape, n),
            timings[str(n)],
        )
        for n in divisors
    ]
    return Result(
        name="gqa",
        learnt=_learnt(shape, rows),
        how=(
            f"{shape.num_heads} query heads of {shape.head_dim} over fewer and fewer KV heads; "
            f"bytes of {shape.num_layers} layers in float32.",
            f"Time: one layer's attention while {batch} sequences of {context:,} tokens decode, "
            f"the engine's {path!r} path, random numbers (which do not change the time), fastest "
            "of rounds in which the variants take turns.",
        ),
        tables=(_table(rows),),
        plots=_plots(rows),
        data={
            "batch": batch,
            "context": context,
            "path": path,
            "model_num_kv_heads": shape.num_kv_heads,
            "rows": [
                {
                    "num_kv_heads": row.num_kv_heads,
                    "modelled_bytes_per_token": row.modelled_bytes,
                    "measured_bytes_per_token": row.measured_bytes,
                    "seconds": row.seconds,
                }
                for row in rows
            ],
        },
    )


def _cache_bytes(shape: AttentionShape, num_kv_heads: int) -> int:
    """What the engine's own cache allocates per token, all layers."""
    shapes = (KVShape(num_kv_heads, shape.head_dim),) * shape.num_layers
    kv = KVCache(shapes, kv_layout([None] * len(shapes), shapes), 1, BLOCK_SIZE)
    return kv.num_bytes // BLOCK_SIZE


def _table(rows: list[Row]) -> Table:
    most = rows[-1]
    return Table(
        "KV heads, bytes, time",
        (
            Column("KV heads", source=""),
            Column("KV bytes per token", "bytes", "modelled: 2 × KV heads × head_dim × 4 × layers"),
            Column("allocated", "bytes", "measured: the engine's cache"),
            Column("time of a layer", "s"),
            Column("bytes saved", "times", "quotient"),
            Column("faster", "times", "quotient"),
        ),
        tuple(
            (
                row.num_kv_heads,
                row.modelled_bytes,
                row.measured_bytes,
                row.seconds,
                most.measured_bytes / row.measured_bytes,
                most.seconds / row.seconds,
            )
            for row in rows
        ),
    )


def _plots(rows: list[Row]) -> tuple[Lines, ...]:
    heads = Axis("KV heads")
    return (
        Lines(
            "KV bytes per token",
            heads,
            Axis("bytes per token", "bytes"),
            (
                Series("allocated", tuple((r.num_kv_heads, r.measured_bytes) for r in rows)),
                Series(
                    "formula", tuple((r.num_kv_heads, r.modelled_bytes) for r in rows), "modelled"
                ),
            ),
        ),
        Lines(
            "Time of one layer's attention",
            heads,
            Axis("time", "s"),
            (Series("time", tuple((r.num_kv_heads, r.seconds) for r in rows)),),
        ),
    )


def _learnt(shape: AttentionShape, rows: list[Row]) -> str:
    most = rows[-1]
    own = next(row for row in rows if row.num_kv_heads == shape.num_kv_heads)
    one = rows[0]
    error = max(abs(row.measured_bytes / row.modelled_bytes - 1) for row in rows)
    exact = "exactly as the formula says" if error == 0 else f"within {error:.1%} of the formula"
    said = (
        f"With {own.num_kv_heads} KV heads for {shape.num_heads} query heads, as this model has "
        f"them, a token's KV is {byte_size(own.measured_bytes)} instead of "
        f"{byte_size(most.measured_bytes)} ({times(most.measured_bytes / own.measured_bytes)} "
        f"less, {exact}) and decoding's attention is {_speed(most.seconds / own.seconds)}"
    )
    if own.num_kv_heads != one.num_kv_heads:
        said += (
            f"; one KV head would save {times(most.measured_bytes / one.measured_bytes)} and be "
            f"{_speed(most.seconds / one.seconds)}"
        )
    return said + "."


def _speed(ratio: float) -> str:
    if abs(ratio - 1) < 0.03:
        return "as fast"
    return f"{times(ratio)} as fast" if ratio > 1 else f"{times(1 / ratio)} slower"
