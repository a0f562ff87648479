"""Processor time of one layer of SmolLM2-135M, 4,096 random tokens, one thread: readings and SDPA.

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

from ullage.engine.kernels import product
from ullage.engine.kernels.team import Team
from ullage.engine.rule import AttentionRule
from ullage.probes.entropy import attention_rows

TOKENS, HEADS, KV_HEADS, DIM = 4096, 9, 3, 64
RUNS = 8


def fastest_s(function: Callable[[], object]) -> float:
    function()
    found = []
    for _ in range(RUNS):
        started = time.thread_time()
        function()
        found.append(time.thread_time() - started)
    return min(found)


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
    }
    print("| what | processor ms |\n|---|---|")
    for name, function in table.items():
        print(f"| {name} | {1e3 * fastest_s(function):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
