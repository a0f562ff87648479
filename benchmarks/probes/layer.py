"""Processor time of layers of SmolLM2-135M, random tokens, one thread: readings and SDPA.

Each is run several times and the fastest taken, so that a busy machine disturbs little. Prints a
table:

    .venv/bin/python benchmarks/probes/layer.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ullage.engine.batch import Span
from ullage.engine.kernels import product
from ullage.engine.kernels.team import Team
from ullage.engine.kv import KV_FORMATS, KVCache, KVShape
from ullage.engine.paging.layout import kv_layout
from ullage.engine.rule import AttentionRule
from ullage.probes.attention.entropy import attention_rows
from ullage.probes.attention.rows import RowReader

LAYERS, TOKENS, HEADS, KV_HEADS, DIM = 30, 4096, 9, 3, 64
# What a served sequence may hold when a row of it is read.
CONTEXT = 500
RUNS = 20


def fastest_s(function: Callable[[], object]) -> float:
    function()
    found = []
    for _ in range(RUNS):
        started = time.thread_time()
        function()
        found.append(time.thread_time() - started)
    return min(found)


def row_of_layers(stored: str) -> Callable[[], object]:
    """Reads the last row of a sequence in every layer, where the cache has it."""
    shapes, size = [KVShape(KV_HEADS, DIM)] * LAYERS, 16
    blocks = -(-CONTEXT // size)
    layout = kv_layout([None] * LAYERS, shapes)
    kv = KVCache(shapes, layout, blocks, size, KV_FORMATS[stored])
    for layer in range(LAYERS):
        k, v = torch.randn(CONTEXT, KV_HEADS, DIM), torch.randn(CONTEXT, KV_HEADS, DIM)
        kv.write(layer, torch.arange(CONTEXT), k, v)
    reader = RowReader(kv, [AttentionRule(DIM**-0.5)] * LAYERS)
    span = Span(0, 1, CONTEXT - 1, (tuple(range(blocks)),))
    queries = torch.randn(LAYERS, HEADS, DIM).numpy()
    return lambda: reader.read(span, queries)


@torch.inference_mode()
def main() -> int:
    torch.set_num_threads(1)
    product._team = Team(1)
    q, k, v = (torch.randn(TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rows, rule = torch.arange(TOKENS), AttentionRule(DIM**-0.5)
    q_1HTD, k_1KSD, v_1KSD = (x.transpose(0, 1)[None] for x in (q, k, v))
    table = {
        "readings of every row": lambda: attention_rows(q, k, rows, rule),
        "readings and attention": lambda: attention_rows(q, k, rows, rule, values_SKD=v),
        "attention alone (SDPA)": lambda: F.scaled_dot_product_attention(
            q_1HTD, k_1KSD, v_1KSD, is_causal=True, enable_gqa=True
        ),
        "readings of one row": lambda: attention_rows(q[-1:], k, rows[-1:], rule),
        **{
            f"one row in {LAYERS} layers, context {CONTEXT}, {stored}": row_of_layers(stored)
            for stored in KV_FORMATS
        },
    }
    print("| what | processor ms |\n|---|---|")
    for name, function in table.items():
        print(f"| {name} | {1e3 * fastest_s(function):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
